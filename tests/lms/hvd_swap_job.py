"""One of two Horovod ranks: trains twenty steps without and with swapping, and prints both as JSON."""

import contextlib
import hashlib
import json
import os
import sys
import warnings
from functools import partial
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import horovod.tensorflow as hvd  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
import lms.hvd  # noqa: E402
from lms.engine import installation  # noqa: E402
from lms.intercept import oom_retry  # noqa: E402

STEPS, BATCH = 20, 8
PLANNED, TAKEN = 18 << 20, 4 << 20
"""The bytes that a step is planned for, and those of them that something else takes."""


def train() -> str:
    """Fit a small network on this rank's own data; the digest of the weights."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    inputs = x = layers.Input((16, 16, 3))
    for _ in range(4):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(x)))
    model = tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    random = np.random.RandomState(hvd.rank())
    images, labels = random.rand(BATCH * STEPS, 16, 16, 3).astype("f"), random.randint(0, 10, BATCH * STEPS)
    optimizer = lms.hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(images, labels, batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
    trained = [variable.numpy() for variable in model.trainable_variables]
    return hashlib.sha256(b"".join(value.tobytes() for value in trained)).hexdigest()


def main() -> dict[str, Any]:
    """Without, then with."""
    hvd.init()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    before = train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lms.enable(enabled=True, policy="all", min_tensor_bytes=4096)
    after = train()
    edited = [graph.tensors for graph in lms.report().edited]
    return {"rank": hvd.rank(), "before": before, "after": after, "tensors": edited}


def peaks() -> dict[str, Any]:
    """Swapping from the first step on: what was planned, and what the device held at most."""
    lms.enable(enabled=True, policy="all", min_tensor_bytes=4096)
    hvd.init()
    train()
    report = lms.report()
    return {
        "rank": hvd.rank(),
        "base": [graph.base_bytes for graph in report.edited],
        "planned": report.planned_peak_bytes,
        "measured": report.measured_peak_bytes,
    }


def train_dense(units: int = 128, *, compiled: bool) -> tuple[list[float], str]:
    """Fit layers of this rank's own data; the losses, and the digest of the weights."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    inputs = x = layers.Input((128,))
    for _ in range(4):
        x = layers.Dense(units, activation="gelu")(x)
    model = tf.keras.Model(inputs, layers.Dense(10)(x))
    random = np.random.RandomState(hvd.rank())
    rows, labels = random.rand(1024, 128).astype("f"), random.randint(0, 10, 1024)
    optimizer = lms.hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=compiled)
    losses = model.fit(rows, labels, batch_size=512, epochs=4, verbose=0, shuffle=False).history["loss"]
    trained = b"".join(variable.numpy().tobytes() for variable in model.trainable_variables)
    return losses, hashlib.sha256(trained).hexdigest()


def retried(*, later: bool = False, **settings: str) -> dict[str, Any]:
    """Train where one rank finds less memory than its first plan was made for.

    Something else takes it once the plan is made, or ``later``, when it has run once. The rank finds out
    before it has exchanged anything.
    """
    hvd.init()
    _, before = train_dense(512, compiled=False)
    lms.enable(enabled=True, policy="budget", budget_bytes=PLANNED, min_tensor_bytes=4096, **settings)
    steps, held, free = installation.engine().steps, [], []
    apart, undo = steps.apart, steps.runs_apart.undo

    def crowd() -> None:
        if hvd.rank() == 1 and not held:
            held.extend(tf.zeros(1 << 18) for _ in range((free[0] + TAKEN) >> 20))

    def planned(works: Any, graph: bytes) -> bytes:
        free.append(works[0].limit_bytes - PLANNED)
        if not later:
            crowd()
        return bytes(apart(works, graph))

    def undone(call: Any) -> None:
        undo(call)
        crowd()

    steps.apart, steps.runs_apart.undo = planned, undone
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, after = train_dense(512, compiled=False)
    report = lms.report()
    return {
        "rank": hvd.rank(),
        "before": before,
        "after": after,
        "retries": report.retries,
        "plans": len(report.edited),
        "steps": steps.attempts.history.count,
        "said": [str(one.message) for one in caught],
    }


def asserted(*, constant: bool = False) -> dict[str, Any]:
    """Train a step that fails without the other rank: it checks what the ranks make together.

    Where that is made of a ``constant``, TensorFlow exchanges it when it optimizes the step.
    """
    hvd.init()
    lms.enable(enabled=True, policy="all", min_tensor_bytes=4096)
    weights = [tf.Variable(tf.random.stateless_normal((64, 64), (seed, 1)) * 0.1) for seed in range(6)]

    @tf.function
    def step(ones: Any) -> Any:
        with tf.GradientTape() as tape:
            x = ones
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x * x)
        gradients = tape.gradient(loss, weights)
        ranks = hvd.allreduce(tf.ones(()) if constant else tf.reduce_max(ones), op=hvd.Sum, name="ranks")
        with tf.control_dependencies([tf.debugging.assert_equal(ranks, 2.0)]):
            for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                weight.assign_sub(1e-3 * hvd.allreduce(gradient, name=f"gradient.{number}"))
        return loss

    losses = [float(step(tf.ones((512, 64)))) for _ in range(3)]
    trained = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()
    edited = [graph.tensors for graph in lms.report().edited]
    apart = installation.engine().steps.runs_apart.count
    return {"rank": hvd.rank(), "losses": losses, "trained": trained, "tensors": edited, "apart": apart}


def left() -> dict[str, Any]:
    """Catch an error of runs apart; and call functions that may have no graph of such a run."""
    hvd.init()
    oom_retry._further_tries = lambda config: iter([config])  # each lets TensorFlow wait for ten seconds
    lms.enable(enabled=True, policy="all", min_tensor_bytes=4096)
    weights = [tf.Variable(tf.random.stateless_normal((64, 64), (seed, 1)) * 0.1) for seed in range(6)]
    steps, held = installation.engine().steps, []
    apart, mine = steps.apart, tf.ones(()) * (hvd.rank() + 1)

    def crowded(works: Any, graph: bytes) -> bytes:
        held.extend(tf.zeros(1 << 16) for _ in range((works[0].limit_bytes >> 18) - 8))
        return bytes(apart(works, graph))

    def train(x: Any, mine: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x * x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-6 * gradient)
        return hvd.allreduce(mine, op=hvd.Sum, name="mine")

    step, rows = tf.function(train), tf.ones((8192, 64))
    before = [weight.numpy() for weight in weights]
    collector = installation.engine().books.collector
    withdraw = collector.withdraw

    def interrupted(graphs: Any) -> None:
        collector.withdraw = withdraw
        raise KeyboardInterrupt

    collector.withdraw = interrupted
    with contextlib.suppress(KeyboardInterrupt):
        tf.function(train)(rows, mine)  # has run apart, and changed the weights
    assert collector.withdraw == withdraw, "it was not interrupted"
    undone = all(map(np.array_equal, before, [weight.numpy() for weight in weights]))
    steps.apart = crowded
    caught = ""
    try:
        step(rows, mine)
    except tf.errors.ResourceExhaustedError as error:
        caught = str(error)
    steps.apart, _ = apart, held.clear()
    sums = [float(step(rows, mine))]
    step = tf.function(train)
    sums += [float(step(rows, mine)), float(step.get_concrete_function(rows, mine)(rows, mine))]

    def elements() -> Any:
        yield from (np.full((8192, 64), number, "f") for number in range(8))

    def through(dataset: Any, mine: Any) -> Any:
        batch = next(iter(dataset))
        return train(batch, mine + batch[0, 0])

    batches = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec((8192, 64)))
    sums.append(float(tf.function(through)(batches, mine)))
    figures = {"sums": sums, "undone": undone, "apart": installation.engine().steps.runs_apart.count}
    return {"rank": hvd.rank(), "caught": caught, **figures}


def segments() -> dict[str, Any]:
    """Train a step that XLA compiles in segments between the swaps and what Horovod exchanges."""
    lms.enable(enabled=True, policy="all", xla="auto", min_tensor_bytes=4096)
    hvd.init()
    losses, trained = train_dense(compiled=True)
    return {
        "rank": hvd.rank(),
        "losses": losses,
        "trained": trained,
        "segments": [graph.segments for graph in lms.report().edited],
        "swapped": [graph.tensors for graph in lms.report().edited],
        "executed": [graph.executed for graph in lms.report().edited],
    }


KINDS = {
    "peaks": peaks,
    "retried": retried,
    "retried later": partial(retried, later=True),
    "retried with variables on the host": partial(retried, optimizer_state="host", variables="host"),
    "left": left,
    "asserted": asserted,
    "folded": partial(asserted, constant=True),
    "segments": segments,
}

if __name__ == "__main__":
    print(json.dumps(KINDS.get(sys.argv[-1], main)()), flush=True)
