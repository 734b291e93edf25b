"""Meets what LMS has to tell of a step; prints as JSON what was told, where, and what ran."""

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow_large_model_support import LMS  # noqa: E402

import lms  # noqa: E402
from lms.engine import editing  # noqa: E402
from lms.errors import LMSWarning  # noqa: E402
from lms.intercept.batch_growth import Growth  # noqa: E402
from lms.session import edit_graph  # noqa: E402

Step = Callable[..., Any]


def layers(count: int = 8) -> list[Any]:
    """The weights of a deep network."""
    return [tf.Variable(tf.random.stateless_normal((64, 64), (seed, 1)) * 0.1) for seed in range(count)]


def descend(x: Any, weights: list[Any]) -> Any:
    """A training step on ``x``."""
    with tf.GradientTape() as tape:
        for weight in weights:
            x = tf.tanh(x @ weight)
        loss = tf.reduce_sum(x * x)
    for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(1e-4 * slope)
    return loss


def swap_outs() -> int:
    """How many tensors were sent to the host so far."""
    return int(lms.report().store.swap_outs)


def raised(call: Callable[[], Any]) -> str:
    """The type of the error that a call ends in, and how it begins."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error)[:60]}"
    return ""


def switched_on(**options: Any) -> None:
    """LMS afresh, every tensor a candidate."""
    lms.disable()
    lms.enable(policy="all", min_tensor_bytes=1, **options)


def a_step() -> Step:
    """A training step of its own."""
    weights = layers()
    return tf.function(lambda x: descend(x, weights))


BATCH = tf.ones((256, 64))


def first_loss(step: Step) -> bool:
    """Call a step, and tell whether no step of it has run before."""
    return bool(step(BATCH) == a_step()(BATCH))


def conditional() -> Any:
    """A step in a branch that the first call does not take."""
    switched_on()
    weights = layers()

    @tf.function
    def train(x: Any, wanted: Any) -> Any:
        return tf.cond(wanted, lambda: descend(x, weights), lambda: 0.0)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(BATCH, tf.constant(False))
        before = swap_outs()
        train(BATCH, tf.constant(True))
    ours = [str(one.message) for one in told if issubclass(one.category, LMSWarning)]
    return {"told": ours, "before": before, "swapped": swap_outs()}


def warnings_as_errors() -> Any:
    """A step of which a warning tells, for a program that has made errors of warnings."""
    switched_on(excl_types={"Nowhere"})
    step = a_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LMSWarning)
        error = raised(lambda: step(BATCH))
    found = {"error": error, "edited": len(lms.report().edited), "swapped": swap_outs()}
    return found | {"again": first_loss(step), "edited again": len(lms.report().edited)}


def a_callback() -> Any:
    """Keras's fit with a callback that names a scope which is not there."""
    lms.disable()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.ones((4, 8), "f"), np.ones((4, 1), "f")
    unknown = LMS()
    unknown.excl_output_by_scopes = {"nowhere"}
    return raised(lambda: model.fit(*data, verbose=0, callbacks=[unknown]))


def interrupted() -> Any:
    """A step that is interrupted while another thread runs one."""
    switched_on()
    entered, may_go = threading.Event(), threading.Event()
    edit, mine = editing.Editing.edit, threading.get_ident()

    def interrupting(self: Any, task: Any) -> Any:
        if threading.get_ident() == mine:
            entered.set()
            assert may_go.wait(60)
            raise KeyboardInterrupt
        return edit(self, task)

    editing.Editing.edit = interrupting
    errors: list[str] = []

    def other() -> None:
        assert entered.wait(60)
        errors.append(raised(lambda: step_of_other(BATCH)))
        may_go.set()

    step_of_other = a_step()
    step_of_main = a_step()
    thread = threading.Thread(target=other)
    thread.start()
    here = raised(lambda: step_of_main(BATCH))
    thread.join()
    editing.Editing.edit = edit
    before = len(lms.report().edited)
    is_first = first_loss(step_of_main)
    return {"here": here, "there": errors, "first": is_first, "planned": len(lms.report().edited) - before}


def interrupted_once(call: Callable[[], Any]) -> str:
    """Return the error of a call whose step is interrupted while it is planned."""

    def interrupting(_self: Any, _task: Any) -> Any:
        raise KeyboardInterrupt

    edit, editing.Editing.edit = editing.Editing.edit, interrupting
    try:
        return raised(call)
    finally:
        editing.Editing.edit = edit


def interrupted_callers() -> Any:
    """Steps that are called with and without their function, the one or the other interrupted."""
    switched_on()
    found = {}
    for which in ("function", "concrete"):
        step = a_step()
        calls = {
            "function": partial(step, BATCH),
            "concrete": partial(step.get_concrete_function(BATCH), BATCH),
        }
        error, before = interrupted_once(calls[which]), len(lms.report().edited)
        later = [raised(calls[one]) for one in ("concrete", "function", "concrete")]
        found[which] = [error, *later, len(lms.report().edited) - before]
    return found


def draws(interrupts: bool) -> list[float]:
    """Return the numbers of a step that draws, and whose other trace is interrupted before the last two."""
    switched_on()
    weights = layers()

    @tf.function
    def step(x: Any) -> Any:
        descend(x, weights)
        return tf.random.normal((), seed=5)

    found = [float(step(BATCH)), float(step(BATCH))]
    if interrupts:
        assert interrupted_once(lambda: step(BATCH[:128])) == "KeyboardInterrupt: "
    return [*found, float(step(BATCH)), float(step(BATCH))]


def drawn() -> Any:
    """Tell whether numbers go on behind an interrupted trace."""
    return [draws(False), draws(True)]


def interrupted_elsewhere() -> Any:
    """A session, and a loop over a dataset within a function, interrupted in their first step."""
    switched_on()
    v1, found = tf.compat.v1, {}
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.get_variable("x", initializer=tf.ones((64, 64)))
        y = x
        for _ in range(8):
            y = tf.tanh(y @ x)
        loss = tf.reduce_sum(y * y)
        train = v1.train.GradientDescentOptimizer(1e-4).minimize(loss)
        session.run(v1.global_variables_initializer())
        error, before = interrupted_once(lambda: session.run(train)), session.run(x).sum()
        session.run(train)
        found["session"] = [error, float(before), len(lms.report().edited)]
    switched_on()
    weights, begun = layers(), tf.Variable(0.0)

    @tf.function
    def epoch(dataset: Any) -> None:
        begun.assign_add(1.0)
        for batch in dataset:
            descend(batch, weights)

    dataset = tf.data.Dataset.from_tensors(BATCH).repeat(2)
    error = interrupted_once(lambda: epoch(dataset))
    epoch(dataset)
    found["body"] = [error, float(begun), len(lms.report().edited)]
    return found


def a_body() -> str:
    """A function whose body is planned apart, behind it, and then larger arguments."""
    growth = Growth()
    growth.planned(None, (), "step", open_arguments={0: (64, 8)})
    growth.planned(None, (), "step")
    return growth.outgrown_arguments(None, "step", [tf.ones((1024, 8))])


def two_loops() -> Any:
    """Two loops that train, in one call."""
    switched_on()
    weights, others = layers(), layers(6)

    @tf.function
    def train(x: Any) -> Any:
        for _ in tf.range(2):
            descend(x, weights)
        for _ in tf.range(1):
            descend(x, others)

    train(BATCH)
    plans = lms.report().edited
    return {"places": len({one.place for one in plans}), "executed": [one.executed for one in plans]}


def enabled_again() -> Any:
    """A step that was planned, when LMS is switched on again with another configuration."""
    lms.disable()
    step = a_step()
    found = []
    for options in ({"excl_types": ("Tanh", "MatMul", "Mul")}, {}, {}):
        lms.disable()
        lms.enable(policy="all", min_tensor_bytes=1, **options)
        step(BATCH)
        found.append([len(lms.report().graphs), swap_outs()])
    return found


def resting() -> Any:
    """A session's graph that is handed over while LMS rests."""
    lms.disable()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.ones((4, 8), "f"), np.ones((4, 1), "f"), verbose=0, callbacks=[LMS()])
    state = lms.state()
    rested = state is not None and not state.active
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.get_variable("x", initializer=tf.ones((256, 64)))
        y = tf.reduce_sum(tf.tanh(tf.tanh(x)) ** 2)
        v1.train.GradientDescentOptimizer(0.1).minimize(y)
    edit_graph(graph)
    now = lms.state()
    return [rested, now is not None and now.active]


def main() -> None:
    """Print what each case has seen."""
    warnings.simplefilter("ignore")
    cases = (
        conditional,
        warnings_as_errors,
        a_callback,
        interrupted,
        interrupted_callers,
        drawn,
        interrupted_elsewhere,
        a_body,
        two_loops,
        enabled_again,
        resting,
    )
    wanted = sys.argv[1:] or [case.__name__ for case in cases]
    print(json.dumps({case.__name__: case() for case in cases if case.__name__ in wanted}))


if __name__ == "__main__":
    main()
