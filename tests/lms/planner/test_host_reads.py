"""Concatenations and slices that read from the host what lies there."""

from dataclasses import replace
from typing import Any

import pytest
from child_job import run_job

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.planner import host_operands
from lms.planner.host_operands import FETCH, HELD, SEND, narrow_movers, needed, read_from_host
from lms.planner.hybrid import decide
from lms.simulate.cost_model import Costs
from lms.swaps.case import Case

MIB = 1 << 20


def joined(forbidden: str | None = None, keep: bool = False) -> tuple[Graph, dict[str, int]]:
    """Two large tensors that one op concatenates; the first is read again at the end, as a skip is."""
    build = GraphBuilder()
    (x,) = build.add("x", "Placeholder", outputs=[MIB])
    (skip,) = build.add("skip", "Conv", inputs=[x], outputs=[8 * MIB], forbidden=forbidden)
    (small,) = build.add("small", "Conv", inputs=[skip], outputs=[MIB])
    (up,) = build.add("up", "Conv", inputs=[small], outputs=[16 * MIB])
    (axis,) = build.add("axis", "Const", outputs=[4])
    (both,) = build.add("both", "ConcatV2", inputs=[up, skip, axis], outputs=[24 * MIB])
    (y,) = build.add("y", "Conv", inputs=[both], outputs=[MIB])
    (z,) = build.add("z", "Conv", inputs=[y], outputs=[MIB])
    (last,) = build.add("last", "Conv", inputs=[z, skip], outputs=[MIB])
    graph = build.build([both, last] if keep else [last])
    return graph, {op.name: op.id for op in graph.ops}


def test_an_op_that_needs_most_at_once_is_found() -> None:
    graph, ops = joined()
    assert narrow_movers(Case.of(graph, LMSConfig(policy="all"), Costs())) == {ops["both"]}


def test_inputs_are_sent_when_they_are_made_and_read_on_the_host() -> None:
    graph, ops = joined()
    relocation = read_from_host(graph, [ops["both"]], MIB, direct=True)
    made = relocation.graph
    (read,) = relocation.reads
    assert sorted(read.slots) == [0, 1] and read.fetches == (), "the axis is no large input"
    sends = [op for op in made.ops if op.type == SEND]
    assert [made.ops[made.tensors[op.inputs[0]].op].name for op in sends] == ["skip", "up"]
    assert all(made.ops[op.id - 1].name in ("skip", "up") for op in sends), "each right behind its producer"
    held = [made.tensors[tensor] for tensor in read.slots.values()]
    assert all(tensor.outside and tensor.forbidden == HELD for tensor in held)
    assert [sent.nbytes for sent in relocation.sent] == [8 * MIB, 16 * MIB]
    assert made.ops[read.op].inputs[2] == made.ops[read.op - 1].outputs[0]


def test_what_may_pass_its_input_on_reads_nothing_from_the_host() -> None:
    """Its result would be the copy on the host itself."""
    build = GraphBuilder()
    (x,) = build.add("x", "Conv", outputs=[8 * MIB])
    (begin,) = build.add("begin", "Const", outputs=[8])
    (same,) = build.add("same", "Slice", inputs=[x, begin, begin], outputs=[8 * MIB])
    (part,) = build.add("part", "Slice", inputs=[x, begin, begin], outputs=[4 * MIB])
    (turned,) = build.add("turned", "Transpose", inputs=[x, begin], outputs=[8 * MIB])
    graph = build.build([same, part, turned])
    ops = {op.name: op.id for op in graph.ops}
    found = read_from_host(graph, [ops[name] for name in ("same", "part", "turned")], MIB, direct=True)
    assert [found.graph.ops[read.op].name for read in found.reads] == ["part", "turned"]


def test_beside_a_gpu_the_op_runs_on_the_host_and_its_result_is_fetched() -> None:
    graph, ops = joined()
    relocation = read_from_host(graph, [ops["both"]], MIB, direct=False)
    made = relocation.graph
    (read,) = relocation.reads
    (fetch,) = read.fetches
    assert made.ops[fetch].type == FETCH and made.ops[fetch].inputs == made.ops[read.op].outputs
    assert made.tensors[made.ops[read.op].outputs[0]].outside
    (y,) = (op for op in made.ops if op.name == "y")
    assert y.inputs == made.ops[fetch].outputs
    assert relocation.fetched_bytes == 24 * MIB


def test_what_only_ops_on_the_host_read_is_not_fetched() -> None:
    """A layout optimizer puts a transpose behind a concatenation: both only move data."""
    build = GraphBuilder()
    (x,) = build.add("x", "Placeholder", outputs=[MIB])
    (one,) = build.add("one", "Conv", inputs=[x], outputs=[8 * MIB])
    (two,) = build.add("two", "Conv", inputs=[x], outputs=[8 * MIB])
    (axis,) = build.add("axis", "Const", outputs=[4])
    (both,) = build.add("both", "ConcatV2", inputs=[one, two, axis], outputs=[16 * MIB])
    (turned,) = build.add("turned", "Transpose", inputs=[both, axis], outputs=[16 * MIB])
    (last,) = build.add("last", "Conv", inputs=[turned], outputs=[MIB])
    graph = build.build([last])
    movers = [op.id for op in graph.ops if op.name in ("both", "turned")]
    found = read_from_host(graph, movers, MIB, direct=False)
    first, second = found.reads
    assert first.on_host and not first.fetches and second.on_host and len(second.fetches) == 1
    assert list(second.slots.values()) == list(found.graph.ops[first.op].outputs)


@pytest.mark.parametrize("forbidden, keep, slots", [("mine", False, [0]), (None, True, [])])
def test_what_must_stay_on_the_device_is_left_there(
    forbidden: str | None, keep: bool, slots: list[int]
) -> None:
    graph, ops = joined(forbidden, keep)
    found = read_from_host(graph, [ops["both"]], MIB, direct=False).reads
    assert [slot for read in found for slot in sorted(read.slots)] == slots


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_policy_all_needs_less_than_the_operands_and_the_result_together(device: str) -> None:
    decided = decide(joined()[0], LMSConfig(policy="all"), device, None)
    assert decided.plan.peak_bytes < 26 * MIB <= 24 * MIB + 24 * MIB
    assert decided.plan.floor_bytes <= decided.plan.peak_bytes
    assert decided.relocation is not None and "read from the host (both)" in decided.plan.notes[-1]
    assert decided.plan.peak_before_bytes >= 48 * MIB, "the step that the user wrote"


def test_a_swap_takes_the_copy_that_is_there() -> None:
    decided = decide(joined()[0], LMSConfig(policy="all"), "CPU", None)
    made, tensors = decided.plan, decided.graph.tensors
    skips = [swap.tensor for swap in made.swaps if tensors[swap.tensor].nbytes == 8 * MIB]
    assert skips and list(made.copied) == skips
    assert made.bytes_out == 24 * MIB and made.tensors_out == len(made.swaps) + 1


def test_a_budget_reads_from_the_host_only_where_it_is_not_met_otherwise() -> None:
    graph, _ = joined()
    plenty = decide(graph, LMSConfig(policy="budget", budget_bytes=50 * MIB, margin=0.0), "CPU", None)
    tight = decide(graph, LMSConfig(policy="budget", budget_bytes=30 * MIB, margin=0.0), "CPU", None)
    assert plenty.relocation is None and plenty.plan.feasible
    assert tight.relocation is not None and tight.plan.feasible
    assert decide(graph, LMSConfig(policy="threshold"), "CPU", None).relocation is None


def test_a_plan_that_may_fail_by_chance_wants_less() -> None:
    config, limit = LMSConfig(policy="auto", recompute="off"), 48 * MIB
    made = decide(joined()[0], config, "CPU", limit)
    assert made.plan.feasible and not made.plan.is_empty
    assert not host_operands._wants_less(replace(made, doubt=""), config, limit)
    assert host_operands._wants_less(replace(made, doubt="by chance"), config, limit)


@pytest.mark.tensorflow
@pytest.mark.parametrize("where", ["direct", "host", "nested"])
def test_a_unet_trains_to_the_same_bits(where: str) -> None:
    pytest.importorskip("tensorflow")
    seen: dict[str, Any] = run_job("host_reads_job.py", "all", where)
    assert seen["on"] == seen["off"]
    assert seen["sent"] >= 2 and seen["copied"] >= 1
    assert seen["counted_bytes_out"] == 3 * seen["bytes_out"], "three steps, each copy once"
    assert bool(seen["fetched_bytes"]) == (where != "direct")
    assert "read from the host" in seen["notes"][-1]


def test_what_the_allocator_leaves_unused_within_the_limit_is_not_worth_a_copy() -> None:
    made = decide(joined()[0], LMSConfig(policy="all"), "GPU", None)
    wasteful = replace(made, peak_bytes=made.peak_bytes + MIB)
    assert needed(wasteful, 2 * wasteful.peak_bytes) == needed(made, 2 * wasteful.peak_bytes)
    assert needed(wasteful, made.peak_bytes) > needed(made, made.peak_bytes)
