"""Trains a compat.v1 graph without LMS, with the hook, and under lms.enable(); prints what it saw as JSON."""

import json
import os
import warnings
from contextlib import nullcontext
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "600"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.enable import LMSWarning  # noqa: E402
from lms.errors import LMSError  # noqa: E402
from lms.session import LMSSessionRunHook, edit_graph  # noqa: E402

v1 = tf.compat.v1
v1.disable_eager_execution()
BATCH = 32


def network() -> tuple[Any, Any, Any, Any]:
    """Images, labels, loss and training op in the default graph."""
    x, y = v1.placeholder(tf.float32, (None, 28, 28, 1)), v1.placeholder(tf.int32, (None,))
    h = x
    for layer in range(6):
        start = v1.glorot_uniform_initializer(seed=layer)
        kernel = v1.get_variable(f"kernel{layer}", (3, 3, h.shape[-1], 16), initializer=start)
        h = tf.identity(tf.nn.relu(tf.nn.conv2d(h, kernel, 1, "SAME")), name=f"seen{layer}")
    top = v1.get_variable("top", (16, 10), initializer=v1.glorot_uniform_initializer(seed=9))
    logits = tf.reduce_mean(h, (1, 2)) @ top
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    return x, y, loss, v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def train(with_hook: LMSSessionRunHook | None = None, feed_first: bool = False) -> tuple[str, int]:
    """Twenty steps; the weights as a text, and how many ops LMS added."""
    random = np.random.RandomState(0)
    images, labels = random.rand(BATCH, 28, 28, 1).astype("f"), random.randint(0, 10, BATCH)
    options = v1.ConfigProto()
    options.graph_options.rewrite_options.arithmetic_optimization = 2
    with tf.Graph().as_default() as graph:
        x, y, loss, step = network()
        fed = {x: images, y: labels}
        if with_hook is not None:
            creator = v1.train.ChiefSessionCreator(config=options)
            session = v1.train.MonitoredSession(creator, hooks=[with_hook])
        else:
            session = v1.Session(config=options)
        with session:
            if with_hook is None:
                session.run(v1.global_variables_initializer(), fed if feed_first else None)
            for _ in range(20):
                session.run([loss, step], fed)
            values = session.run(v1.trainable_variables())
        added = sum("/lms/" in op.name for op in graph.get_operations())
    return b"".join(value.tobytes() for value in values).hex(), added


def refusals() -> list[str]:
    """What is said where an edit cannot be."""
    texts = []
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
        try:
            edit_graph(graph)
        except LMSError as error:
            texts.append(str(error))
        network()
        edit_graph(graph, lms.LMSConfig(batch_size=BATCH, policy="all"))
        try:
            edit_graph(graph)
        except LMSError as error:
            texts.append(str(error))
    return texts


def too_late() -> list[str]:
    """The training step is built after the session has started."""
    with warnings.catch_warnings(record=True) as caught, tf.Graph().as_default(), v1.Session() as session:
        warnings.simplefilter("always")
        session.run(tf.constant(1.0))
        network()
        session.run(v1.global_variables_initializer())
    return [str(one.message) for one in caught]


def open_session(ran: str, finalized: bool = False) -> dict[str, Any]:
    """LMS is enabled while a session is open that has run ``ran``: what is edited, said and reported."""
    fed = {"images": np.zeros((BATCH, 28, 28, 1)), "labels": np.zeros(BATCH)}
    with (
        warnings.catch_warnings(record=True) as caught,
        tf.Graph().as_default() as graph,
        v1.Session() as session,
    ):
        warnings.simplefilter("always")
        net = network() if ran != "nothing" else None
        if net is not None:
            session.run(v1.global_variables_initializer())
        if ran == "a step":
            session.run(net[3], {net[0]: fed["images"], net[1]: fed["labels"]})
        lms.enable(policy="all", batch_size=BATCH)
        x, y, _, step = net or network()
        start = v1.global_variables_initializer()
        if finalized:
            graph.finalize()
        with v1.Session() if finalized else nullcontext(session) as used:
            used.run(start)
            for _ in range(2):
                used.run(step, {x: fed["images"], y: fed["labels"]})
        report = lms.report()
        lms.disable()
    return {
        "edited": len(report.edited),
        "moved": report.store.swap_outs,
        "why": [one.why for one in report.graphs],
        "said": [str(one.message) for one in caught if one.category is LMSWarning],
    }


def feed_of_a_bypassed_tensor() -> str:
    """What is said when a value is fed where the readers were sent elsewhere."""
    with tf.Graph().as_default():
        x, y, _, step = network()
        fed = {x: np.zeros((BATCH, 28, 28, 1)), y: np.zeros(BATCH), "seen2:0": np.zeros((BATCH, 28, 28, 16))}
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            try:
                session.run(step, fed)
            except LMSError as error:
                return str(error)
    return "it ran"


def train_a_while_loop() -> tuple[str, list[str]]:
    """A recurrent net with TensorFlow 1's while loop (Enter, Exit, ...): the weights, and what is said."""
    values = np.random.RandomState(0).rand(BATCH, 64)
    v1.disable_control_flow_v2()
    with warnings.catch_warnings(record=True) as caught, tf.Graph().as_default() as graph:
        warnings.simplefilter("always")
        x = v1.placeholder(tf.float32, (BATCH, 64))
        kernel = v1.get_variable("kernel", (64, 64), initializer=v1.glorot_uniform_initializer(seed=1))
        _, state = tf.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(h @ kernel)), (0, x))
        step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(state**2))
        assert any(op.type == "Enter" for op in graph.get_operations())
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(20):
                session.run(step, {x: values})
            weights = session.run(kernel).tobytes().hex()
    v1.enable_control_flow_v2()
    return weights, [str(one.message) for one in caught]


def main() -> dict[str, Any]:
    """All ways."""
    seen: dict[str, Any] = {"off": train()}
    seen["hook"] = train(LMSSessionRunHook(lms.LMSConfig(batch_size=BATCH, policy="all")))
    seen["refusals"] = refusals()
    seen["while off"] = train_a_while_loop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lms.enable(policy="all", batch_size=BATCH)
    seen["enabled"] = train()
    seen["while on"] = train_a_while_loop()
    seen["report"] = str(lms.report())
    seen["too late"] = too_late()
    seen["bypassed"] = feed_of_a_bypassed_tensor()
    lms.disable()
    lms.enable(policy="all")
    seen["fed"] = train(feed_first=True)
    lms.disable()
    seen["open"] = {ran: open_session(ran) for ran in ("a step", "the initializer", "nothing")}
    seen["finalized"] = open_session("the initializer", finalized=True)
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
