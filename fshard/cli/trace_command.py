"""``fshard trace``: the records of all ranks of a run as one trace, and who waits for whom."""

import argparse
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

from fshard.runtime.flight.rank_records import RankRecord, read_records
from fshard.runtime.flight.verdict import of_one_job, straggler, verdict
from fshard.view.chrome import OpSpan, ScheduleRun, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.set_defaults(run=run)
    parser.add_argument("folder", help="the folder that an error named, or fs.view.record, or FSHARD_RECORD")
    parser.add_argument("--out", help="the trace file; trace.json in the folder by default")


def run(args: argparse.Namespace) -> int:
    """Write the trace, and say who waits for whom."""
    folder = Path(args.folder)
    every = read_records(folder)
    records, _ = of_one_job(every)
    out = Path(args.out) if args.out else folder / "trace.json"
    start = min((record.entries[0].time for record in records if record.entries), default=0.0)
    write(out, {f"rank {record.rank}": [*runs_of(record, start)] for record in records})
    print(verdict(every))
    if told := straggler([record for record in records if record.entries]):
        print(told)
    print(f"{sum(len(record.entries) for record in records):,} entries of {len(records)} ranks: {out}")
    return 0


def runs_of(record: RankRecord, start: float) -> Iterator[ScheduleRun]:
    """The runs of a record, times counted from ``start``. The last op is under way unless its run was over."""
    pairs = [*pairwise(record.entries), *((entry, None) for entry in record.entries[-1:])]
    for (number, schedule), group in groupby(pairs, key=lambda pair: (pair[0].run, pair[0].schedule)):
        known = record.schedules.get(schedule)
        if known is None:
            continue
        spans = []
        for entry, following in group:
            if 0 <= entry.op < len(known):
                end = None if following is None else following.time - start
                spans.append(OpSpan(entry.op, known[entry.op], entry.time - start, end))
        yield ScheduleRun(known, spans, step=number)
