"""Trains graphs of compat.v1 without LMS and with it, in every way that is; prints what it saw as JSON."""

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "600"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.enable import LMSWarning  # noqa: E402
from lms.engine import installation  # noqa: E402
from lms.errors import LMSError  # noqa: E402
from lms.session import LMSSessionRunHook, edit_graph  # noqa: E402

v1 = tf.compat.v1
v1.disable_eager_execution()
BATCH, STEPS = 32, 8
RANDOM = np.random.RandomState(0)
IMAGES, LABELS = RANDOM.rand(BATCH, 28, 28, 1).astype("f"), RANDOM.randint(0, 10, BATCH)
SEEN = RANDOM.rand(BATCH, 28, 28, 16).astype("f")


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


def weights_after(session: Any, net: Any, extra: Any = None, steps: int = STEPS) -> str:
    """Train; the weights as a text. ``extra`` is fed as well."""
    x, y, loss, step = net
    for _ in range(steps):
        session.run([loss, step], {x: IMAGES, y: LABELS, **(extra or {})})
    return b"".join(value.tobytes() for value in session.run(v1.trainable_variables())).hex()


def train(hook: LMSSessionRunHook | None = None, extra: Any = None) -> str:
    """The weights after all steps in a new graph."""
    with tf.Graph().as_default():
        net = network()
        if hook is not None:
            with v1.train.MonitoredSession(hooks=[hook]) as session:
                return weights_after(session, net)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return weights_after(session, net, extra)


def train_late(when: str) -> str:
    """The same where LMS is switched on late: after ``when``."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        if when == "a session of nothing":
            lms.enable(policy="all")
        net = network()
        session.run(v1.global_variables_initializer())
        if when == "the graph is final":
            graph.finalize()
        if when == "a step":
            weights_after(session, net, steps=3)
        if lms.state() is None:
            lms.enable(policy="all")
        return weights_after(session, net, steps=STEPS - 3 if when == "a step" else STEPS)


def train_around_lms() -> tuple[str, int, int]:
    """The weights where LMS is switched off after a few steps; the swaps by then, and after all steps."""
    with tf.Graph().as_default(), v1.Session() as session:
        net = network()
        session.run(v1.global_variables_initializer())
        lms.enable(policy="all")
        weights_after(session, net, steps=3)
        store = installation.engine().resources.transport()
        moved = store.stats().swap_outs
        lms.disable()
        weights = weights_after(session, net, steps=STEPS - 3)
        return weights, moved, store.stats().swap_outs


def train_a_while_loop() -> str:
    """A recurrent net with TensorFlow 1's while loop (Enter, Exit, ...)."""
    v1.disable_control_flow_v2()
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (BATCH, 64))
        kernel = v1.get_variable("kernel", (64, 64), initializer=v1.glorot_uniform_initializer(seed=1))
        _, state = tf.while_loop(lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(h @ kernel)), (0, x))
        for _ in range(6):
            state = tf.tanh(state @ kernel)
        step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(state**2))
        assert any(op.type == "Enter" for op in graph.get_operations())
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(STEPS):
                session.run(step, {x: IMAGES.reshape(BATCH, -1)[:, :64]})
            weights = session.run(kernel).tobytes().hex()
    v1.enable_control_flow_v2()
    return weights


def looked_at(run: Callable[[], str]) -> dict[str, Any]:
    """The weights that ``run`` comes to, what LMS made of it, and what it warned of; LMS is off then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = run()
    report = lms.report()
    lms.disable()
    return {
        "weights": weights,
        "edited": [graph.tensors for graph in report.edited],
        "moved": report.store.swap_outs,
        "said": [str(one.message) for one in caught if one.category is LMSWarning],
        "report": str(report),
    }


def enabled(run: Callable[[], str]) -> dict[str, Any]:
    """The same under ``lms.enable``."""
    lms.enable(policy="all", min_tensor_bytes=1024)
    return looked_at(run)


def hook_leaves_the_graph() -> list[Any]:
    """Whether asking for plans, twice, changes the graph; and what is said of one without a step."""
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
        try:
            edit_graph(graph)
        except LMSError as error:
            refused = str(error)
        x, y, _, step = network()
        start = v1.global_variables_initializer()
        before = graph.as_graph_def()
        for _ in range(2):
            edit_graph(graph, lms.LMSConfig(policy="all"))
        with v1.Session() as session:
            session.run(start)
            session.run(step, {x: IMAGES, y: LABELS})
        return [refused, graph.as_graph_def() == before, len(lms.report().edited)]


def main() -> dict[str, Any]:
    """All ways."""
    plain = {
        "steps": train(),
        "feed": train(extra={"seen2:0": SEEN}),
        "while loop": train_a_while_loop(),
    }
    seen: dict[str, Any] = {"graph": hook_leaves_the_graph()}
    lms.disable()
    asked = lms.LMSConfig(batch_size=BATCH, policy="all")
    seen["hook"] = looked_at(lambda: train(LMSSessionRunHook(asked)))
    seen["enabled"] = enabled(train)
    seen["feed"] = enabled(lambda: train(extra={"seen2:0": SEEN}))
    seen["while loop"] = enabled(train_a_while_loop)
    for when in ("a session of nothing", "the initializer", "the graph is final", "a step"):
        seen[when] = looked_at(lambda when=when: train_late(when))
    seen["switched off"] = train_around_lms()
    return {"plain": plain, **seen}


if __name__ == "__main__":
    print(json.dumps(main()))
