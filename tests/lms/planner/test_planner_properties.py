"""Random steps against an oracle that shares no code with the planner.

The oracle builds the edited graph out of the plan, node by node and edge by edge, and then runs it as an
executor
might: in any order that the edges allow, with copies that take arbitrarily long, counting references to
buffers. What the planner predicts must bound every such run.
"""

import random
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers
from lms.ir.swap_plan import SwapPlan
from lms.planner.fragmentation import plan_in_pieces
from lms.planner.host_operands import FETCH, SEND, read_from_host
from lms.simulate.cost_model import Costs
from lms.simulate.range_max import MemoryProfile
from lms.simulate.step_time import simulate
from lms.swaps import swap_planner
from lms.swaps.budget import memory_with
from lms.swaps.case import Case
from lms.swaps.swap_planner import least_plans, plan, plan_all

SLOW_LINK = Costs(
    flops_per_s=1e9, device_bytes_per_s=1e9, launch_s=1e-6, out_bytes_per_s=1e8, in_bytes_per_s=1e8
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    build = GraphBuilder()
    tensors: list[int] = []
    sizes: list[int] = []
    for number in range(draw(st.integers(2, 22))):
        inputs = draw(st.lists(st.sampled_from(tensors), max_size=3)) if tensors else []
        kind = draw(
            st.sampled_from(
                ["Op"] * 6 + ["Relu", "AddV2", "Reshape", "Sink", "Const", "ConcatV2", "ConcatV2"]
            )
        )
        if kind in ("Relu", "AddV2", "Reshape") and not inputs:
            kind = "Op"
        count = 0 if kind == "Sink" else draw(st.sampled_from([1, 1, 1, 2])) if kind == "Op" else 1
        outputs = [draw(st.integers(0, 6)) * 256 for _ in range(count)]
        if kind in ("Relu", "AddV2", "Reshape"):
            outputs = [sizes[inputs[0]]]
        made = build.add(
            f"op{number}",
            kind,
            inputs=inputs[:1] if kind == "Reshape" else inputs,
            outputs=outputs,
            controls=draw(st.lists(st.integers(0, number - 1), max_size=1))
            if number and kind != "Reshape"
            else [],
            forbidden="no" if draw(st.integers(0, 9)) == 0 else None,
            workspace_bytes=draw(st.sampled_from([0, 0, 0, 512])),
        )
        tensors += made
        sizes += outputs
    kept = draw(st.lists(st.sampled_from(tensors), max_size=2)) if tensors else []
    return build.build(kept)


@dataclass
class Node:
    """One node of the edited graph."""

    after: set[str] = field(default_factory=set)
    reads: list[tuple[str, int]] = field(default_factory=list)
    makes: list[tuple[str, int]] = field(default_factory=list)
    """(name of the buffer, bytes)."""
    in_place: bool = False
    scratch: int = 0
    is_copy: bool = False
    is_alias: bool = False


class Oracle:
    """The edited graph, and runs of it."""

    def __init__(self, graph: Graph, made: SwapPlan) -> None:
        self.nodes: dict[str, Node] = {}
        redirected: dict[tuple[int, int], str] = {}
        for swap in made.swaps:
            for number, swap_in in enumerate(swap.swap_ins):
                for use in swap_in.uses:
                    assert (use.op, use.slot) not in redirected, "a use reads two copies"
                    redirected[use.op, use.slot] = f"in{swap.tensor}.{number}"
        owner: dict[int, str] = {}
        for op in graph.ops:
            alias = op.type == "Reshape"
            node = self.nodes[f"op{op.id}"] = Node(scratch=op.workspace_bytes, is_alias=alias)
            node.after = {f"op{before}" for before in op.controls}
            for slot, tensor in enumerate(op.inputs):
                copy = redirected.get((op.id, slot))
                producer = copy or f"op{graph.tensors[tensor].op}"
                node.after.add(producer)
                node.reads.append((copy or owner[tensor], 0))
            for tensor in op.outputs:
                value = graph.tensors[tensor]
                if op.type == "Reshape":
                    owner[tensor] = owner[op.inputs[0]]
                else:
                    owner[tensor] = f"t{tensor}"
                    node.makes.append((f"t{tensor}", 0 if value.outside else value.nbytes or 0))
            node.in_place = op.type in ("Relu", "AddV2")
        self.kept = {owner[tensor] for tensor in graph.kept}
        for edge in made.serial_edges:
            self.nodes[f"op{edge.after}"].after.add(f"op{edge.before}")
        for swap in made.swaps:
            sender = made.copied.get(swap.tensor)
            out = f"out{swap.tensor}" if sender is None else f"op{sender}"
            assert owner[swap.tensor] == f"t{swap.tensor}", "an alias is swapped"
            assert graph.tensors[swap.tensor].forbidden is None and owner[swap.tensor] not in self.kept
            producers = {f"op{graph.tensors[swap.tensor].op}", f"op{swap.after}"}
            if sender is None:
                self.nodes[out] = Node(after=producers, reads=[(owner[swap.tensor], 0)], is_copy=True)
            for op in swap.blocks:
                self.nodes[f"op{op}"].after.add(out)
            for number, swap_in in enumerate(swap.swap_ins):
                name = f"in{swap.tensor}.{number}"
                self.nodes[name] = Node(
                    {out, f"op{swap_in.trigger}"}, [], [(name, swap.nbytes)], is_copy=True
                )
                for op in swap_in.blocks:
                    self.nodes[f"op{op}"].after.add(name)
        self._prune(graph, redirected)

    def _prune(self, graph: Graph, redirected: dict[tuple[int, int], str]) -> None:
        """Aliases that nobody reads any more are not run (nor are they by a real executor)."""
        for op in reversed(graph.ops):
            name = f"op{op.id}"
            read = any(name in node.after for node in self.nodes.values())
            if op.type == "Reshape" and not read and not set(op.outputs) & graph.kept:
                del self.nodes[name]

    def run(self, rng: random.Random) -> int:
        """One run; returns the most bytes allocated at once, and fails when some node never runs."""
        waiting = {name: set(node.after) for name, node in self.nodes.items()}
        readers: dict[str, int] = {}
        for node in self.nodes.values():
            for buffer, _ in node.reads:
                readers[buffer] = readers.get(buffer, 0) + 1
        held: dict[str, int] = {}
        copying: list[str] = []
        peak = 0
        while waiting or copying:
            ready = sorted(name for name, after in waiting.items() if not after)
            assert ready or copying, "the plan makes a cycle"
            aliases = [name for name in ready if self.nodes[name].is_alias]
            name = rng.choice(aliases or ready + copying)
            if name in copying:
                copying.remove(name)
            else:
                del waiting[name]
                peak = max(peak, self._start(name, held, readers))
                if self.nodes[name].is_copy:
                    copying.append(name)
                    continue
            self._finish(name, held, readers)
            for after in waiting.values():
                after.discard(name)
        assert set(held) <= self.kept, "something is never freed"
        return peak

    def _start(self, name: str, held: dict[str, int], readers: dict[str, int]) -> int:
        node = self.nodes[name]
        for buffer, _ in node.reads:
            assert buffer in held, f"{name} reads {buffer} before it is there"
        saved = 0
        if node.in_place and node.makes:
            wanted = node.makes[0][1]
            for buffer, _ in node.reads:
                if readers[buffer] == 1 and buffer not in self.kept and held[buffer] == wanted:
                    saved = wanted
                    break
        for buffer, nbytes in node.makes:
            held[buffer] = nbytes
        return sum(held.values()) + node.scratch - saved

    def _finish(self, name: str, held: dict[str, int], readers: dict[str, int]) -> None:
        node = self.nodes[name]
        for buffer, _ in node.reads:
            readers[buffer] -= 1
        for buffer in [*(b for b, _ in node.reads), *(b for b, _ in node.makes)]:
            if not readers.get(buffer) and buffer not in self.kept:
                held.pop(buffer, None)


def check(graph: Graph, made: SwapPlan, seed: int) -> None:
    oracle = Oracle(graph, made)
    rng = random.Random(seed)  # noqa: S311
    worst = max(oracle.run(rng) for _ in range(4))
    assert worst <= made.peak_bytes, f"a run took {worst}, planned were {made.peak_bytes}"
    timing = simulate(Buffers.of(graph), made.order, made.swaps, SLOW_LINK)
    assert timing.peak_bytes <= made.peak_bytes
    assert made.floor_bytes <= made.peak_bytes


MODEST = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@MODEST
@given(graphs(), st.integers(0, 99))
def test_all_never_exceeds_its_own_prediction(graph, seed):
    made = plan(graph, LMSConfig(policy="all", min_tensor_bytes=1), costs=SLOW_LINK)
    check(graph, made, seed)
    assert made.feasible


def value_of(graph: Graph, tensor: int, known: dict[int, object]) -> object:
    """What a tensor stands for, as a term over the names of ops; a copy stands for what it copies."""
    if tensor not in known:
        made = graph.tensors[tensor]
        op = graph.ops[made.op]
        read = tuple(value_of(graph, one, known) for one in op.inputs)
        known[tensor] = read[0] if op.type in (SEND, FETCH) else (op.name, made.index, read)
    return known[tensor]


@MODEST
@given(graphs(), st.booleans(), st.integers(0, 99))
def test_reading_from_the_host_changes_no_value_and_holds_the_prediction(graph, direct, seed):
    movers = [op.id for op in graph.ops if op.type == "ConcatV2"]
    relocation = read_from_host(graph, movers, 1, direct=direct)
    known: tuple[dict[int, object], dict[int, object]] = ({}, {})
    for new, old in enumerate(relocation.tensors):
        if old is not None:
            assert value_of(relocation.graph, new, known[0]) == value_of(graph, old, known[1])
    for new, old in enumerate(relocation.ops):
        if old is not None:
            read = [
                value_of(relocation.graph, tensor, known[0]) for tensor in relocation.graph.ops[new].inputs
            ]
            assert read == [value_of(graph, tensor, known[1]) for tensor in graph.ops[old].inputs]
    made = plan(relocation.graph, LMSConfig(policy="all", min_tensor_bytes=1), costs=SLOW_LINK)
    check(relocation.graph, replace(made, sent=relocation.sent), seed)


@MODEST
@given(graphs(), st.integers(2, 4))
def test_the_memory_beside_trips_is_that_without_them_less_each_by_itself(graph, shortest):
    for schedule in Case.of(graph, LMSConfig(min_tensor_bytes=1), SLOW_LINK).schedules:
        trips = plan_all(schedule, shortest)
        one_by_one = MemoryProfile(schedule.memory)
        for trip in trips:
            one_by_one.add(*schedule.away(trip), -schedule.buffers.nbytes[trip.tensor])
        beside = memory_with(schedule, trips)
        assert [beside[point] for point in range(len(beside))] == [
            one_by_one[point] for point in range(len(schedule.memory))
        ]


@MODEST
@given(graphs())
def test_copies_beside_compute_take_no_more_memory(graph):
    case = Case.of(graph, LMSConfig(policy="all", min_tensor_bytes=1), SLOW_LINK)
    for made, (schedule, trips) in zip(least_plans(case, None), swap_planner._least_trips(case), strict=True):
        plain = case.buffers.timeline(schedule.order, schedule.swaps(trips)).peak_bytes
        assert made.peak_bytes <= plain


@MODEST
@given(graphs(), st.floats(0.1, 0.9), st.integers(0, 99))
def test_policy_all_swaps_no_more_than_the_host_holds(graph, share, seed):
    config = LMSConfig(policy="all", min_tensor_bytes=1)
    whole = plan_in_pieces(Case.of(graph, config, SLOW_LINK), config, None)
    room = int(whole.bytes_out * share)
    made = plan_in_pieces(Case.of(graph, config, replace(SLOW_LINK, host_room_bytes=room)), config, None)
    if made.bytes_out > room:
        assert made == whole, "no plan holds so little: the transport refuses this one"
    elif made != whole:
        check(graph, made, seed)
        assert made.peak_bytes <= made.peak_before_bytes
        assert "because the host holds no more" in made.notes[-1]


@MODEST
@given(graphs(), st.floats(0.2, 1.0))
def test_a_step_that_no_plan_helps_is_left_alone_on_a_device_with_a_limit(graph, share):
    config = LMSConfig(policy="auto", min_tensor_bytes=1)
    case = Case.of(graph, config, SLOW_LINK)
    made = plan_in_pieces(case, config, max(1, int(case.peak_before_bytes * share)))
    assert made.is_empty or made.feasible or made.peak_bytes < case.peak_before_bytes


@MODEST
@given(graphs(), st.floats(0.2, 1.0), st.integers(0, 99))
def test_budget_holds_or_says_that_it_does_not(graph, share, seed):
    whole = plan(graph, LMSConfig(policy="all", min_tensor_bytes=1), costs=SLOW_LINK)
    budget = max(1, int(whole.peak_before_bytes * share))
    config = LMSConfig(policy="budget", budget_bytes=budget, margin=0.0, min_tensor_bytes=1)
    made = plan(graph, config, costs=SLOW_LINK)
    assert made.feasible or made.peak_bytes <= made.peak_before_bytes
    if made.is_empty and made.feasible:
        return
    if not made.is_empty:
        check(graph, made, seed)
    assert made.feasible == (made.peak_bytes <= budget)
    assert made.feasible or "is not met" in made.notes[0]
    assert made == plan(graph, config, costs=SLOW_LINK), "the same input gives another plan"


@MODEST
@given(
    graphs(),
    st.sampled_from([1, 3]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_threshold_that_waits_for_copies_out_holds_its_prediction(
    graph, sync, threshold, ahead, groupby, seed
):
    config = LMSConfig(
        policy="threshold",
        swapout_threshold=threshold,
        swapin_ahead=ahead,
        swapin_groupby=groupby,
        sync_mode=sync,
        min_tensor_bytes=1,
    )
    check(graph, plan(graph, config, costs=SLOW_LINK), seed)


@MODEST
@given(
    graphs(), st.integers(1, 4), st.integers(0, 3), st.sampled_from([":3", "2", "1:6:2"]), st.integers(0, 99)
)
def test_named_levels_make_no_cycle_and_read_nothing_before_it_is_there(graph, ahead, sync, levels, seed):
    config = LMSConfig(
        policy="threshold",
        swapout_threshold=1,
        swapin_ahead=ahead,
        sync_mode=sync,
        serialization=(levels,),
        min_tensor_bytes=1,
    )
    made = plan(graph, config, costs=SLOW_LINK)
    Oracle(graph, made).run(random.Random(seed))  # noqa: S311
    place = {op: place for place, op in enumerate(made.order)}
    edges = [*made.serial_edges, *(edge for swap in made.swaps for edge in swap.edges)]
    assert all(place[edge.before] < place[edge.after] for edge in edges)
    assert all(place[b] < place[op] for op, before in enumerate(graph.predecessors) for b in before)
    assert made.peak_bytes == Buffers.of(graph).timeline(made.order, made.swaps).peak_bytes
