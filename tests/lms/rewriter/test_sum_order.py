"""The term with which a sum begins, where ops that tell shapes hold some of its terms."""

from collections.abc import Collection
from typing import Any

import pytest
from child_job import run_job

tf = pytest.importorskip("tensorflow")

from tensorflow.core.framework import graph_pb2  # noqa: E402

from lms.device.kernels import PlainCpu  # noqa: E402
from lms.optimizer.grappler_item import Output  # noqa: E402
from lms.reader.node_table import NodeTable  # noqa: E402
from lms.reader.step_reader import read_step  # noqa: E402
from lms.reader.survey import Place  # noqa: E402
from lms.rewriter.sum_order import Beginning, named_beginnings  # noqa: E402

pytestmark = pytest.mark.tensorflow

FLOAT, INT = tf.float32.as_datatype_enum, tf.int32.as_datatype_enum
NODES = {
    "x": ("Placeholder",),
    "first": ("Sqrt", "x"),
    "second": ("Log", "x"),
    "third": ("Exp", "x"),
    "sum": ("AddN", "first", "second", "third"),
    "end": ("Tanh", "sum"),
}


def beginnings(
    more: dict[str, tuple[str, ...]], fetches: Collection[str] = ("end",), away: Collection[str] = ()
) -> dict[str, Beginning]:
    graph_def = graph_pb2.GraphDef()
    for name, (op_type, *inputs) in {**NODES, **more}.items():
        device = f"/device:CPU:{int(name in away)}"
        node = graph_def.node.add(name=name, op=op_type, input=inputs, device=device)
        node.attr["T"].type = FLOAT
    table = NodeTable.of(graph_def)
    outputs = [
        [Output(INT, (2,))] * 3 if op_type in ("Shape", "ShapeN") else [Output(FLOAT, (8, 8))] * 2
        for op_type in table.types
    ]
    return named_beginnings(
        read_step(table, outputs, Place(lambda device: device.endswith("0"), PlainCpu()), fetches=fetches)
    )


def test_a_sum_whose_first_terms_nobody_holds_needs_no_slot() -> None:
    assert beginnings({}) == {}


def test_a_shape_that_waits_for_nothing_else_holds_no_term() -> None:
    assert beginnings({"one": ("Shape", "first"), "two": ("Shape", "second")}) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"one": ("Shape", "first", "^end"), "two": ("Shape", "second", "^sum")},
        {"both": ("ShapeN", "first", "second", "^end")},
        {"all": ("ShapeN", "first", "second", "end")},
        {"view": ("Identity", "first"), "one": ("Shape", "view", "^end"), "two": ("Tanh", "second", "^end")},
    ],
)
def test_a_term_that_is_held_for_its_shape_begins_no_sum(more: dict[str, tuple[str, ...]]) -> None:
    assert beginnings(more) == {"sum": Beginning(2, (0,))}


def test_a_sum_of_which_all_terms_are_held_begins_with_the_first() -> None:
    assert beginnings({"all": ("ShapeN", "first", "second", "third", "end")}) == {"sum": Beginning(0, (2,))}
    two = {"both": ("ShapeN", "first", "second", "end")}
    assert beginnings(two, fetches=("end", "third")) == {"sum": Beginning(0, (2,))}


BRANCHES = {
    "taken": ("Placeholder",),
    "kept": ("Switch", "x", "taken"),
    "left": ("Cos", "kept"),
    "right": ("Sin", "kept:1"),
    "either": ("Merge", "left", "right"),
}


@pytest.mark.parametrize(
    ("third", "fetches", "held"),
    [("third", ("end",), (0,)), ("third", ("end", "third"), (0, 2)), ("either", ("end",), (0, 1))],
)
def test_a_sum_that_may_begin_with_what_a_branch_hands_on_stays_as_it_is(
    third: str, fetches: Collection[str], held: tuple[int, ...]
) -> None:
    """Those terms are held that something holds for certain without an edit."""
    second = "second" if third == "either" else "either"
    more = {**BRANCHES, "sum": ("AddN", "first", second, third), "read": ("Tanh", "first", "^end")}
    more["again"] = ("Log", "second", "^end")
    assert beginnings(more, fetches) == {"sum": Beginning(0, held)}


def test_a_sum_that_may_begin_with_what_another_device_makes_stays_as_it_is() -> None:
    held = {"again": ("Tanh", "first", "^end")}
    assert beginnings(held, away=("second",)) == {"sum": Beginning(0, (0,))}
    assert beginnings({}, away=("second",)) == {}, "for the first is free"


@pytest.fixture(scope="module")
def added() -> dict[str, Any]:
    return run_job("handed_on_job.py")


@pytest.mark.parametrize("way", ["of_branch", "of_case", "of_loop", "read_again", "in_branch", "repeated"])
def test_a_sum_adds_what_is_handed_on_in_its_order(added: dict[str, Any], way: str) -> None:
    alone, edited = added["found"][way][:3], added["found"][way][3:]
    assert edited == alone
    assert len(set(alone)) == 1, "nothing is left to chance"
    assert len(added["edited"]) == 6
    assert all(added["edited"])
