"""Steps that LMS cannot see, or whose swaps something else may undo: the warnings of each case, as JSON.

Run as a child process by test_unseen.py. Arguments: ``keras3`` or ``tf_keras``.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1" if sys.argv[1] == "tf_keras" else "0"

import tensorflow as tf  # noqa: E402
from watch_job import BATCH, WEIGHTS, enabled, forward, train  # noqa: E402

import lms  # noqa: E402

keras = tf.keras


def said(act: Callable[[], Any]) -> tuple[list[str], bool]:
    """The warnings while ``act`` runs under LMS, and whether a step was edited."""
    with enabled(policy="all") as texts:
        act()
        edited = bool(lms.report().edited)
    return texts, edited


def model(**options: Any) -> Any:
    """Four convolutions, compiled."""
    layers = [keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]
    made = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
    made.build((None, 16, 16, 3))
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return made


def fit(trained: Any) -> Any:
    """One step by Keras."""
    return trained.fit(tf.zeros((8, 16, 16, 3)), tf.zeros(8, tf.int32), batch_size=8, verbose=0)


def loop(variables: Any) -> None:
    """Three eager steps of a user's own."""
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable**2) for variable in variables])
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(1e-9 * gradient)


def tape_around_a_function() -> None:
    """The forward pass is one function, its tape stands outside."""
    inner = tf.function(forward)
    with tf.GradientTape() as tape:
        loss = inner(BATCH)
    tape.gradient(loss, WEIGHTS)


def saliency() -> None:
    """What is looked at, not trained."""
    image = tf.zeros((1, 16, 16, 3))
    network = model()
    with tf.GradientTape() as tape:
        tape.watch(image)
        score = tf.reduce_max(network(image))
    tape.gradient(score, image)
    network.evaluate(tf.zeros((8, 16, 16, 3)), tf.zeros(8, tf.int32), verbose=0)


def jit_after_enable() -> None:
    """Clustering is switched on before the step runs, after LMS."""
    tf.config.optimizer.set_jit(True)
    try:
        tf.function(train)(BATCH)
    finally:
        tf.config.optimizer.set_jit(False)


def finalized_session() -> None:
    """A graph of compat.v1 that nobody may change any more: nobody does."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        h = x = v1.placeholder(tf.float32, (64, 128))
        for layer in range(4):
            h = tf.tanh(h @ v1.get_variable(f"w{layer}", (128, 128)))
        step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(h))
        start = v1.global_variables_initializer()
        graph.finalize()
        with v1.Session() as session:
            session.run(start)
            session.run(step, {x: [[0.0] * 128] * 64})


def main() -> dict[str, Any]:
    """All cases."""
    early = model()
    fit(early)
    scale = [tf.Variable(1.0), tf.Variable(0.0)]
    return {
        "fit traced before": said(lambda: fit(early)),
        "fit": said(lambda: fit(model())),
        "fit run eagerly": said(lambda: fit(model(run_eagerly=True))),
        "eager loop": said(lambda: loop(WEIGHTS)),
        "eager fit of a scale": said(lambda: loop(scale)),
        "tape around a function": said(tape_around_a_function),
        "saliency and evaluation": said(saliency),
        "jit after enable": said(jit_after_enable),
        "finalized session": said(finalized_session),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
