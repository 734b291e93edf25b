"""Trains with momentum and looks where variables lie between steps; prints JSON.

python kept_places_job.py fitted|loop|reader|"assigned first" off|all
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
import numpy as np
import tensorflow as tf

import lms
from lms.variables.memory import address_of

tf.keras.utils.set_random_seed(1)
WIDTH, STEPS = 256, 6
SPEED, MOMENTUM = 0.01, 0.9


def main(case: str, policy: str) -> None:
    """Train for some steps."""
    if policy != "off":
        lms.enable(policy=policy, min_tensor_bytes=1024)
    weights, momenta, step = CASES[case]()
    places: list[list[int | None]] = []
    found: dict[str, int] = {}
    if case == "threads":
        found = read_meanwhile(momenta[0], step)
    for _ in range(STEPS):
        step()
        places.append([address_of(one.value()) for one in momenta])
    bits = sha256(b"".join(one.numpy().tobytes() for one in [*weights, *momenta])).hexdigest()
    swapped = lms.report().graphs[-1].tensors if policy != "off" else 0
    print(json.dumps({"places": places, "bits": bits, "tensors": swapped, **found}))


def parameters() -> tuple[list[Any], list[Any]]:
    """Three matrices, and the momentum of each."""
    random = np.random.default_rng(0)
    weights = [tf.Variable(random.normal(size=(WIDTH, WIDTH)).astype("f") / 16) for _ in range(3)]
    return weights, [tf.Variable(tf.zeros_like(one)) for one in weights]


def update(weights: list[Any], momenta: list[Any], batch: Any) -> None:
    """Make a step: an assignment gives each momentum a new value."""
    with tf.GradientTape() as tape:
        made = batch
        for one in weights:
            made = tf.tanh(made @ one)
        loss = tf.reduce_sum(made * made)
    for weight, momentum, slope in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
        momentum.assign(MOMENTUM * momentum - SPEED * slope)
        weight.assign_add(momentum)


def fitted() -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """A function of its own."""
    weights, momenta = parameters()
    batch = tf.random.stateless_normal((64, WIDTH), (1, 2))
    return weights, momenta, tf.function(lambda: update(weights, momenta, batch))


def loop() -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """Two steps in a loop of the graph."""
    weights, momenta = parameters()
    batch = tf.random.stateless_normal((64, WIDTH), (1, 2))

    @tf.function
    def step() -> None:
        for _ in tf.range(2):
            update(weights, momenta, batch)

    return weights, momenta, step


def reader() -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """Somebody else holds the values of before each step, which must stay what they are."""
    weights, momenta, step = fitted()
    held: list[tuple[Any, Any]] = []

    def watched() -> None:
        held.extend((one.value(), one.numpy().copy()) for one in momenta)
        step()
        assert all(np.array_equal(value, copy) for value, copy in held)

    return weights, momenta, watched


def assigned_first() -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """A variable that is read in its first step has no memory of its own before: it is assigned first."""
    weights, momenta = parameters()
    late = tf.Variable(tf.zeros((WIDTH, WIDTH)))

    @tf.function
    def step() -> None:
        late.assign(weights[0] * 2.0)
        update(weights, momenta, late.value())

    return weights, [*momenta, late], step


def threads() -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """A variable all of whose numbers are the same in each step: one of another step shows."""
    weights, momenta, step = fitted()
    counter = tf.Variable(tf.zeros((2 * WIDTH, 4 * WIDTH)))

    @tf.function
    def counted() -> None:
        batch = tf.random.stateless_normal((64, WIDTH), (1, 2))
        update(weights, momenta, batch)
        counter.assign(counter * 1.0 + 1.0)

    return weights, [counter, *momenta], counted


def read_meanwhile(variable: Any, step: Callable[[], Any]) -> dict[str, int]:
    """Read a variable in another thread while steps run."""
    seen = {"reads": 0, "torn": 0}
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            value = variable.numpy()
            seen["reads"] += 1
            seen["torn"] += bool((value != value[0, 0]).any())

    step()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(600):
        step()
    done.set()
    reader.join()
    return seen


def lengths() -> tuple[list[Any], list[Any], Callable[[], Any]]:
    """A variable of open length, which has that of each batch."""
    weights, momenta = parameters()
    kept = tf.Variable(tf.zeros((64, WIDTH)), shape=(None, WIDTH))
    batches = (tf.random.stateless_normal((64, WIDTH), (1, one))[: 64 - 8 * one] for one in range(STEPS))

    @tf.function(input_signature=[tf.TensorSpec((None, WIDTH))])
    def step(batch: Any) -> None:
        kept.assign(tf.reduce_mean(kept) + tf.tanh(batch @ weights[0]))
        update(weights, momenta, batch)

    return weights, [*momenta, kept], lambda: step(next(batches))


CASES = {
    "fitted": fitted,
    "loop": loop,
    "reader": reader,
    "assigned first": assigned_first,
    "threads": threads,
    "lengths": lengths,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
