"""What LMS notices around a graph: each case prints its name when it holds.

Run as a child process by test_watch.py.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "64"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.engine import installation  # noqa: E402
from lms.errors import LMSError  # noqa: E402
from lms.intercept.oom_retry import LATER_STEPS  # noqa: E402
from lms.intercept.sessions import SessionWatch  # noqa: E402
from lms.passes import planning  # noqa: E402

WEIGHTS = [tf.Variable(tf.random.stateless_normal((128, 128), (seed, 1)) * 0.1) for seed in range(10)]
BATCH = tf.random.stateless_uniform((1024, 128), (1, 2))


def forward(x: Any) -> Any:
    """Ten layers."""
    for weight in WEIGHTS:
        x = tf.tanh(x @ weight)
    return tf.reduce_sum(x * x)


def train(x: Any, loss_of: Any = forward) -> Any:
    """One step."""
    with tf.GradientTape() as tape:
        loss = loss_of(x)
    for weight, gradient in zip(WEIGHTS, tape.gradient(loss, WEIGHTS), strict=True):
        weight.assign_sub(1e-5 * gradient)
    return loss


@contextmanager
def enabled(**fields: Any) -> Iterator[list[str]]:
    """LMS on within the block; yields the warnings of that time."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lms.enable(**fields)
        try:
            yield texts
        finally:
            texts += [str(one.message) for one in caught]
            lms.disable()


def nested_functions_become_visible() -> None:
    """A forward pass in a function of its own is planned with the step, and traced as it is without us."""
    inner = tf.function(forward)
    with enabled(policy="all"):
        tf.function(lambda x: train(x, inner))(BATCH)
        (graph,) = lms.report().edited
        assert graph.tensors > 10 and graph.executed == graph.tensors, graph
    assert inner.experimental_get_tracing_count() == 1


def a_signature_still_converts_its_arguments() -> None:
    """A function within the step keeps what it promises about its arguments."""

    @tf.function(input_signature=[tf.TensorSpec((), tf.float32)])
    def scaled(factor: Any) -> Any:
        assert factor.dtype == tf.float32
        return forward(BATCH) * factor

    with enabled(policy="all"):
        tf.function(lambda: train(2, scaled))()
        assert lms.report().edited


def xla_is_off_and_comes_back() -> None:
    """Says why XLA is off, and leaves it as it was."""
    step = tf.function(train, jit_compile=True)
    with enabled(policy="all") as texts:
        step(BATCH)
        assert lms.report().edited
        assert step._jit_compile is None
    assert any("XLA is off for train" in text and "no swap would survive" in text for text in texts), texts
    assert step._jit_compile is True


def a_tape_outside_is_reported() -> None:
    """Nothing is edited that a tape is going to differentiate."""
    inner = tf.function(forward)
    with enabled(policy="all") as texts:
        with tf.GradientTape() as tape:
            loss = inner(BATCH)
        assert tape.gradient(loss, WEIGHTS)[0] is not None
        report = lms.report()
    assert not report.edited and "a gradient tape around the function" in report.graphs[0].why, report
    (told,) = texts
    assert "put the tape" in told, told


def a_function_traced_before_is_planned() -> None:
    """It is not traced again, its own graph holds nothing of ours, and once LMS is off it runs unedited."""
    early = tf.function(train)
    early(BATCH)
    with enabled(policy="all") as texts:
        early(BATCH)
        engine = installation.engine()
        (graph,) = lms.report().edited
        assert 0 < graph.tensors == lms.report().store.swap_outs, graph
    assert not texts
    early(BATCH)
    assert engine.report().store.swap_outs == graph.tensors, "it was swapped without LMS"
    assert early.experimental_get_tracing_count() == 1
    ops = early.get_concrete_function(BATCH).graph.get_operations()
    assert not any("Lms" in op.type or "/lms/" in op.name for op in ops)


def a_step_that_fits_is_left_alone() -> None:
    """Policy auto edits nothing then, and says so."""
    with enabled(policy="auto"):
        tf.function(train)(BATCH)
        report = lms.report()
        assert not report.edited
        assert "the step fits" in str(report) and report.graphs[0].asked_policy == "auto"


def a_loop_within_a_step_is_no_step_of_its_own() -> None:
    """Of the whole step it is said that nothing is swapped, once."""

    def looped(x: Any) -> Any:
        for _ in tf.range(3):
            for weight in WEIGHTS:
                x = tf.tanh(x @ weight)
        return tf.reduce_sum(x)

    def step(x: Any) -> Any:
        return train(x, tf.function(looped))

    with enabled(policy="all", min_tensor_bytes=1 << 30) as texts:
        tf.function(step)(BATCH)
        assert [graph.name for graph in lms.report().graphs] == ["step"]
    (told,) = [text for text in texts if "nothing can be swapped" in text]
    assert told.startswith("step: "), told


def a_loop_of_steps_is_planned_turn_by_turn() -> None:
    """The step is the body of the loop, and its swaps run in each turn."""

    def steps(x: Any) -> Any:
        for _ in tf.range(3):
            train(x)

    with enabled(policy="all"):
        tf.function(steps)(BATCH)
        report = lms.report()
    (graph,) = report.edited
    assert graph.varies and graph.tensors > 10
    assert report.store.swap_outs == 3 * graph.tensors, report.store


def inference_is_left_alone() -> None:
    """A graph without a gradient is no step."""
    with enabled(policy="all"):
        tf.function(forward)(BATCH)
        assert not lms.report().graphs


def a_first_step_out_of_memory_is_planned_again() -> None:
    """The failed step is undone, its traces are forgotten, and the second plan has a larger margin."""
    before = [weight.numpy() for weight in WEIGHTS]
    failures = [True]

    def fail(x: Any) -> Any:
        if failures and failures.pop():
            raise MemoryError("OOM when allocating tensor")
        return x

    def step(x: Any) -> Any:
        loss = train(x)
        with tf.control_dependencies([loss]):
            return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0) as texts:
        function = tf.function(step)
        function(BATCH)
        report = lms.report()
        assert report.retries == 1
        budgets = [graph.budget_bytes for graph in report.edited]
        assert budgets == [3 << 20, (3 << 20) * 3 // 4], budgets
    assert any("planned again with margin 0.25" in text for text in texts), texts
    after = [weight.numpy() for weight in WEIGHTS]
    for weight, value in zip(WEIGHTS, before, strict=True):
        weight.assign(value)
    tf.function(train)(BATCH)
    assert all((weight.numpy() == value).all() for weight, value in zip(WEIGHTS, after, strict=True))


def the_last_try_is_policy_all() -> None:
    """Margin first, then the least memory, each from the variables of before; then the error."""
    start = [weight.numpy() for weight in WEIGHTS]
    seen: list[Any] = []

    def fail(x: Any) -> Any:
        seen.append(WEIGHTS[0].numpy())
        raise MemoryError("OOM when allocating tensor")

    def step(x: Any) -> Any:
        loss = train(x)
        with tf.control_dependencies([loss]):
            return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0) as texts:
        try:
            tf.function(step)(BATCH)
        except tf.errors.ResourceExhaustedError as error:
            assert "largest tensors alive" in str(error), error
        else:
            raise AssertionError("the error is lost")
        report = lms.report()
        assert report.retries == 2
        assert [graph.policy for graph in report.edited] == ["budget", "budget", "all"]
    assert len(seen) == 3
    assert any("planned again with policy all instead of budget" in text for text in texts), texts
    for weight, value in zip(WEIGHTS, start, strict=True):
        weight.assign(value)


def a_later_step_out_of_memory_is_not_repeated() -> None:
    """It has updated variables that nobody kept; the message says where to start again."""
    failures = [False] * (1 + LATER_STEPS) + [True]

    def fail(x: Any) -> Any:
        if failures.pop(0):
            raise MemoryError("OOM when allocating tensor")
        return x

    def step(x: Any) -> Any:
        loss = train(x)
        return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0):
        function = tf.function(step)
        for _ in range(1 + LATER_STEPS):
            function(BATCH)
        try:
            function(BATCH)
        except tf.errors.ResourceExhaustedError as error:
            assert "last checkpoint" in str(error), error
        else:
            raise AssertionError("the error is lost")
        assert lms.report().retries == 0


def a_scope_called_lms_is_no_edit() -> None:
    """A user's own name must not pass for the mark of an edit."""

    def step(x: Any) -> Any:
        with tf.name_scope("lms"):
            return train(x)

    with enabled(policy="all"):
        tf.function(step)(BATCH)
        assert lms.report().edited


def a_loop_of_compat_v1_is_planned_too() -> None:
    """Behind TensorFlow's optimizer it is a loop like all others."""
    with enabled(policy="all"):
        tf.compat.v1.disable_control_flow_v2()
        try:
            with tf.Graph().as_default() as graph:
                x = tf.compat.v1.placeholder(tf.float32, (1024, 128))
                weight = tf.compat.v1.get_variable("w", (128, 128), use_resource=True)
                h = x
                for _ in range(10):
                    h = tf.tanh(h @ weight)
                halve = (lambda i, _: i < 3, lambda i, y: (i + 1, y * 0.5), (0, tf.reduce_sum(h)))
                loss = tf.while_loop(*halve)[1]
                update = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
                start = tf.compat.v1.global_variables_initializer()
            with tf.compat.v1.Session(graph=graph) as session:
                session.run(start)
                session.run(update, {x: BATCH.numpy()})
        finally:
            tf.compat.v1.enable_control_flow_v2()
        report = lms.report()
    assert [graph.name for graph in report.edited] == ["session graph"], report
    assert report.edited[0].executed == report.edited[0].tensors > 0


def a_fault_of_our_own_trains_as_it_is() -> None:
    """What planning stumbles over is a warning with its type, and in a debug run the log has the fault."""

    def stumble(*_: Any) -> Any:
        raise KeyError("conv_7")

    original, faults = planning.decide, []
    planning.decide = stumble
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: faults.append(record.exc_info[0])  # type: ignore[method-assign,index]
    logging.getLogger("lms").addHandler(listener)
    try:
        with enabled(policy="all") as texts:
            tf.function(train)(BATCH)
            assert not lms.report().edited
        assert not faults
        with enabled(policy="all", debug=True):
            tf.function(train)(BATCH)
        assert faults == [KeyError]
    finally:
        planning.decide = original
        logging.getLogger("lms").removeHandler(listener)
        logging.getLogger("lms").setLevel(logging.NOTSET)
    said = "stays as it is: LMS has a fault here (KeyError: 'conv_7'); debug=True (LMS_DEBUG=1) shows where"
    assert any(said in text for text in texts), texts


def a_second_try_starts_from_what_kernels_had_written_too() -> None:
    """Momentum and counters are only written by handle, and are put back like what is read."""
    momentum = tf.Variable(tf.ones((128, 128)), trainable=False)
    count = tf.Variable(0, trainable=False)
    start = [weight.numpy() for weight in WEIGHTS]
    failures = [True]

    def fail(x: Any) -> Any:
        if failures and failures.pop():
            raise MemoryError("OOM when allocating tensor")
        return x

    def step(x: Any) -> Any:
        loss = train(x)
        update = tf.raw_ops.ResourceApplyMomentum(
            var=WEIGHTS[0].handle, accum=momentum.handle, lr=0.1, grad=tf.ones((128, 128)), momentum=0.5
        )
        counted = count.assign_add(1, read_value=False)
        with tf.control_dependencies([update, counted]):
            return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0):
        tf.function(step)(BATCH)
        assert lms.report().retries == 1
    assert (momentum.numpy() == 1.5).all() and count.numpy() == 1, (momentum.numpy()[0, 0], count.numpy())
    for weight, value in zip(WEIGHTS, start, strict=True):
        weight.assign(value)


def a_step_with_collectives_is_not_tried_again() -> None:
    """Other ranks have received a part of it; the message says so."""

    def fail(_: Any) -> Any:
        raise MemoryError("OOM when allocating tensor")

    def reduced(x: Any) -> Any:
        numbers = {"group_size": 1, "group_key": 1, "instance_key": 1, "ordering_token": []}
        return tf.raw_ops.CollectiveReduceV2(input=x, merge_op="Add", final_op="Id", **numbers)

    def step(x: Any) -> Any:
        loss = train(x)
        loss = tf.cond(loss < 0, lambda: reduced(loss), lambda: loss)
        return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0):
        try:
            tf.function(step)(BATCH)
        except tf.errors.ResourceExhaustedError as error:
            assert "other ranks may have received" in str(error), error
        assert lms.report().retries == 0


def a_full_store_is_told_as_one() -> None:
    """The device has room then: neither a larger margin nor a smaller one helps."""

    def fail(_: Any) -> Any:
        raise MemoryError("LMS store: no room for 8 bytes. Raise host_mem_limit_mb.")

    def step(x: Any) -> Any:
        loss = train(x)
        return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0):
        try:
            tf.function(step)(BATCH)
        except tf.errors.ResourceExhaustedError as error:
            assert "LMS store" in str(error) and "ran out of memory on" not in str(error), error
        assert lms.report().retries == 0


def runs_out(x: Any) -> None:
    """Train, and run out of memory behind it each time."""

    def fail(_: Any) -> Any:
        raise MemoryError("OOM when allocating tensor")

    tf.numpy_function(fail, [train(x)], [])


def the_message_that_remains_explains() -> None:
    """Out of memory twice: the error names tensors, the plan and what to change."""
    with enabled(policy="all"):
        try:
            tf.function(runs_out)(BATCH)
        except tf.errors.ResourceExhaustedError as error:
            text = str(error)
        assert "largest tensors alive" in text and "0.5 MiB" in text and " 0.0 MiB  " not in text, text
        assert "Policies 'all' and 'auto' were both tried" in text and "LMS_" not in text, text


def the_message_tells_of_the_step_that_failed() -> None:
    """Another step of the same name was planned since, whose tensors are smaller."""
    fails = [False]

    def fail(_: Any) -> Any:
        if fails[0]:
            raise MemoryError("OOM when allocating tensor")
        return []

    def made() -> Any:
        def step(x: Any) -> None:
            tf.numpy_function(fail, [train(x)], [])

        return tf.function(step)

    with enabled(policy="all"):
        large, small = made(), made()
        large(BATCH)
        small(BATCH[:256])
        for step, nbytes in ((large, "0.5 MiB"), (small, "0.1 MiB"), (large, "0.5 MiB")):
            fails[0] = True
            try:
                step(BATCH if step is large else BATCH[:256])
            except tf.errors.ResourceExhaustedError as error:
                text = str(error)
            fails[0] = False
            assert f" {nbytes}  " in text, text


def behind_policy_all_comes_auto() -> None:
    """The plan of the fewest bytes may find no room where one for more bytes does."""
    start, tries = [weight.numpy() for weight in WEIGHTS], [0]

    def fail(_: Any) -> Any:
        tries[0] += 1
        if tries[0] == 1:
            raise MemoryError("OOM when allocating tensor")
        return []

    def step(x: Any) -> None:
        tf.numpy_function(fail, [train(x)], [])

    with enabled(policy="all") as texts:
        tf.function(step)(BATCH)
        assert lms.report().retries == 1 and tries == [2]
    assert any("planned again with policy auto instead of all" in text for text in texts), texts
    for weight, value in zip(WEIGHTS, start, strict=True):
        weight.assign(value)


def a_plan_of_all_above_its_budget_is_not_tried_again() -> None:
    """Nor is one of ``auto`` behind it that is above the budget: no plan needs less."""
    with enabled(policy="all", budget_bytes=1 << 20):
        try:
            tf.function(runs_out)(BATCH)
        except tf.errors.ResourceExhaustedError as error:
            assert "largest tensors alive" in str(error), error
        else:
            raise AssertionError("the error is lost")
        assert lms.report().retries == 0


def every_transport_trains_the_same_bits() -> None:
    """Through memory, through a file without a name, and through NumPy."""
    start = [weight.numpy() for weight in WEIGHTS]
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for fields in ({}, {"store_dir": directory}, {"transport": "numpy"}):
            for weight, value in zip(WEIGHTS, start, strict=True):
                weight.assign(value)
            with enabled(policy="all", **fields):
                tf.function(train)(BATCH)
                report = lms.report()
            assert report.transport == fields.get("transport", "file" if fields else "host")
            assert report.store.bytes_out > 0
            results.append(b"".join(weight.numpy().tobytes() for weight in WEIGHTS))
        assert not os.listdir(directory)
    assert len(set(results)) == 1


def a_store_that_is_too_small_is_an_error() -> None:
    """Whether the step runs unedited then or fails for want of memory: this error is the one to mend."""

    def fail(_: Any) -> Any:
        raise MemoryError("OOM when allocating tensor")

    def failing(x: Any) -> None:
        tf.numpy_function(fail, [train(x)], [])

    def failing_by_itself(x: Any) -> None:
        tf.function(failing).get_concrete_function(x)(x)

    for step in (tf.function(train), tf.function(failing), failing_by_itself):
        with enabled(policy="threshold", swapout_threshold=2, host_mem_limit_mb=1):
            try:
                step(BATCH)
            except LMSError as error:
                assert "host_mem_limit_mb" in str(error)
            else:
                raise AssertionError("it trained")


def a_budget_that_cannot_be_met_says_the_floor() -> None:
    """Number, op and what would help."""
    with enabled(policy="budget", budget_bytes=1 << 19) as texts:
        tf.function(train)(BATCH)
    assert any("is not met" in text and "smaller batch" in text for text in texts), texts


def debug_logs_each_decision() -> None:
    """What goes and when it comes back, and why the rest stays."""
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lms")
    logger.addHandler(listener)
    try:
        with enabled(policy="all", debug=True):
            tf.function(train)(BATCH)
            (graph,) = lms.report().edited
    finally:
        logger.removeHandler(listener)
    assert sum(": out after " in line for line in lines) == graph.tensors, lines
    assert sum(": stays: " in line for line in lines) == sum(count for _, count in graph.rejected), lines


def a_start_that_fails_can_be_tried_again() -> None:
    """Nothing of it stays."""
    install = SessionWatch.install

    def broken(_: Any) -> None:
        raise RuntimeError("broken")

    call = type(tf.function(train)).__call__
    SessionWatch.install = broken  # type: ignore[method-assign]
    try:
        with enabled(policy="all"):
            raise AssertionError("it started")
    except RuntimeError as error:
        assert str(error) == "broken"
    finally:
        SessionWatch.install = install  # type: ignore[method-assign]
    assert type(tf.function(train)).__call__ is call
    with enabled(policy="all"):
        tf.function(train)(BATCH)
        assert lms.report().edited


def a_step_that_makes_variables_is_planned_as_it_runs() -> None:
    """Only where first values need the batch does TensorFlow run another graph for the first step."""
    made: list[Any] = []

    def step(x: Any, start: Any) -> Any:
        if not made:
            made.append(tf.Variable(start(x), trainable=False))
        return made[0].assign_add(tf.reshape(train(x), (1,)))

    def from_nothing(_: Any) -> Any:
        return tf.zeros(1)

    def from_the_batch(x: Any) -> Any:
        return x[0, :1] * 0.0

    for start, graphs in ((from_nothing, 1), (from_the_batch, 2)):
        before = [weight.numpy() for weight in WEIGHTS]
        with enabled(policy="all") as texts:
            function = tf.function(step)
            losses = [float(function(BATCH, start)[0]) for _ in range(2)]
            assert len(lms.report().edited) == graphs, lms.report()
        assert 0 < losses[0] < losses[1], losses
        assert not texts, texts
        for weight, value in zip(WEIGHTS, before, strict=True):
            weight.assign(value)
        made.clear()


def a_first_step_that_makes_variables_is_planned_again_too() -> None:
    """They have their first values before the step runs, and get them back."""
    made: list[Any] = []
    failures = [True]
    before = [weight.numpy() for weight in WEIGHTS]

    def fail(x: Any) -> Any:
        if failures and failures.pop():
            raise MemoryError("OOM when allocating tensor")
        return x

    def step(x: Any) -> Any:
        if not made:
            made.append(tf.Variable(0, trainable=False))
        loss = train(x)
        with tf.control_dependencies([made[0].assign_add(1, read_value=False)]):
            return tf.numpy_function(fail, [loss], tf.float32)

    with enabled(policy="budget", budget_bytes=3 << 20, margin=0.0):
        tf.function(step)(BATCH)
        assert lms.report().retries == 1
    assert made[0].numpy() == 1
    for weight, value in zip(WEIGHTS, before, strict=True):
        weight.assign(value)


def open_sizes_are_no_numbers() -> None:
    """Rows that the values choose have no size to plan with: no peak is told, and no batch size asked for."""

    def chosen(x: Any) -> Any:
        return forward(tf.boolean_mask(x, x[:, 0] > 0.5))

    with enabled(policy="all") as texts:
        tf.function(train)(BATCH, chosen)
        report = lms.report()
        assert report.planned_peak_bytes is None and report.open_sizes, report
        assert report.measured_peak_bytes
    assert any("depend on the data, or" in text and "stay on the device" in text for text in texts), texts


def what_is_not_on_says_so() -> None:
    """A report without LMS is an error with the remedy."""
    try:
        installation.report()
    except LMSError as error:
        assert "lms.enable()" in str(error)


CASES = (
    nested_functions_become_visible,
    a_signature_still_converts_its_arguments,
    xla_is_off_and_comes_back,
    a_tape_outside_is_reported,
    a_function_traced_before_is_planned,
    a_step_that_fits_is_left_alone,
    a_loop_within_a_step_is_no_step_of_its_own,
    a_loop_of_steps_is_planned_turn_by_turn,
    inference_is_left_alone,
    a_first_step_out_of_memory_is_planned_again,
    a_scope_called_lms_is_no_edit,
    a_loop_of_compat_v1_is_planned_too,
    a_fault_of_our_own_trains_as_it_is,
    a_second_try_starts_from_what_kernels_had_written_too,
    the_last_try_is_policy_all,
    a_later_step_out_of_memory_is_not_repeated,
    a_step_with_collectives_is_not_tried_again,
    a_full_store_is_told_as_one,
    the_message_that_remains_explains,
    the_message_tells_of_the_step_that_failed,
    behind_policy_all_comes_auto,
    a_plan_of_all_above_its_budget_is_not_tried_again,
    every_transport_trains_the_same_bits,
    a_store_that_is_too_small_is_an_error,
    a_budget_that_cannot_be_met_says_the_floor,
    debug_logs_each_decision,
    a_start_that_fails_can_be_tried_again,
    a_step_that_makes_variables_is_planned_as_it_runs,
    a_first_step_that_makes_variables_is_planned_again_too,
    open_sizes_are_no_numbers,
    what_is_not_on_says_so,
)

if __name__ == "__main__":
    import traceback

    for case in CASES:
        try:
            case()
        except Exception:
            traceback.print_exc(file=sys.stderr)
        else:
            print("held:", case.__name__, flush=True)
