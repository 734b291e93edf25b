"""Keeps what a session may fetch by itself free from the rest of the training step.

What a session fetches decides what runs. A control edge makes all that the first op needs run with the
second: after an edge from the labels to the first layer, nobody could predict without feeding labels.
"""

from collections.abc import Sequence
from dataclasses import replace

from lms.graph import Graph
from lms.liveness import Buffers, timeline
from lms.swap_plan import SerialEdge, Swap, SwapIn, SwapPlan

SOURCE_PREFIXES = (
    "EagerPyFunc",
    "Iterator",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Placeholder",
    "PyFunc",
    "Queue",
    "Random",
    "TruncatedNormal",
    "Unstage",
)
"""How the types of ops begin that ask for a feed, or change something whenever they run: the next element of
an iterator, the next random number."""


def keep_fetches_apart(graph: Graph, made: SwapPlan) -> SwapPlan:
    """``made`` without what would let an op ask for sources that it does not need by itself.

    Args:
        graph: The training step of a session's graph.
        made: A plan for it.

    Returns:
        The plan, with the peak that is left; ``made`` itself where nothing had to go.
    """
    needs = needed_sources(graph)
    edges = _safe_edges(made.serial_edges, needs)
    swaps = tuple(safe for swap in made.swaps if (safe := _safe_swap(graph, swap, needs)) is not None)
    if edges == made.serial_edges and swaps == made.swaps:
        return made
    peak = timeline(Buffers.of(graph), made.order, swaps).peak_bytes
    note = "a part of the order is left open, so that a session can run parts of the step by themselves"
    return replace(made, swaps=swaps, serial_edges=edges, peak_bytes=peak, notes=(*made.notes, note))


def needed_sources(graph: Graph) -> tuple[int, ...]:
    """For each op the sources that run whenever it runs, as a set of bits."""
    needs: list[int] = []
    sources = 0
    for op in graph.ops:
        mine = 0
        for before in graph.predecessors[op.id]:
            mine |= needs[before]
        if op.type.startswith(SOURCE_PREFIXES) and op.type != "PlaceholderWithDefault":
            mine |= 1 << sources
            sources += 1
        needs.append(mine)
    return tuple(needs)


def _safe_edges(edges: Sequence[SerialEdge], needs: Sequence[int]) -> tuple[SerialEdge, ...]:
    """Each edge from the nearest op up the chain that needs nothing more than its end does."""
    earlier = {edge.after: edge.before for edge in edges}
    safe = []
    for edge in edges:
        before: int | None = edge.before
        while before is not None and needs[before] & ~needs[edge.after]:
            before = earlier.get(before)
        if before is not None:
            safe.append(SerialEdge(before, edge.after))
    return tuple(safe)


def _safe_swap(graph: Graph, swap: Swap, needs: Sequence[int]) -> Swap | None:
    """The swap with those uses alone that may wait for it; the others go on reading the tensor itself."""
    out = needs[graph.tensors[swap.tensor].op] | needs[swap.after]
    swap_ins = []
    for swap_in in swap.swap_ins:
        needed = out | needs[swap_in.trigger]
        uses = tuple(use for use in swap_in.uses if not needed & ~needs[use.op])
        if uses:
            blocks = _safe_ops(swap_in.blocks, needed, needs)
            swap_ins.append(SwapIn(swap_in.trigger, uses, blocks))
    return (
        replace(swap, swap_ins=tuple(swap_ins), blocks=_safe_ops(swap.blocks, out, needs))
        if swap_ins
        else None
    )


def _safe_ops(ops: Sequence[int], needed: int, needs: Sequence[int]) -> tuple[int, ...]:
    return tuple(op for op in ops if not needed & ~needs[op])
