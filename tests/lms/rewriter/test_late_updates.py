"""Updates wait for what still reads the old value, and no step gets a cycle by that."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_python

pytest.importorskip("tensorflow")
import tensorflow as tf
from hypothesis import given, settings
from tensorflow.core.framework import graph_pb2
from test_streaming_properties import ACTIONS, Step

from lms.device.kernels import PlainCpu
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import ROOT, NodeTable
from lms.reader.survey import Place
from lms.rewriter.late_updates import delay_updates

pytestmark = pytest.mark.tensorflow

LARGE, SMALL = Output(tf.float32.as_datatype_enum, (8192,)), Output(tf.float32.as_datatype_enum, (1024,))
CPU, GPU = "/device:CPU:0", "/device:GPU:0"
Nodes = dict[str, tuple[str, tuple[str, ...]]]
STEP: Nodes = {
    "w": ("_Arg", ()),
    "batch": ("IteratorGetNext", ()),
    "read": ("ReadVariableOp", ("w",)),
    "made": ("MatMul", ("batch", "read")),
    "slope": ("MatMul", ("made", "batch")),
    "shown": ("Identity", ("read",)),
    "input_slope": ("MatMul", ("made", "shown")),
    "update": ("AssignSubVariableOp", ("w", "slope", "^read")),
}


def waits(nodes: Nodes, size: Output = LARGE, devices: dict[str, str] | None = None) -> dict[str, list[str]]:
    """Return what each node waits for afterwards that it did not wait for before."""
    graph_def = graph_pb2.GraphDef()
    for name, (op_type, inputs) in nodes.items():
        graph_def.node.add(name=name, op=op_type, input=inputs, device=(devices or {}).get(name, CPU))
    table = NodeTable.of(graph_def)
    place = Place(lambda device: True, PlainCpu())
    table, nbytes = delay_updates(table, [[size] * 2 for _ in table.nodes], place, ROOT)
    found = {
        node.name: [text for text in node.input if text not in nodes[node.name][1]] for node in graph_def.node
    }
    assert len(table.order) == len(nodes) and vars(NodeTable.of(graph_def)).items() <= vars(table).items()
    waiting = {name: texts for name, texts in found.items() if texts}
    assert nbytes == len(waiting) * 4 * 8192, "of each one variable"
    return waiting


def test_an_update_waits_for_the_gradient_that_reads_the_old_value() -> None:
    assert waits(STEP) == {"update": ["^input_slope"]}, "not for the forward pass, which it waits for anyway"


def test_an_update_of_what_the_step_returns_waits_for_nothing() -> None:
    assert waits({**STEP, "returned": ("_Retval", ("read",))}) == {}, "it makes a copy in any case"


def test_an_update_of_a_part_waits_for_nothing() -> None:
    rows: Nodes = {"update": ("ResourceScatterSub", ("w", "slope", "slope", "^read"))}
    assert waits({**STEP, **rows}) == {}


@pytest.mark.parametrize(
    "op_type", ["IteratorGetNext", "Unstage", "QueueDequeueV2", "EagerPyFunc", "NoSuchOp"]
)
def test_an_update_waits_for_nothing_that_may_block(op_type: str) -> None:
    fed: Nodes = {"taken": (op_type, ()), "input_slope": ("MatMul", ("taken", "shown"))}
    assert waits({**STEP, **fed}) == {}
    both: Nodes = {**fed, "update": ("AssignSubVariableOp", ("w", "slope", "^read", "^taken"))}
    assert waits({**STEP, **both}) == {"update": ["^input_slope"]}, "it waits for that itself"


def test_an_update_that_a_loop_waits_for_does_not_wait_for_the_loop() -> None:
    """Not each node of the loop waits for the update: the count of turns does not."""
    loop: Nodes = {
        "new": ("ReadVariableOp", ("w", "^update")),
        "first": ("Const", ()),
        "enter": ("Enter", ("first",)),
        "enter_new": ("Enter", ("new",)),
        "merge": ("Merge", ("enter", "next")),
        "merge_new": ("Merge", ("enter_new", "next_new")),
        "goes_on": ("Less", ("merge", "merge")),
        "turns": ("LoopCond", ("goes_on",)),
        "switch": ("Switch", ("merge", "turns")),
        "switch_new": ("Switch", ("merge_new", "turns")),
        "next": ("NextIteration", ("switch:1",)),
        "next_new": ("NextIteration", ("switch_new:1",)),
        "turned": ("Exit", ("switch",)),
        "turned_new": ("Exit", ("switch_new",)),
        "input_slope": ("MatMul", ("turned", "shown")),
    }
    assert waits({**STEP, **loop}) == {}
    apart = {**loop, "enter_new": ("Enter", ("made",))}
    assert waits({**STEP, **apart}) == {"update": ["^input_slope"]}


def test_small_variables_may_move() -> None:
    assert waits(STEP, SMALL) == {}


def test_an_update_waits_for_no_op_that_waits_for_it() -> None:
    again: Nodes = {
        "again": ("ReadVariableOp", ("w", "^update")),
        "next": ("MatMul", ("again", "shown")),
        "second": ("AssignSubVariableOp", ("w", "next", "^again")),
        "last": ("MatMul", ("again", "batch")),
    }
    assert waits({**STEP, **again}) == {"second": ["^input_slope", "^last"]}, "the first has to make a copy"


def test_updates_that_could_wait_for_each_others_readers_do_not() -> None:
    nodes: Nodes = {
        "v": ("_Arg", ()),
        "w": ("_Arg", ()),
        "v_read": ("ReadVariableOp", ("v",)),
        "w_read": ("ReadVariableOp", ("w",)),
        "v_update": ("AssignSubVariableOp", ("v", "v_read")),
        "w_update": ("AssignSubVariableOp", ("w", "w_read")),
        "v_used": ("Relu", ("v_read", "^w_update")),
        "w_used": ("Relu", ("w_read", "^v_update")),
    }
    assert len(waits(nodes)) == 1


def test_an_update_without_the_batch_does_not_wait_for_it() -> None:
    decay: Nodes = {"decay": ("AssignSubVariableOp", ("w", "shown", "^read"))}
    assert "decay" not in waits({**STEP, **decay})


def test_an_update_does_not_wait_for_another_device_or_other_ranks() -> None:
    assert waits(STEP, devices={"input_slope": GPU}) == {}
    summed: Nodes = {
        "sum": ("HorovodAllreduce", ("made",)),
        "input_slope": ("MatMul", ("sum", "shown")),
    }
    nodes = {name: summed.pop(name, node) if name == "input_slope" else node for name, node in STEP.items()}
    ordered = {name: nodes[name] for name in nodes if name not in ("input_slope", "update")}
    assert (
        waits({**ordered, **summed, "input_slope": ("MatMul", ("sum", "shown")), "update": STEP["update"]})
        == {}
    )


def test_an_update_does_not_wait_for_what_a_condition_leaves_out() -> None:
    under: Nodes = {
        "p": ("_Arg", ()),
        "switch": ("Switch", ("made", "p")),
        "input_slope": ("MatMul", ("switch:1", "shown")),
    }
    ordered = {name: node for name, node in STEP.items() if name not in ("input_slope", "update")}
    assert waits({**ordered, **under, "update": STEP["update"]}) == {}


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_no_step_gets_a_cycle(actions: list[tuple[str, int, int, int]]) -> None:
    step = Step()
    for action in actions:
        step.act(*action)
    step.add("_Retval", reads=(step.values[-1],))
    table = NodeTable.of(step.graph_def)
    large = [[LARGE] * len(made) for made in step.outputs]
    delay_updates(table, large, Place(lambda device: True, PlainCpu()), ROOT)
    assert len(NodeTable.of(step.graph_def).order) == len(table.nodes)


JOB = """
import json, os, sys
from hashlib import sha256
import numpy as np, tensorflow as tf, lms
from lms.variables.memory import address_of
random = np.random.default_rng(0)
if sys.argv[1] != "off":
    lms.enable(policy=sys.argv[1], min_tensor_bytes=1024)
width = int(sys.argv[2])
weights = [tf.Variable(random.normal(size=(width, width)).astype("f") / 16) for _ in range(6)]
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        for one in weights:
            x = tf.tanh(x @ one)
        loss = tf.reduce_sum(x * x)
    slopes = tape.gradient(loss, weights)
    used_last = sum(tf.reduce_sum(weight * slopes[0]) for weight in weights)
    for weight, slope in zip(weights, slopes):
        weight.assign_sub(0.01 * slope)
    return used_last
batch, places = tf.constant(random.random((64, width)).astype("f")), []
for _ in range(5):
    step(batch)
    places.append([address_of(one.value()) for one in weights])
bits = sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()
found = {"places": places, "bits": bits}
if sys.argv[1] != "off":
    graph = lms.report().graphs[-1]
    found |= {"swapped": graph.tensors, "edited": graph.edited, "why": graph.why}
print(json.dumps(found))
"""


def trained(policy: str, limit_mb: int = 64, width: int = 256) -> Any:
    environ = os.environ | {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb)}
    environ |= {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = warm_python.run(["-c", JOB, policy, str(width)], environ, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_variables_that_are_updated_in_place_stay_there() -> None:
    without, edited = trained("off"), trained("all")
    assert edited["bits"] == without["bits"] and edited["swapped"] > 0
    assert all(places == edited["places"][0] for places in edited["places"][1:])


def test_a_step_that_might_not_fit_without_the_edges_gets_them_though_nothing_is_swapped() -> None:
    without, edited = trained("off", 256, 1024), trained("auto", 90, 1024)
    assert edited["bits"] == without["bits"]
    assert edited["swapped"] == 0 and edited["edited"] and "control edges" in edited["why"]
    assert all(places == edited["places"][0] for places in edited["places"][1:])
    ample = trained("auto", 256, 1024)
    assert not ample["edited"] and "the step fits" in ample["why"]
