"""Bubbles: the share of a step for which the ranks of a pipeline are idle, against the formula of each order.

Each stage has one unit that sleeps: as long in its forward, for the gradient of its input, and for those of its leaves.
Sleeping ranks need no processor, so a step takes the time of its order, and what the host takes. With ``p`` ranks and
``m`` microbatches ranks are idle for ``(p - 1) / (m + p - 1)`` of a step in 1F1B, and a third of that time in
``zb_h1``; in ``zbv``, whose ``2 p`` stages are of half a size, for ``(p - 1) / (6 m + p - 1)`` if microbatches are
many. The claim: the idle share is within .02 of the formula, and within .01 of the forecast by ``fs.sim.simulate``.

With ``--delay .001`` each case runs over links that hold each packet for a millisecond, and over the same links that
hold none. Some actions wait for a message in any case: in a warm-up, and in 1F1B between the forward of a microbatch
and its backward, on the rank before the last one. The claim: the idle share rises by what the order makes it, within
.01, so all other messages are hidden.
"""

import argparse
import math
import statistics
import sys

from common import Report, Row, arguments, middle, run_workers

from fshard.pipeline import bubble, make_order

SECONDS = 0.05
"""A sleep."""

ORDERS = ("fshard gpipe", "fshard 1f1b", "fshard zb_h1", "fshard zbv")
"""Peers over links that hold packets."""

RATE = "1gbit"
"""Of the links that hold packets."""

TURNS = 3
"""Times that links which hold packets and links which do not take turns."""

PEERS = ("torch 1f1b", "fshard 1f1b", "fshard zb_h1", "fshard zbv")


def measure(args: argparse.Namespace) -> int:
    """Run the workers case by case, report."""
    ranks = args.ranks or ((2, 4) if args.quick else (2, 4, 8))
    counts = args.microbatches or ((4, 8) if args.quick else (4, 8, 16, 32))
    rounds = 2 if args.quick else 3
    peers = ORDERS if args.delay else PEERS
    configuration = {"sleep": SECONDS, "rounds": rounds, "peers": peers, "delay": args.delay}
    report = Report("bubbles_links" if args.delay else "bubbles", __doc__.splitlines()[0], configuration)
    for size in ranks:
        for count in counts:
            if args.delay:
                links(report, size, count, rounds, args.delay)
            else:
                case(report, size, count, rounds)
    return report.finish(args)


def links(report: Report, ranks: int, count: int, rounds: int, delay: float) -> None:
    """The fastest steps of all orders over links that hold packets, and over those that do not, which take turns."""
    options = {"peers": ORDERS, "microbatches": count, "rounds": rounds, "seconds": SECONDS}
    found: tuple[dict[str, float], dict[str, float]] = {}, {}
    for _ in range(TURNS):
        for fastest, held in zip(found, (0.0, delay), strict=True):
            walls = run_workers(ranks, RATE, options, "bubbles_rank.py", delay=held)["walls"]
            fastest.update({peer: min(fastest.get(peer, math.inf), *walls[peer]) for peer in ORDERS})
    for peer in ORDERS:
        order = peer.split()[1]
        each = SECONDS / (2 if order == "zbv" else 1)
        least, held = [bubble(make_order(order, ranks, count), each, each, each, sent) for sent in (0.0, delay)]
        without, with_ = [1 - 3 * SECONDS * count / fastest[peer] for fastest in found]
        title = f"{ranks} ranks, {count} microbatches: {peer}, links of {delay:g} s"
        rise = f"{title} beyond links of none ({held - least:.4f} in its order)"
        report.rows.append(Row(rise, "idle", with_ - without, target=held - least + 0.01))


def case(report: Report, ranks: int, count: int, rounds: int) -> None:
    """The steps of all peers with this number of ranks and microbatches."""
    peers = [peer for peer in PEERS if count >= ranks or "torch" not in peer]
    options = {"peers": peers, "microbatches": count, "rounds": rounds, "seconds": SECONDS}
    found = run_workers(ranks, None, options, "bubbles_rank.py")
    for peer, walls in found["walls"].items():
        title = f"{ranks} ranks, {count} microbatches: {peer}"
        formula = bubble(make_order(peer.split()[1], ranks, count))
        shares = [1 - 3 * SECONDS * count / wall for wall in walls]
        beyond, target = [share - formula for share in shares], None if "torch" in peer else 0.02
        report.rows.append(middle(f"{title}, beyond its formula ({formula:.3f})", "idle", beyond, target))
        if peer in found["simulated"]:
            off = statistics.median(shares) - found["simulated"][peer]
            report.rows.append(Row(f"{title}, beyond the forecast", "idle", off, target=0.01))


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--ranks", nargs="+", type=int, help="numbers of ranks, in place of 2, 4 and 8")
    cli.add_argument("--microbatches", nargs="+", type=int, help="numbers of microbatches, in place of 4 to 32")
    cli.add_argument("--delay", type=float, default=0.0, help="seconds for which links hold a packet; needs root")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
