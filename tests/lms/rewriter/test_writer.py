"""What an edit writes for a swap, node by node."""

from typing import Any

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.device.kernels import PlainCpu
from lms.ir.graph import Use
from lms.ir.swap_plan import Filler, Swap, SwapIn, SwapPlan
from lms.optimizer.grappler_item import Output
from lms.planner.host_operands import read_from_host
from lms.reader.node_table import NodeTable
from lms.reader.step_reader import Step, read_step
from lms.reader.survey import Place
from lms.rewriter.writer import put_copies_first, relocated, write_plan
from lms.transports.device import DeviceTransport

pytestmark = pytest.mark.tensorflow

NODES = {
    "x": ("Placeholder",),
    "f": ("Sqrt", "x"),
    "g": ("Exp", "f"),
    "h": ("Log", "g"),
    "b": ("Mul", "f", "h"),
}
FLOAT = tf.float32.as_datatype_enum


def read(
    nodes: dict[str, tuple[str, ...]], device: str, elsewhere: str = "", shape: tuple[int, ...] = (1024,)
) -> tuple[Any, Step]:
    """A graph of these nodes, as it is and read; one node may be on a second device."""
    graph_def = graph_pb2.GraphDef()
    for name, (op_type, *inputs) in nodes.items():
        where = f"/job:a/device:{device}:{int(name == elsewhere)}"
        graph_def.node.add(name=name, op=op_type, input=inputs, device=where).attr["T"].type = FLOAT
    table = NodeTable.of(graph_def)
    outputs = [[Output(FLOAT, shape)] for _ in table.nodes]
    return graph_def, read_step(table, outputs, Place(lambda device: True, PlainCpu()))


def edited(device: str, *, held: bool = True, elsewhere: str = "") -> Any:
    """The graph whose ``f`` leaves behind ``g`` and comes back behind ``h``, for ``b``."""
    graph_def, step = read(NODES, device, elsewhere)
    number = {op.name: op.id for op in step.graph.ops}
    leaves, until, waits, back = (number[name] for name in "fghb")
    (tensor,) = step.graph.ops[leaves].outputs
    swap_in = SwapIn(waits, (Use(back, 0),))
    swap = Swap(tensor, 4096, leaves, (swap_in,), (waits,), until if held else None)
    order = tuple(range(len(step.graph.ops)))
    plan = SwapPlan("budget", order, (swap,), (), (), 0, 0, 0, None)
    write_plan(graph_def, step, plan, DeviceTransport({}))
    return graph_def


def nodes(graph_def: Any) -> dict[str, Any]:
    return {node.name: node for node in graph_def.node}


def test_a_buffer_is_held_until_its_copy_and_an_op_are_done() -> None:
    """What is put in its place waits for the node that holds it."""
    made = nodes(edited("GPU"))
    hold = made["f/lms/0/hold"]
    assert hold.op == "IdentityN" and hold.device == made["f"].device
    assert list(hold.attr["T"].list.type) == [FLOAT]
    assert list(hold.input) == ["f", "^f/lms/0/swap_out", "^g"]
    assert list(made["h"].input) == ["g", "^f/lms/0/hold"]
    assert list(made["b"].input) == ["f/lms/0/swap_in_0", "h", "^h/lms/launched"]


def test_what_follows_the_trigger_of_a_copy_is_launched_behind_the_copy() -> None:
    """A copy waits for all kernels launched before it; on a CPU none runs any more when its op is done."""
    made = nodes(edited("GPU"))
    gate = made["h/lms/launched"]
    assert gate.op == "NoOp" and gate.device == made["h"].device and list(gate.input) == ["^h"]
    assert "h/lms/launched" not in nodes(edited("CPU"))


@pytest.mark.parametrize("elsewhere", ["h", "b"])
def test_a_device_launches_no_copies_of_another(elsewhere: str) -> None:
    """Both devices' plans may have a copy begin with one op, whose name a node behind it has."""
    assert not [name for name in nodes(edited("GPU", elsewhere=elsewhere)) if "launched" in name]


def test_of_copies_that_begin_together_the_one_needed_first_stands_first() -> None:
    """Here it is the later one of the two tensors."""
    graph_def, step = read({**NODES, "b": ("Mul", "g", "h"), "c": ("Mul", "f", "b")}, "GPU")
    number = {op.name: op.id for op in step.graph.ops}
    swaps = tuple(
        Swap(step.graph.ops[number[made]].outputs[0], 4096, number[made], (back,))
        for made, user in (("f", "c"), ("g", "b"))
        for back in [SwapIn(number["h"], (Use(number[user], 0),))]
    )
    order = tuple(range(len(step.graph.ops)))
    write_plan(graph_def, step, SwapPlan("budget", order, swaps, (), (), 0, 0, 0, None), DeviceTransport({}))
    back = [node.name for node in graph_def.node if "swap_in" in node.name]
    assert back == ["g/lms/0/swap_in_0", "f/lms/0/swap_in_0"]


def test_what_an_op_on_the_host_makes_comes_back_to_the_ops_own_device() -> None:
    """The first that reads it may be on another one, where no kernel copies to a GPU."""
    graph_def, step = read({**NODES, "g": ("Transpose", "f"), "b": ("Mul", "g", "h")}, "GPU", "h", (32, 32))
    (mover,) = (op.id for op in step.graph.ops if op.type == "Transpose")
    relocation = read_from_host(step.graph, [mover], 1024, direct=False)
    order = tuple(range(len(relocation.graph.ops)))
    plan = SwapPlan("budget", order, (), (), (), 0, 0, 0, None, sent=relocation.sent)
    write_plan(graph_def, relocated(step, relocation), plan, DeviceTransport({}), relocation)
    made = nodes(graph_def)
    assert made["g"].device.endswith("CPU:0")
    assert made["g/lms/0/fetch"].device == made["f"].device
    assert made["h"].input[0] == made["b"].input[0] == "g/lms/0/fetch"


@pytest.mark.parametrize(("device", "held"), [("CPU", True), ("GPU", False)])
def test_nothing_is_held_where_a_copy_frees_its_buffer_as_planned(device: str, held: bool) -> None:
    made = nodes(edited(device, held=held))
    assert "f/lms/0/hold" not in made
    assert list(made["h"].input) == ["g", "^f/lms/0/swap_out"]


def test_copies_to_the_host_come_first_and_the_others_keep_their_order() -> None:
    graph_def = edited("GPU")
    before = [node.name for node in graph_def.node]
    put_copies_first(graph_def)
    before.remove("f/lms/0/swap_out")
    assert [node.name for node in graph_def.node] == ["f/lms/0/swap_out", *before]
    assert all("_lms" in node.attr for node in graph_def.node if "/lms/" in node.name)
    assert not any("_lms" in node.attr for node in graph_def.node if node.name in NODES)


def test_a_copy_on_a_cpu_begins_behind_cheap_ops_that_follow_its_maker() -> None:
    """Behind one node more than these, so that a thread has left all else to others by then."""
    made = nodes(edited("CPU"))
    assert list(made["f/lms/0/swap_out"].input) == ["f", "^f/lms/0/delay_3"]  # g, h and b are small
    assert [list(made[f"f/lms/0/delay_{one}"].input) for one in (0, 1)] == [["^f"], ["^f/lms/0/delay_0"]]
    assert made["f/lms/0/delay_0"].op == "NoOp" and made["f/lms/0/delay_0"].device == made["f"].device
    assert not [name for name in nodes(edited("GPU")) if "delay" in name]


def test_a_filler_is_there_while_an_op_or_a_copy_gets_its_memory() -> None:
    """It waits for what these wait for, and the op behind waits until it is freed."""
    graph_def, step = read(NODES, "GPU")
    number = {op.name: op.id for op in step.graph.ops}
    f, g, h, b = (number[name] for name in "fghb")
    swap = Swap(step.graph.ops[f].outputs[0], 4096, f, (SwapIn(g, (Use(b, 0),)),))
    fillers = (Filler(g, False, (4096,), 256, h, g, h), Filler(g, True, (4096, 4096), 512, h, h, b))
    order = tuple(range(len(step.graph.ops)))
    plan = SwapPlan("budget", order, (swap,), (), (), 0, 0, 0, None, fillers=fillers)
    write_plan(graph_def, step, plan, DeviceTransport({}))
    made = nodes(graph_def)
    zero, one = sorted(name for name in made if "/filler_" in name and "hold" not in name)
    first, second = made[zero], made[one]
    assert zero.startswith("g/lms/filler_0_") and one.startswith("g/lms/filler_1_")
    assert first.op == second.op == "LmsFiller" and first.device == made["g"].device
    assert (list(second.attr["sizes"].list.i), second.attr["least"].i) == ([4096, 4096], 512)
    assert list(first.input) == ["^f"] and f"^{zero}" in made["g"].input
    assert list(made[f"{zero}/hold"].input) == [zero, "^g"]
    assert list(second.input) == ["^g"] and f"^{one}" in made["f/lms/0/swap_in_0"].input
    assert list(made[f"{one}/hold"].input) == [one, "^f/lms/0/swap_in_0", "^h"]
    assert {f"^{zero}/hold", f"^{one}"} <= {*made["h"].input}
    assert f"^{one}/hold" in made["b"].input
