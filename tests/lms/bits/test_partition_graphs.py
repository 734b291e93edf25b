"""What TensorFlow runs in the end with LMS is what it runs without it, but for LMS's own ops."""

from types import SimpleNamespace
from typing import Any

import pytest
from bits_runs import ALL, keras_environ, skip_without
from child_job import run_job
from graph_difference import ADDED_EDGES, KINDS, difference, is_ours, paired

QUICK = (("3", "encoder"),)
MORE = (
    *(("3", name) for name in ("swin", "vae", "penalty", "convnext", "mixed_float16", "range loop", "lstm")),
    *(("3", name) for name in ("steps_per_execution", "dataset loop", "mirrored", "accumulation", "volumes")),
    *(("2", name) for name in ("encoder", "residual", "connected", "steps_per_execution")),
)


@pytest.mark.tensorflow
@pytest.mark.parametrize(("keras", "case"), (*QUICK, *MORE) if ALL else QUICK)
def test_nothing_differs_but_our_ops(keras: str, case: str) -> None:
    skip_without(keras)
    found = run_job("bits/partition_graphs_job.py", case, **keras_environ(keras))
    assert [one for one in found["functions"] if not one["equal"]] == []
    added = sum(one["counts"][ADDED_EDGES] for one in found["functions"])
    assert added <= found["control_edges"], "edges that the report does not tell of"
    assert found["tensors"] > 2
    assert max(one["ours"] for one in found["functions"]) > 2


@pytest.mark.tensorflow
@pytest.mark.parametrize(("keras", "case"), (*QUICK, *MORE) if ALL else QUICK)
def test_what_is_recomputed_runs_twice_and_nothing_merges_it(keras: str, case: str) -> None:
    skip_without(keras)
    found = run_job("bits/partition_graphs_job.py", case, "recompute", **keras_environ(keras))
    assert [one for one in found["functions"] if not one["equal"]] == []
    assert found["run_twice"] == found["repeated"] > 2
    assert not found["tensors"]


def node(name: str, *inputs: str, op: str = "Relu", **attributes: str) -> Any:
    return SimpleNamespace(name=name, op=op, device="", input=inputs, attr=attributes)


def graph(*nodes: Any) -> list[Any]:
    return [SimpleNamespace(node=nodes)]


PLAIN = (node("a"), node("b", "a"), node("c", "a:1", "^b"))
SWAPPED = (
    node("a"),
    node("lms/out", "a:1", "^a", op="LmsSwapOut"),
    node("x/lms/in", "lms/out", "^b", op="LmsSwapIn"),
    node("b", "a"),
)


def test_reading_through_our_ops_is_no_difference() -> None:
    found = difference(graph(*PLAIN), graph(*SWAPPED, node("c", "x/lms/in", "^b", "^lms/out")))
    assert {kind: found[kind] for kind in KINDS} == {kind: [] for kind in KINDS}
    assert (found["nodes"], found["ours"]) == (3, 2)


@pytest.mark.parametrize(("shape", "differs"), [("s", []), ("t", ["d"])])
def test_a_copy_of_a_view_is_no_difference(shape: str, differs: list[str]) -> None:
    given = [node("s"), node("t")]
    before = graph(*PLAIN[:1], *given, node("view", "a:1", "s", op="Reshape"), node("d", "view"))
    view = [node("view", "a:1", "s", op="Reshape"), node("lms/view", "x/lms/in", shape, op="Reshape")]
    after = graph(*SWAPPED[:3], *given, *view, node("d", "lms/view"))
    found = difference(before, after)
    assert {kind: found[kind] for kind in KINDS} == {kind: [] for kind in KINDS} | {"data inputs": differs}


def carried(number: int, source: str) -> tuple[Any, Any]:
    """What the partitioner makes of an edge between two devices."""
    edge = {"tensor_name": f"edge_{number}", "send_device": "0", "recv_device": "1"}
    name = source.lstrip("^").partition(":")[0]
    sent = node(f"{name}/_{number}", source, op="_Send", **edge)
    return sent, node(f"{name}/_{number + 1}", op="_Recv", **edge)


def test_what_carries_tensors_between_devices_is_no_difference() -> None:
    def partitions(first: int, source: str) -> list[Any]:
        data, control = carried(first, source), carried(first + 2, f"b/ctrl/_{first}")
        sender = [node("a"), node("b", "a"), node(f"b/ctrl/_{first}", "^b", op="Const"), data[0], control[0]]
        waits = node(f"b/_{first + 4}", control[1].name, op="Identity")
        return [sender, [data[1], control[1], waits, node("c", data[1].name, f"^{waits.name}")]]

    def joined(parts: list[Any], *more: Any) -> list[Any]:
        return [*graph(*parts[0], *more), *graph(*parts[1])]

    before = joined(partitions(1, "a"))
    assert {kind for kind in KINDS if difference(before, joined(partitions(20, "a")))[kind]} == set()
    swapped = joined(partitions(20, "lms/in"), node("lms/in", "a", op="LmsSwapIn"))
    assert {kind for kind in KINDS if difference(before, swapped)[kind]} == set()
    assert difference(before, joined(partitions(20, "b")))["data inputs"] == ["c"]


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("data inputs", node("c", "lms/out", "b", "^b")),
        ("data inputs", node("c", "a", "^b")),
        ("control inputs missing", node("c", "x/lms/in")),
        ("ops", node("c", "a:1", "^b", op="Elu")),
        ("attributes", node("c", "a:1", "^b", T="half")),
        ("missing", node("lms/c", "a:1", "^b")),
    ],
)
def test_every_difference_is_seen(kind: str, other: Any) -> None:
    found = difference(graph(*PLAIN), graph(*SWAPPED, other))
    assert [one for one in KINDS if found[one]] == [kind]
    assert found[kind] == ["c"]


def test_an_edge_between_ops_that_are_not_ours_is_told_by_itself() -> None:
    found = difference(graph(*PLAIN), graph(*SWAPPED, node("c", "x/lms/in", "^b", "^lms/out", "^a")))
    assert {kind: found[kind] for kind in (*KINDS, ADDED_EDGES) if found[kind]} == {ADDED_EDGES: ["a -> c"]}


def test_an_op_too_many_is_seen_and_numbers_of_functions_are_not() -> None:
    before = graph(node("__inference_f_12", "a_1"), node("a_1"))
    after = graph(node("__inference_f_7", "a_1"), node("a_1"), node("d"))
    found = difference(before, after)
    assert {kind: found[kind] for kind in KINDS if found[kind]} == {"extra": ["d"]}


def test_functions_are_paired_by_their_ops() -> None:
    first, second = graph(*PLAIN), graph(node("d"), node("e"))
    assert [*paired([first, second], [second, first], 2)] == [(first, first), (second, second)]
    assert [*paired([first], [second], 1)] == [(first, None), (None, second)]
    assert [*paired([first, second], [second], 3)] == [(first, None)]


def test_our_ops_are_known_by_name_and_attribute() -> None:
    assert is_ours(node("lms/a")) and is_ours(node("b/lms/a")) and is_ours(node("b", _lms="1"))
    assert not is_ours(node("films/a"))
