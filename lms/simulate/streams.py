"""Place the copies of variables that stream in the order of a step.

The order says how long each variable is on the device: from the op that brings it to the one that makes host
memory its value again (:data:`~lms.ir.op_traits.STREAM_LEAVE`). Control edges hold it there, as with swaps:
what comes waits for the op of the chain before it and for what leaves in between, and the op of the chain
behind waits for what leaves. So the memory of a plan does not hang on how fast the link really is.

:func:`closest` brings each variable right before its first use and has it leave right behind its last one.
That takes the least memory, and compute waits for each copy. :func:`spread` walks over that order with a
clock, brings variables as early as the link needs and lets them leave as late as their copies take, as far
as the budget allows.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate

from lms.ir.graph import Graph
from lms.ir.liveness import Buffers, positions
from lms.ir.op_traits import (
    OUTSIDE_TYPES,
    STREAM_ENTER,
    STREAM_IN,
    STREAM_LAST,
    STREAM_LEAVE,
    STREAM_OUT,
    STREAM_TYPES,
)
from lms.ir.swap_plan import SerialEdge, Swap
from lms.simulate.cost_model import Costs
from lms.simulate.range_max import MemoryProfile
from lms.simulate.step_time import Clock, StreamedCopies

SPREADS = 2
"""How often variables are spread: again with less room where those that no chain holds take more."""
ARRIVING = frozenset({STREAM_IN, STREAM_ENTER})
LEAVING = frozenset({STREAM_LAST, STREAM_OUT, STREAM_LEAVE})


def streams_of(graph: Graph) -> frozenset[int]:
    """Return the ops that stream variables."""
    return frozenset(op.id for op in graph.ops if op.type in STREAM_TYPES)


def closest(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """Return ``order`` with what streams right before its first use and right behind its last one.

    The values in host memory stand in front, so that a copy of one may stand anywhere.
    """
    types = [op.type for op in graph.ops]
    late = {op for op, op_type in enumerate(types) if op_type in ARRIVING}
    if not late:
        return tuple(order)
    late |= {op for enter in late if types[enter] == STREAM_ENTER for op in _reads(graph, enter)}
    open_before = {op: len(graph.predecessors[op]) for op, op_type in enumerate(types) if op_type in LEAVING}
    placed: list[int] = []
    done: set[int] = set()

    def put(op: int) -> None:
        placed.append(op)
        done.add(op)
        for later in graph.successors[op]:
            if later in open_before:
                open_before[later] -= 1
                if not open_before[later]:
                    put(later)

    sources = _ancestors(graph, [op for op in late if types[op] == STREAM_IN])
    others = [op for op in order if op not in late and op not in open_before and op not in sources]
    for op in (*(op for op in order if op in sources), *others, *sorted(late)):
        open_ops, seen = [op], {op}
        while open_ops:
            for other in graph.predecessors[open_ops.pop()]:
                if (other in late or other in open_before) and not (other in done or other in seen):
                    seen.add(other)
                    open_ops.append(other)
        ready = [one for one in seen if one not in done and (one == op or one in late)]
        for one in sorted(ready):  # an op's number is above those of its inputs
            put(one)
    return tuple(placed)


def _ancestors(graph: Graph, ops: Sequence[int]) -> set[int]:
    found: set[int] = set()
    open_ops = [*ops]
    while open_ops:
        new = set(graph.predecessors[open_ops.pop()]) - found
        found |= new
        open_ops += new
    return found


def _reads(graph: Graph, enter: int) -> Iterator[int]:
    """Yield the ops that only show a variable that has come to those that use it."""
    return (op for op in graph.successors[enter] if op in graph.views and graph.ops[op].type not in LEAVING)


def stream_edges(
    buffers: Buffers, order: Sequence[int], chain: Set[int], floating: Set[int]
) -> Iterator[SerialEdge]:
    """Yield the control edges that hold what streams at its place in ``order``.

    The chain never waits for ops in ``floating``: another rank might wait for this one meanwhile. Variables
    that these use wait for their gradients and for each other.
    """
    graph, nbytes = buffers.graph, _bytes_of(buffers)
    floats = _Floats(graph, floating, positions(order))
    step: int | None = None
    gap: list[int] = []
    for op in order:
        if op in chain:
            yield from (SerialEdge(one, op) for one in uncovered(gap, nbytes))
            step, gap = op, []
        elif op in nbytes and floats.has(op):
            yield from (SerialEdge(one, op) for one in floats.waits(op))
        elif op in nbytes:
            yield from (SerialEdge(one, op) for one in _waits(op, gap, nbytes, step))
            gap.append(op)


def _waits(op: int, gap: Sequence[int], nbytes: Mapping[int, int], step: int | None) -> Iterator[int]:
    """Yield what streams in a gap behind a step waits for: this, and what comes also for what leaves there.

    What leaves waits, too: were it gone as soon as its copy is done, free memory would lie in other pieces in
    each step than in the plan.
    """
    if nbytes[op] > 0:
        yield from (one for one in gap if nbytes[one] < 0)
    if step is not None:
        yield step


def uncovered(gap: Sequence[int], nbytes: Mapping[int, int]) -> list[int]:
    """Return what leaves in a gap of the chain without as much coming in its place.

    What comes waits for what leaves, and the plan counts it from there on: until then its room is what the
    other still has.
    """
    room, found = 0, []
    for op in reversed(gap):
        if room + nbytes[op] >= 0:
            room += nbytes[op]
        else:
            found.append(op)
    return found[::-1]


class _Floats:
    """The variables that ops in no chain use: when these run is decided elsewhere."""

    def __init__(self, graph: Graph, floating: Set[int], place: Sequence[int]) -> None:
        self._graph, self._floating, self._place = graph, floating, place
        self._left: list[int] = []
        self._has_come = False
        self._used: deque[int] = deque(maxlen=2)
        """Ops that run once the latest two have been used."""

    def has(self, op: int) -> bool:
        """Tell whether what comes or leaves is one of them."""
        if self._graph.ops[op].type == STREAM_IN:
            return not self._floating.isdisjoint(self._graph.successors[op])
        return op in self._floating

    def waits(self, op: int) -> list[int]:
        """Return what one of them waits for; they are passed in their order.

        What comes waits for its gradient, for what has left before, and until the second before it has been
        used: so one copy runs beside the use of another, and not all of them at once. It does not wait for
        one that is used together with it.
        """
        graph = self._graph
        if graph.ops[op].type == STREAM_LEAVE:
            self._left = [op] if self._has_come else [*self._left, op]
            self._has_come = False
            return []
        self._has_come = True
        used = graph.successors[op][0]
        waits = [one for one in (*self._used,)[:-1] if self._place[one] < self._place[op]]
        if graph.ops[used].type == STREAM_ENTER:
            gates = (one for one in graph.predecessors[used] if one != op)
            waits += [*(one for one in gates if graph.ops[one].type not in OUTSIDE_TYPES), *self._left]
            used = next(one for one in graph.successors[used] if graph.ops[one].type == STREAM_LAST)
        self._used.append(used)
        return waits


def _bytes_of(buffers: Buffers) -> dict[int, int]:
    """Return by op the bytes that it brings, below zero those that leave; found once."""
    return buffers.once((_bytes_of,), lambda: _find_bytes(buffers))


def _find_bytes(buffers: Buffers) -> dict[int, int]:
    graph = buffers.graph
    found = {}
    for op in graph.ops:
        if op.type == STREAM_IN:
            found[op.id] = buffers.nbytes[graph.roots[op.outputs[0]]]
        elif op.type == STREAM_LEAVE:
            found[op.id] = -buffers.nbytes[graph.roots[op.inputs[-1]]]
    return found


def spread(
    buffers: Buffers,
    order: Sequence[int],
    chain: Set[int],
    floating: Set[int],
    swaps: Sequence[Swap],
    budget_bytes: int,
    costs: Costs,
    seconds: Sequence[float],
) -> tuple[int, ...]:
    """Return ``order``, as :func:`closest` makes it, with variables that come earlier and leave later.

    Args:
        buffers: The step's.
        order: The order.
        chain: The ops that run one after the other.
        floating: Those that wait for other ranks, and what depends on them.
        swaps: What is swapped.
        budget_bytes: What the step may take; a step that takes more in any case gets the order as it is.
        costs: The device and its link.
        seconds: The ops' own times by id.
    """
    allowed = budget_bytes
    for _ in range(SPREADS):
        streamed = StreamedCopies.of(buffers.graph)
        if streamed is None:
            return tuple(order)
        walk = _Walk(buffers, order, chain, floating, swaps, allowed, costs, seconds, streamed)
        spread_out = _copied_ahead(buffers, walk.placed(), floating)
        excess = buffers.timeline(spread_out, tuple(swaps)).peak_bytes - budget_bytes
        if excess <= 0:
            return spread_out
        allowed -= excess
    return _copied_ahead(buffers, order, floating)


def _copied_ahead(buffers: Buffers, order: Sequence[int], floating: Set[int]) -> tuple[int, ...]:
    """Return ``order`` with each variable that ops in no chain use coming as early as its waits let it.

    Nothing else holds it there, so it takes its memory from then on. What comes keeps its order.
    """
    graph, nbytes, place = buffers.graph, _bytes_of(buffers), positions(order)
    floats = _Floats(graph, floating, place)
    behind: dict[int, list[int]] = {}
    latest: int | None = None
    for op in order:
        if op in nbytes and floats.has(op):
            waits = floats.waits(op)
            if nbytes[op] < 0:
                continue
            if latest is None and not waits:
                latest = op
                continue
            latest = max([*waits, *(() if latest is None else (latest,))], key=place.__getitem__)
            behind.setdefault(latest, []).append(op)
    moved = {op for ops in behind.values() for op in ops}
    return tuple(one for op in order if op not in moved for one in (op, *behind.get(op, ())))


class _Walk:
    """Goes over an order and puts its ops into one in which variables come earlier and leave later."""

    def __init__(
        self,
        buffers: Buffers,
        order: Sequence[int],
        chain: Set[int],
        floating: Set[int],
        swaps: Sequence[Swap],
        budget_bytes: int,
        costs: Costs,
        seconds: Sequence[float],
        streamed: StreamedCopies,
    ) -> None:
        self._graph, self._order, self._chain = buffers.graph, order, chain
        self._budget, self._costs, self._seconds = budget_bytes, costs, seconds
        self._waits, self._place = streamed.waits, positions(order)
        self._clock = Clock(self._place, swaps, costs, streamed)
        self._memory = MemoryProfile(buffers.timeline(tuple(order), tuple(swaps)).allocated)
        """At the points of the order, with what was brought early and without what leaves later."""
        self._nbytes, self._floats = _bytes_of(buffers), _Floats(buffers.graph, floating, self._place)
        self._planned_s: list[float] = []
        """When each op of the order would start if none waited for a copy."""
        self._wanted_s: dict[int, float] = {}
        self._coming: deque[int] = deque()
        """What comes next, in the order of its need."""
        self._leaving: deque[int] = deque()
        self._held = 0
        """The bytes of what leaves."""
        self._step: int | None = None
        self._gap: list[int] = []
        """What has been put behind the last op of the chain, which is ``_step``."""
        self._done: dict[int, None] = {}
        self._untimed: list[int] = []
        """The ops that have been put and not timed yet, in their order."""
        self._plan_starts()

    def placed(self) -> tuple[int, ...]:
        """Return the new order."""
        leaves = {op for op in self._nbytes if self._graph.ops[op].type == STREAM_LEAVE}
        for place, op in enumerate(self._order):
            if op in leaves:
                self._leaving.append(op)
                self._held -= self._nbytes[op]
            elif op not in self._done:
                if self._leaving:
                    self._let_leave(place, op)
                self._put(op)
                if self._coming and op in self._chain:
                    self._bring_early(place)
        while self._leaving:
            self._release()
        return tuple(self._done)

    def _let_leave(self, place: int, op: int) -> None:
        """Release what must have left before the op at ``place``, and in the chain what has been copied."""
        self._make_room(place)
        while not set(self._leaving).isdisjoint(self._graph.predecessors[op]):
            self._release()
        if op in self._chain:
            self._release_copied()

    def _plan_starts(self) -> None:
        """Find when each copy to the device should start to be in time, with its own duration to spare."""
        self._planned_s += accumulate((self._seconds[op] for op in self._order), initial=0.0)
        free_s = float("inf")
        for op in reversed(self._order):
            if self._graph.ops[op].type == STREAM_IN and not self._floats.has(op):
                seconds = self._costs.in_seconds(self._nbytes[op])
                free_s = min(free_s, self._planned_s[self._place[op]]) - seconds
                self._wanted_s[op] = free_s - seconds
                self._coming.appendleft(op)
        chain = [op for op in self._order if op in self._chain]
        self._next = dict(zip(chain, chain[1:], strict=False))

    def _put(self, op: int) -> None:
        if op in self._nbytes:
            self._waits[op] += _waits(op, self._gap, self._nbytes, self._step)
            self._gap.append(op)
        elif op in self._chain:
            if waits := uncovered(self._gap, self._nbytes):
                self._waits[op] = [*self._waits.get(op, ()), *waits]
            self._gap, self._step = [], op
        self._done[op] = None
        self._untimed.append(op)

    def _timed(self) -> Clock:
        """Return the clock, with all that has been put."""
        self._clock.pass_ops(self._untimed, self._seconds)
        self._untimed = []
        return self._clock

    def _release(self) -> None:
        """Let the variable that has left the chain's ops first have left the device."""
        leave = self._leaving.popleft()
        self._held += self._nbytes[leave]
        self._put(leave)

    def _make_room(self, place: int) -> None:
        most = max(self._memory[2 * place], self._memory[2 * place + 1])
        while self._leaving and most + self._held > self._budget:
            self._release()

    def _release_copied(self) -> None:
        """Release what has been copied by now, and had as much time again to spare."""
        while self._leaving:
            leave, clock = self._leaving[0], self._timed()
            copied_s = max(clock.ends[op] for op in self._waits[leave])
            if copied_s + self._costs.out_seconds(-self._nbytes[leave]) > clock.now_s:
                break
            self._release()

    def _bring_early(self, place: int) -> None:
        """Start the copies that the op behind the one at ``place`` would start too late."""
        op, clock = self._order[place], self._timed()
        until_s = clock.now_s + (self._seconds[self._next[op]] if op in self._next else 0.0)
        stalled_s = clock.now_s - self._planned_s[place + 1]
        while self._coming:
            come = self._coming[0]
            if come in self._done:
                self._coming.popleft()
                continue
            nbytes = self._nbytes[come]
            is_idle = self._timed().back.free_s <= until_s + self._costs.in_seconds(nbytes)
            if self._wanted_s[come] + stalled_s > until_s or not is_idle:
                return
            first, last = 2 * place + 1, 2 * self._place[come] - 1
            missing = self._memory.largest(first, last) + nbytes + self._held - self._budget
            if missing > 0:
                leaving = self._in_place_of(nbytes, missing)
                if not leaving:
                    return
                for _ in range(leaving):
                    self._release()
            self._memory.add(first, last, nbytes)
            self._put(come)

    def _in_place_of(self, nbytes: int, missing: int) -> int:
        """Return how many must leave for ``nbytes`` that lack ``missing`` bytes; 0 if that would not do."""
        freed = 0
        for number, leave in enumerate(self._leaving, 1):
            freed -= self._nbytes[leave]
            if freed > nbytes or self._floats.has(leave):
                return 0
            if freed >= missing:
                return number
        return 0
