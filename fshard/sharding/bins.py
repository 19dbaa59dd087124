"""Whole leaves packed into equal chunks: ``Rule(align=\"leaf\")``."""

from fshard.sharding.leaf import Leaf


def bins(leaves: list[Leaf], load: list[int], align: int) -> list[list[Leaf]]:
    """Whole leaves for each chunk, by size.

    Largest first, each leaf goes to the chunk that holds least (Graham, "Bounds on multiprocessing timing anomalies",
    1969: at most 4/3 of the optimum). The fullest chunk goes to the part with the smallest ``load`` of earlier groups;
    ``load`` is updated in place. So all parts update about equally much. Leaves begin at multiples of ``align``.
    """
    found: list[list[Leaf]] = [[] for _ in load]
    held = [0] * len(load)
    for leaf in sorted(leaves, key=lambda leaf: -leaf.numel):
        least = held.index(min(held))
        found[least].append(leaf)
        held[least] += -(-leaf.numel // align) * align
    place = {leaf.path: number for number, leaf in enumerate(leaves)}
    fullest_first = sorted(range(len(load)), key=lambda n: -held[n])
    out: list[list[Leaf]] = [[] for _ in load]
    for part, number in zip(sorted(range(len(load)), key=lambda n: load[n]), fullest_first, strict=True):
        out[part] = sorted(found[number], key=lambda leaf: place[leaf.path])
        load[part] += held[number]
    return out
