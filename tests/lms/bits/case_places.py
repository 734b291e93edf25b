"""Trainings elsewhere than in one function on one device: two devices, two ranks, sessions."""

from typing import Any

import numpy as np
import tensorflow as tf
from case_models import adamw, encoder, images, momentum, residual, sentences
from case_tools import (
    BATCH,
    CLASSES,
    Case,
    Variables,
    fit,
    labels_of,
    numbers,
    plain_config,
    start_anew,
)

v1 = tf.compat.v1


def mirrored(steps: int) -> Variables:
    """Fit a model whose copies lie on two devices."""
    start_anew()
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model, optimizer = residual(), momentum()
        return fit(model, optimizer, images(steps * BATCH), labels_of(steps * BATCH))


def mirrored_loop(steps: int) -> Variables:
    """Run a step of one's own on two devices."""
    start_anew()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    names = range(4)
    with strategy.scope():
        weights = [tf.Variable(numbers(128, 128, seed=seed) * 0.1, name=f"weight{seed}") for seed in names]

    @tf.function
    def run(batch: Any) -> None:
        def one(x: Any) -> None:
            context = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                x = x * (1.0 + tf.cast(context.replica_id_in_sync_group, tf.float32))
                for weight in weights:
                    x = tf.nn.gelu(tf.matmul(x, weight))
                loss = tf.reduce_mean(x**2)
            slopes = context.all_reduce("sum", tape.gradient(loss, weights))
            context.merge_call(update, args=(slopes,))

        strategy.run(one, (batch,))

    def update(strategy: Any, slopes: Any) -> None:
        for weight, slope in zip(weights, slopes, strict=True):
            strategy.extended.update(weight, lambda one, by: one.assign_sub(0.1 * by), args=(slope,))

    for number in range(steps):
        run(tf.constant(numbers(8 * BATCH, 128, seed=number)))
    return weights


def ranks(steps: int) -> Variables:
    """Fit a model on two Horovod ranks, each with its own data."""
    import horovod.tensorflow as hvd

    import lms.hvd

    start_anew()
    rank, count = hvd.rank(), steps * BATCH
    optimizer = lms.hvd.DistributedOptimizer(adamw())
    return fit(encoder(), optimizer, sentences(2 * count)[rank::2], labels_of(2 * count)[rank::2])


def layer(x: Any, name: str, width: int) -> Any:
    """A dense layer of a session's graph."""
    start = v1.glorot_uniform_initializer(seed=len(name))
    kernel = v1.get_variable(f"{name}/kernel", (x.shape[-1], width), initializer=start)
    return tf.matmul(x, kernel) + v1.get_variable(
        f"{name}/bias", (width,), initializer=v1.zeros_initializer()
    )


def convolution(x: Any, name: str, width: int) -> Any:
    """A convolution of a session's graph."""
    start = v1.glorot_uniform_initializer(seed=len(name))
    kernel = v1.get_variable(f"{name}/kernel", (3, 3, x.shape[-1], width), initializer=start)
    bias = v1.get_variable(f"{name}/bias", (width,), initializer=v1.zeros_initializer())
    return tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias)


def session(steps: int) -> Variables:
    """Train a graph in a session, its batch size open."""
    with tf.Graph().as_default():
        v1.set_random_seed(1)
        image, label = v1.placeholder(tf.float32, (None, 24, 24, 1)), v1.placeholder(tf.int32, (None,))
        x = image
        for name in ("one", "three", "longer"):
            x = tf.nn.gelu(convolution(x, name, 16))
        x = tf.nn.dropout(tf.reshape(x[:, ::4, ::4], (-1, 36 * 16)), 0.2, seed=3)
        logits = layer(tf.nn.gelu(layer(x, "hidden", 128)), "head", CLASSES)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits))
        update = v1.train.AdamOptimizer(1e-3).minimize(loss)
        return run_session(
            steps,
            [loss, update],
            lambda number: {
                image: numbers(BATCH, 24, 24, 1, seed=number),
                label: labels_of(BATCH + number)[:BATCH],
            },
        )


def session_loop(steps: int) -> Variables:
    """Train with TensorFlow 1's ``while`` loop (Enter, Exit, ...) in a session."""
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            given = v1.placeholder(tf.float32, (16 * BATCH, 128))
            x = tf.nn.gelu(layer(given, "first", 128))
            kernel = v1.get_variable("kernel", (128, 128), initializer=v1.glorot_uniform_initializer(seed=1))
            turns = tf.while_loop(
                lambda i, _: i < 5, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, kernel))), (0, x)
            )
            loss = tf.reduce_mean(layer(tf.nn.gelu(layer(turns[1], "second", 256)), "head", CLASSES) ** 2)
            update = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            return run_session(steps, [update], lambda number: {given: numbers(16 * BATCH, 128, seed=number)})
    finally:
        v1.enable_control_flow_v2()


def run_session(steps: int, fetches: Any, fed: Any) -> Variables:
    """Train in the default graph; the values of its variables."""
    with v1.Session(config=plain_config()) as running:
        running.run(v1.global_variables_initializer())
        for number in range(steps):
            running.run(fetches, fed(number))
        found: list[np.ndarray] = running.run(v1.global_variables())
    return found


CASES = {
    "mirrored": Case(mirrored, devices=2),
    "mirrored loop": Case(mirrored_loop, devices=2),
    "ranks": Case(ranks, ranks=2),
    "session": Case(session, options={"batch_size": BATCH}),
    "session loop": Case(session_loop),
}
