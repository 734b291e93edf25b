"""Sessions of compat.v1 whose steps are planned again; prints what each case saw as JSON.

Run as a child process with the memory of the CPU device in MiB, and ``lms`` or ``plain``. A function behind
the updates of a step says as often as wanted that memory ran out: the updates must be undone.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = sys.argv[1]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf.config_pb2 import CallableOptions  # noqa: E402

import lms  # noqa: E402
from lms.errors import LMSWarning  # noqa: E402
from lms.session import LMSSessionRunHook  # noqa: E402
from lms.variables.session_values import SessionValues  # noqa: E402

v1 = tf.compat.v1
v1.disable_eager_execution()
WIDTH, LAYERS, FEW, MANY = 256, 6, 64, 4096
WITH_LMS = sys.argv[2] == "lms"
FAILURES: list[str] = []
READS: list[Any] = []
"""The sessions whose variables were read to be put back."""
BESIDE: list[Callable[[], None]] = []
Net = tuple[Any, Any, Any]
read_values = SessionValues.of


def noted(session: Any, ops: Any) -> SessionValues:
    """Read the variables, and note that."""
    READS.append(session)
    return read_values(session, ops)


SessionValues.of = noted


def mark(value: Any) -> Any:
    """Fails as long as that is wanted."""
    while BESIDE:
        BESIDE.pop()()
    if FAILURES:
        raise MemoryError(FAILURES.pop())
    return value


def network(*, use_resource: bool = True, rows: Any = None, seed: int | None = None) -> Net:
    """The rows, the variables, and a loss that is known once the step has updated them."""
    given = v1.placeholder(tf.float32, (None, WIDTH)) if rows is None else rows
    made = given if seed is None else given + v1.random_normal(tf.shape(given), seed=seed)
    for layer in range(LAYERS):
        start = v1.glorot_uniform_initializer(seed=layer)
        kernel = v1.get_variable(f"w{layer}", (WIDTH, WIDTH), initializer=start, use_resource=use_resource)
        made = tf.tanh(made @ kernel)
    loss = tf.reduce_mean(tf.square(made))
    with tf.control_dependencies([v1.train.AdamOptimizer(1e-3).minimize(loss)]):
        marked = tf.ensure_shape(tf.numpy_function(mark, [tf.identity(loss)], tf.float32), ())
    return given, v1.global_variables(), marked


def rows(number: int, count: int = FEW) -> Any:
    """The rows of a step."""
    return np.random.default_rng(number).random((count, WIDTH), dtype="f")


def stepper(session: Any, loss: Any, given: Any, *, calls: bool) -> Callable[[Any], Any]:
    """A function that runs a step with the rows that it gets; ``calls``: as Keras does."""
    if not calls:
        return lambda fed: session.run(loss, {given: fed})
    made = session._make_callable_from_options(CallableOptions(feed=[given.name], fetch=[loss.name]))
    return lambda fed: made(fed)[0]


def train(session: Any, net: Net, *, fails_in: tuple[int, ...] = (0,), calls: bool = False) -> list[float]:
    """Six steps, of which some fail as often as there are further ways to plan."""
    given, _, loss = net
    step = stepper(session, loss, given, calls=calls)
    losses = []
    for number in range(6):
        FAILURES[:] = ["OOM when allocating tensor"] * (2 if WITH_LMS and number in fails_in else 0)
        losses.append(float(step(rows(number))))
    return losses


def fails(**options: Any) -> Callable[[], Any]:
    """A case in which steps fail."""
    keywords = {name: options.pop(name) for name in ("fails_in", "calls") if name in options}
    is_final = options.pop("is_final", False)

    def case() -> Any:
        net = network(**options)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            if is_final:
                v1.get_default_graph().finalize()
            losses = train(session, net, **keywords)
            return losses, b"".join(value.tobytes() for value in session.run(net[1])).hex()[-4000:]

    return case


def grows(**options: Any) -> Callable[[], Any]:
    """A case in which rows become more, and fewer again."""
    calls, many = options.pop("calls", False), options.pop("many", MANY)

    def case() -> Any:
        given, variables, loss = network(**options)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            step = stepper(session, loss, given, calls=calls)
            losses = [float(step(rows(n, count))) for n, count in enumerate((FEW, many, FEW, many))]
            return losses, b"".join(value.tobytes() for value in session.run(variables)).hex()[-4000:]

    return case


def has_buckets(*, calls: bool = False) -> Any:
    """Many short sequences and few long ones in turn; how often the variables were read, too."""
    given = v1.placeholder(tf.float32, (None, None, WIDTH))
    made, variables = given, []
    for layer in range(LAYERS):
        start = v1.glorot_uniform_initializer(seed=layer)
        variables.append(v1.get_variable(f"w{layer}", (WIDTH, WIDTH), initializer=start))
        made = tf.tanh(tf.einsum("bsw,wv->bsv", made, variables[-1]))
    loss = tf.reduce_mean(tf.square(made))
    with tf.control_dependencies([v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)]):
        loss = tf.identity(loss)
    READS.clear()
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        step, losses = stepper(session, loss, given, calls=calls), []
        for number, (count, words) in enumerate([(256, 16), (8, 512), (256, 16), (8, 512), (4, 256)]):
            batch = rows(number, count * words).reshape(count, words, WIDTH)
            losses.append(float(step(batch)))
        return losses, b"".join(value.tobytes() for value in session.run(variables)).hex()[-4000:]


def refused(loss: Any, given: Any = None, beside: Callable[[Any], None] | None = None) -> str:
    """The last line of the error of a step that fails once; ``beside`` runs before it fails."""
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        BESIDE[:] = [lambda: beside(session)] if beside is not None else []
        FAILURES[:] = ["OOM when allocating tensor"] if WITH_LMS else []
        try:
            session.run(loss, None if given is None else {given: rows(0)})
        except tf.errors.OpError as error:
            return str(error.message.splitlines()[-1])
        return ""


def takes_from_iterator() -> str:
    """A step that takes its batch from an iterator of the session."""
    batches = tf.data.Dataset.range(8).map(lambda n: tf.random.stateless_normal((FEW, WIDTH), (n, 1)))
    _, _, loss = network(rows=v1.data.make_one_shot_iterator(batches).get_next())
    return refused(loss)


def draws() -> str:
    """A step whose kernels count what they draw, in a session, which keeps them."""
    given, _, loss = network(seed=7)
    return refused(loss, given)


def runs_beside() -> str:
    """A session that runs something else while the step is under way."""
    given, variables, loss = network()
    return refused(loss, given, lambda session: session.run(variables[0]))


def is_tiny() -> str:
    """A step that is too small to be planned."""
    weight = v1.get_variable("w", (4, 4))
    loss = tf.reduce_sum(weight * weight)
    with tf.control_dependencies([v1.train.GradientDescentOptimizer(0.1).minimize(loss)]):
        marked = tf.numpy_function(mark, [loss], tf.float32)
    return refused(marked)


def is_interactive() -> str:
    """A session whose graph TensorFlow does not optimize."""
    given, _, loss = network()
    session = v1.InteractiveSession()
    session.run(v1.global_variables_initializer())
    session.run(loss, {given: rows(0)})
    session.close()
    return ""


def trains_two() -> str:
    """Two steps in one session, of which the first fails when the second has been planned."""
    given, _, loss = network()
    with v1.variable_scope("other"):
        more, _, other = network()
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for number in range(5):
            session.run(loss, {given: rows(number)})
        session.run(other, {more: rows(0)})
        FAILURES[:] = ["OOM when allocating tensor"] if WITH_LMS else []
        try:
            session.run(loss, {given: rows(0)})
        except tf.errors.OpError as error:
            return error.message[error.message.index("LMS:") :]
        return ""


def changes_its_shape() -> str:
    """A variable that cannot be given its value back where its initial value was."""
    given, _, loss = network()
    other = tf.Variable(tf.zeros((1,)), shape=tf.TensorShape(None))
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(other.assign(tf.zeros((5,))))
        FAILURES[:] = ["OOM when allocating tensor"] if WITH_LMS else []
        try:
            session.run(loss + tf.reduce_sum(other), {given: rows(0)})
        except tf.errors.OpError as error:
            return str(error.message.splitlines()[-1])
        return ""


def with_hook() -> Any:
    """IBM's hook, whose own parameters plan the graph."""
    net = network()
    with v1.train.MonitoredSession(
        hooks=[LMSSessionRunHook(lms.LMSConfig(**BUDGET))] if WITH_LMS else []
    ) as session:
        given, variables, loss = net
        losses = []
        for number in range(3):
            FAILURES[:] = ["OOM when allocating tensor"] * (2 if WITH_LMS and not number else 0)
            losses.append(float(session.run(loss, {given: rows(number)})))
        return losses, b"".join(value.tobytes() for value in session.run(variables)).hex()[-4000:]


BUDGET = {"policy": "budget", "budget_bytes": 600 << 10, "margin": 0.0, "min_tensor_bytes": 1 << 12}
GROWING = ("grows", "callable grows", "random numbers", "buckets", "callable buckets")
CASES = {
    "run": fails(),
    "callable": fails(calls=True),
    "references": fails(use_resource=False),
    "final graph": fails(is_final=True),
    "third step": fails(fails_in=(2,)),
    "grows": grows(),
    "callable grows": grows(calls=True),
    "random numbers": grows(seed=7),
    "buckets": has_buckets,
    "callable buckets": partial(has_buckets, calls=True),
    "iterator": takes_from_iterator,
    "draws": draws,
    "beside": runs_beside,
    "tiny": is_tiny,
    "shape": changes_its_shape,
    "interactive": is_interactive,
    "two": trains_two,
    "hook": with_hook,
}


def main() -> dict[str, Any]:
    """What each case saw, with the warnings of LMS, its retries, and the planned peaks."""
    seen = {}
    for name, case in CASES.items():
        with warnings.catch_warnings(record=True) as caught, tf.Graph().as_default():
            warnings.simplefilter("always")
            if WITH_LMS and name != "hook":
                lms.enable(**({} if name in GROWING else BUDGET))
            found = case()
        report = lms.report() if WITH_LMS else None
        seen[name] = {
            "found": found,
            "said": [str(one.message) for one in caught if issubclass(one.category, LMSWarning)],
            "retries": report.retries if report else 0,
            "reads": len(READS),
            "tensors": [graph.tensors for graph in report.edited] if report else [],
        }
        if WITH_LMS:
            lms.disable()
    return seen


if __name__ == "__main__":
    print(json.dumps(main()))
