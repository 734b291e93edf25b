"""First steps that run out of memory, and are tried again: each case prints its name when it holds.

Run as a child process by test_retry.py, with ``keras`` or ``loops``. A function of the step says twice that
memory ran out, so that each case meets all three tries.
"""

import ctypes
import gc
import os
import re
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "64"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.calls import attempts  # noqa: E402
from lms.intercept import batch_replay as lms_batches  # noqa: E402

KERAS_2 = not hasattr(tf.keras, "ops")
"""Tells tf_keras, or the Keras of TensorFlow 2.15."""
WIDTH, LAYERS, ROWS = 64, 8, 256
FAILURES: list[str] = []
SEEN: list[float] = []
"""The first number of each batch that a step has got to its end with."""
WEIGHTS = [tf.Variable(tf.zeros((WIDTH, WIDTH))) for _ in range(LAYERS)]
BATCH = tf.random.stateless_normal((ROWS, WIDTH), (9, 1))


def mark(first: Any) -> Any:
    """Notes the batch, or fails as long as that is wanted."""
    if FAILURES:
        raise MemoryError(FAILURES.pop())
    SEEN.append(float(first))
    return first


def marked(first: Any) -> Any:
    """The same as an op of the step."""
    return tf.ensure_shape(tf.numpy_function(mark, [tf.cast(first, tf.float32)], tf.float32), ())


def batches(count: int) -> Any:
    """Batches whose first number is their own, made while they are asked for."""
    numbers = tf.data.Dataset.range(count)
    return numbers.map(lambda i: tf.random.stateless_normal((ROWS, WIDTH), (i, 1)), num_parallel_calls=2).map(
        lambda x: (x, tf.reduce_sum(x, 1, keepdims=True))
    )


def train(x: Any) -> Any:
    """One step of a hand-made net."""
    with tf.GradientTape() as tape:
        h = x
        for weight in WEIGHTS:
            h = tf.tanh(h @ weight)
        loss = tf.reduce_sum(h * h)
    for weight, gradient in zip(WEIGHTS, tape.gradient(loss, WEIGHTS), strict=True):
        weight.assign_sub(1e-3 * gradient)
    with tf.control_dependencies([loss]):
        return loss + 0.0 * marked(x[0, 0])


def through(batched: Any) -> Any:
    """Train on all batches of a dataset or an iterator."""
    total = 0.0
    for x, _ in batched:
        total += train(x)
    return total


@contextmanager
def tried(failures: int, **fields: Any) -> Iterator[list[str]]:
    """LMS with a budget, whose first steps fail as often as that; yields the warnings of that time."""
    texts: list[str] = []
    fields = {
        "policy": "budget",
        "budget_bytes": 1 << 20,
        "margin": 0.0,
        "min_tensor_bytes": 1 << 12,
        **fields,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lms.enable(**fields)
        FAILURES[:] = ["OOM when allocating tensor"] * failures
        try:
            yield texts
        finally:
            FAILURES.clear()
            texts += [str(one.message) for one in caught]
            lms.disable()


def start() -> None:
    """The same weights and random numbers for every run."""
    SEEN.clear()
    tf.random.set_seed(7)
    for seed, weight in enumerate(WEIGHTS):
        weight.assign(tf.random.stateless_normal(weight.shape, (seed, 2)) * 0.2)


def weights_after(run: Callable[[], Any]) -> tuple[Any, ...]:
    """What ``run`` gives, the batches that it saw, and the weights that it leaves."""
    start()
    found = run()
    return found, list(SEEN), b"".join(weight.numpy().tobytes() for weight in WEIGHTS)


def require_same(run: Callable[[], Any], **fields: Any) -> list[str]:
    """``run`` comes to the same without LMS and with two failures under it; gives the warnings."""
    plain = weights_after(run)
    with tried(2, **fields) as texts:
        retried = weights_after(run)
        assert not FAILURES and lms.report().retries == 2, lms.report()
        assert lms.report().edited, lms.report()
    assert retried[:2] == plain[:2], (retried[:2], plain[:2])
    assert retried[2] == plain[2], "other weights"
    assert plain[1], "nothing was trained"
    return texts


def fit(
    count: int, *, steps_per_execution: int = 1, dropout: float = 0.0, fails: int | None = None
) -> Callable[[], Any]:
    """A training by Keras of ``count`` batches; gives what the callbacks saw and the weights.

    Memory runs out in the step of the number ``fails``.
    """

    def run() -> Any:
        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(3)

        class Marking(keras.Model):  # type: ignore[misc, name-defined]
            def train_step(self, data: Any) -> Any:
                logs = super().train_step(data)
                return {**logs, "first": marked(data[0][0, 0])}

        x = inputs = keras.Input((WIDTH,))
        for _ in range(LAYERS):
            x = layers.Dense(WIDTH, activation="relu")(x)
            x = layers.Dropout(dropout)(x) if dropout else x
        model = Marking(inputs, layers.Dense(1)(x))
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)

        class Failing(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if lms.report().graphs and batch == fails and len(SEEN) == fails:
                    FAILURES.append("OOM when allocating tensor")

        given = {"epochs": 2, "verbose": 0, "validation_data": batches(2), "callbacks": [Failing()]}
        history = model.fit(batches(count), **given)
        values = [weight.tobytes() for weight in (*model.get_weights(), *optimizer_values(model.optimizer))]
        return history.history, values

    return run


def optimizer_values(optimizer: Any) -> list[Any]:
    """The optimizer's own variables."""
    variables = optimizer.variables
    return [variable.numpy() for variable in (variables() if callable(variables) else variables)]


def keras_trains_with_the_batches_that_it_would_have() -> None:
    """Two batches, two failures: all of them are trained with, in their order."""
    require_same(fit(2))
    assert len(SEEN) == 4 and SEEN[:2] == SEEN[2:], SEEN


def several_steps_in_one_call() -> None:
    """Of seven batches in calls of three the last call gets one."""
    require_same(fit(7, steps_per_execution=3))
    assert len(SEEN) == 14 and SEEN[:7] == SEEN[7:], SEEN


def keras_goes_on_after_its_third_step_has_failed() -> None:
    """Keras 3 counts what dropout draws in a variable; Keras 2 has kernels count, which would begin anew."""
    dropout = 0.0 if KERAS_2 else 0.3
    plain = weights_after(fit(4, dropout=dropout))
    with tried(0, budget_bytes=500 << 10) as texts:
        assert weights_after(fit(4, dropout=dropout, fails=2)) == plain
        assert lms.report().retries == 1 and lms.report().edited, lms.report()
    assert any("a step ran out of memory although the plan fitted" in text for text in texts), texts


def a_later_step_whose_kernels_count_what_they_draw_is_an_error() -> None:
    """They begin anew with the next plan, which is right in a first step only."""
    if KERAS_2:
        with tried(0, budget_bytes=500 << 10):
            try:
                weights_after(fit(4, dropout=0.3, fails=2))
            except tf.errors.ResourceExhaustedError as error:
                assert "it is not one of the first" in str(error), error
            else:
                raise AssertionError("the error is lost")


def random_numbers_of_layers_are_drawn_again() -> None:
    """Dropout counts in variables, or in kernels that are made anew."""
    require_same(fit(4, dropout=0.3))


def the_steps_behind_the_first_are_tried_again() -> None:
    """Memory runs out in the third step, twice, and in the sixth of seven, which is an error."""

    def run(fails: dict[int, int]) -> Any:
        step, iterator, losses = tf.function(lambda iterator: train(next(iterator)[0])), iter(batches(7)), []
        for number in range(7):
            FAILURES.extend(["OOM when allocating tensor"] * fails.get(number, 0))
            losses.append(float(step(iterator)))
        return losses

    plain = weights_after(lambda: run({}))
    with tried(0, budget_bytes=500 << 10):
        assert weights_after(lambda: run({2: 2})) == plain and lms.report().retries == 2
    with tried(0, budget_bytes=500 << 10):
        try:
            weights_after(lambda: run({5: 1}))
        except tf.errors.ResourceExhaustedError as error:
            assert "it is not one of the first" in str(error), error
        else:
            raise AssertionError("the error is lost")


def a_loop_whose_step_takes_its_batch() -> None:
    """It ends where it would have, with TensorFlow's own exception."""

    def run() -> Any:
        step, iterator, losses = tf.function(lambda iterator: train(next(iterator)[0])), iter(batches(3)), []
        try:
            while True:
                losses.append(float(step(iterator)))
        except tf.errors.OutOfRangeError as error:
            return losses, "End of sequence" in str(error)

    texts = require_same(run)
    assert len(SEEN) == 3
    assert any("numpy_function or py_function runs once more" in text for text in texts), texts


def a_function_that_runs_asynchronously() -> None:
    """Its call returns before it has run, and errors come with a later one."""

    def run() -> None:
        step = tf.function(train)
        tf.config.experimental.set_synchronous_execution(False)
        try:
            for x, _ in batches(5):
                step(x)
        finally:
            tf.config.experimental.set_synchronous_execution(True)

    texts = require_same(run)
    assert not any("has not taken" in text for text in texts), texts


def every_structure_is_given_again() -> None:
    """Dictionaries, nothing, ragged and sparse tensors, strings, small floats, several iterators."""

    def elements(i: Any) -> Any:
        x = tf.random.stateless_normal((ROWS, WIDTH), (i, 1))
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
        extra = {"text": tf.strings.as_string(i), "ragged": ragged, "sparse": tf.sparse.from_dense(tf.eye(3))}
        return {"x": x, "extra": (extra, tf.cast(x, tf.bfloat16))}, None

    def step(first: Any, *, others: Any) -> Any:
        inputs, nothing = next(first)
        extra, small = inputs["extra"]
        assert nothing is None
        total = tf.reduce_sum(extra["ragged"] * 2) + tf.strings.to_number(extra["text"], tf.int32)
        added = tf.sparse.reduce_sum(extra["sparse"]) + tf.cast(tf.reduce_sum(small), tf.float32)
        return train(inputs["x"] + next(others["b"])[0]), total, added

    def run() -> Any:
        function = tf.function(step)
        first, second = iter(tf.data.Dataset.range(3).map(elements)), iter(batches(4).prefetch(2))
        found = [[float(one) for one in function(first, others={"b": second})] for _ in range(3)]
        return found, float(next(second)[0][0, 0]), function.experimental_get_tracing_count()

    require_same(run)


def a_loop_in_the_step() -> None:
    """The number of batches is known to nobody before it runs."""
    require_same(lambda: float(tf.function(through)(iter(batches(5)))))
    assert len(SEEN) == 5


def a_dataset_in_the_step() -> None:
    """It begins anew, and a warning says that; what is not shuffled gives the same.

    What the function changes before the loop, or in one that nobody plans, is put back, too.
    """
    count, generator = tf.Variable(0.0), tf.random.Generator.from_seed(5)

    def epoch(dataset: Any) -> Any:
        count.assign_add(generator.uniform([]))
        for _ in dataset:
            count.assign_add(1.0)
        return through(dataset)

    def run() -> Any:
        count.assign(0.0)
        generator.reset_from_seed(5)
        return float(tf.function(epoch)(batches(3))), float(count), generator.state.numpy().tobytes()

    require_same_through(run, 2, r"the first step(, some .* plan,)? ran out of memory")


def an_iterator_that_the_step_makes() -> None:
    """It is made anew with its dataset, also where single batches are taken from it."""

    def epoch(dataset: Any) -> Any:
        iterator = iter(dataset)
        return through(iterator) + train(next(iter(dataset))[0])

    require_same_through(
        lambda: float(tf.function(epoch)(batches(3))),
        2,
        r"the first step(, some .* plan,)? ran out of memory",
    )


def require_same_through(run: Callable[[], Any], failures: int, said: str) -> None:
    """``run``, which goes through a dataset, comes to the same without LMS and with failures under it.

    TensorFlow may go on to the next batch before it says that one has failed.
    """
    plain, _, weights = weights_after(run)
    with tried(failures) as texts:
        found, _, left = weights_after(run)
        assert (found, left) == (plain, weights)
        assert not FAILURES and 1 <= lms.report().retries <= failures, lms.report()
    assert any(re.search(said, text) for text in texts), texts
    assert any("the dataset that it goes through begins anew" in text for text in texts), texts


def a_later_call_that_goes_through_a_dataset_is_tried_again() -> None:
    """It is planned anew in each call, and begins with what the call before it has left."""

    def run() -> Any:
        later = bool(FAILURES)
        FAILURES.clear()
        epoch = tf.function(through)
        first = float(epoch(batches(2)))
        FAILURES[:] = ["OOM when allocating tensor"] * later
        return first, float(epoch(batches(2)))

    require_same_through(run, 1, "a step ran out of memory although")


def a_dataset_that_may_not_begin_anew_is_an_error() -> None:
    """Nor is anything else put back that the function does beside it."""
    data, iterator = batches(3), iter(batches(9))
    require_refusal(tf.function(lambda: through(data)), "none of its arguments; pass it")
    once = (x.numpy() for x, _ in batches(3))
    spec = tf.TensorSpec((ROWS, WIDTH))
    given = tf.data.Dataset.from_generator(lambda: once, output_signature=spec).map(lambda x: (x, 0))
    require_refusal(lambda: tf.function(through)(given), "runs Python code")
    queue = tf.queue.FIFOQueue(30, [tf.float32], [[]])

    def enqueuing(dataset: Any) -> Any:
        for x, _ in dataset:
            queue.enqueue(x[0, 0])
        return through(dataset)

    require_refusal(lambda: tf.function(enqueuing)(data), "items of a queue")

    def taking(dataset: Any) -> Any:
        return through(dataset) + 0.0 * next(iterator)[0][0, 0]

    require_refusal(lambda: tf.function(taking)(data), "an iterator that may not be its own")

    def mapping(dataset: Any) -> Any:
        drawn = dataset.map(lambda x, y: (x + tf.numpy_function(lambda: next(numbers), [], tf.float32), y))
        x, _ = next(iter(drawn))
        return train(tf.ensure_shape(x, (ROWS, WIDTH)))

    def scanning(dataset: Any) -> Any:
        drawn = dataset.scan(0.0, lambda n, x: (tf.numpy_function(lambda: next(numbers), [], tf.float32), x))
        return through(drawn)

    numbers = iter(map(np.float32, range(99)))
    require_refusal(lambda: tf.function(mapping)(data), "runs Python code")
    require_refusal(lambda: tf.function(scanning)(data), "runs Python code")


def an_iterator_that_lasts_is_an_error() -> None:
    """It goes on where the failed step has left it, though no argument leads to it."""
    lasting = iter(batches(9).map(lambda x, _: x))
    name = tf.raw_ops.IteratorToStringHandle(resource_handle=lasting._iterator_resource)

    def named(dataset: Any, name: Any) -> Any:
        types, shapes = [tf.float32], [[ROWS, WIDTH]]
        found = tf.raw_ops.IteratorFromStringHandleV2(
            string_handle=name, output_types=types, output_shapes=shapes
        )
        (x,) = tf.raw_ops.IteratorGetNext(iterator=found, output_types=types, output_shapes=shapes)
        return through(dataset) + train(x)

    require_refusal(lambda: tf.function(named)(batches(3), name), "an iterator that may not be its own")

    def one_shot(dataset: Any) -> Any:
        kept = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(9))
        return through(dataset) + tf.cast(kept.get_next(), tf.float32)

    require_refusal(lambda: tf.function(one_shot)(batches(3)), "an iterator that may not be its own")


def a_loop_that_may_end_early() -> None:
    """Its condition is a part of the step, too."""

    def epoch(dataset: Any) -> Any:
        total = 0.0
        for x, _ in dataset:
            total += train(x)
            if total < 0.0:
                break
        return total

    require_same_through(
        lambda: float(tf.function(epoch)(batches(3))),
        2,
        r"the first step(, some .* plan,)? ran out of memory",
    )


def what_has_no_plan_gets_the_advice_of_no_step() -> None:
    """A function that trains nothing runs out of memory behind a step that was planned."""
    start()
    with tried(0):
        tf.function(lambda given: train(next(given)[0]))(iter(batches(1)))
        FAILURES[:] = ["OOM when allocating tensor"]
        try:
            tf.function(lambda x: marked(x[0, 0]))(tf.ones((ROWS, WIDTH)))
        except tf.errors.ResourceExhaustedError as error:
            assert "It has no plan" in str(error) and "checkpoint" not in str(error), error
        else:
            raise AssertionError("the error is lost")


def a_later_call_above_its_budget_is_planned_with_all_at_once() -> None:
    """A larger margin would ask for what no plan gives; and no plan fitted."""
    start()
    step = tf.function(lambda dataset: train(next(iter(dataset))[0]))
    with tried(0, budget_bytes=1 << 14) as texts:
        step(batches(3))
        FAILURES[:] = ["OOM when allocating tensor"]
        step(batches(3))
        assert lms.report().retries == 1, lms.report()
    assert any("a step ran out of memory; planned again with policy all" in text for text in texts), texts


def a_step_that_fails_each_time_is_an_error() -> None:
    """It is TensorFlow's, with what to try, and of no more tries than there are kinds of plans."""
    start()
    with tried(9):
        try:
            tf.function(lambda dataset: train(next(iter(dataset))[0]))(batches(3))
        except tf.errors.ResourceExhaustedError as error:
            assert "LMS: the step ran out of memory" in str(error), error
        else:
            raise AssertionError("the error is lost")
        assert lms.report().retries == 2, lms.report()


def the_next_function_is_planned_as_the_first_one_was() -> None:
    """Who looks for the batch that fits catches the error; what comes next has all its tries again."""
    start()
    with tried(3):
        try:
            tf.function(lambda dataset: train(next(iter(dataset))[0]))(batches(3))
        except tf.errors.ResourceExhaustedError:
            assert not FAILURES, FAILURES
        else:
            raise AssertionError("the error is lost")
        FAILURES[:] = ["OOM when allocating tensor"]
        tf.function(lambda dataset: train(next(iter(dataset))[0]))(batches(2))
        assert not FAILURES and lms.report().retries == 3, lms.report()


def a_failed_step_is_not_held_while_it_runs_again() -> None:
    """Its error holds what it was called with, and the batches in that."""
    failed: list[Any] = []
    known, held = attempts.is_out_of_memory, []

    def note(error: Exception) -> bool:
        failed.append(weakref.ref(error))
        return bool(known(error))

    def look(first: Any) -> Any:
        gc.collect()
        held.append(sum(one() is not None for one in failed))
        return first

    def step(x: Any) -> Any:
        return train(tf.ensure_shape(tf.numpy_function(look, [x], tf.float32), x.shape))

    attempts.is_out_of_memory = note
    try:
        start()
        with tried(1):
            tf.function(lambda dataset: step(next(iter(dataset))[0]))(batches(3))
            assert lms.report().retries == 1, lms.report()
    finally:
        attempts.is_out_of_memory = known
    assert failed and held == [0, 0], (failed, held)


def generators_and_seeds_are_put_back() -> None:
    """A generator is a variable; an op without a seed counts in a kernel, which is new in a new trace."""
    made = tf.random.Generator.from_seed(5)

    def run() -> Any:
        made.reset_from_seed(5)

        @tf.function
        def step(iterator: Any) -> Any:
            x = next(iterator)[0] + made.normal((ROWS, WIDTH)) + tf.random.normal((ROWS, WIDTH))
            return train(x)

        iterator = iter(batches(2))
        return [float(step(iterator)) for _ in range(2)]

    require_same(run)


def variables_around_the_step_are_put_back() -> None:
    """What the caller of the planned function counts is none of that function's own."""
    count = tf.Variable(0.0)

    def run() -> Any:
        count.assign(0.0)
        inner = tf.function(train)

        @tf.function
        def outer(iterator: Any) -> Any:
            count.assign_add(1.0)
            return inner(next(iterator)[0])

        iterator = iter(batches(2))
        return [float(outer(iterator)) for _ in range(2)], float(count)

    require_same(run)


def require_refusal(run: Callable[[], Any], *said: str) -> None:
    """``run`` is not tried again; the error says why."""
    start()
    with tried(1):
        try:
            run()
        except tf.errors.ResourceExhaustedError as error:
            assert "not tried again" in str(error) and all(text in str(error) for text in said), error
        else:
            raise AssertionError("the error is lost")
        assert lms.report().retries == 0


def what_cannot_be_given_again_is_an_error() -> None:
    """Iterators that the step captures, datasets that it goes through, tables and queues that it changes."""
    iterator, data = iter(batches(9)), batches(2)
    require_refusal(tf.function(lambda: train(next(iterator)[0])), "none of its arguments")
    captured = tf.function(lambda other: train(next(other)[0] + next(iterator)[0]))
    require_refusal(lambda: captured(iter(data)), "none of its arguments")

    later = tf.function(lambda other, trains: train(next(other)[0]) if trains else next(other)[1])
    require_refusal(lambda: [later(iterator, trains) for trains in (False, True)], "in a later trace")

    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    queue = tf.queue.FIFOQueue(3, [tf.float32], [[]])
    queue.enqueue(1.0)

    def inserting(x: Any) -> Any:
        table.insert(tf.constant(1, tf.int64), tf.constant(2, tf.int64))
        return train(x)

    x = next(iterator)[0]
    require_refusal(lambda: tf.function(inserting)(x), "changes a lookup table")
    failing = data.map(lambda x, _: (tf.numpy_function(lambda x: mark(x[0, 0]), [x], tf.float32), 0))
    require_refusal(
        lambda: tf.function(lambda it: train(BATCH + next(it)[0]))(iter(failing)), "pipeline itself failed"
    )
    require_refusal(lambda: tf.function(lambda y: train(y + queue.dequeue()))(x), "items of a queue")


def more_than_is_kept_is_an_error() -> None:
    """The step goes on, with the batches in their order, but is not tried again."""
    kept, lms_batches.KEPT_BYTES = lms_batches.KEPT_BYTES, 1

    def run() -> Any:
        return float(tf.function(through)(iter(batches(5))))

    try:
        plain = weights_after(run)
        with tried(0):
            assert weights_after(run) == plain
        require_refusal(run, "more than")
    finally:
        lms_batches.KEPT_BYTES = kept


def a_table_that_is_only_read_is_no_matter() -> None:
    """Nor is one beside an iterator among the arguments."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2.0]), 0.0)

    def run() -> Any:
        step = tf.function(lambda iterator: train(next(iterator)[0] * table.lookup(tf.constant(1))))
        iterator = iter(batches(2))
        return [float(step(iterator)) for _ in range(2)]

    require_same(run)


class Rows(tf.experimental.BatchableExtensionType):  # type: ignore[misc]
    """A type of a user's own."""

    rows: tf.RaggedTensor


def rows_of_ragged_tensors_reach_the_step() -> None:
    """Their pipeline says ragged and gives plain ones, alone or in another type."""
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], []])

    def run(data: Any) -> Any:
        step, iterator = (
            tf.function(lambda iterator: train(BATCH + tf.reduce_sum(next(iterator)))),
            iter(data),
        )
        return [float(step(iterator)) for _ in range(3)]

    def summed(data: Any) -> Any:
        step, iterator = tf.function(lambda iterator: tf.reduce_sum(next(iterator).rows)), iter(data)
        return [float(step(iterator)) for _ in range(3)]

    alone = tf.data.Dataset.from_tensor_slices(rows)
    plain = weights_after(lambda: run(alone))
    with tried(0):
        assert weights_after(lambda: run(alone)) == plain
        assert summed(tf.data.Dataset.from_tensor_slices(Rows(rows))) == [1.0, 5.0, 0.0]


def calls_of_other_threads_are_no_part_of_it() -> None:
    """One ends while the step runs, as those in an input pipeline do."""
    other = tf.function(lambda: tf.constant(1.0))

    def beside(x: Any) -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return x

    def run() -> Any:
        step = tf.function(lambda x: train(x + 0.0 * tf.numpy_function(beside, [x[0, 0]], tf.float32)))
        return [float(step(BATCH)) for _ in range(2)]

    require_same(run)


@contextmanager
def step_under_way(call: Callable[[Any], Any]) -> Iterator[Any]:
    """Have ``call`` run a step in another thread while the block runs; gives a step of this one."""
    start()
    begun, done = threading.Event(), threading.Event()

    def wait(first: Any) -> Any:
        begun.set()
        done.wait(60)
        return first

    first = tf.function(lambda x: train(tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)))
    thread = threading.Thread(target=call, args=(first,))
    thread.start()
    begun.wait(60)
    yield tf.function(lambda x: train(x))
    done.set()
    thread.join()


def a_step_of_another_thread_is_told_of() -> None:
    """Both are planned for the whole device."""
    with tried(0, policy="all") as texts, step_under_way(lambda first: first(BATCH)) as other:
        other(BATCH)
        other(BATCH)
    told = [text for text in texts if "another thread runs beside it" in text]
    assert len(told) == 1, texts


def an_error_names_the_calls_of_other_threads() -> None:
    """Each of them is planned for the whole device, although it fits alone."""
    errors: list[str] = []
    with tried(9, policy="all"), step_under_way(lambda first: require_error(first, errors)) as other:
        require_error(other, errors)
    assert ["Other threads were calling steps" in text for text in errors] == [True, False], errors


def require_error(function: Any, errors: list[str]) -> None:
    """Call a function that runs out of memory, and note what it says."""
    try:
        function(BATCH)
    except tf.errors.ResourceExhaustedError as error:
        errors.append(str(error))


def what_a_pipeline_raises_is_raised() -> None:
    """As it is, and not as the stand-in would put it; the iterator goes on behind it."""

    def elements(i: Any) -> Any:
        with tf.control_dependencies(
            [tf.debugging.assert_none_equal(i, tf.constant(1, tf.int64), message="bad element")]
        ):
            return tf.random.stateless_normal((ROWS, WIDTH), (i, 1))

    def run() -> Any:
        step, found = tf.function(lambda iterator: train(next(iterator)) + train(next(iterator))), []
        iterator = iter(tf.data.Dataset.range(5).map(elements))
        for _ in range(3):
            try:
                found.append(float(step(iterator)))
            except tf.errors.OpError as error:
                found.append((type(error).__name__, "bad element" in str(error)))
        return found

    plain = weights_after(run)
    with tried(0):
        again = weights_after(run)
    assert plain[0][0] == ("InvalidArgumentError", True) and isinstance(plain[0][1], float), plain[0]
    assert again[:2] == plain[:2], (again[:2], plain[:2])


def batches_are_kept_outside_of_the_device() -> None:
    """Eight of a mebibyte each, which the device does not hold while the step runs."""

    def in_use() -> int:
        return int(tf.config.experimental.get_memory_info("CPU:0")["current"])

    source = lms_batches.Source.of(iter(tf.data.Dataset.range(9).map(lambda i: tf.fill((1 << 18,), i))))
    stand_in = source.stand_in()
    assert int(next(stand_in)[0]) == 0
    before = in_use()
    assert [int(next(stand_in)[0]) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert in_use() - before < 1 << 20, (before, in_use())
    source.rewind()
    assert [int(batch[0]) for batch in source.stand_in()] == list(range(9))


class Mallinfo(ctypes.Structure):
    """The answer of ``mallinfo2``; ``hblks`` counts the blocks that are mapped one by one."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")
        + ("uordblks", "fordblks", "keepcost")
    ]


def malloc_keeps_its_blocks() -> None:
    """A block as large as one that was freed is not mapped anew, as it would be with a fixed threshold."""
    assert int(next(lms_batches.Source.of(iter(tf.data.Dataset.range(2))).stand_in())) == 0
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return  # a libc that is older than glibc 2.33, or another one
    libc.mallinfo2.restype, libc.malloc.restype = Mallinfo, ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.free(libc.malloc(4 << 20))
    before = libc.mallinfo2().hblks
    block = libc.malloc(4 << 20)
    now = libc.mallinfo2().hblks
    libc.free(block)
    assert now == before, (now, before)


KERAS_CASES = (
    keras_trains_with_the_batches_that_it_would_have,
    several_steps_in_one_call,
    keras_goes_on_after_its_third_step_has_failed,
    a_later_step_whose_kernels_count_what_they_draw_is_an_error,
    random_numbers_of_layers_are_drawn_again,
)
LOOP_CASES = (
    malloc_keeps_its_blocks,  # the first: from_generator in another case would have malloc map each
    a_loop_whose_step_takes_its_batch,
    a_function_that_runs_asynchronously,
    the_steps_behind_the_first_are_tried_again,
    every_structure_is_given_again,
    a_loop_in_the_step,
    a_dataset_in_the_step,
    a_later_call_that_goes_through_a_dataset_is_tried_again,
    a_dataset_that_may_not_begin_anew_is_an_error,
    an_iterator_that_lasts_is_an_error,
    an_iterator_that_the_step_makes,
    a_step_that_fails_each_time_is_an_error,
    the_next_function_is_planned_as_the_first_one_was,
    a_failed_step_is_not_held_while_it_runs_again,
    a_loop_that_may_end_early,
    what_has_no_plan_gets_the_advice_of_no_step,
    a_later_call_above_its_budget_is_planned_with_all_at_once,
    generators_and_seeds_are_put_back,
    variables_around_the_step_are_put_back,
    what_cannot_be_given_again_is_an_error,
    more_than_is_kept_is_an_error,
    a_table_that_is_only_read_is_no_matter,
    rows_of_ragged_tensors_reach_the_step,
    calls_of_other_threads_are_no_part_of_it,
    a_step_of_another_thread_is_told_of,
    an_error_names_the_calls_of_other_threads,
    what_a_pipeline_raises_is_raised,
    batches_are_kept_outside_of_the_device,
)

if __name__ == "__main__":
    for case in KERAS_CASES if sys.argv[1:] == ["keras"] else LOOP_CASES:
        try:
            case()
        except Exception:
            traceback.print_exc(file=sys.stderr)
        else:
            print("held:", case.__name__, flush=True)
