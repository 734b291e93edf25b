"""Trains and calls what waits, draws or changes things beside its variables; prints as JSON what came of it.

    python tests/lms/intercept/awkward_job.py queue

Each way runs without LMS and then with it, in one process.
"""

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from tempfile import NamedTemporaryFile
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "64"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.python.framework import function  # noqa: E402

import lms  # noqa: E402

v1 = tf.compat.v1
ROWS, WIDTH, LAYERS = 64, 64, 8
ALL: dict[str, Any] = {"policy": "all", "min_tensor_bytes": 1}


def start(layer: int) -> Any:
    """Return the first value of a layer's weight."""
    return np.random.RandomState(layer).randn(WIDTH, WIDTH).astype("f") / 8


def both(train: Callable[[], Any], **config: Any) -> dict[str, Any]:
    """Return what comes of it without LMS and with it."""
    plain = train()
    lms.enable(**{**ALL, **config})
    ours = train()
    report = lms.report()
    swapped = [stats.copies_out for stats in report.edited]
    left = [text for text in report.warnings if "stays as it is" in text]
    lms.disable()
    return {
        "plain": plain,
        "ours": ours,
        "swapped": swapped,
        "peak": report.planned_peak_bytes,
        "left": left,
    }


def tower(x: Any, name: str) -> tuple[Any, Any]:
    """A net in a graph of TensorFlow 1, and the op that trains it."""
    weights = []
    for layer in range(LAYERS):
        begin = v1.constant_initializer(start(layer))
        weights.append(v1.get_variable(f"{name}{layer}", (WIDTH, WIDTH), initializer=begin))
        x = tf.tanh(x @ weights[-1])
    loss = tf.reduce_sum(x * x)
    return loss, v1.train.GradientDescentOptimizer(1e-3).minimize(loss, var_list=weights)


def data(rows: int = ROWS) -> Any:
    """A batch."""
    return np.random.RandomState(0).randn(rows, WIDTH).astype("f")


def queue() -> Any:
    """A step trains on what it takes from a queue that it also fills."""

    def train() -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, (ROWS, WIDTH))
            line = tf.queue.FIFOQueue(1, [tf.float32], [[ROWS, WIDTH]])
            put, taken = line.enqueue(tf.tanh(x * 2.0)), line.dequeue()
            loss, update = tower(taken, "w")
            session.run(v1.global_variables_initializer())
            found = [session.run([loss, update, put], {x: data() * turn})[0] for turn in range(1, 4)]
        return [float(one) for one in found]

    return both(train)


def relay() -> Any:
    """A step takes its batch from one queue, and puts what it has made into another."""

    def train() -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, (ROWS, WIDTH))
            lines = [tf.queue.FIFOQueue(8, [tf.float32], [shape]) for shape in ([ROWS, WIDTH], [])]
            fill = lines[0].enqueue(x)
            loss, update = tower(lines[0].dequeue(), "w")
            put, taken = lines[1].enqueue(loss), lines[1].dequeue()
            session.run(v1.global_variables_initializer())
            found = []
            for _ in range(3):
                session.run(fill, {x: data()})
                session.run([update, put])
                found.append(session.run(taken))
        return [float(one) for one in found]

    return both(train)


def looking() -> Any:
    """A step waits for what it puts itself: by a look, in a loop, in a function, in Python code."""
    return {
        place.__name__: both(partial(wait_for_own, place))
        for place in (looks, in_loop, in_call, in_own_call, in_python)
    }


def looks() -> tuple[Any, Callable[[Any], Any]]:
    """Look at what a staging area holds."""
    raw: Any = tf.raw_ops
    (seen,) = raw.StagePeek(index=0, dtypes=[tf.float32], shared_name="looks")
    return seen, lambda made: raw.Stage(values=[made], shared_name="looks")


def in_loop() -> tuple[Any, Callable[[Any], Any]]:
    """Take within a loop."""
    line = tf.queue.FIFOQueue(4, [tf.float32], [[ROWS, WIDTH]])
    turns = tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, line.dequeue()), (0, tf.zeros((ROWS, WIDTH)))
    )
    return turns[1], line.enqueue


def in_call() -> tuple[Any, Callable[[Any], Any]]:
    """Take within a function that stays a call."""
    raw: Any = tf.raw_ops

    @tf.function(experimental_attributes={"_noinline": True})
    def take() -> Any:
        return raw.Unstage(dtypes=[tf.float32], shared_name="call")[0]

    return take(), lambda made: raw.Stage(values=[made], shared_name="call")


def in_own_call() -> tuple[Any, Callable[[Any], Any]]:
    """Take within a function that only the session's graph knows."""
    raw: Any = tf.raw_ops

    @function.Defun(noinline=True)
    def take() -> Any:
        return raw.Unstage(dtypes=[tf.float32], shared_name="own")[0]

    return take(), lambda made: raw.Stage(values=[made], shared_name="own")


def in_python() -> tuple[Any, Callable[[Any], Any]]:
    """Let Python code wait for Python code."""
    line: SimpleQueue[Any] = SimpleQueue()
    got = v1.py_func(line.get, [], tf.float32)
    return got, lambda made: v1.py_func(lambda one: (line.put(one), one)[1], [made], tf.float32)


def wait_for_own(place: Callable[[], tuple[Any, Callable[[Any], Any]]]) -> list[float]:
    """Train with what is put by the step that waits for it, after its update."""
    with tf.Graph().as_default(), v1.Session() as session:
        got, put = place()
        got = tf.ensure_shape(got, (ROWS, WIDTH))
        late = tf.reduce_sum(tf.tanh(got * 2.0) * tf.sigmoid(got))
        x = v1.placeholder(tf.float32, (ROWS, WIDTH))
        loss, update = tower(x, "w")
        with tf.control_dependencies([update]):
            fill = put(tf.tanh(x * 1.5))
        session.run(v1.global_variables_initializer())
        return [float(one) for one in session.run([loss, late, fill], {x: data()})[:2]]


def beside() -> dict[str, Any]:
    """Let more lie on the device after a while: beside a step that was edited, and two that fitted."""
    return {
        "edited": beside_more(partial(train_eagerly, 20000)),
        "fitted": beside_more(partial(train_eagerly, 16384)),
        "session": beside_more(train_in_session),
    }


def beside_more(train: Callable[[int], list[float]]) -> dict[str, Any]:
    """Return what comes of it with LMS, with nothing else there and with 25 MiB, and the warnings."""
    found: dict[str, Any] = {}
    for name, mebibytes in {"alone": 0, "beside": 25}.items():
        lms.enable(policy="auto")
        found[name] = train(mebibytes << 20)
        found["warnings"] = list(lms.report().warnings)
        lms.disable()
    return found


def train_eagerly(rows: int, nbytes: int) -> list[float]:
    """Train, make a tensor, and train on."""
    weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
    step = tf.function(lambda x: net(x, weights) / rows)
    x = tf.constant(data(rows))
    found = [step(x) for _ in range(3)]
    other = tf.range(nbytes // 4, dtype=tf.float32)  # a NumPy array's memory may be used as it is
    found += [step(x) for _ in range(3)]
    assert other.shape.rank == 1
    return [float(one) for one in found]


def train_in_session(nbytes: int) -> list[float]:
    """Train in a session, give a variable its first value, and train on."""
    rows = nbytes // 4 // WIDTH
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (16384, WIDTH))
        loss, update = tower(x, "w")
        session.run(v1.global_variables_initializer())
        other = v1.get_variable("other", (rows, WIDTH), initializer=v1.zeros_initializer())
        value = v1.placeholder(tf.float32, other.shape)
        begin = v1.assign(other, value).op
        found = [session.run([loss, update], {x: data(16384)})[0] for _ in range(3)]
        session.run(begin, {value: data(rows)})
        found += [session.run([loss, update], {x: data(16384)})[0] for _ in range(3)]
    return [float(one) for one in found]


def partial_run() -> Any:
    """Two nets are fed and fetched one after the other within one run, in either order."""

    def train() -> list[float]:
        found = []
        with tf.Graph().as_default(), v1.Session() as session:
            fed = [v1.placeholder(tf.float32, (ROWS, WIDTH)) for _ in range(2)]
            fetched = []
            for number, x in enumerate(fed):
                loss, update = tower(x, f"net{number}_")
                with tf.control_dependencies([update]):
                    fetched.append(tf.identity(loss))
            session.run(v1.global_variables_initializer())
            for order in ((0, 1), (1, 0)):
                handle = session.partial_run_setup(fetched, fed)
                found += [session.partial_run(handle, fetched[one], {fed[one]: data()}) for one in order]
        return [float(one) for one in found]

    return both(train)


def two_fed() -> Any:
    """What an iterator gives, images and labels, is fed."""

    def train() -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            batches = tf.data.Dataset.from_tensor_slices((data(256), np.zeros((256, WIDTH), "f")))
            x, y = v1.data.make_one_shot_iterator(batches.repeat().batch(ROWS)).get_next()
            loss, update = tower(x + 0 * y, "w")
            session.run(v1.global_variables_initializer())
            fed = {x: data(), y: np.zeros((ROWS, WIDTH), "f")}
            found = [session.run([loss, update], fed)[0] for _ in range(3)]
        return [float(one) for one in found]

    return both(train)


def two_fed_flag() -> Any:
    """What an iterator gives is fed, images and whether to train on them."""

    def train() -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            batches = tf.data.Dataset.from_tensors((data(256), True)).repeat()
            x, training = v1.data.make_one_shot_iterator(batches).get_next()
            loss, update = tower(tf.cond(training, lambda: x * 0.5, lambda: x), "w")
            session.run(v1.global_variables_initializer())
            fed = {x: data(256), training: True}
            found = [session.run([loss, update], fed)[0] for _ in range(3)]
            score = session.make_callable(loss, feed_list=[x, training])
            found.append(score(data(256), np.array(False)))
        return [float(one) for one in found]

    return both(train)


def newton() -> Any:
    """First values are computed from constants, by steps that use each result twice, and by many steps."""

    def train() -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            twice, many = tf.constant(0.1), tf.constant(0.1)
            for _ in range(60):
                twice = twice * (2.0 - 3.0 * twice)
            for _ in range(300):
                many = many + 0.001
            made = [
                v1.get_variable(name, initializer=one) for name, one in (("twice", twice), ("many", many))
            ]
            session.run(v1.global_variables_initializer())
            found = session.run(made)
        return [float(one) for one in found]

    return both(train)


def keyword() -> Any:
    """A function has an argument named ``function``, and one that tells no data set."""

    class Other:
        """An argument whose attributes cannot be read."""

        @property
        def _dataset(self) -> Any:
            raise RuntimeError("no data set")

    def train() -> list[float]:
        @tf.function
        def apply(x: Any, other: Any, function: str = "tanh") -> Any:
            return tf.reduce_sum(getattr(tf, function)(x))

        return [float(apply(tf.ones(4), Other(), function=name)) for name in ("sin", "tanh")]

    return both(train)


def net(x: Any, weights: Any) -> Any:
    """One step of eager variables."""
    with tf.GradientTape() as tape:
        hidden = x
        for weight in weights:
            hidden = tf.tanh(hidden @ weight)
        loss = tf.reduce_sum(hidden * hidden)
    for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(1e-3 * slope)
    return loss


OPEN = [tf.TensorSpec((None, WIDTH))]


def seeded() -> Any:
    """A function that is not inlined draws from a seed; the batch grows."""

    def train() -> list[float]:
        tf.random.set_seed(7)
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]

        @tf.function(experimental_attributes={"_noinline": True})
        def draw() -> Any:
            return tf.random.uniform([], seed=1)

        @tf.function(input_signature=OPEN)
        def step(x: Any) -> Any:
            drawn = draw()
            net(x, weights)
            return drawn

        return [float(step(tf.ones((rows, WIDTH)))) for rows in (8, 8, 64, 64)]

    return both(train)


def two_threads() -> Any:
    """A function that draws from a seed is called while a step with a later plan runs in another thread."""

    def train() -> list[float]:
        tf.random.set_seed(7)
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
        waits, inside, go_on = [False], threading.Event(), threading.Event()
        draw = tf.function(lambda: tf.random.uniform([], seed=1)).get_concrete_function()

        def wait(loss: Any) -> Any:
            if waits[0]:
                inside.set()
                go_on.wait(60)
            return loss

        @tf.function(input_signature=OPEN)
        def step(x: Any) -> Any:
            return tf.numpy_function(wait, [net(x, weights)], tf.float32)

        step(tf.ones((8, WIDTH)))
        step(tf.ones((ROWS, WIDTH)))  # has a plan of its own
        found = [float(draw())]
        waits[0] = True
        thread = threading.Thread(target=lambda: step(tf.ones((ROWS, WIDTH))))
        thread.start()
        inside.wait(60)
        found += [float(draw()), float(draw())]
        go_on.set()
        thread.join()
        return [*found, float(draw())]

    return both(train)


def frames() -> Any:
    """Variables that stream are updated behind a loop's gradient, and before it."""

    def train() -> list[float]:
        size = 32
        inputs = tf.constant(np.random.RandomState(9).randn(16, size).astype("f"))
        weights = [tf.Variable(start(layer)[:size, :size]) for layer in range(2)]
        shift, scale, mean = (tf.Variable(tf.zeros(size), trainable=one) for one in (True, False, False))

        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                hidden = tf.nn.bias_add(tf.tanh(x @ weights[0]), shift)
                mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(hidden, 0))
                hidden = hidden - mean
                added = hidden + shift
                _, hidden = tf.while_loop(
                    lambda turn, _: turn < 3,
                    lambda turn, one: (turn + 1, tf.tanh(tf.matmul(one, weights[1]) + added)),
                    (0, hidden),
                )
                loss = tf.reduce_sum(hidden * hidden)
            slopes = tape.gradient(loss, [*weights, shift])
            shift.assign(shift * 0.999)
            scale.assign_add(slopes[2] * slopes[2])
            shift.assign_sub(1e-3 * slopes[2] * tf.math.rsqrt(scale + 1e-3))
            for weight, slope in zip(weights, slopes, strict=False):
                weight.assign(weight * 0.999)
                weight.assign_sub(1e-3 * slope)
            return loss

        return [float(step(inputs)) for _ in range(3)]

    return both(train, variables="host", optimizer_state="host")


def read_anew() -> Any:
    """Variables that stream are updated under a condition, and read each other's new values there."""

    def train() -> list[float]:
        size = 32
        inputs = tf.constant(np.random.RandomState(9).randn(16, size).astype("f"))
        weights = [tf.Variable(start(layer)[:size, :size]) for layer in range(4)]
        means = [tf.Variable(tf.zeros((size, size)), trainable=False) for _ in weights]
        turn = tf.Variable(0)

        def update(slopes: Any) -> Any:
            for weight, mean, slope in zip(weights, means, slopes, strict=True):
                mean.assign(0.9 * mean + slope)
                weight.assign_sub(1e-3 * mean)
                is_third = turn % 3 == 0
                mean.assign(tf.where(is_third, weight * 0.5 + mean * 0.5, mean))
                weight.assign(tf.where(is_third, mean, weight))
            return tf.constant(0)

        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            turn.assign_add(1)
            with tf.GradientTape() as tape:
                hidden = tf.tanh(tf.tanh(x @ weights[0]) @ weights[1] + weights[2][0])
                hidden = tf.tanh(hidden @ weights[3])
                loss = tf.reduce_sum(hidden * hidden)
            slopes = [tf.convert_to_tensor(one) for one in tape.gradient(loss, weights)]
            is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(one)) for one in slopes])
            tf.cond(is_finite, lambda: update(slopes), lambda: tf.constant(0))
            return loss

        return [float(step(inputs)) for _ in range(4)]

    return both(train, variables="host", optimizer_state="host")


def captured() -> Any:
    """Tensors from outside of the function, which never change, decide sizes."""
    axis, shape, order = tf.constant(-1), tf.constant([ROWS, 8, WIDTH]), tf.constant([1, 0, 2], tf.int64)

    def train() -> list[float]:
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
        backwards = [*reversed(range(WIDTH))]

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                for weight in weights:
                    x = tf.transpose(tf.reshape(x, shape), order)
                    x = tf.reshape(tf.gather(x, backwards, axis=axis), [8 * ROWS, WIDTH])
                    x = tf.tanh(x @ weight)
                loss = tf.reduce_sum(x * x)
            for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(1e-4 * slope)
            return loss

        return [float(step(tf.constant(data(8 * ROWS)))) for _ in range(3)]

    return both(train)


def captured_beside() -> Any:
    """A data set runs the steps of a function that took integers from around it; they decide no sizes."""
    twice, thrice = tf.constant(2), tf.constant(3)

    def train() -> list[float]:
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
        batches = tf.data.Dataset.from_tensor_slices(data(4 * ROWS)).batch(ROWS)

        @tf.function
        def epoch() -> Any:
            def step(total: Any, x: Any) -> Any:
                return total + net(x * tf.cast(twice - thrice, tf.float32), weights)

            return batches.reduce(0.0, step)

        return [float(epoch()) for _ in range(2)]

    return both(train, batch_size=ROWS)


class NoRoom:
    """Fails once, like a kernel that finds no memory."""

    def __init__(self) -> None:
        self.fails = True

    def __call__(self, value: Any) -> Any:
        """Return the value, but for the first time."""
        if self.fails:
            self.fails = False
            raise MemoryError("OOM when allocating tensor")
        return value


def shared() -> Any:
    """Return the refusal of a step beside which another thread counted, and the count."""
    counted, inside, go_on = tf.Variable(0.0), threading.Event(), threading.Event()
    weights, fails = [tf.Variable(start(layer)) for layer in range(LAYERS)], NoRoom()
    said: list[str] = []
    lms.enable(policy="budget", budget_bytes=10 << 20, min_tensor_bytes=1)

    def slow(value: Any) -> Any:
        inside.set()
        go_on.wait(60)
        return fails(value)

    @tf.function
    def step(x: Any) -> Any:
        loss = net(x, weights)
        counted.assign_add(0.0)
        return tf.numpy_function(slow, [loss], tf.float32)

    @tf.function
    def count() -> None:
        counted.assign_add(1.0)

    def run() -> None:
        try:
            step(tf.constant(data()))
        except tf.errors.ResourceExhaustedError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(60)
    for _ in range(100):
        count()
    go_on.set()
    thread.join()
    lms.disable()
    return {"said": said, "count": float(counted)}


def again(kind: str) -> list[Any]:
    """Return whether a step that ran out of memory went on, and how often its effect is there."""
    fails, effects = NoRoom(), []
    lms.enable(policy="budget", budget_bytes=10 << 20, min_tensor_bytes=1)
    if kind == "accumulator":
        with tf.Graph().as_default(), v1.Session() as session:
            kept = v1.SparseConditionalAccumulator(tf.float32, shape=(4, 2))
            x = v1.placeholder(tf.float32, (ROWS, WIDTH))
            added = kept.apply_grad([0], [[1.0, 1.0]])
            with tf.control_dependencies([added]):
                loss, update = tower(x, "w")
            failing = v1.py_func(fails, [loss], tf.float32)
            session.run(v1.global_variables_initializer())
            try:
                session.run([failing, update, added], {x: data()})
            except tf.errors.ResourceExhaustedError:
                effects.append("failed")
            effects.append(int(session.run(kept.num_accumulated())))
    elif kind == "reader":
        with tf.Graph().as_default(), v1.Session() as session, NamedTemporaryFile("w") as lines:
            lines.write("1\n2\n3\n")
            lines.flush()
            names = tf.queue.FIFOQueue(1, [tf.string], [()])
            number = tf.strings.to_number(v1.TextLineReader().read(names)[1])
            x = v1.placeholder(tf.float32, (ROWS, WIDTH))
            loss, update = tower(x + 0 * number, "w")
            failing = v1.py_func(fails, [loss], tf.float32)
            session.run([v1.global_variables_initializer(), names.enqueue(lines.name)])
            try:
                session.run([failing, update], {x: data()})
            except tf.errors.ResourceExhaustedError:
                effects.append("failed")
            effects.append(float(session.run(number)))
    elif kind in ("count", "slice"):
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
        counted = tf.Variable(tf.zeros((2,), tf.int64))
        counter = tf.Variable(tf.zeros((), tf.int64))
        raw: Any = tf.raw_ops

        def number_of(_: Any) -> Any:
            if kind == "count":
                return raw.ResourceCountUpTo(resource=counter.handle, limit=100, T=tf.int64)
            return counted[:1].assign(counted[:1] + 1)[0]

        @tf.function
        def epoch(numbers: Any) -> Any:
            found = 0.0
            for one in numbers:
                found += net(tf.constant(data()) + 0 * tf.cast(one, tf.float32), weights)
                tf.ensure_shape(tf.numpy_function(fails, [found], tf.float32), ())
            return found

        try:
            epoch(tf.data.Dataset.range(2).map(number_of))
        except tf.errors.ResourceExhaustedError:
            effects.append("failed")
    else:
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        batches = tf.data.Dataset.range(1000).shuffle(1000).batch(4)

        @tf.function(experimental_attributes={"_noinline": True})
        def count() -> None:
            one = tf.constant([1], tf.int64)
            table.insert(one, table.lookup(one) + 1)

        @tf.function
        def step(x: Any) -> Any:
            if kind == "table":
                count()
            else:
                x = x + 0 * tf.cast(tf.reduce_sum(batches.take(1).get_single_element()), tf.float32)
            return tf.ensure_shape(tf.numpy_function(fails, [net(x, weights)], tf.float32), ())

        try:
            step(tf.constant(data()))
        except tf.errors.ResourceExhaustedError:
            effects.append("failed")
        effects.append(int(table.lookup(tf.constant([1], tf.int64))[0]))
    lms.disable()
    return effects


def effects() -> Any:
    """What a step does twice where it is tried again."""
    return {kind: again(kind) for kind in ("accumulator", "table", "element", "reader", "count", "slice")}


def variant() -> Any:
    """A step that has a variable whose value is no array."""
    raw: Any = tf.raw_ops

    def train() -> list[float]:
        weights = [tf.Variable(start(layer)) for layer in range(LAYERS)]
        made = raw.TensorListReserve(element_shape=tf.constant([2]), num_elements=3, element_dtype=tf.float32)
        kept = tf.Variable(made, trainable=False, dtype=tf.variant, shape=())

        @tf.function
        def step(x: Any) -> Any:
            kept.assign(kept.read_value())
            return net(x, weights)

        return [float(step(tf.constant(data()))) for _ in range(3)]

    return both(train, policy="budget", budget_bytes=64 << 10, margin=0.0)


WAYS = [
    beside,
    captured,
    captured_beside,
    effects,
    frames,
    keyword,
    looking,
    newton,
    partial_run,
    queue,
    read_anew,
    relay,
    seeded,
    shared,
    two_fed,
    two_fed_flag,
    two_threads,
    variant,
]


def main() -> None:
    """Run the way that is asked for."""
    warnings.simplefilter("ignore")
    (way,) = (way for way in WAYS if way.__name__ == sys.argv[1])
    print(json.dumps(way()))


if __name__ == "__main__":
    main()
