"""Trains steps with branches, loops and ops that block; prints what it found as JSON.

python flow_job.py off|all KIND
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "128"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

MODE, KIND, WIDTH, STEPS = sys.argv[1], sys.argv[2], 128, 6
if MODE != "off":
    lms.enable(policy=MODE, min_tensor_bytes=1 << 18)
random = np.random.default_rng(0)


def weights() -> list[tf.Variable]:
    """Return three square matrices."""
    return [tf.Variable(random.normal(size=(WIDTH, WIDTH)).astype("f") / 12) for _ in range(3)]


GROUPS = [weights() for _ in range(3)]
EACH = sum(GROUPS, [])
BATCH = tf.constant(random.random((4096, WIDTH)).astype("f"))


def slopes(batch: tf.Tensor, trained: list[tf.Variable]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Run the layers of all groups forward and backward."""
    with tf.GradientTape() as tape:
        for one in EACH:
            batch = tf.tanh(batch @ one)
        loss = tf.reduce_sum(batch * batch)
    return loss, tape.gradient(loss, trained)


def in_branches(number: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """Train one group of weights, in a branch with a whole step."""

    def train(group: list[tf.Variable]) -> tf.Tensor:
        loss, made = slopes(batch, group)
        for one, slope in zip(group, made, strict=True):
            one.assign_sub(1e-4 * slope)
        return loss

    return tf.switch_case(number, [lambda group=group: train(group) for group in GROUPS])


def updates_in_branches(number: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """Update one group of weights, by gradients made outside, with what is read of another group."""
    loss, made = slopes(batch, EACH)

    def update(place: int) -> tf.Tensor:
        others = GROUPS[place - 1]
        for one, other, slope in zip(GROUPS[place], others, made[3 * place : 3 * place + 3], strict=True):
            one.assign_sub(1e-4 * slope + 1e-3 * tf.matmul(other, other))
        return loss

    return tf.switch_case(number, [lambda place=place: update(place) for place in range(3)])


def with_loop(number: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """Have a loop read a weight behind its update, and an op read the loop's turns and the old weight."""
    first = EACH[0]
    loss, made = slopes(batch, EACH)
    old = tf.identity(first)
    for one, slope in zip(EACH, made, strict=True):
        one.assign_sub(1e-4 * slope)
    new = first.read_value()
    turns, value = tf.while_loop(
        lambda turn, _: turn < number + 2, lambda turn, value: (turn + 1, tf.tanh(value)), (0, new)
    )
    return loss + tf.reduce_sum(tf.tanh(old / tf.cast(turns, tf.float32))) + tf.reduce_sum(value)


def with_staging() -> list[float]:
    """Put into a staging area what the updates wait for, and read old weights with what comes out."""
    losses: list[float] = []
    values, rows = [one.numpy() for one in EACH], BATCH.numpy()
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        own = [
            v1.get_variable(f"w{place}", initializer=value, use_resource=True)
            for place, value in enumerate(values)
        ]
        read = [one.read_value() for one in own]
        batch = tf.constant(rows)
        for value in read:
            batch = tf.tanh(batch @ value)
        loss = tf.reduce_sum(batch * batch)
        train = v1.train.GradientDescentOptimizer(1e-4).minimize(loss, var_list=own)
        with tf.control_dependencies([train]):
            put = tf.raw_ops.Stage(values=[loss], shared_name="area")
        (got,) = tf.raw_ops.Unstage(dtypes=[tf.float32], shared_name="area")
        late = tf.reduce_sum(read[0] * tf.ensure_shape(got, ()))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(STEPS):
                losses += map(float, session.run([loss, late, put])[:2])
            losses += [float(np.sum(value)) for value in session.run(own)]
    return losses


if KIND == "staging":
    losses = with_staging()
else:
    kinds: dict[str, Callable[..., Any]] = {
        "branches": in_branches,
        "updates": updates_in_branches,
        "loop": with_loop,
    }
    step = tf.function(kinds[KIND])
    losses = [float(step(tf.constant(number % 3), BATCH)) for number in range(STEPS)]
bits = hashlib.sha256(b"".join(one.numpy().tobytes() for one in EACH)).hexdigest()
found: dict[str, Any] = {"losses": losses, "bits": bits}
if MODE != "off":
    report = lms.report()
    found["swapped"] = sum(graph.tensors for graph in report.edited)
    found["executed"] = [graph.executed for graph in report.edited]
    found["warnings"] = list(report.warnings)
print(json.dumps(found))
