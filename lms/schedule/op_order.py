"""Orders of a step's ops, and the control edges that make the executor keep to them.

TensorFlow's executor runs whatever is ready. Where big tensors are at stake the order decides the peak, so
the ops that touch them are put in one chain; all others stay free.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from lms.ir.graph import Graph
from lms.ir.liveness import Buffers
from lms.ir.op_traits import MERGES, is_update, may_end_step
from lms.ir.swap_plan import SerialEdge


def executor_order(graph: Graph, edges: Iterable[SerialEdge] = (), *, ahead: bool = False) -> tuple[int, ...]:
    """Return the order in which an executor with one thread runs the graph: first ready, first run.

    Args:
        graph: The step.
        edges: Control edges beside those of the graph.
        ahead: Whether ops are launched long before the device runs them, as on a GPU. Then what waits for
            the device comes behind all that does not (:func:`waits_for_device`).
    """
    waiting = [len(before) for before in graph.predecessors]
    released: dict[int, list[int]] = {}
    for edge in edges:
        waiting[edge.after] += 1
        released.setdefault(edge.before, []).append(edge.after)
    rank = waits_for_device(graph) if ahead else [0] * len(graph.ops)
    ready: dict[int, deque[int]] = {}

    def enqueue(op: int) -> None:
        ready.setdefault(rank[op], deque()).append(op)

    for op, count in enumerate(waiting):
        if count == 0:
            enqueue(op)
    order = []
    while ready:
        first = min(ready)
        op = ready[first].popleft()
        if not ready[first]:
            del ready[first]
        order.append(op)
        for later in (*graph.successors[op], *released.get(op, ())):
            waiting[later] -= 1
            if waiting[later] == 0:
                enqueue(later)
    return tuple(order)


def waits_for_device(graph: Graph, *, copies: bool = True) -> list[int]:
    """Count for each op the waits for a device on the way to it that has most of them.

    An op waits for the result of communication, and with ``copies`` for what another device has made. Such
    waits end when the device has run what was launched before. So a step's gradients pile up on a GPU until
    it has run the backward pass, although only a collective, or their sum with those of another GPU, stands
    between them and their updates. What may not be chained counts as communication.
    """
    tensors, ops, waits = graph.tensors, graph.ops, list[int]()
    for op, before in zip(ops, graph.predecessors, strict=True):
        most = max((waits[earlier] + (not ops[earlier].chainable) for earlier in before), default=0)
        for tensor in op.inputs:
            maker = tensors[tensor].op
            if copies and ops[maker].elsewhere != op.elsewhere and not tensors[tensor].outside:
                most = max(most, waits[maker] + 1)
        waits.append(most)
    return waits


def floating_ops(graph: Graph) -> frozenset[int]:
    """Find the ops that must not be chained, and all that depend on them.

    When these run is decided elsewhere, by a communication library for instance. Nor must ops that may get no
    control edge be chained; what depends on them may.
    """
    floating: set[int] = set()
    for op in graph.ops:
        if not op.chainable or not floating.isdisjoint(graph.predecessors[op.id]):
            floating.add(op.id)
    return frozenset(floating).union(op.id for op in graph.ops if op.unordered)


def early_ops(graph: Graph) -> frozenset[int]:
    """Find the ops that change a variable, or lead to that, and do not wait for the step's batch.

    Weight decay is one. Such ops run even in the step that finds no batch left, and a chain would have them
    wait for one: that step would leave other values behind.
    """
    behind: set[int] = set()
    for op in graph.ops:
        if may_end_step(op.type) or not behind.isdisjoint(graph.predecessors[op.id]):
            behind.add(op.id)
    early: set[int] = set()
    for op in reversed(graph.ops) if behind else ():
        if op.id not in behind and (op.id in early or any(map(is_update, (op.type, *op.parts)))):
            early.update((op.id, *graph.predecessors[op.id]))
    return frozenset(early)


def big_ops(buffers: Buffers, min_bytes: int, unchained: Collection[int]) -> frozenset[int]:
    """Find the ops that read or make a buffer of at least ``min_bytes`` and may be chained.

    ``unchained`` may not. Scratch memory of that size counts too. Views do not belong to them: an edit may
    leave a view without readers, and then it runs no more.
    """
    graph = buffers.graph
    min_bytes = max(1, min_bytes)  # what takes no memory need not be put in an order
    big = {op for op in buffers.with_workspace if graph.ops[op].workspace_bytes >= min_bytes}
    for root in buffers.owners:
        if buffers.nbytes[root] >= min_bytes:
            big.add(graph.tensors[root].op)
            big.update(buffers.users[root])
    return frozenset(big.difference(unchained, graph.views))


def frugal_order(buffers: Buffers, big: Collection[int], floating: Collection[int]) -> tuple[int, ...]:
    """Schedule the ops greedily for a low peak, in O(n log n).

    Small ops run as soon as they can; of the big ones first those that free the most, then, where all of them
    allocate, the earliest in the graph. Floating ops come when nothing else can run, and communication before
    what uses its results, which is the worst case for what they hold.
    """
    graph = buffers.graph
    release = _Release(buffers)
    waiting = [len(before) for before in graph.predecessors]
    small: list[int] = []
    costly: list[tuple[int, int]] = []
    late: list[tuple[bool, int]] = []

    def enqueue(op: int) -> None:
        if op in floating:
            heappush(late, (graph.ops[op].chainable, op))
        elif op in big:
            heappush(costly, (min(release.growth(op), 1), op))
        else:
            heappush(small, op)

    for op, count in enumerate(waiting):
        if count == 0:
            enqueue(op)
    done = [False] * len(graph.ops)
    order: list[int] = []
    while small or costly or late:
        op = heappop(small) if small else heappop(costly)[1] if costly else heappop(late)[1]
        if done[op]:
            continue
        done[op] = True
        order.append(op)
        for last_reader in release.run(op):
            if waiting[last_reader] == 0 and last_reader in big and not done[last_reader]:
                enqueue(last_reader)
        for later in graph.successors[op]:
            waiting[later] -= 1
            if waiting[later] == 0:
                enqueue(later)
    return tuple(order)


class _Release:
    """Counts the readers that each buffer still has, and so what running an op would free."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._left = [len(users) for users in buffers.users]
        self._sum = [sum(users) for users in buffers.users]
        for root, kept in enumerate(buffers.kept):
            self._left[root] += kept  # never down to one reader

    def growth(self, op: int) -> int:
        """Return by how many bytes the allocated memory grows when the op runs."""
        nbytes = self._buffers.nbytes
        made = sum(nbytes[tensor] for tensor in self._buffers.graph.ops[op].outputs)
        return made - sum(nbytes[root] for root in self._buffers.reads[op] if self._left[root] == 1)

    def run(self, op: int) -> Iterator[int]:
        """Mark the op as run, and yield ops that have become the last reader of a buffer."""
        for root in self._buffers.reads[op]:
            self._left[root] -= 1
            self._sum[root] -= op
            if self._left[root] == 1:
                yield self._sum[root]


def serial_edges(graph: Graph, order: Sequence[int], chain: Sequence[int]) -> tuple[SerialEdge, ...]:
    """Return the fewest control edges that keep ``chain`` in order: none where the graph already does.

    Paths through a view count only from the buffer it shows: a reader that is sent to a copy of that buffer
    no longer waits for what else the view waits for. A ``Merge`` runs once one
    of its inputs is there: a path through it counts only where each of these has one.
    """
    place = {op: index for index, op in enumerate(chain)}
    views, predecessors = graph.views, graph.predecessors
    latest = [-1] * len(graph.ops)  # for an op of the chain its own place
    edges: list[SerialEdge] = []
    for op in order:
        if op in views:
            latest[op] = min(latest[before] for before in _shown(graph, op))
            continue
        waited_for, reached = predecessors[op], -1
        if graph.ops[op].type in MERGES:
            waited_for = graph.ops[op].controls
            read = {graph.tensors[tensor].op for tensor in graph.ops[op].inputs}
            reached = min((latest[before] for before in read), default=-1)
        reached = max([reached, *[latest[before] for before in waited_for]])
        own = place.get(op)
        if own and reached < own - 1:
            edges.append(SerialEdge(chain[own - 1], op))
        latest[op] = reached if own is None else own
    return tuple(edges)


def _shown(graph: Graph, view: int) -> list[int]:
    """Return the ops that make the tensors of which ``view`` is an alias."""
    shown = (graph.tensors[tensor].alias_of for tensor in graph.ops[view].outputs)
    return [graph.tensors[tensor].op for tensor in shown if tensor is not None]


def level_edges(
    graph: Graph, order: Sequence[int], levels: Sequence[int], wanted: Collection[int], big: Collection[int]
) -> tuple[SerialEdge, ...]:
    """Return control edges that run the big ops of each wanted level one after the other, in order."""
    previous: dict[int, int] = {}
    edges: list[SerialEdge] = []
    for op in order:
        if op in big and levels[op] in wanted:
            if levels[op] in previous:
                edges.append(SerialEdge(previous[levels[op]], op))
            previous[levels[op]] = op
    return tuple(edges)


def topological_levels(graph: Graph) -> tuple[int, ...]:
    """Return for each op the length of the longest path that leads to it."""
    levels: list[int] = []
    for before in graph.predecessors:
        levels.append(max((levels[op] + 1 for op in before), default=0))
    return tuple(levels)
