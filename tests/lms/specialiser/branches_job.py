"""Sessions of compat.v1 whose steps have conditions; prints what each case came to as JSON.

Run as a child process with ``v1`` or ``v2``, the kind of control flow, ``lms`` or ``plain``, and the names of
cases, or none for all.
"""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "256"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

v1 = tf.compat.v1
v1.disable_eager_execution()
CONTROL_FLOW, WITH_LMS = sys.argv[1], sys.argv[2] == "lms"
if CONTROL_FLOW == "v1":
    v1.disable_v2_behavior()
if WITH_LMS:
    lms.enable(policy="all", min_tensor_bytes=1 << 14)

ROWS, SIZE, WIDE, LAYERS, STEPS = 8, 16, 32, 5, 4
Layer = Callable[[Any, int], Any]


def batch_norm(training: Any) -> Layer:
    """Return a layer that normalizes as its predicate says, and updates its statistics once."""

    def layer(hidden: Any, number: int) -> Any:
        width = hidden.shape[-1]
        scale = v1.get_variable(f"scale{number}", [width], initializer=v1.ones_initializer())
        offset = v1.get_variable(f"offset{number}", [width], initializer=v1.zeros_initializer())
        mean = v1.get_variable(f"mean{number}", [width], initializer=v1.zeros_initializer(), trainable=False)
        spread = v1.get_variable(
            f"spread{number}", [width], initializer=v1.ones_initializer(), trainable=False
        )

        def train() -> Any:
            return v1.nn.fused_batch_norm(hidden, scale, offset, epsilon=1e-3, is_training=True)

        def infer() -> Any:
            return v1.nn.fused_batch_norm(
                hidden, scale, offset, mean, spread, epsilon=1e-3, is_training=False
            )

        made, now, spread_now = v1.cond(training, train, infer)
        for variable, value in ((mean, now), (spread, spread_now)):
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, variable.assign(variable * 0.9 + value * 0.1))
        return made

    return layer


def dropout(training: Any) -> Layer:
    """Return a layer that drops values if its predicate holds."""

    def layer(hidden: Any, number: int) -> Any:
        return v1.cond(
            training,
            lambda: tf.nn.dropout(hidden, rate=0.3, seed=number),
            lambda: tf.identity(hidden),
        )

    return layer


def nested(outer: Any, inner: Any) -> Layer:
    """Return a layer with a condition within a condition, and a loop in one of its branches."""

    def layer(hidden: Any, number: int) -> Any:
        def turned() -> Any:
            return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h * 1.5)), (0, hidden))[1]

        return v1.cond(
            outer,
            lambda: v1.cond(inner, lambda: tf.sigmoid(hidden) * hidden, lambda: tf.nn.elu(hidden)),
            turned,
        )

    return layer


def both(training: Any) -> Layer:
    """Return a layer that normalizes and then drops values."""
    normalized, dropped = batch_norm(training), dropout(training)

    def layer(hidden: Any, number: int) -> Any:
        return dropped(normalized(hidden, number), number)

    return layer


def many_terms(training: Any) -> Layer:
    """Return a layer whose input has four readers, so that its gradient is a sum of four and more terms."""
    normalized, dropped = batch_norm(training), dropout(training)

    def layer(hidden: Any, number: int) -> Any:
        return normalized(hidden, number) + dropped(hidden, number) * 0.3 + tf.tanh(hidden) + hidden / 7

    return layer


def by_its_values(hidden: Any, number: int) -> Any:
    """Apply a layer whose predicate only the step itself knows."""
    return v1.cond(tf.reduce_mean(hidden) > 0.0, lambda: tf.tanh(hidden), lambda: hidden * 0.5)


def one_of_three(hidden: Any, number: int) -> Any:
    """Apply one of three functions, by a number that is always the same."""
    branches = [lambda: tf.tanh(hidden), lambda: tf.nn.elu(hidden), lambda: tf.sigmoid(hidden)]
    return tf.switch_case(tf.constant(number % 3), branches)


class Case:
    """A network with one kind of layer, and its session."""

    def __init__(self, layer: Layer) -> None:
        self.rows = v1.placeholder(tf.float32, [ROWS, SIZE, SIZE, 3])
        hidden: Any = self.rows
        for number in range(LAYERS):
            kernel = v1.get_variable(
                f"kernel{number}",
                [3, 3, hidden.shape[-1], WIDE],
                initializer=v1.glorot_uniform_initializer(seed=number),
            )
            hidden = tf.nn.relu(layer(tf.nn.conv2d(hidden, kernel, 1, "SAME"), number))
        self.last = hidden
        self.loss = tf.reduce_mean(tf.square(tf.reduce_mean(hidden, [1, 2]) - 0.5))
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            self.train = v1.train.MomentumOptimizer(0.05, 0.9).minimize(self.loss)
        self.session = v1.Session()
        self.session.run(v1.global_variables_initializer())
        self.random = np.random.default_rng(7)
        self.losses: list[str] = []

    def batch(self) -> Any:
        """Make rows."""
        return self.random.normal(size=(ROWS, SIZE, SIZE, 3)).astype("f")

    def step(self, feeds: Any, *more: Any) -> Any:
        """Train with a batch; return what else was fetched."""
        loss, _, *others = self.session.run(
            [self.loss, self.train, *more], {self.rows: self.batch(), **feeds}
        )
        self.losses.append(float(loss).hex())
        return others

    def result(self, **more: Any) -> dict[str, Any]:
        """Tell losses, a digest of all variables, and what LMS planned."""
        digest = hashlib.sha256()
        for variable in v1.global_variables():
            digest.update(self.session.run(variable).tobytes())
        self.session.close()
        report = lms.report()
        edited = [graph for graph in report.graphs if graph.edited]
        return {
            "bits": [*self.losses, digest.hexdigest()],
            "step": max((graph.step_bytes or 0 for graph in edited), default=None),
            "planned": report.planned_peak_bytes,
            "measured": report.measured_peak_bytes,
            "graphs": [graph.name for graph in report.graphs],
            "warnings": list(report.warnings),
            **more,
        }


def predicate() -> Any:
    """Return what a script feeds."""
    return v1.placeholder(tf.bool, [], "fed")


def fed(make: Callable[[Any], Layer]) -> dict[str, Any]:
    """Train with the predicate fed."""
    training = predicate()
    case = Case(make(training))
    for _ in range(STEPS):
        case.step({training: True})
    return case.result()


def both_ways() -> dict[str, Any]:
    """Train with one branch and with the other in turns."""
    training = predicate()
    case = Case(many_terms(training))
    for number in range(2 * STEPS):
        case.step({training: number % 3 != 2})
    return case.result()


def by_default() -> dict[str, Any]:
    """Train with a predicate that need not be fed, and is fed once."""
    training = v1.placeholder_with_default(True, [], "fed")
    case = Case(many_terms(training))
    for number in range(STEPS):
        case.step({training: False} if number == 2 else {})
    return case.result()


def computed() -> dict[str, Any]:
    """Train with predicates that are computed from what is fed."""
    infers, drops = predicate(), predicate()
    case = Case(dropout(tf.logical_and(tf.logical_not(infers), drops)))
    for number in range(STEPS):
        case.step({infers: False, drops: number != 1})
    return case.result()


def within() -> dict[str, Any]:
    """Train with conditions within conditions, each way."""
    outer, inner = predicate(), predicate()
    case = Case(nested(outer, inner))
    for number in range(STEPS):
        case.step({outer: number < 2, inner: number % 2 == 0})
    return case.result()


def fetched() -> dict[str, Any]:
    """Fetch what a condition hands on."""
    training = predicate()
    case = Case(lambda hidden, number: hidden)
    made = v1.cond(training, lambda: tf.tanh(case.last), lambda: case.last * 2)
    others = [case.step({training: number != 1}, made)[0] for number in range(STEPS)]
    return case.result(others=hashlib.sha256(b"".join(one.tobytes() for one in others)).hexdigest())


def called() -> dict[str, Any]:
    """Train through a callable, one way and the other."""
    training = predicate()
    case = Case(many_terms(training))
    step = case.session.make_callable([case.loss, case.train], feed_list=[case.rows, training])
    for number in range(STEPS):
        case.losses.append(float(step(case.batch(), np.array(number != 1))[0]).hex())
    return case.result()


def threads() -> dict[str, Any]:
    """Fetch gradients with both branches from two threads at once: each gets its own branch's."""
    training = predicate()
    case = Case(nested(training, training))
    gradient = v1.gradients(case.loss, v1.trainable_variables())[0]
    batch, seen = case.batch(), {True: set[str](), False: set[str]()}

    def run(value: bool) -> None:
        for _ in range(12):
            found = case.session.run(gradient, {case.rows: batch, training: value})
            seen[value].add(hashlib.sha256(found.tobytes()).hexdigest())

    both = [threading.Thread(target=run, args=(value,)) for value in seen]
    for one in both:
        one.start()
    for one in both:
        one.join()
    return case.result(seen=[sorted(found) for found in seen.values()])


def averages() -> dict[str, Any]:
    """Average the new weights if a predicate holds, behind the step."""
    training = predicate()
    case = Case(both(training))
    average = tf.train.ExponentialMovingAverage(0.5)

    def averaged() -> Any:
        return tf.group(average.apply(v1.trainable_variables()))

    with tf.control_dependencies([case.train]):
        case.train = v1.cond(training, averaged, tf.no_op)
    added = [average.average(variable) for variable in v1.trainable_variables()]
    case.session.run(v1.variables_initializer(added))  # of them alone: each reads its variable
    for _ in range(STEPS):
        case.step({training: True})
    return case.result()


def fed_and_run() -> dict[str, Any]:
    """Run what has a default, and is fed another value."""
    training = v1.placeholder_with_default(True, [], "fed")
    case = Case(many_terms(training))
    for _ in range(STEPS):
        case.step({training: False}, training.op)
    return case.result()


def which() -> dict[str, Any]:
    """Fetch which branch a merge has taken, where the older control flow tells it."""
    training = predicate()
    case = Case(lambda hidden, number: hidden)
    made = v1.cond(training, lambda: tf.tanh(case.last), lambda: case.last * 2)
    taken = [made.op.outputs[1]] if made.op.type == "Merge" else []
    others = [case.step({training: number != 1}, *taken) for number in range(STEPS)]
    return case.result(others=[[int(one) for one in step] for step in others])


def many_ways() -> dict[str, Any]:
    """Train with gates that change from step to step."""
    gates = [v1.placeholder(tf.bool, [], f"gate{number}") for number in range(3)]
    case = Case(lambda hidden, number: dropout(gates[number % 3])(hidden, number))
    for ways in range(2**3):
        case.step({gate: bool(ways >> bit & 1) for bit, gate in enumerate(gates)})
    return case.result()


def as_it_is(layer: Layer) -> dict[str, Any]:
    """Train a network whose conditions no feed decides."""
    case = Case(layer)
    for _ in range(STEPS):
        case.step({})
    return case.result()


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "batch norm": lambda: fed(batch_norm),
    "dropout": lambda: fed(dropout),
    "sums": lambda: fed(many_terms),
    "both ways": both_ways,
    "default": by_default,
    "computed": computed,
    "nested": within,
    "fetched": fetched,
    "callable": called,
    "threads": threads,
    "both": lambda: fed(both),
    "averages": averages,
    "fed and run": fed_and_run,
    "which": which,
    "many ways": many_ways,
    "values": lambda: as_it_is(by_its_values),
    "three": lambda: as_it_is(one_of_three),
}

found = {}
for name, run in CASES.items():
    if sys.argv[3:] and name not in sys.argv[3:]:
        continue
    if WITH_LMS:
        lms.disable()
        lms.enable(policy="all", min_tensor_bytes=1 << 14)
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        found[name] = run()
print(json.dumps(found))
