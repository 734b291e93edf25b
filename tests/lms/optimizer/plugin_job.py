"""Cases of the plug-in: ``plugin_job.py CASE[,CASE...] [ARGUMENTS]``, in one process.

The last line printed is what they found, by case, as JSON. The step of :func:`make_step` subtracts ``RATE``
times the gradient; :func:`double_rate` is an editor that doubles the constant, which the weights then tell.
"""

import ctypes
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from lms.optimizer import c_api, plugin
from lms.optimizer.c_api import find_tensorflow
from lms.optimizer.compiled_form import split_outputs
from lms.optimizer.ctypes_form import CtypesForm, parse_properties
from lms.optimizer.plugin import PluginError, Request

RATE = 0.125
SIDE = 16
CASES: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count()


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def make_step(**options: Any) -> Callable[[], float]:
    """A fresh training step; each call gives how far one weight went, in units of one unedited step."""
    weights = tf.Variable(tf.zeros((SIDE, SIDE)), name=f"weights_{next(_numbers)}")
    x = tf.ones((4, SIDE))

    @tf.function(**options)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(tf.matmul(x, weights)))
        gradient = tape.gradient(loss, weights)
        weights.assign_sub(RATE * gradient)
        return loss

    def run() -> float:
        before = float(weights[0, 0])
        step(x)
        return round((before - float(weights[0, 0])) / (4 * RATE), 3)

    return run


def make_forward(scope: str = "forward") -> Callable[[], float]:
    """A function with nothing of gradients in it but what the scope says, as long as a step."""
    weights = tf.Variable(tf.zeros((SIDE, SIDE)), name=f"weights_{next(_numbers)}")

    @tf.function
    def forward(x: Any) -> Any:
        with tf.name_scope(scope):
            for _ in range(12):
                x = tf.tanh(tf.matmul(tf.sin(x), weights))
        return x

    return lambda: float(forward(tf.ones((4, SIDE)))[0, 0])


def double_rate(request: Request) -> bytes | None:
    graph = graph_pb2.GraphDef.FromString(request.graph)
    found = [node for node in graph.node if node.op == "Const" and rate_of(node) == RATE]
    for node in found:
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(2 * RATE))
    return graph.SerializeToString() if found else None


def rate_of(node: Any) -> float | None:
    value = tf.make_ndarray(node.attr["value"].tensor)
    return float(value) if value.shape == () and value.dtype.kind == "f" else None


def load(*device_types: str) -> str:
    return plugin.load(device_types or ("CPU",), os.environ)


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except PluginError as error:
        return str(error)
    return "nothing was refused"


@case
def life() -> Any:
    """Everything that a process may do one after the other."""
    seen: list[Request] = []

    def editor(request: Request) -> bytes | None:
        seen.append(request)
        return double_rate(request)

    found: dict[str, Any] = {"before": make_step()()}
    found["unloaded"] = [refusal(lambda: plugin.arm(editor)), refusal(lambda: plugin.expect_iterations(2))]
    plugin.disarm()
    found["unknown"] = refusal(lambda: load("CPU", "TPU"))
    found["form"] = [load(), load(), load("GPU", "CPU"), load("GPU")]
    early = make_step()
    found["idle"] = [early(), len(seen)]
    plugin.arm(editor)
    early()  # TensorFlow has optimized it before
    found["early"] = len(seen)
    step = make_step()
    found["armed"] = [step(), len(seen)]
    found["forward"] = [make_forward()(), len(seen)]
    found["gradient"] = [make_forward("gradient")(), len(seen)]
    plugin.disarm()
    step()
    found["disarmed"] = [make_step()(), len(seen)]
    plugin.arm(editor)
    found["again"] = [make_step()(), len(seen)]
    plugin.arm(lambda request: None)
    found["left"] = make_step()()
    found["late"] = refusal(seen[0].item.fetches), refusal(lambda: seen[0].item.output_properties(["x"]))
    found["devices"] = sorted({request.device_type for request in seen})
    found["count"] = refusal(lambda: plugin.expect_iterations(3))
    return found


@case
def item() -> Any:
    """What the editor can ask."""
    found: dict[str, Any] = {}

    def editor(request: Request) -> None:
        graph = graph_pb2.GraphDef.FromString(request.graph)
        names = [node.name for node in graph.node]
        outputs = request.item.output_properties([*names, "no such node"])
        again = request.item.output_properties(names[:3])
        found["same"] = again == outputs[:3]
        by_op = {node.op: of for node, of in zip(graph.node, outputs, strict=False)}
        found["MatMul"], found["AssignSubVariableOp"] = by_op["MatMul"], by_op["AssignSubVariableOp"]
        found["Const"], found["missing"] = by_op["Const"], outputs[-1]
        found["fetches"], found["preserved"] = request.item.fetches(), request.item.preserved()
        found["named"] = set(found["fetches"] + found["preserved"]) <= set(names)
        found["none"] = request.item.output_properties([])
        found["fields"] = [of.dtype for of in by_op["MatMul"]]

    load()
    plugin.arm(editor, on_fault=lambda fault: found.update(fault=repr(fault)))
    make_step()()
    return found


@case
def faults() -> Any:
    """Whatever an editor does, the graph stays as it is, and somebody is told."""
    told: list[str] = []

    def raising(error: BaseException) -> Callable[[Request], bytes | None]:
        def editor(request: Request) -> bytes | None:
            raise error

        return editor

    def told_badly(fault: BaseException) -> None:
        told.append(type(fault).__name__)
        raise KeyboardInterrupt

    editors: Sequence[Any] = (
        raising(ValueError("no")),
        raising(KeyboardInterrupt()),
        raising(SystemExit(3)),
        raising(MemoryError()),
        lambda request: "text",
        lambda request: b"",
        lambda request: bytearray(request.graph),
        lambda request: True,
        lambda: None,
    )
    load()
    steps = []
    for editor in editors:
        plugin.arm(editor, on_fault=lambda fault: told.append(type(fault).__name__))
        steps.append(make_step()())
    plugin.arm(editors[0], on_fault=told_badly)
    steps.append(make_step()())
    plugin.arm(editors[0])
    steps.append(make_step()())
    plugin.arm(lambda request: b"\xff\xff no graph", on_fault=lambda fault: told.append("?"))
    steps.append(make_step()())
    return {"told": told, "steps": steps}


@case
def iterations() -> Any:
    """How often the editor is asked, by TensorFlow's iterations and by what the thread says."""
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

    seen: list[int] = []
    load()
    plugin.arm(lambda request: seen.append(0))

    def train(count: int) -> int:
        del seen[:]
        config = config_pb2.ConfigProto()
        options = config.graph_options.rewrite_options
        options.meta_optimizer_iterations = {
            0: rewriter_config_pb2.RewriterConfig.DEFAULT_NUM_ITERS,
            1: rewriter_config_pb2.RewriterConfig.ONE,
            2: rewriter_config_pb2.RewriterConfig.TWO,
        }[count]
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            x = tf.compat.v1.get_variable("x", initializer=tf.ones((8, 8)), use_resource=True)
            loss = tf.reduce_sum(tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, x)), x)))
            update = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(update)
        return len(seen)

    found = {"silent": [train(0), train(1), train(2)]}
    plugin.expect_iterations(1)
    found["one"] = [train(0), train(1), train(2)]
    other: list[int] = []
    thread = threading.Thread(target=lambda: other.extend([train(0), train(1)]))
    thread.start()
    thread.join()
    found["other thread"] = other
    plugin.expect_iterations(2)
    found["two"] = [train(0), train(1), train(2)]
    return found


@case
def threads() -> Any:
    """Two threads train at once, a third one loaded the plug-in; editors meet, and know their thread."""
    loader = threading.Thread(target=load)
    loader.start()
    loader.join()
    both = threading.Barrier(2, timeout=600)
    idents: dict[int, int] = {}
    waiting = set(range(2))

    def editor(request: Request) -> bytes | None:
        ident = threading.get_ident()
        idents[ident] = idents.get(ident, 0) + 1
        if waiting:
            waiting.pop()
            both.wait()  # both are in their editor at the same time
        return double_rate(request)

    plugin.arm(editor)
    steps: dict[int, list[float]] = {}

    def train() -> None:
        steps[threading.get_ident()] = [make_step()() for _ in range(3)]

    trainers = [threading.Thread(target=train) for _ in range(2)]
    for thread in trainers:
        thread.start()
    for thread in trainers:
        thread.join()
    return {"steps": list(steps.values()), "own": {*idents} == {*steps}, "calls": list(idents.values())}


@case
def fork() -> Any:
    """A child forked before TensorFlow began loads the plug-in itself, and so does its parent."""
    receive, send = os.pipe()
    child = os.fork()
    load()
    plugin.arm(double_rate)
    step = make_step()()
    if child == 0:
        os.write(send, json.dumps(step).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return {"child": json.loads(os.read(receive, 100)), "parent": step, "status": status}


@case
def nested() -> Any:
    """TensorFlow may be used in an editor; graphs that it optimizes for that are not handed over."""
    seen: list[Any] = []

    def editor(request: Request) -> bytes | None:
        seen.append(make_forward("gradient")())
        return double_rate(request)

    load()
    plugin.arm(editor, on_fault=lambda fault: seen.append(repr(fault)))
    return {"outer": [make_step()(), make_step()()], "seen": seen}


@case
def quiet(*options: str) -> Any:
    """The optimized graph with the plug-in, idle and asked for nothing, is the one without it."""
    from tensorflow.python.eager import context

    for option in options:
        tf.config.optimizer.set_experimental_options({option: False})
    rewritten = []

    def optimized() -> str:
        context.enable_graph_collection()
        make_step()()
        metadata = context.export_run_metadata()
        context.disable_graph_collection()
        (graphs,) = [one for one in metadata.function_graphs if len(one.pre_optimization_graph.node) > 8]
        nodes = graphs.post_optimization_graph.node
        return "\n".join(sorted(f"{node.op} {len(node.input)}" for node in nodes))

    rewritten.append(optimized())
    print("-- loaded --", file=sys.stderr, flush=True)
    load()
    rewritten.append(optimized())
    plugin.arm(lambda request: None)
    rewritten.append(optimized())
    return {"same": len(set(rewritten)) == 1, "nodes": rewritten[0].count("\n")}


@case
def foreign(path: str, when: str) -> Any:
    """Another plug-in: loaded before ours, or only lying in a folder that TensorFlow loads from."""
    from tensorflow.python.framework import load_library

    if when == "loaded":
        load_library.load_pluggable_device_library(path)
    if when == "deleted":
        load_library.load_pluggable_device_library(path)
        os.remove(path)
    if when == "folder":
        sys.path.append(str(Path(path).parents[1]))
    refused = refusal(load)
    found = {"refused": refused, "again": refusal(load) == refused, "plain": make_step()()}
    if refused == "nothing was refused":
        plugin.arm(double_rate)
        found["edited"] = make_step()()
    else:
        found["armed"] = refusal(lambda: plugin.arm(double_rate))
    return found


@case
def other_copy(path: str) -> Any:
    """Another copy of ours that serves the type already, as another installation's would."""
    form = plugin.CompiledForm(Path(path), find_tensorflow(), lambda *_: None, lambda fault: None)
    idle = form.registered()
    form.register("CPU")
    return {"idle": sorted(idle), "refused": refusal(load), "GPU": load("GPU"), "step": make_step()()}


@case
def second_import() -> Any:
    """A module that is imported a second time meets what the first one registered."""
    load()
    del sys.modules["lms.optimizer.plugin"]
    second = importlib.import_module("lms.optimizer.plugin")
    assert second is not plugin
    try:
        name = second.load(("CPU",), os.environ)
    except PluginError as error:
        return {"refused": str(error), "step": make_step()()}
    second.arm(double_rate)
    return {"form": name, "step": make_step()()}


@case
def shapes() -> Any:
    """The reader in C and the classes of protobuf tell the same of one graph."""
    found: dict[str, Any] = {}
    load()
    reader = CtypesForm(find_tensorflow(), lambda *_: None, lambda fault: None)

    def editor(request: Request) -> None:
        names = [node.name for node in graph_pb2.GraphDef.FromString(request.graph).node]
        fast = request.item.output_properties(names)
        request.item._read_outputs = reader.read_outputs
        slow = request.item.output_properties(names)
        dims = [one.dims for of in fast for one in of]
        found["same"] = fast == slow
        found["nodes"] = len(names)
        found["kinds"] = [None in dims, () in dims, any(-1 in one for one in dims if one)]
        found["many"] = max(map(len, fast))

    plugin.arm(editor, on_fault=lambda fault: found.update(fault=repr(fault)))
    weights = tf.Variable(tf.ones((SIDE, SIDE)))
    unknown, open_batch = tf.TensorSpec(None), tf.TensorSpec((None, SIDE))

    @tf.function(input_signature=[open_batch, unknown, tf.TensorSpec((), tf.string)])
    def step(x: Any, anything: Any, text: Any) -> Any:
        with tf.GradientTape() as tape:
            for _ in tf.range(3):
                x = tf.tanh(tf.matmul(x, weights))
            loss = tf.reduce_sum(x) + tf.reduce_sum(anything) + tf.cast(tf.strings.length(text), tf.float32)
            for part in tf.split(x, 4, axis=1):
                loss += tf.reduce_sum(part * part)
        weights.assign_sub(RATE * tape.gradient(loss, weights))
        return loss, tf.unique(tf.reshape(x, [-1]))

    step(tf.ones((4, SIDE)), tf.ones((2, 3)), tf.constant("text"))
    return found


@case
def messages() -> Any:
    """The reader in C takes and refuses what the classes of protobuf take and refuse."""
    import random

    from google.protobuf.message import DecodeError
    from tensorflow.core.grappler.costs.op_performance_data_pb2 import OpInfo

    load()
    library = plugin._plugin._form[1]._library  # type: ignore[index]
    read = library.lms_plugin_read_properties
    read.restype, read.argtypes = ctypes.c_int64, (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)

    def read_in_c(message: bytes) -> Any:
        numbers = ctypes.c_void_p()
        length = read(message, len(message), ctypes.byref(numbers))
        if length < 0:
            return None
        flat = (ctypes.c_int64 * length).from_address(numbers.value)
        (outputs,) = split_outputs([1, *flat], 1)
        library.lms_plugin_free(numbers)
        return outputs[0]

    chance = random.Random(7)  # noqa: S311
    good, refused = 0, 0
    for _ in range(2000):
        made = OpInfo.TensorProperties(dtype=chance.choice((0, 1, 3, 7, 14, 101)))
        if chance.random() < 0.1:
            made.shape.unknown_rank = True
        elif chance.random() < 0.9:
            sizes = [0, 1, -1, -7, 127, 128, 1 << 31, (1 << 62) + 1]
            for _ in range(chance.randrange(6)):
                made.shape.dim.add(size=chance.choice(sizes), name="n" * chance.choice((0, 0, 3, 200)))
        if chance.random() < 0.3:
            made.value.CopyFrom(tf.make_tensor_proto([1.0, 2.0, 3.0]))
            made.shape.SetInParent()
        message = made.SerializeToString()
        expected = parse_properties(message)
        assert read_in_c(message) == expected, (message, expected)
        good += 1
        cut = message[: chance.randrange(len(message) + 1)]
        try:
            expected_or_none = parse_properties(cut)
        except DecodeError:
            expected_or_none = None
        assert read_in_c(cut) == expected_or_none, (cut, expected_or_none)
        refused += expected_or_none is None
        read_in_c(bytes(chance.randrange(256) for _ in range(chance.randrange(40))))  # does not crash
    return {"good": good, "refused": refused > 200}


@case
def speed() -> Any:
    """How long the nodes of a large graph take, and how long a graph waits for an idle plug-in."""
    times: dict[str, Any] = {}
    load()

    def editor(request: Request) -> None:
        names = [node.name for node in graph_pb2.GraphDef.FromString(request.graph).node]
        request.item.output_properties(names[:1])
        measured = []
        for _ in range(5):
            start = time.perf_counter()
            request.item.output_properties(names)
            measured.append(time.perf_counter() - start)
        times.update(nodes=len(names), bytes=len(request.graph), outputs_s=min(measured))

    plugin.arm(editor, on_fault=lambda fault: times.update(fault=repr(fault)))
    weights = [tf.Variable(tf.ones((SIDE, SIDE))) for _ in range(320)]

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            for one in weights:
                x = tf.tanh(tf.matmul(x, one))
            loss = tf.reduce_sum(x)
        for one, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            one.assign_sub(RATE * gradient)

    step(tf.ones((4, SIDE)))
    return times


def connect_late_caller(path: str) -> ctypes.CDLL:
    """A library that calls our optimizer as TensorFlow does, with a graph that is worth an editor's time."""
    library = plugin._plugin._form[1]._library  # type: ignore[index]
    library.lms_plugin_register_next(0)
    configs, optimizer = c_api.Configs(), c_api.Optimizer()
    params = c_api.Params(optimizer_configs=ctypes.pointer(configs), optimizer=ctypes.pointer(optimizer))
    library.TF_InitGraph(ctypes.byref(params), None)
    caller = ctypes.CDLL(path)
    graph = ctypes.create_string_buffer(b"gradient " * 100)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
    new_status = ctypes.cast(find_tensorflow().new_status, ctypes.c_void_p)
    caller.set_plugin(ctypes.byref(optimizer), graph, ctypes.c_size_t(len(graph)), new_status)
    return caller


@case
def late(path: str) -> Any:
    """Python ends while a thread goes on calling the armed plug-in, and while an editor is at work."""
    load()
    caller = connect_late_caller(path)
    entered = threading.Event()

    def editor(request: Request) -> bytes:
        entered.set()
        time.sleep(0.002)
        return request.graph

    plugin.arm(editor)
    caller.call_until_the_end()
    entered.wait(60)
    return {"entered": entered.is_set()}


@case
def leave() -> Any:
    """Python ends while an editor of a daemon thread is at work on a real graph."""
    load()
    entered = threading.Event()

    def editor(request: Request) -> bytes | None:
        entered.set()
        for _ in range(100):
            time.sleep(0.01)
        print("edited", file=sys.stderr, flush=True)
        return double_rate(request)

    plugin.arm(editor)
    threading.Thread(target=make_step(), daemon=True).start()
    entered.wait(60)
    return {"entered": entered.is_set()}


@case
def armed_at_exit() -> Any:
    load("CPU", "GPU")
    plugin.arm(double_rate)
    return make_step()()


@case
def pending_interrupt(path: str) -> Any:
    """A Ctrl-C that came while TensorFlow was at work is told, as one in the editor is."""
    load()
    caller = connect_late_caller(path)
    told: list[str] = []
    edited: list[int] = []

    def editor(request: Request) -> None:
        edited.append(1)

    plugin.arm(editor, on_fault=lambda fault: told.append(type(fault).__name__))
    caller.call_with_interrupt_pending()
    return {"told": told, "edited": edited}


@case
def interrupt() -> Any:
    """A Ctrl-C while the editor is at work is told, and so is what a handler of the user's raises."""
    load()
    told: list[str] = []

    def editor(request: Request) -> None:
        signal.raise_signal(signal.SIGINT)

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError

    plugin.arm(editor, on_fault=lambda fault: told.append(type(fault).__name__))
    steps = [make_step()()]
    signal.signal(signal.SIGINT, handler)
    steps.append(make_step()())
    kept = signal.getsignal(signal.SIGINT) is handler
    return {"told": told, "steps": steps, "kept": kept}


@case
def forms(prebuilt: str, other_version: str) -> Any:
    """Which form would be taken, or why none, while what lies at ``prebuilt`` changes."""

    def open_form(**environ: str) -> str:
        try:
            return plugin._Plugin()._open({**os.environ, **environ})[0]
        except PluginError as error:
            return str(error)

    found = {"missing": open_form(LMS_PLUGIN="prebuilt"), "compiled": open_form()}
    Path(prebuilt).write_bytes(b"not a library")
    found["broken"] = open_form()
    path, os.environ["PATH"] = os.environ["PATH"], "/nowhere"
    empty = f"{prebuilt}.cache"
    found["no compiler"] = open_form(LMS_CACHE=empty)
    found["refused"] = open_form(LMS_CACHE=empty, LMS_PLUGIN="compiled")
    os.environ["PATH"] = path
    os.replace(other_version, prebuilt)
    found["other version"] = open_form(LMS_PLUGIN="prebuilt")
    found["bad name"] = open_form(LMS_PLUGIN="gcc")
    return found


@case
def alone() -> Any:
    """Without TensorFlow's own functions there is one line."""
    calls = find_tensorflow()
    calls._libraries = []
    return [refusal(lambda: calls._function("TF_NewStatus", None)), calls.find("TF_NewStatus")]


if __name__ == "__main__":
    names = sys.argv[1].split(",")
    print(json.dumps({name: CASES[name](*sys.argv[2:]) for name in names}), flush=True)
