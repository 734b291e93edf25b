"""Trains steps with loops, without Large Model Support and with their lists swapped; prints what came out."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "600"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

UNITS, ROWS, TURNS = 64, 256, 12
MIB = 1 << 20

Body = Callable[[Any, Sequence[Any]], Any]


def turned(x: Any, weight: Any, turns: int = TURNS) -> Any:
    """A recurrent layer that reads its inputs from a list and writes its outputs to another one."""
    inputs = tf.TensorArray(tf.float32, turns).unstack(tf.stack([x * (1 + 0.01 * i) for i in range(turns)]))

    def turn(i: Any, state: Any, made: Any) -> Any:
        state = tf.tanh(state @ weight + inputs.read(i))
        return i + 1, state, made.write(i, state)

    begin = 0, tf.zeros_like(x), tf.TensorArray(tf.float32, turns)
    _, state, made = tf.while_loop(lambda i, *_: i < turns, turn, begin, maximum_iterations=turns)
    return state + tf.reduce_mean(made.stack(), 0)


def layers(x: Any, weights: Sequence[Any]) -> Any:
    for weight in weights:
        x = turned(x, weight)
    return x


def ranged(x: Any, weights: Sequence[Any]) -> Any:
    """Loops over ``tf.range``; they state no bound."""
    for weight in weights:
        state = x
        for _ in tf.range(TURNS):
            state = tf.tanh(tf.sin(state @ weight) + x)
        x = state
    return x


def halves(x: Any, weights: Sequence[Any]) -> Any:
    """Half precision."""
    x = tf.cast(x, tf.float16)
    for weight in weights:
        half = tf.cast(weight, tf.float16)
        x = tf.scan(lambda state, one: tf.tanh(state @ half + one), tf.stack([x] * TURNS))[-1]  # noqa: B023
    return tf.cast(x, tf.float32)


def early(x: Any, weights: Sequence[Any]) -> Any:
    """The data decide when a loop ends."""
    for weight in weights:
        going = lambda i, state: tf.logical_and(i < 7, tf.reduce_sum(state * state) > -1.0)  # noqa: E731
        turn = lambda i, state: (i + 1, tf.tanh(state @ weight + x))  # noqa: B023, E731
        _, x = tf.while_loop(going, turn, (0, x), maximum_iterations=500)
    return x


def growing(x: Any, weights: Sequence[Any]) -> Any:
    """A value is longer after each turn."""
    for weight in weights:
        turn = lambda i, rows: (i + 1, tf.concat([rows, tf.tanh(rows[-64:] @ weight)], 0))  # noqa: B023, E731
        shapes = tf.TensorShape(()), tf.TensorShape((None, UNITS))
        _, rows = tf.while_loop(lambda i, _: i < 6, turn, (0, x[:64]), shapes, maximum_iterations=6)
        x = tf.tanh(x + tf.reduce_sum(rows, 0))
    return x


def empty(x: Any, weights: Sequence[Any]) -> Any:
    """A value that begins without rows."""
    for weight in weights:
        turn = lambda i, rows: (i + 1, tf.concat([rows, tf.sin(x[i : i + 1] @ weight)], 0))  # noqa: B023, E731
        shapes = tf.TensorShape(()), tf.TensorShape((None, UNITS))
        _, rows = tf.while_loop(lambda i, _: i < 6, turn, (0, x[:0]), shapes, maximum_iterations=6)
        x = tf.tanh(x + tf.reduce_sum(rows, 0))
    return x


def sliced(x: Any, weights: Sequence[Any]) -> Any:
    """The number of the turn decides a size."""
    for weight in weights:
        state = x
        for i in tf.range(TURNS):
            before = tf.tanh(x[: 8 * (i + 1)] @ weight)
            state = tf.tanh(state @ weight + tf.reduce_mean(tf.sin(before), 0))
        x = state
    return x


def nested(x: Any, weights: Sequence[Any]) -> Any:
    for weight in weights:
        for _ in tf.range(4):
            for _ in tf.range(3):
                x = tf.tanh(x @ weight)
            x = tf.sin(x)
    return x


def conditional(x: Any, weights: Sequence[Any]) -> Any:
    """Loops within branches, and branches within loops."""
    for weight in weights:
        for i in tf.range(TURNS):
            x = tf.tanh(x @ weight) if i % 2 == 0 else tf.sin(x @ weight)
        x = turned(x, weight, 8) if tf.reduce_sum(x) > -1e9 else x * 2.0
    return x


def train(body: Body, repeats: int = 1) -> str:
    """Return a digest of the weights after three steps, of which ``repeats`` run in one call."""
    weights = [tf.Variable(tf.random.stateless_normal((UNITS, UNITS), (seed, 1)) * 0.1) for seed in range(3)]
    rows = tf.random.stateless_normal((ROWS, UNITS), (9, 9))
    converted = tf.autograph.to_graph(body)

    @tf.function
    def step(x: Any) -> None:
        for _ in tf.range(repeats) if repeats > 1 else range(1):
            with tf.GradientTape() as tape:
                made = converted(x, weights)
                loss = tf.reduce_sum(made * made)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(1e-3 * gradient)

    for _ in range(3):
        step(rows)
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()


def first_turns(x: Any, weights: Sequence[Any]) -> Any:
    """Loops that read the first of the rows that are given; their number is the same in each call."""
    rows = tf.transpose(x, (1, 0, 2))
    inputs = tf.TensorArray(tf.float32, tf.shape(rows)[0]).unstack(rows @ weights[0])
    state = tf.zeros((ROWS, UNITS))
    for weight in weights:
        for i in tf.range(6):
            state = tf.tanh(tf.sin(state @ weight) + inputs.read(i))
    return state


def train_on(body: Body, shapes: Sequence[tuple[int, ...]], spec: tuple[int | None, ...]) -> str:
    """Return a digest of the weights after steps on tensors of these shapes, which the trace leaves open."""
    weights = [tf.Variable(tf.random.stateless_normal((UNITS, UNITS), (seed, 1)) * 0.1) for seed in range(3)]
    converted = tf.autograph.to_graph(body)

    @tf.function(input_signature=[tf.TensorSpec(spec)])
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            made = converted(x, weights)
            loss = tf.reduce_sum(made * made)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)

    for seed, shape in enumerate(shapes):
        step(tf.random.stateless_normal(shape, (seed, 9)))
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()


def both(run: Callable[[], str], **options: Any) -> dict[str, Any]:
    """Run without Large Model Support, and with it."""
    seen: dict[str, Any] = {}
    for way in ("off", "on"):
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        if way == "on":
            lms.enable(min_tensor_bytes=1024, **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen[way] = run()
        seen[f"{way} mib"] = (tf.config.experimental.get_memory_info("CPU:0")["peak"] - before) / MIB
    report = lms.report()
    lms.disable()
    seen["told"] = [str(one.message) for one in told if "loop" in str(one.message)]
    return seen | {
        "stacked": sum(graph.lists for graph in report.edited),
        "error": report.peak_error,
        "swapped": sum(graph.tensors for graph in report.edited),
    }


def recurrent_model() -> Any:
    """Return bidirectional layers, whose loops Keras writes."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((24, UNITS))])
    for _ in range(3):
        model.add(keras.layers.Bidirectional(keras.layers.GRU(UNITS // 2, return_sequences=True)))
    model.add(keras.layers.GlobalAveragePooling1D())
    model.compile("adam", "mse")
    return model


def recurrent() -> str:
    """Train them."""
    model = recurrent_model()
    rows = np.random.default_rng(0).normal(size=(640, 24, UNITS)).astype("f")  # the last batch is a half one
    model.fit(rows, np.zeros((640, UNITS), "f"), batch_size=256, epochs=2, shuffle=False, verbose=0)
    return hashlib.sha256(b"".join(one.tobytes() for one in model.get_weights())).hexdigest()


def forecast() -> dict[str, int]:
    """Return the largest batch of each way to run them on this device."""
    rows, labels = np.zeros((256, 24, UNITS), "f"), np.zeros((256, UNITS), "f")
    found = lms.estimate(recurrent_model(), rows, labels, batch_size=256, gpus=["here"]).to_json()
    return {one["mode"]: one["largest_batch"] for one in found["gpus"][0]["modes"]}


seen = {
    body.__name__: both(lambda body=body: train(body), policy="all")  # type: ignore[misc]
    for body in (layers, ranged, halves, early, growing, empty, sliced, nested, conditional)
}
fewer = [(ROWS, UNITS), (ROWS, UNITS), (ROWS // 3, UNITS)]
seen["fewer rows"] = both(lambda: train_on(layers, fewer, (None, UNITS)), policy="all")
shorter = [(ROWS, 24, UNITS), (ROWS, 24, UNITS), (ROWS, 16, UNITS)]
seen["shorter"] = both(lambda: train_on(first_turns, shorter, (ROWS, None, UNITS)), policy="all")
seen["repeated"] = both(lambda: train(layers, 2), policy="all")
seen["keras"] = both(recurrent, policy="all")
seen["budget"] = both(recurrent, policy="auto", budget_bytes=int(0.6 * seen["keras"]["off mib"] * MIB))
print(json.dumps({**seen, "forecast": forecast(), "is_legacy": not hasattr(tf.keras, "ops")}))
