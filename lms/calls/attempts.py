"""Run steps, timed and compared with their plans; try again what another plan may mend."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from lms.calls.planning_engine import PlanningEngine
from lms.calls.runs_apart import RunsApart
from lms.device.device import is_out_of_memory, is_out_of_pinned_memory
from lms.intercept.batch_growth import Growth
from lms.intercept.function_calls import Call
from lms.intercept.oom_retry import NO_ROOM, Rescue
from lms.report.history import History
from lms.report.render import explain_out_of_memory, explain_unplanned
from lms.report.stats import GraphStats, Report
from lms.report.step_log import StepLog
from lms.report.step_status import open_status
from lms.transports.base import StoreStats

logger = logging.getLogger("lms")

FULL_STORE = "LMS store:"
"""The beginning of the swap op's message when the store is full, and not the device: more swaps would not
help, and the message says what does."""

FULL_POOL = (
    "The pool of pinned host memory, which swaps and batches share, is full. Raise "
    "TF_GPU_HOST_MEM_LIMIT_IN_MB (MiB) as far as the host has memory, or use less batch."
)
OTHER_THREADS = (
    "Other threads were calling steps at that moment, and each step is planned for the whole device: call "
    "one at a time, or share the device out by policy='budget' and budget_bytes."
)


class _RanApart(Exception):  # noqa: N818 - it is no error
    """Ends a run of a step apart from other ranks, which is undone and does not count."""


class _Fresh(threading.local):
    """The results of the edits in this thread since its step began."""

    def __init__(self) -> None:
        self.stats: list[GraphStats] = []
        self.noted: list[BaseException] = []


class Attempts:
    """Runs steps of functions and sessions until they succeed, or no other plan may help.

    Args:
        engine: The engine that plans the steps.
        environ: The process's variables.
        growth: Counts the plans.
        apart: Has plans run apart from other ranks first.

    Raises:
        PlaceError: If the file for the steps, or into the folder for TensorBoard, cannot be written.
    """

    def __init__(
        self, engine: PlanningEngine, environ: Mapping[str, str], growth: Growth, apart: RunsApart
    ) -> None:
        self._engine, self._growth, self._apart, config = engine, growth, apart, engine.config
        warn, path = engine.books.warn, config.stats_file
        self.log = StepLog(path, environ, self._counters, warn) if path else None
        self.status = open_status(config.tensorboard, environ, self._figures)
        self.history = History(lambda: self._counters()[1])
        self._fresh = _Fresh()
        self._noted_elsewhere: list[BaseException] = []

    def note(self, error: BaseException, *, is_here: bool) -> None:
        """Have an error that the user must hear of raised once this thread's step has run or was stopped.

        A body that a dataset runs is edited in a thread of TensorFlow's: then once any step has run.
        """
        (self._fresh.noted if is_here else self._noted_elsewhere).append(error)

    def raise_what_was_noted(self) -> None:
        """Raise the first error that an edit has noted.

        The edit itself could not raise it, for TensorFlow called it. The error hides one of the step itself.
        """
        noted = [*self._fresh.noted, *self._noted_elsewhere]
        self._fresh.noted, self._noted_elsewhere = [], []
        noted.sort(key=lambda error: isinstance(error, Exception))
        if noted:
            raise noted[0]

    def forget_plans(self) -> None:
        """Take the plans of this thread's step from the report: they do not run."""
        self._engine.books.collector.withdraw(self._fresh.stats)
        self._fresh.stats = []

    def planned(self, stats: GraphStats) -> None:
        """Note that a frame of a graph has been planned in this thread's step."""
        if stats.edited or stats.whole:
            self._fresh.stats.append(stats)

    def watch_steps_of(self, owner: Any) -> None:
        """Have the steps of a function or a session's graph kept, logged and told."""
        for watcher in (self.history, self.log, self.status):
            if watcher is not None:
                watcher.planned(owner)

    def run(
        self,
        call: Call,
        step: Callable[[], Any],
        rescue: Rescue,
        owner: Any,
        logged: str,
        *,
        aside: Callable[[], AbstractContextManager[None]],
        idle: bool = True,
        is_alone: Callable[[], bool],
        beside: Callable[[], Sequence[Any]] = tuple,
    ) -> Any:
        """Run the step, and try it again after each failure that another plan may mend.

        Args:
            call: The call.
            step: Runs it once.
            rescue: What is kept to run it again.
            owner: The function, or the graph of a session.
            logged: The name of the step in the log of steps.
            aside: Has sessions of this thread run something for us.
            idle: Whether the log has a line of it although it moves nothing.
            is_alone: Tells whether no other step may have changed its variables since it began.
            beside: Returns the functions that other threads are calling now.
        """
        log, engine, function = self.log, self._engine, call.function
        try:
            while True:
                once = self._timed(owner, partial(self._counted, partial(self._real, call, step)))
                try:
                    done = once() if log is None else log.run(owner, logged, once, idle=idle)
                except tf.errors.OpError as error:
                    self._prepare(error, call, rescue, owner, aside=aside, is_alone=is_alone, beside=beside)
                except _RanApart:
                    logger.info("%s ran apart from other ranks, to see whether its plan fits", function._name)
                    with aside():
                        self._undo(call)
                    call.again = True
                    continue
                else:
                    rescue.succeeded(call)
                    return done
                call.again = True
                self._growth.renew(function, [one.name for one in call.ran] or [""])  # a session has no name
                engine.books.collector.retries += 1
                engine.books.warn(rescue.message)
        finally:
            with aside():
                self._apart.leave(call)

    def _prepare(
        self,
        error: Any,
        call: Call,
        rescue: Rescue,
        owner: Any,
        *,
        aside: Callable[[], AbstractContextManager[None]],
        is_alone: Callable[[], bool],
        beside: Callable[[], Sequence[Any]],
    ) -> None:
        """Undo a failed step, to be tried again; nothing here holds its error then, and with that its inputs.

        Raises:
            tf.errors.OpError: If it is not tried again.
        """
        failure = call.feed.failure or error
        if (other := self._other_than_device_memory(failure)) is not None:
            raise other from (None if other is failure else error)
        others = OTHER_THREADS if beside() else ""
        with aside():
            is_retried = rescue.prepare(call, is_alone=is_alone())
        if not is_retried:
            raise self._explained(failure, owner, call, rescue.refusal, others) from error
        self._apart.leave(call, undone=True)

    def _real(self, call: Call, step: Callable[[], Any]) -> Any:
        """Run a step; it does not count if it ran apart from other ranks.

        Raises:
            _RanApart: If that is so. Other errors than want of memory may come of that: copies are no sums.
        """
        try:
            made = _finished(step)
        except tf.errors.OpError as error:
            if not self._apart.is_apart(call) or is_out_of_memory(error):
                raise
            call.apart.runs = 1
        else:
            if not self._apart.is_apart(call):
                self._apart.ran(call)
                return made
            del made
        self._engine.books.collector.withdraw(self._fresh.stats)
        raise _RanApart

    def _undo(self, call: Call) -> None:
        """Undo a run of a step apart from other ranks.

        Raises:
            tf.errors.ResourceExhaustedError: If there is no room for that.
        """
        try:
            self._apart.undo(call)
        except tf.errors.ResourceExhaustedError as error:
            raise _with_lines(error, NO_ROOM) from error

    def _counted(self, step: Callable[[], Any]) -> Any:
        """Run a step; if it was planned in this run, compare the swaps that ran with the plan."""
        outer, self._fresh.stats = self._fresh.stats, []
        before, began_s = self._swap_outs(), time.perf_counter()
        try:
            result = step()
            took_s = time.perf_counter() - began_s
            self._compare(before or 0)
            self._tell_of_segments(took_s)
        finally:
            self._fresh.stats = outer
            self.raise_what_was_noted()
        return result

    def _tell_of_segments(self, seconds: float) -> None:
        """Note how long the first run of steps took that XLA compiles."""
        if any(one.segments or one.whole for one in self._fresh.stats):
            logger.info("the first run, in which XLA compiles the step, took %.1f s", seconds)
            self._engine.books.collector.first_run(self._fresh.stats, seconds)

    def _moved(self) -> StoreStats | None:
        transport = self._engine.resources.active_transport
        return transport.stats() if transport is not None and transport.counts else None

    def _swap_outs(self) -> int | None:
        """Count the copies out that steps made; those that made room between steps are not theirs."""
        moved = self._moved()
        return None if moved is None else moved.swap_outs - self._engine.resources.host.sent

    def _compare(self, before: int) -> None:
        """Warn where an edited step ran without its swaps: TensorFlow has not taken the edit."""
        fresh, after = [stats for stats in self._fresh.stats if stats.edited], self._swap_outs()
        if not fresh or after is None:
            return
        ran = after - before
        wanted = sum(stats.copies_out for stats in fresh)
        self._engine.books.collector.executed(fresh, ran)
        if ran < wanted and not any(stats.varies for stats in fresh):
            self._engine.books.warn(
                f"{fresh[0].name}: {wanted} tensors were planned to be swapped and {ran} were: TensorFlow "
                "has not taken the edited graph; its log says why (TF_CPP_MIN_LOG_LEVEL=0)"
            )

    def _timed(self, owner: Any, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a step whose time is kept, and told where somebody follows this process."""
        kept = partial(self.history.run, owner, step)
        return kept if self.status is None else partial(self.status.run, owner, kept)

    def _figures(self) -> tuple[Report, bool]:
        transport = self._engine.resources.active_transport
        return self._engine.report(settled=False), transport is not None and transport.counts

    def _counters(self) -> tuple[StoreStats | None, int | None]:
        memory = self._engine.fullest_device.memory()
        return self._moved(), None if memory is None else memory[1]

    def _other_than_device_memory(self, failure: Any) -> Exception | None:
        """Return the error to raise where a step failed for anything but want of the device's memory."""
        if is_out_of_pinned_memory(failure, self._engine.resources.devices):
            return _with_lines(failure, FULL_POOL)
        failed_otherwise = not is_out_of_memory(failure) or FULL_STORE in failure.message
        return failure if failed_otherwise else None

    def _explained(self, error: Any, owner: Any, call: Call, refusal: str, others: str) -> Exception:
        collector, name = self._engine.books.collector, call.function._name
        if collector.latest is not None and not self.history.holds_step(owner):
            limit = self._engine.fullest_device.limit_bytes
            return _with_lines(error, explain_unplanned(name, limit), others)
        policy, swaps = self._engine.config.policy, self._engine.config.recompute != "only"
        streams = self._engine.resources.host.is_on
        report = self._engine.report()
        planned = collector.planned_of(name, call.functions)
        explanation = explain_out_of_memory(planned, report, policy=policy, swaps=swaps, streams=streams)
        return _with_lines(error, explanation, refusal, others)


def _finished(step: Callable[[], Any]) -> Any:
    """Run a step to its end, also where functions run asynchronously (``set_synchronous_execution``).

    What ran is compared with the plan, and what failed is tried again, behind it.
    """
    try:
        made = step()
        if context.is_async():
            context.async_wait()
    except tf.errors.OpError:
        if context.is_async():
            context.async_clear_error()  # else each later op raises the error again
        raise
    return made


def _with_lines(error: Any, *lines: str) -> Exception:
    text = "\n".join(line for line in (error.message, *lines) if line)
    explained: Exception = tf.errors.ResourceExhaustedError(error.node_def, error.op, text)
    return explained
