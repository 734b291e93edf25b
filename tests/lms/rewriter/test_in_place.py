"""Assignments that write into the memory which their variable has, so that variables stay where they are."""

from typing import Any

import pytest
from child_job import run_job

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.device.kernels import PlainCpu
from lms.ir.swap_plan import SwapPlan
from lms.native.build import ASSIGN
from lms.native.library import load_library
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.reader.step_reader import read_step
from lms.reader.survey import Place, in_place_assignments
from lms.rewriter.validation import validate
from lms.rewriter.writer import write_plan
from lms.transports.device import DeviceTransport

pytestmark = pytest.mark.tensorflow

FLOAT, HANDLE = tf.float32.as_datatype_enum, tf.resource.as_datatype_enum
CPU, GPU = "/job:a/replica:0/task:0/device:CPU:0", "/job:a/replica:0/task:0/device:GPU:0"


@pytest.mark.parametrize("case", ["fitted", "loop"])
def test_each_momentum_stays_in_its_place(case: str) -> None:
    """And has the bits that it has without LMS, where it moves."""
    off, on = (run_job("rewriter/in_place_job.py", case, policy) for policy in ("off", "all"))
    moved, kept = ([len({*one}) for one in zip(*found["places"], strict=True)] for found in (off, on))
    assert max(moved) > 1 and set(kept) == {1} and None not in on["places"][0]
    assert on["bits"] == off["bits"] and on["tensors"] > 3


def test_who_holds_an_old_value_keeps_it() -> None:
    """The job compares what it holds after each step."""
    off, on = (run_job("rewriter/in_place_job.py", "reader", policy) for policy in ("off", "all"))
    assert on["bits"] == off["bits"] and on["tensors"] > 3
    assert {len({*one}) for one in zip(*on["places"], strict=True)} == {len(on["places"])}


def test_another_thread_sees_no_value_half_written() -> None:
    seen = run_job("rewriter/in_place_job.py", "threads", "all")
    assert seen["torn"] == 0 and seen["reads"] > 100 and seen["tensors"] > 3
    counter, *_ = zip(*seen["places"], strict=True)
    assert len({*counter}) == 1, "else it is never written in place"


def test_the_op_does_what_tensorflow_s_does_where_it_cannot_write_in_place() -> None:
    found = run_job("rewriter/assign_op_job.py")
    assert found["plain"] and found["integers"] and found["empty"] and found["fresh"]
    assert not found["shape"] and found["held"] == [True, False]
    assert "has shape [4096], and the new value [1024]" in found["validated"]
    assert "is of type float, and the new value of type int32" in found["type"]
    assert found["rows"] == [True, 3.0, 5.0]


def test_a_batch_of_another_length_gives_a_variable_another_shape() -> None:
    off, on = (run_job("rewriter/in_place_job.py", "lengths", policy) for policy in ("off", "all"))
    assert on["bits"] == off["bits"] and on["tensors"] > 0


def test_what_is_assigned_before_it_is_read_may_have_no_memory_yet() -> None:
    off, on = (run_job("rewriter/in_place_job.py", "assigned first", policy) for policy in ("off", "all"))
    *momenta, late = ([*one] for one in zip(*on["places"], strict=True))
    assert on["bits"] == off["bits"] and all(len({*one}) == 1 for one in momenta) and len({*late}) > 1


def test_without_a_compiler_variables_move_and_steps_are_swapped(tmp_path: Any) -> None:
    """The transport of NumPy needs none either."""
    environ = {"PATH": str(tmp_path), "LMS_CACHE": str(tmp_path), "LMS_TRANSPORT": "numpy"}
    found = run_job("rewriter/in_place_job.py", "fitted", "all", **environ)
    assert max(len({*one}) for one in zip(*found["places"], strict=True)) > 1 and found["tensors"] > 3


Extra = tuple[str, str, str]


def graph_of(
    *extra: Extra, dims: tuple[int, ...] = (8, 8), read: tuple[int, ...] = (8, 8)
) -> tuple[Any, NodeTable, list[list[Output]]]:
    """A variable that is read and assigned to, with further ops on it: name, type, device."""
    graph_def = graph_pb2.GraphDef()
    graph_def.node.add(name="handle", op="_Arg", device=CPU)
    graph_def.node.add(name="read", op="ReadVariableOp", input=["handle"], device=CPU)
    graph_def.node.add(name="value", op="Mul", input=["read", "read"], device=CPU)
    graph_def.node.add(name="assign", op="AssignVariableOp", input=["handle", "value", "^read"], device=CPU)
    graph_def.node[-1].attr["dtype"].type = FLOAT
    for name, op_type, device in extra:
        graph_def.node.add(name=name, op=op_type, input=["handle"], device=device)
    made = {"handle": [Output(HANDLE, ())], "value": [Output(FLOAT, dims)], "assign": []}
    table = NodeTable.of(graph_def)
    return graph_def, table, [made.get(name, [Output(FLOAT, read)]) for name in table.names]


@pytest.mark.parametrize(
    ("extra", "sizes", "in_place"),
    [
        (None, {}, True),
        (("again", "ReadVariableOp", CPU), {}, True),
        (("add", "AssignAddVariableOp", CPU), {}, True),
        (("rows", "ResourceGather", CPU), {}, False),
        (("scatter", "ResourceScatterAdd", CPU), {}, False),
        (None, {"dims": (8, 4)}, False),
        (None, {"dims": (8, -1), "read": (8, -1)}, False),
    ],
)
def test_which_assignments_may_be_in_place(
    extra: Extra | None, sizes: dict[str, tuple[int, ...]], in_place: bool
) -> None:
    _, table, outputs = graph_of(*([extra] if extra else []), **sizes)
    place = Place(lambda device: device == CPU, PlainCpu())
    found = in_place_assignments(table, outputs, place)
    assert [table.names[node] for node in found] == ["assign"] * in_place


def test_no_assignment_of_another_device_or_of_a_value_on_the_host_is_in_place() -> None:
    _, table, outputs = graph_of()
    assert not in_place_assignments(table, outputs, Place(lambda device: device == GPU, PlainCpu()))
    on_host = Place(lambda device: True, PlainCpu(), on_host=lambda node, index: node.name == "value")
    assert not in_place_assignments(table, outputs, on_host)


def test_a_variable_that_streams_is_assigned_to_as_before() -> None:
    _, table, outputs = graph_of(("value of the host", "ReadVariableOp", CPU))
    table.nodes[table.number["value of the host"]].attr["_lms"].s = b"value"
    assert not in_place_assignments(table, outputs, Place(lambda device: True, PlainCpu()))


def test_what_is_written_is_another_op_with_the_same_inputs() -> None:
    graph_def, table, outputs = graph_of()
    kernels = PlainCpu()
    step = read_step(table, outputs, Place(lambda device: True, kernels))
    (assign,) = (op.id for op in step.graph.ops if op.assigns_in_place)
    order = tuple(range(len(step.graph.ops)))
    plan = SwapPlan("budget", order, (), (), (), 0, 0, 0, None)
    edits = write_plan(graph_def, step, plan, DeviceTransport({}), in_place=[assign])
    node = graph_def.node[table.number["assign"]]
    assert (node.op, list(node.input)) == ("LmsAssign", ["handle", "value", "^read"])
    assert [*edits.nodes] == ["assign"] and "_lms" in node.attr
    load_library(ASSIGN, {})
    validate(graph_def, table, outputs, edits.nodes, kernels)
