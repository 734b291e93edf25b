"""What a session fetches by itself needs no more after an edit than before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lms.fetches import keep_fetches_apart, needed_sources
from lms.graph import GraphBuilder, Use
from lms.swap_plan import SerialEdge, Swap, SwapIn, SwapPlan

ROOT = Path(__file__).resolve().parents[2]
U = 256


def step():
    """Ops: 0 images, 1 labels, 2 f, 3 targets (of labels), 4 g (reads f), 5 loss, 6 h (reads f and g)."""
    build = GraphBuilder()
    (images,) = build.add("images", "Placeholder", outputs=[U])
    (labels,) = build.add("labels", "Placeholder", outputs=[U])
    (f,) = build.add("f", "Conv2D", inputs=[images], outputs=[U])
    (targets,) = build.add("targets", "OneHot", inputs=[labels], outputs=[U])
    (g,) = build.add("g", "Conv2D", inputs=[f], outputs=[U])
    build.add("loss", "Loss", inputs=[g, targets], outputs=[U])
    build.add("h", "Conv2D", inputs=[f, g], outputs=[U])
    return build.build(), f


def plan(graph, edges=(), swaps=()):
    return SwapPlan("test", tuple(range(len(graph.ops))), swaps, edges, (), 0, 0, 0, None)


def test_needs_follow_inputs_and_only_what_changes_or_is_fed_counts():
    graph, _ = step()
    assert needed_sources(graph) == (1, 2, 1, 2, 1, 3, 1)
    build = GraphBuilder()
    (constant,) = build.add("c", "Const", outputs=[8])
    build.add("fed_or_not", "PlaceholderWithDefault", inputs=[constant], outputs=[8])
    assert needed_sources(build.build()) == (0, 0)


def test_an_edge_that_asks_for_more_starts_further_up_the_chain():
    graph, _ = step()
    made = keep_fetches_apart(graph, plan(graph, (SerialEdge(2, 3), SerialEdge(3, 4), SerialEdge(4, 5))))
    assert made.serial_edges == (SerialEdge(2, 4), SerialEdge(4, 5))
    assert "by themselves" in made.notes[-1]


def test_a_use_that_must_not_wait_reads_the_tensor_itself():
    graph, f = step()
    free = Swap(f, U, 2, (SwapIn(4, (Use(6, 0),)),), blocks=(3, 4))
    bound = Swap(f, U, 2, (SwapIn(5, (Use(6, 0),)),))
    assert keep_fetches_apart(graph, plan(graph, swaps=(free,))).swaps[0].blocks == (4,)
    assert keep_fetches_apart(graph, plan(graph, swaps=(bound,))).swaps == ()


def test_a_plan_in_which_nothing_asks_for_more_stays_as_it_is():
    graph, f = step()
    made = plan(graph, (SerialEdge(4, 5),), (Swap(f, U, 2, (SwapIn(4, (Use(6, 0),)),)),))
    assert keep_fetches_apart(graph, made) is made


SESSION = """
import numpy as np, tensorflow as tf, lms
v1 = tf.compat.v1
lms.enable(policy="all", min_tensor_bytes=4096)
def train():
    x, y = v1.placeholder(tf.float32, (16, 16, 16, 3), "x"), v1.placeholder(tf.int32, (16,), "y")
    targets, h = tf.one_hot(y, 500), x
    for layer in range(4):
        start = v1.glorot_uniform_initializer(seed=layer)
        kernel = v1.get_variable(f"kernel{layer}", (3, 3, h.shape[-1], 8), initializer=start)
        h = tf.nn.relu(tf.nn.conv2d(h, kernel, 1, "SAME") + 1.0)
        if layer == 1:
            h = middle = v1.placeholder_with_default(h, h.shape)
    top = v1.get_variable("top", (2048, 500), initializer=v1.glorot_uniform_initializer(seed=9))
    logits = tf.reshape(h, (16, -1)) @ top
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits))
    with v1.Session() as session:
        step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())
        images, zeros = np.ones(x.shape, "f"), np.zeros(middle.shape, "f")
        session.run(step, {x: images, y: np.arange(16)})
        assert session.run(logits, {x: images}).shape == (16, 500)  # no labels are fed
        kernels = [v for v in v1.trainable_variables() if v.name == "kernel2:0"]
        before = session.run(kernels)
        session.run(step, {x: images, y: np.arange(16), middle: zeros})
        assert (before[0] == session.run(kernels)[0]).all()  # its layer read zeros, so it has no gradient
with tf.Graph().as_default():
    train()
print("edited", len(lms.report().edited))
"""


@pytest.mark.tensorflow
def test_a_session_predicts_without_labels_and_sees_what_is_fed_in_the_middle():
    pytest.importorskip("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "edited 1"
