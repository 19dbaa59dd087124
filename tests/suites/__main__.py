"""Run PyTorch's lists of modules and operators: ``python -m tests.suites``. Nothing may be wrong, or fail raw."""

import argparse
import sys
from collections import Counter

from tests.suites.databases import modules, operators
from tests.suites.run import outcome


def main() -> int:
    """Run the lists, and say what is not right."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("--samples", type=int, default=3, help="the most sample inputs of each entry")
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--every", type=int, default=1, help="one entry in so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first entry")
    parser.add_argument("--db", default="modules,operators", help="which lists")
    given = parser.parse_args()
    bad = 0
    for name, cases in (("modules", modules), ("operators", operators)):
        counts: Counter[str] = Counter()
        chosen = cases(given.samples, given.every, given.first) if name in given.db else ()
        for case, compiled in ((case, way) for case in chosen for way in (None, "fx")):
            if given.only not in case.name:
                continue
            found = outcome(case, compiled)
            counts[found.verdict] += 1
            if found.verdict in ("refused", "raw", "wrong"):
                print(f"{found.verdict}  {found.name}: {found.said.splitlines()[0][:200]}", flush=True)
        print(name, dict(counts), flush=True)
        bad += counts["raw"] + counts["wrong"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
