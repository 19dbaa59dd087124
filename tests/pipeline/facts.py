"""Schedules of other libraries, written down: a row a rank, in a short notation.

``.`` is an idle step, ``0>F1`` and ``1<F1`` send and receive, ``0F1+1B2`` may run together. The facts are those of
PyTorch's ``test/distributed/pipelining/artifacts``: ``zb1p_2rank_2stagep_compute.csv``,
``zb1p_2rank_2stagep_comms.csv`` and ``dualpipev_4rank_10mb.csv``.
"""

import re

ZB_COMPUTE = """
0: 0F0 0F1 2F0 . 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 0F4 2I3 2W3 0F5 0I2 0W2 2F4 0I3 0W3 2F5
   2I4 2W4 0F6 2I5 2W5 0F7 0I4 0W4 2F6 0I5 0W5 2F7 2I6 2W6 2I7 2W7 0I6 0W6 0I7 0W7
1: . 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1F4 1I2 3W3 1F5 1I3 1W2 3F4 3I4 1W3
   3F5 3I5 3W4 1F6 1I4 3W5 1F7 1I5 1W4 3F6 3I6 1W5 3F7 3I7 3W6 1I6 3W7 1I7 1W6 1W7
"""

ZB_MESSAGES = """
0: 0F0 0>F0 2<F0 0F1 0>F1 2<F1 2F0 2>F0 2F1 2>F1 2<B0 2B0 2>B0 0F2 0>F2 2<B1 2B1 2>B1 0F3 0>F3 2<F2 0<B0 0B0 2F2
   2>F2 2<F3 0<B1 0B1 2F3 2>F3 2<B2 2B2 2>B2 0F4 0>F4 2<B3 2B3 2>B3 0F5 0>F5 2<F4 0<B2 0B2 2F4 2>F4 2<F5 0<B3 0B3
   2F5 2>F5 2<B4 2B4 2>B4 0F6 0>F6 2<B5 2B5 2>B5 0F7 0>F7 2<F6 0<B4 0B4 2F6 2>F6 2<F7 0<B5 0B5 2F7 2>F7 2<B6 2B6
   2>B6 2<B7 2B7 2>B7 0<B6 0B6 0<B7 0B7
1: 1<F0 1F0 1>F0 1<F1 1F1 1>F1 3<F0 3F0 3<F1 3I0 3>B0 1<B0 3F1 1<F2 3I1 3>B1 1<B1 3W0 1<F3 1F2 1>F2 1I0 1>B0 3W1
   3<F2 1F3 1>F3 1I1 1>B1 1W0 3<F3 3F2 3I2 3>B2 1<B2 1W1 1<F4 3F3 3I3 3>B3 1<B3 3W2 1<F5 1F4 1>F4 1I2 1>B2 3W3 3<F4
   1F5 1>F5 1I3 1>B3 1W2 3<F5 3F4 3I4 3>B4 1<B4 1W3 1<F6 3F5 3I5 3>B5 1<B5 3W4 1<F7 1F6 1>F6 1I4 1>B4 3W5 3<F6 1F7
   1>F7 1I5 1>B5 1W4 3<F7 3F6 3I6 3>B6 1<B6 1W5 3F7 3I7 3>B7 1<B7 3W6 1I6 1>B6 3W7 1I7 1>B7 1W6 1W7
"""

DUAL_PIPE_V = """
0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 0F7+7B3 7F4+0B0 0F8+7B4 7F5+0B1 0F9+7B5
   7F6+0B2 7B6 7F7+0B3 7B7 7F8+0B4 7B8 7F9+0B5 7B9 0I6 0W6 0I7 0W7 0I8 0W8 0I9 0W9
1: 1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 1F6+6B2 6F4+1B0 1F7+6B3 6F5+1B1 1F8+6B4 6F6+1B2 1F9+6B5
   6F7+1B3 6B6 6F8+1B4 6B7 6F9+1B5 6B8 1B6 6I9 1I7 6W9 1I8 1W7 1I9 1W8 1W9
2: 2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 2F5+5B1 5F4+2B0 2F6+5B2 5F5+2B1 2F7+5B3 5F6+2B2 2F8+5B4 5F7+2B3
   2F9+5B5 5F8+2B4 5B6 5F9+2B5 5B7 2B6 5B8 2I7 5I9 2I8 2W7 2I9 5W9 2W8 2W9
3: 3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 4F4+3B0 3F5+4B1 4F5+3B1 3F6+4B2 4F6+3B2 3F7+4B3 4F7+3B3 3F8+4B4 4F8+3B4
   3F9+4B5 4F9+3B5 4B6 3B6 4B7 3B7 4I8 3I8 4I9 3I9 4W8 3W8 4W9 3W9
"""


def rows(facts: str) -> list[list[str]]:
    """The words of each rank."""
    return [row.split() for row in re.split(r"\n[0-9]+: ", facts)[1:]]


def cells(facts: str) -> str:
    """The text of the CSV file with these facts."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows(facts))


def _cell(word: str) -> str:
    if "+" in word:
        return f"({word.replace('+', ';')})OVERLAP_F_B"
    return word.replace(".", "").replace(">", "SEND_").replace("<", "RECV_")
