"""Simulate TensorFlow's executor: which op runs beside which is partly chance.

A thread that is done with an op goes on with one of those that have become ready, and leaves the others to
other threads (``ExecutorState::ScheduleReady`` in ``executor.cc``). So the gradient of a filter, which
nothing waits for, holds its operands while the backward pass goes on beside it. An order of one op after the
other has no such moment. How long each op takes depends on what else the machine does, and with it the peak:
a step is run several times, each with times of its own.

Meanwhile the input pipeline makes the next batch ready, in memory of the same allocator. Its buffers lie
between those of the step, and have free memory lie in other pieces each time.

On a GPU one thread of the host launches the ops as they become ready, and memory is taken and given back at
the launch. Only copies to the host keep theirs until the device has come to them. How far the host is ahead
is chance there.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush
from random import Random
from statistics import median_low

from lms.ir.assignments import VariableReads, in_place
from lms.ir.liveness import Buffers, Residency, round_up
from lms.ir.op_traits import in_place_output, may_end_step
from lms.ir.swap_plan import Swap, SwapIn, SwapPlan
from lms.simulate.allocation_trace import Demand, Filled, batch_bytes, updates_of
from lms.simulate.cost_model import Costs
from lms.simulate.rehearsal import GROWN_STEPS, STEPS, peak_in_pieces

SPREAD = 0.3
"""The standard deviation of the logarithm of an op's time. Seen over the steps of a residual net: 0.35 to 0.7
on two cores with ten programs at work, which slow ops that run side by side alike. On the first 29 cases of
``bench/fit_accuracy.py`` the mean error of the peak was 1% with 0.3, and 6% with 0.5."""
RUNS = STEPS
"""How often a step is run: as many steps as plans are simulated for."""
MOST_OPS = 60_000
"""The ops that all runs together may simulate."""


def peaks_by_chance(
    buffers: Buffers, plan: SwapPlan, costs: Costs, rooms: Sequence[int]
) -> Iterator[int | None]:
    """Yield each run's peak in each room, as the allocator counts it; ``None`` where a buffer finds no chunk.

    Args:
        buffers: The step's.
        plan: For that step; an empty one leaves the ops in no order.
        costs: The device and its link.
        rooms: Bytes that the device has for the step's own tensors. A run is the same in each.
    """
    tasks = Tasks(buffers, plan, costs)
    runs = min(RUNS, max(1, MOST_OPS // max(1, len(buffers.graph.ops))))
    for seed in range(runs):
        chance = Random(seed)  # noqa: S311 - the same in each process
        demand = Execution(tasks, chance).demand(costs.resident_bytes)
        for room in rooms:
            yield peak_in_pieces(demand, room, GROWN_STEPS, pooled=not plan.is_empty)


def likely_peak(buffers: Buffers, plan: SwapPlan, costs: Costs, room: int) -> int | None:
    """Return the peak that is likely on the threads of a CPU, as the allocator counts it: the median of runs.

    A run in which a buffer finds no chunk counts as one that takes all of the room. ``None`` where there is
    one thread, so that ops come in one order. The peak of twelve real steps was within 10% of this median for
    22 of the 24 plans of ``auto`` in ``bench/lms.py``, for 19 within 10% of the peak of the planned order.
    With memory to spare, as under ``all``, that is nearer: 8 of 10 plans, and 4 with the median.

    A step without a plan has its ops in no order, and the largest peak of the runs is the likely one: it was
    within 10% of that of ten real steps for 24 of 25 in ``bench/fit_accuracy.py``.
    """
    if costs.threads == 1:
        return None
    likely = max if plan.is_empty else median_low
    return likely(room if peak is None else peak for peak in peaks_by_chance(buffers, plan, costs, (room,)))


class Tasks:
    """What each run of a step has to do, and which of its tasks wait for which.

    Copies are tasks like ops: their numbers come behind those of the ops, first the copies to the host.

    Args:
        buffers: The step's.
        plan: For that step.
        costs: The device and its link.
    """

    def __init__(self, buffers: Buffers, plan: SwapPlan, costs: Costs) -> None:
        self.buffers, self.plan, self.costs = buffers, plan, costs
        seconds, swaps, graph = costs.op_seconds(buffers.graph), plan.swaps, buffers.graph
        self.in_place = frozenset() if plan.is_empty else in_place(buffers, plan.order)
        self._out = {swap.tensor: len(seconds) + number for number, swap in enumerate(swaps)}
        self.back: list[tuple[Swap, SwapIn]] = [(swap, back) for swap in swaps for back in swap.swap_ins]
        self.first_copy, self.first_back = len(seconds), len(seconds) + len(swaps)
        self.seconds = [*seconds, *(costs.out_seconds(swap.nbytes) for swap in swaps)]
        self.seconds += [costs.in_seconds(swap.nbytes) for swap, _ in self.back]
        later: list[set[int]] = [set(after) for after in graph.successors]
        later += [set() for _ in range(len(self.seconds) - len(seconds))]
        self._add_waits(later)
        self.later = [sorted(after) for after in later]
        """By task, those that wait for it."""
        self.waiting = [0] * len(later)
        """How many others each task waits for."""
        for after in later:
            for task in after:
                self.waiting[task] += 1
        swapped = {swap.tensor: swap for swap in swaps}
        self.stays = {root: self._stays(root, swapped.get(root)) for root in buffers.owners}
        """By buffer the first task of each of its stays, and the tasks that this outlives."""
        self.takeovers = [
            (op, [stay for root in sources for stay in self._taken(op, root)])
            for op, sources in buffers.takeovers
        ]
        """Ops that may take over stays, and for each of these what must be done by then."""

    def _add_waits(self, later: Sequence[set[int]]) -> None:
        """Add the waits of the plan."""
        for edge in () if self.plan.is_empty else self.plan.serial_edges:
            later[edge.before].add(edge.after)
        for swap in self.plan.swaps:
            out = self._out[swap.tensor]
            later[swap.after].add(out)
            later[self.buffers.graph.tensors[swap.tensor].op].add(out)
            later[out].update(swap.blocks)
        for task, (swap, back) in enumerate(self.back, self.first_back):
            later[self._out[swap.tensor]].add(task)
            later[back.trigger].add(task)
            later[task].update(use.op for use in back.uses)
            later[task].update(back.blocks)

    def _stays(self, root: int, swap: Swap | None) -> list[tuple[int, list[int]]]:
        maker, users = self.buffers.graph.tensors[root].op, self.buffers.users[root]
        if swap is None:
            return [(maker, [maker, *users])]
        far = {use.op for back in swap.swap_ins for use in back.uses}
        held = [] if swap.until is None or swap.at_once else [swap.until]
        near = [maker, self._out[root], *held, *(op for op in users if op not in far)]
        return [(maker, near), *self._returns.get(root, ())]

    @cached_property
    def _returns(self) -> dict[int, list[tuple[int, list[int]]]]:
        """The stays that begin with a copy to the device, by buffer."""
        found: dict[int, list[tuple[int, list[int]]]] = {}
        for task, (swap, back) in enumerate(self.back, self.first_back):
            found.setdefault(swap.tensor, []).append((task, [task, *(use.op for use in back.uses)]))
        return found

    def _taken(self, op: int, root: int) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Yield the stays of a buffer that an op may take over, with the other tasks that they outlive."""
        for number, (_, users) in enumerate(self.stays[root]):
            if op in users:
                yield (root, number), [task for task in users if task != op]


class Execution:
    """One run of a step: on a CPU's threads, or launched on a GPU.

    Args:
        tasks: What it does.
        chance: Decides how long each task takes.
    """

    def __init__(self, tasks: Tasks, chance: Random) -> None:
        self._tasks, self._chance, costs = tasks, chance, tasks.costs
        self._times = [one * chance.lognormvariate(0.0, SPREAD) for one in tasks.seconds]
        self.begins, self.ends = [0] * len(self._times), [0] * len(self._times)
        """By task, as points: each begin and each end of a task is an even one of its own."""
        self._now = 0
        self._launches = costs.overlaps and costs.threads == 1
        if self._launches:
            self._launch(costs.launch_s)
        else:
            self._run(max(1, costs.threads))

    def _run(self, threads: int) -> None:
        waiting = [*self._tasks.waiting]
        shared = deque(task for task, count in enumerate(waiting) if not count)
        own: list[deque[int]] = [deque() for _ in range(threads)]
        idle = [*range(threads)]
        busy: list[tuple[float, int, int]] = []
        now_s = 0.0
        while True:
            still: list[int] = []
            for thread in sorted(idle):
                if (taken := _next(thread, own, shared)) is None:
                    still.append(thread)
                    continue
                self.begins[taken] = self._point()
                heappush(busy, (now_s + self._times[taken], taken, thread))
            idle = still
            if not busy:
                return
            now_s, task, thread = heappop(busy)
            self.ends[task] = self._point()
            idle.append(thread)
            for later in self._tasks.later[task]:
                waiting[later] -= 1
                if not waiting[later]:
                    own[thread].appendleft(later)

    def _launch(self, launch_s: float) -> None:
        """Launch ops one by one as they become ready, and have copies run beside them, one a direction."""
        waiting = [*self._tasks.waiting]
        slowness = self._chance.random()
        ready: deque[int] = deque()
        copies: list[tuple[float, int]] = []
        links_s = [0.0, 0.0]
        now_s = device_s = 0.0

        def begin(task: int) -> None:
            if task < self._tasks.first_copy:
                ready.append(task)
                return
            way = task >= self._tasks.first_back
            self.begins[task] = self._point()
            links_s[way] = max(now_s, device_s, links_s[way]) + self._times[task]
            heappush(copies, (links_s[way], task))

        for task, number in enumerate(waiting):
            if not number:
                begin(task)
        while ready or copies:
            if ready and not (copies and copies[0][0] <= now_s):
                task = ready.popleft()
                self.begins[task] = self._point()
                now_s += launch_s
                device_s = max(device_s, now_s) + slowness * self._times[task]
            else:
                done_s, task = heappop(copies)
                now_s = max(now_s, done_s)
            self.ends[task] = self._point()
            for later in self._tasks.later[task]:
                waiting[later] -= 1
                if not waiting[later]:
                    begin(later)

    def _point(self) -> int:
        self._now += 2
        return self._now

    def demand(self, resident_bytes: int | None) -> Demand:
        """Return what the run asks of the allocator."""
        tasks, buffers, graph = self._tasks, self._tasks.buffers, self._tasks.buffers.graph
        takers = self._takers()
        stays = []
        for root, found in tasks.stays.items():
            for number, (first, outlived) in enumerate(found):
                last = self._end(outlived)
                if buffers.kept[root] and number == len(found) - 1:
                    last = self._now + 1
                if (root, number) in takers:
                    last = self.begins[takers[root, number]] - 1
                stays.append(Residency(root, buffers.nbytes[root], self.begins[first], last))
        stays += self._next_batch()
        for op in buffers.with_workspace:
            nbytes = round_up(graph.ops[op].workspace_bytes)
            stays.append(Residency(-1 - op, nbytes, self.begins[op], self.ends[op]))
        handed_on = {
            graph.ops[op].outputs[in_place_output(graph.ops[op].type)]: root
            for (root, _), op in takers.items()
        }
        reads = VariableReads(buffers, self.begins, self.ends, self._now + 1)
        updates = tuple(updates_of(buffers, reads, self.begins, tasks.in_place & reads.may_stay))
        room = (batch_bytes(buffers),) * tasks.plan.batches
        return Demand(tuple(stays), updates, handed_on, resident_bytes, self._filled(), room)

    def _filled(self) -> dict[int, Filled]:
        """Return what fillers take, by the begin of the op or of the first copy back that they precede."""
        copies: dict[int, list[int]] = {}
        for task, (_, back) in enumerate(self._tasks.back, self._tasks.first_back):
            copies.setdefault(back.trigger, []).append(self.begins[task])
        found: dict[int, Filled] = {}
        for one in self._tasks.plan.fillers:
            point = min(copies[one.op]) if one.copies else self.begins[one.op]
            last = self.begins[one.until] - 1 if one.copies else self.ends[one.op]
            found[point] = Filled(one.sizes, one.least, last)
        return found

    def _next_batch(self) -> Iterator[Residency]:
        """Yield the buffers of the batch that the input pipeline makes ready meanwhile, at any time.

        A GPU's batches are made ready in the host's memory.
        """
        if self._launches:
            return
        begin = self._chance.randrange(self._now)
        buffers = self._tasks.buffers
        nowhere = -1 - len(buffers.graph.ops)
        for op in buffers.graph.ops:
            if may_end_step(op.type):
                for root in op.outputs:
                    yield Residency(nowhere - root, buffers.nbytes[root], begin, self._now + 1)

    def _end(self, tasks: Sequence[int]) -> int:
        ends = self.ends
        return max([ends[task] for task in tasks])

    def _takers(self) -> dict[tuple[int, int], int]:
        """Map buffers that an op takes over, with the number of the stay, to that op.

        All else that the stay outlives is done by then: of a swapped buffer the copy to the host, too.
        """
        takers: dict[tuple[int, int], int] = {}
        for op, stays in self._tasks.takeovers:
            for stay, others in stays:
                if stay not in takers and self._end(others) < self.begins[op]:
                    takers[stay] = op
                    break
        return takers


def _next(thread: int, own: Sequence[deque[int]], shared: deque[int]) -> int | None:
    """Take a task: the latest of the thread's own, else one that nobody has, else another's earliest."""
    if own[thread]:
        return own[thread].popleft()
    if shared:
        return shared.popleft()
    return next((other.pop() for other in own if other), None)
