"""Bound the time of a step from below: keep, swap or recompute each buffer, as a mixed-integer programme.

The programme shares the cost model of the planner (times of ops and copies, the memory at the points of
:class:`lms.ir.liveness.Timeline`) and no code of its search. It may do all that a plan may do, and more, so
that its optimum is a lower bound of every plan's time:

* A buffer leaves and comes back as often as it likes. It is copied to the host once.
* An op may be repeated before any op of the backward pass that may read a copy, and read originals and copies
  alike; each reader takes what is there.
* Copies may be interrupted, and take the best order: only what a link has to carry between two points counts.
* While an op is repeated, a buffer that comes or goes between the ops beside it takes no memory.

What the programme and the planner's simulator share, and hardware does not: ops run one after the other in
the order of the graph; each takes its time whatever is copied beside it; each direction of the link has its
full speed; an op starts once its memory is free and its inputs are there; free memory is in one piece. Each
op is repeated once at most, and what it makes then is not swapped.

(The memory of repeated ops follows Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", MLSys 2020.)
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lms.ir.liveness import Buffers
from lms.planner.recomputation import Repeats
from lms.simulate.cost_model import Costs


class Programme:
    """Variables and linear constraints, added one at a time."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[dict[int, float], float]] = []

    def binary(self) -> int:
        """Add a variable that is 0 or 1."""
        return self._add(1.0, whole=True)

    def share(self) -> int:
        """Add a variable between 0 and 1."""
        return self._add(1.0, whole=False)

    def amount(self) -> int:
        """Add a variable that is not negative."""
        return self._add(np.inf, whole=False)

    def _add(self, upper: float, *, whole: bool) -> int:
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self._upper) - 1

    def at_least(self, least: float, *terms: tuple[int, float]) -> None:
        """Demand that the sum of variables, each with its factor, is at least ``least``."""
        row: dict[int, float] = defaultdict(float)
        for variable, factor in terms:
            row[variable] += factor
        self._rows.append((row, least))

    def at_most(self, most: float, *terms: tuple[int, float]) -> None:
        """Demand that the sum of variables, each with its factor, is at most ``most``."""
        self.at_least(-most, *((variable, -factor) for variable, factor in terms))

    def minimum(self, variable: int, limit_s: float) -> float | None:
        """Return a lower bound of a variable, the exact one within the time; ``None``: no solution."""
        cost = np.zeros(len(self._upper))
        cost[variable] = 1.0
        rows = [number for number, (row, _) in enumerate(self._rows) for _ in row]
        columns = [column for row, _ in self._rows for column in row]
        factors = [factor for row, _ in self._rows for factor in row.values()]
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._rows), len(cost)))
        found = milp(
            cost,
            integrality=np.array(self._whole, dtype=int),
            bounds=Bounds(0.0, np.array(self._upper)),
            constraints=LinearConstraint(matrix, np.array([least for _, least in self._rows]), np.inf),
            options={"time_limit": limit_s, "mip_rel_gap": 3e-3},
        )
        return None if found.status == 2 else float(found.mip_dual_bound)


class Optimum:
    """The programme of one step.

    Its points are the ops of the step in their order, and a *slot* before each op of the backward pass that
    may read a copy: there ops may be repeated.

    Args:
        buffers: The step; each op makes one tensor at most, and none writes over its input.
        movable: The buffers that may be swapped.
        costs: The device and its link.
        budget_bytes: What the step may take.
    """

    def __init__(self, buffers: Buffers, movable: Collection[int], costs: Costs, budget_bytes: int) -> None:
        graph = buffers.graph
        self._buffers, self._graph, self._budget = buffers, graph, budget_bytes
        self._movable = frozenset(movable)
        self._repeats = Repeats(buffers, 1)
        seconds = costs.op_seconds(graph)
        self._unit_s = max(seconds)  # the solver wants numbers of about one size
        self._op_s = [one / self._unit_s for one in seconds]
        self._out = {root: costs.out_seconds(buffers.nbytes[root]) / self._unit_s for root in buffers.owners}
        self._in = {root: costs.in_seconds(buffers.nbytes[root]) / self._unit_s for root in buffers.owners}
        self._mib = {root: buffers.nbytes[root] / 2**20 for root in buffers.owners}
        self._points: list[int | None] = []
        """The op of each point; ``None`` for a slot."""
        for op in range(len(graph.ops)):
            self._points += [None, op] if op in self._repeats.redirected else [op]
        self._at = {op: number for number, op in enumerate(self._points) if op is not None}
        self._slots = [number for number, op in enumerate(self._points) if op is None]
        self._again = [
            graph.tensors[root].op
            for root in buffers.owners
            if self._repeats.is_repeatable(graph.tensors[root].op) and not buffers.kept[root]
        ]
        self._p = Programme()
        self._one = self._p.share()
        self._p.at_least(1, (self._one, 1))

    def makespan_s(self, limit_s: float = 60.0) -> float | None:
        """Return a lower bound of the step's time; ``None``: no plan meets the budget."""
        self._declare_repeats()
        for root in self._buffers.owners:
            self._declare_stay(root)
        self._demand_inputs()
        self._demand_memory()
        self._demand_times()
        found = self._p.minimum(self._finish, limit_s)
        return None if found is None else found * self._unit_s

    # --- what is where -------------------------------------------------------------------------------------

    def _declare_repeats(self) -> None:
        p, count = self._p, len(self._points)
        self._repeat = {(op, slot): p.binary() for op in self._again for slot in self._slots}
        self._any = {slot: p.share() for slot in self._slots}
        for op in self._again:
            p.at_most(1, *((self._repeat[op, slot], 1) for slot in self._slots))
        for slot in self._slots:
            for op in self._again:
                p.at_least(0, (self._any[slot], 1), (self._repeat[op, slot], -1))
            p.at_least(0, (self._any[slot], -1), *((self._repeat[op, slot], 1) for op in self._again))
        self._copy: dict[tuple[int, int], int] = {}
        """Whether the copy that an op made again is there while another op runs."""
        for op in self._again:
            before: list[tuple[int, float]] = []
            for number in range(self._slots[0] if self._slots else count, count):
                if self._points[number] is not None:
                    made = self._copy[op, number] = p.share()
                    new = [(self._repeat[op, number - 1], 1.0)] if self._points[number - 1] is None else []
                    p.at_most(0, (made, 1), *((one, -factor) for one, factor in (*before, *new)))
                    before = [(made, 1.0)]
        self._here: dict[tuple[int, int], int] = {}
        """Whether a buffer has memory at a point."""
        self._ready: dict[tuple[int, int], int] = {}
        """Whether it can be read there."""
        self._comes: dict[tuple[int, int], int] = {}
        """Whether it gets memory there to be copied back."""
        self._arrives: dict[tuple[int, int], int] = {}
        self._returns: dict[tuple[int, int], int] = {}
        """Whether it comes there or later."""
        self._left: dict[tuple[int, int], int] = {}
        """Whether it was gone there or earlier, and comes back."""

    def _declare_stay(self, root: int) -> None:
        """Add the variables of a buffer at the points from where it is made to where it may be read last."""
        p, users = self._p, self._buffers.users[root]
        first = self._at[self._graph.tensors[root].op]
        last = max((self._at[op] for op in users), default=first)
        if self._slots and any(op in self._again for op in users):
            last = max(last, self._slots[-1])
        if self._buffers.kept[root]:
            last = len(self._points) - 1
        for number in range(first, last + 1):
            key, before = (root, number), (root, number - 1)
            here, ready = self._here[key], self._ready[key] = p.binary(), p.share()
            p.at_least(0, (here, 1), (ready, -1))
            if number == first:
                p.at_least(1, (ready, 1))
                continue
            # What is being copied back stays until it is there.
            p.at_least(0, (here, 1), (self._here[before], -1), (self._ready[before], 1))
            came = self._comes[key] = p.share()
            p.at_least(0, (came, 1), (here, -1), (self._here[before], 1))
            p.at_most(0, (came, 1), (here, -1))
            p.at_most(1, (came, 1), (self._here[before], 1))
            arrived = self._arrives[key] = p.share()
            p.at_least(0, (arrived, 1), (ready, -1), (self._ready[before], 1))
            if root not in self._movable:
                p.at_most(0, (came, 1))
                p.at_most(0, (arrived, 1))
            if self._buffers.kept[root]:
                p.at_least(1, (here, 1))
            if self._points[number - 1] is None:  # nothing changes in a slot in which nothing is repeated
                slot = self._any[number - 1]
                for factor in (1, -1):
                    p.at_least(0, (slot, 1), (here, factor), (self._here[before], -factor))
        for number in range(last, first, -1):
            key, behind = (root, number), (root, number + 1)
            returns = self._returns[key] = p.share()
            p.at_least(0, (returns, 1), (self._comes[key], -1))
            if behind in self._returns:
                p.at_least(0, (returns, 1), (self._returns[behind], -1))
        for number in range(first + 1, last):
            left = self._left[root, number] = p.share()
            returns = self._returns[root, number + 1]
            p.at_least(0, (left, 1), (returns, -1), (self._here[root, number], 1))
            if number > first + 1:
                p.at_least(0, (left, 1), (self._left[root, number - 1], -1))

    def _demand_inputs(self) -> None:
        """Have each op find what it reads."""
        candidates = set(self._repeats.candidates)
        for root in self._buffers.owners:
            maker = self._graph.tensors[root].op
            for op in self._buffers.users[root]:
                at = self._at[op]
                terms = [(self._ready[root, at], 1.0)]
                if op in self._repeats.redirected and root in candidates:
                    terms.append((self._copy[maker, at], 1.0))
                self._p.at_least(1, *terms)
                for slot in self._slots if op in self._again else ():
                    again = [(self._repeat[maker, slot], 1.0)] if maker in self._again else []
                    if (maker, slot - 1) in self._copy:
                        again.append((self._copy[maker, slot - 1], 1.0))
                    if (root, slot) in self._ready:
                        again.append((self._ready[root, slot], 1.0))
                    self._p.at_least(0, *again, (self._repeat[op, slot], -1))

    # --- memory --------------------------------------------------------------------------------------------

    def _demand_memory(self) -> None:
        for number, op in enumerate(self._points):
            if op is None:
                for again in self._again:
                    self._fit([*self._beside_repeat(number, again), *self._copies_in_slot(number, again)])
            else:
                held = [(root, number) for root in self._buffers.owners if (root, number) in self._here]
                copies = self._copies_at(number)
                self._fit([*((root, self._here[root, at]) for root, at in held), *copies])
            if number:
                self._fit([*self._between(number), *self._copies_between(number)])

    def _fit(self, held: Iterable[tuple[int, int]]) -> None:
        """Demand that buffers have room side by side; each comes with the share of it that is there."""
        self._p.at_most(self._budget / 2**20, *((one, self._mib[root]) for root, one in held))

    def _where_all(self, *ways: Sequence[int]) -> int:
        """Add a variable that is 1 where all variables of one of the ``ways`` are."""
        made = self._p.share()
        for terms in ways:
            self._p.at_least(1 - len(terms), (made, 1), *((one, -1) for one in terms))
        return made

    def _between(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield what has memory between two points: what stays, comes, or leaves to return."""
        for root in self._buffers.owners:
            key, before = (root, number), (root, number - 1)
            if key in self._here and before in self._here:
                here = self._here[before]
                share = self._where_all((here, self._here[key]), (here, self._returns[key]))
                slot = self._points[number] is None  # it may come while an op is repeated
                relaxed = [(self._any[number], 1)] if slot else []
                self._p.at_least(0, (share, 1), (self._comes[key], -1), *relaxed)
                yield root, share

    def _beside_repeat(self, slot: int, again: int) -> Iterator[tuple[int, int]]:
        """Yield what has memory while an op is repeated: what stays there, and what that op reads."""
        for root in self._buffers.owners:
            around = [self._here[key] for at in (-1, 0, 1) if (key := (root, slot + at)) in self._here]
            ways = [around] if len(around) == 3 else []
            if (root, slot) in self._here and again in self._buffers.users[root]:
                ways.append([self._here[root, slot], self._repeat[again, slot]])
            if ways:
                yield root, self._where_all(*ways)

    def _made_by(self, op: int) -> int:
        return self._graph.ops[op].outputs[0]

    def _copies_at(self, number: int) -> Iterator[tuple[int, int]]:
        return (
            (self._made_by(op), self._copy[op, number]) for op in self._again if (op, number) in self._copy
        )

    def _copies_in_slot(self, slot: int, again: int) -> Iterator[tuple[int, int]]:
        """Yield the copies that have memory while an op is repeated: those carried through, made or read."""
        runs = self._repeat[again, slot]
        yield self._made_by(again), runs
        for op in self._again:
            root, later = self._made_by(op), self._copy[op, slot + 1]
            readers = [one for one in self._again if one in self._buffers.users[root]]
            if (op, slot - 1) in self._copy:
                carried = self._copy[op, slot - 1]
                yield root, self._where_all((carried, later), *[(carried, runs)] * (again in readers))
            if op < again:
                made = self._repeat[op, slot]
                reads = [(made, self._repeat[one, slot]) for one in readers if one >= again]
                yield root, self._where_all((made, later), *reads)

    def _copies_between(self, number: int) -> Iterator[tuple[int, int]]:
        if self._points[number - 1] is None:
            yield from self._copies_at(number)
            return
        behind = number + 1 if self._points[number] is None else number
        for op in self._again:
            if (op, number - 1) in self._copy:
                yield self._made_by(op), self._where_all((self._copy[op, number - 1], self._copy[op, behind]))

    # --- time ----------------------------------------------------------------------------------------------

    def _demand_times(self) -> None:
        p, count = self._p, len(self._points)
        self._starts = [p.amount() for _ in range(count)]
        self._finish = p.amount()
        for number in range(count):
            behind = self._starts[number + 1] if number + 1 < count else self._finish
            p.at_least(0, (behind, 1), *self._done(number))
            self._await_copies_out(number)
            for release in range(1, number + 1):
                self._await_copies_back(release, number)

    def _done(self, number: int) -> list[tuple[int, float]]:
        """Return the terms of minus the time at which a point is over."""
        op = self._points[number]
        if op is None:
            took = [(self._repeat[again, number], -self._op_s[again]) for again in self._again]
        else:
            took = [(self._one, -self._op_s[op])]
        return [(self._starts[number], -1.0), *took]

    def _await_copies_out(self, number: int) -> None:
        """Have a point wait until the link can have carried what was to leave by then."""
        left = [
            (self._at[self._graph.tensors[root].op], root, self._left[key])
            for root in self._movable
            for last in [max((at for one, at in self._left if one == root), default=-1)]
            if (key := (root, min(number, last))) in self._left
        ]
        for release in {made for made, _, _ in left}:
            carried = [(one, -self._out[root]) for made, root, one in left if made >= release]
            self._p.at_least(0, (self._starts[number], 1), *self._done(release), *carried)

    def _await_copies_back(self, release: int, number: int) -> None:
        """Have a point wait until the link can have carried what may come from ``release`` on and is read.

        In a slot an op that is repeated waits for what it reads; what others wait for is not known.
        """
        if self._points[number] is not None:
            self._carry(release, number, [(self._starts[number], 1.0)], self._movable)
            return
        done = [(one, -factor) for one, factor in self._done(number)]
        for op in self._again:
            runs = self._repeat[op, number]
            read = [root for root in self._movable if op in self._buffers.users[root]]
            self._carry(release, number, [*done, (runs, -self._op_s[op])], read, runs)

    def _carry(
        self,
        release: int,
        number: int,
        by: Sequence[tuple[int, float]],
        roots: Iterable[int],
        if_runs: int | None = None,
    ) -> None:
        """Demand that copies of ``roots`` that come from ``release`` on and have arrived end in time."""
        carried: list[tuple[int, float]] = []
        for root in roots:
            arrived = [one for (other, at), one in self._arrives.items() if other == root and at <= number]
            came = [one for (other, at), one in self._comes.items() if other == root and at < release]
            if arrived and (root, release) in self._comes:
                share = self._p.amount()
                terms = [*((one, -1) for one in arrived), *((one, 1) for one in came)]
                relaxed = [] if if_runs is None else [(if_runs, -1)]
                self._p.at_least(-len(relaxed), (share, 1), *terms, *relaxed)
                carried.append((share, -self._in[root]))
        if carried:
            self._p.at_least(0, *by, *self._done(release - 1), *carried)
