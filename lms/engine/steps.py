"""Follow the calls of training steps: collect what a call knows, choose its plan, and retry it."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager import context

from lms.config import LMSConfig
from lms.device.device import Device, is_out_of_memory, is_out_of_pinned_memory
from lms.engine.work import Task, Work
from lms.intercept.batch_growth import Growth
from lms.intercept.batch_replay import Feeder
from lms.intercept.function_calls import Call, RuntimeCall, Watch
from lms.intercept.keras_batch_size import BatchSizes
from lms.intercept.missed_steps import Unseen
from lms.intercept.oom_retry import Rescue
from lms.intercept.sessions import SessionRun, SessionStep, SessionWatch
from lms.intercept.side_effects import draws_from_seed, functions_draw_from_seed
from lms.intercept.variable_values import VariableValues
from lms.optimizer.plugin import Request
from lms.optimizer.stopped import LEFT
from lms.planner.planner import LEAVES_WHAT_FITS, usable_bytes
from lms.reader.shapes import ShapeHints
from lms.report.history import History
from lms.report.render import explain_out_of_memory, explain_unplanned, mib
from lms.report.stats import GraphStats, Report
from lms.report.step_log import StepLog
from lms.report.step_status import open_status
from lms.rewriter.compiled_functions import CompiledFunctions
from lms.rewriter.segments import compiled_types, why_no_xla
from lms.transports.base import StoreStats

if TYPE_CHECKING:
    from lms.engine.engine import Engine

logger = logging.getLogger("lms")

FULL_STORE = "LMS store:"
"""The beginning of the swap op's message when the store is full, and not the device: more swaps would not
help, and the message says what does."""

FULL_POOL = (
    "The pool of pinned host memory, which swaps and batches share, is full. Raise "
    "TF_GPU_HOST_MEM_LIMIT_IN_MB (MiB) as far as the host has memory, or use less batch."
)

TRACED_ONCE = "to plan it once, begin with the longest batch or pad all to one length"
"""The remedy for batches of many lengths."""

NOT_OPTIMIZED = (
    "TensorFlow does not optimize the graph of a session with place_pruned_graph, which InteractiveSession "
    "sets; make a tf.compat.v1.Session"
)

OFF = "xla is 'off'; with xla='whole', the default, a step that fits is compiled as one"
"""Why XLA compiles nothing at all."""

SWAPS_ALL = (
    "swaps what fits, too, and no swap would survive in what is compiled as one; policy 'auto' leaves what "
    "fits to XLA"
)
"""Why it compiles nothing as one with a policy, whose name comes before."""


@dataclass(frozen=True)
class _Room:
    """What a step may need that XLA compiles as one."""

    step: str
    device: Device
    nbytes: int
    """Of all that the device holds."""


class _Fresh(threading.local):
    """The results of the edits in this thread since its step began."""

    def __init__(self) -> None:
        self.stats: list[GraphStats] = []
        self.noted: list[BaseException] = []
        self.whole: list[_Room] = []
        """The room of a step that XLA compiles as one, before it has run so for the first time."""


class Steps:
    """Watches the calls of steps for one engine.

    Args:
        engine: The engine that plans the steps.
        environ: The process's variables.

    Raises:
        PlaceError: If the file for the steps, or into the folder for TensorBoard, cannot be written.
    """

    def __init__(self, engine: "Engine", environ: Mapping[str, str]) -> None:
        self._engine, config = engine, engine.config
        self.batch_sizes, self.growth, self.feeder = BatchSizes(), Growth(), Feeder()
        self.rescue = Rescue(config, engine.resources.host)
        self.values = VariableValues(engine.resources.host)
        self.unseen = Unseen(engine.books.warn)
        self.watch = Watch(self, engine.options)
        self.sessions = SessionWatch(self, engine.options)
        self.log = StepLog(config.stats_file, environ, self._counters) if config.stats_file else None
        self.status = open_status(config.tensorboard, environ, self._figures)
        self.history = History(lambda: self._counters()[1])
        self._functions = CompiledFunctions()
        self._fresh = _Fresh()
        self.functions_run: set[str] = set()
        """Names of the functions of TensorFlow's runtime that ran; who wants to know empties it before."""
        self._noted_elsewhere: list[BaseException] = []

    def install(self) -> None:
        """Begin to watch."""
        self.watch.install()
        self.unseen.install()
        self.sessions.install()
        self.values.install()
        self.batch_sizes.install()

    def uninstall(self) -> None:
        """Put TensorFlow's own methods back; the sizes of Keras's batches are noted further on."""
        functions, host = self._functions, self._engine.resources.host
        self.watch.uninstall(functions.without_xla if host.is_on else None)
        self.unseen.uninstall()
        self.sessions.uninstall()
        self.values.uninstall()

    # --- what the engine asks ----------------------------------------------------------------------------

    def task(self, request: Request) -> Task | None:
        """Describe a graph that TensorFlow has optimized; ``None`` where it is no step of a call."""
        if self.sessions.is_aside:
            return None
        config = self.rescue.config
        run = self.sessions.run
        if run is not None:
            return self._session_task(request, run)
        runtime = self.watch.runtime
        if runtime is None:
            return Task(request, "a function", config, ShapeHints(batch_size=config.batch_size))
        if runtime.taped or "__backward_" in runtime.name:
            why = "a gradient tape around the function is recording"
            self._engine.books.skip(function_name(runtime.name), why, 0)
            return None
        if runtime.whole:
            return None
        call = self.watch.call
        shapes = {}
        if self.watch.is_here:
            shapes = self.growth.argument_shapes(call.function, runtime.name, runtime.inputs)
        hints = ShapeHints(shapes, call.batches, self._batch_size(call))
        may_compile = bool(runtime.copy) and self._why_no_xla() is None
        may_be_whole = may_compile and self._may_be_whole(call, runtime)
        task = Task(
            request,
            function_name(runtime.name),
            config,
            hints,
            plan=self.growth.generation(call.function, runtime.name),
            beside=self.growth.beside(call.function, runtime.name),
            compiled=may_compile and (may_be_whole or config.xla == "auto"),
            may_be_whole=may_be_whole,
        )
        if not self.watch.is_here:
            return task
        return replace(task, function=runtime.copy or runtime.name, inputs=runtime.inputs)

    def _session_task(self, request: Request, run: SessionRun) -> Task | None:
        if self.sessions.leaves(run.graph):
            return None
        charge = self.sessions.charge_of(run.graph)
        config, size = self._rescue_of(run).config, self._session_batch_size(run)
        assumed = charge.assumed_batch if charge else None
        hints = ShapeHints(batch_size=size or assumed, feeds=_largest_feeds(run))
        guest, limit = (charge.guest, charge.limit_bytes) if charge else (None, None)
        step = run.call.function
        task = Task(request, step._name, config, hints, shared=run.shared, guest=guest, limit_bytes=limit)
        plan, beside = self.growth.generation(step, ""), self.growth.beside(step, "")
        return replace(task, plan=plan, beside=beside, predicates=step.predicates)

    def _rescue_of(self, run: SessionRun) -> Rescue:
        charge = self.sessions.charge_of(run.graph)
        return self.rescue if charge is None else charge.rescue

    def _session_batch_size(self, run: SessionRun) -> int | None:
        return self._rescue_of(run).config.batch_size or self.batch_sizes.of_graph(run.graph)

    def keeps_conditions(self, *, keeps: bool) -> None:
        """Note whether the graph of a session's run keeps its conditions, because it fits with them."""
        if (run := self.sessions.run) is not None:
            run.call.function.keeps_conditions = keeps

    def note(self, error: BaseException) -> None:
        """Have an error that the user must hear of raised once the step of this thread has run.

        A body that a dataset runs is edited in a thread of TensorFlow's: then once any step has run.
        """
        is_here = self.watch.is_here or self.sessions.run is not None
        (self._fresh.noted if is_here else self._noted_elsewhere).append(error)

    def planned(self, work: Work, stats: GraphStats) -> None:
        """Note that a frame of a graph has been planned."""
        if stats.edited or stats.whole:
            self._fresh.stats.append(stats)
        call, runtime, run = self.watch.call, self.watch.runtime, self.sessions.run
        fits, is_body = work.decision is None or work.decision.plan.feasible, work.task.is_body
        if run is not None:
            self._watch_steps_of(run.graph)
            self._planned_in_session(run, work, fits=fits, edited=stats.edited)
            return
        if work.table is None:
            return
        if not work.whole:  # where memory runs out, XLA has freed the variables that it was to update
            self.rescue.planned(
                call, work.table, work.task.inputs, fits=fits, edited=stats.edited, is_body=is_body
            )
        if call.function is not None:
            self._watch_steps_of(call.function)
        if runtime is not None:
            hints = work.task.hints
            told = hints.batch_size if self._engine.config.batch_size is None else None
            arguments = {number: hints.arguments[number] for number in _open_arguments(work, hints)}
            draws = draws_from_seed(work.table)
            self.growth.planned(call.function, runtime.name, told, call.batches, arguments, draws=draws)

    def _planned_in_session(self, run: SessionRun, work: Work, *, fits: bool, edited: bool) -> None:
        call, table = run.call, work.table
        if table is None or work.task.is_body:
            return
        draws = functions_draw_from_seed(run.graph, table)
        if call.begun is not None:  # else its variables' values are not known
            self._rescue_of(run).planned(
                call, table, (), fits=fits, edited=edited, is_body=False, draws=draws
            )
        self.growth.planned(call.function, "", None, call.batches, {}, draws=draws)

    def left_whole(self, works: Sequence[Work]) -> None:
        """Note what a step may need that XLA shall compile as one, when it runs for the first time."""
        for work in works:
            room = usable_bytes(self._engine.config, work.limit_bytes)
            if room is not None:
                self._fresh.whole.append(_Room(work.task.name, work.device, work.residents.nbytes + room))

    # --- what the watch tells ----------------------------------------------------------------------------

    def drops_xla(self, function: Any) -> bool:
        """Warn that XLA is switched off for ``function``, unless it runs whole or in segments."""
        engine = self._engine
        if (obstacle := self._why_no_xla()) is None:
            return False
        if engine.refusal() is not None:
            return True
        engine.books.warn(f"XLA is off for {function._name}: {obstacle}")
        return True

    def without_xla(self, call: Call, runtime: RuntimeCall) -> str:
        """Return the name of the copy to run of a step that XLA compiles, unless it is left to XLA.

        That is also how XLA is off for a step that was traced before LMS could say so.
        """
        engine = self._engine
        if engine.resources.host.is_on:  # what XLA compiles would find no variables there
            return self._functions.without_xla(runtime.name)
        if runtime.taped or "__backward_" in runtime.name or engine.refusal() is not None:
            return ""
        if self.growth.is_whole(call.function, runtime.name):
            return ""
        copy = self._functions.copy_of(runtime.name)
        return "" if copy is None else copy.name

    def is_left_to_xla(
        self, call: Call, runtime: RuntimeCall, generation: int, error: tf.errors.OpError
    ) -> bool:
        """Tell whether a copy ended with ``error`` because its plan leaves the step to XLA, and note that."""
        if LEFT not in error.message:
            return False
        self.growth.leave_whole(call.function, runtime.name, generation)
        return True

    def generation(self, call: Call, runtime: RuntimeCall) -> int:
        """Return the number of the wanted plan; a new one where the call's arguments have grown."""
        if self._engine.refusal() is None:
            self.rescue.begins(call, runtime)
        grown = self.growth.outgrown_arguments(call.function, runtime.name, runtime.inputs)
        if grown:
            self._engine.books.warn(f"{function_name(runtime.name)} {grown}; {TRACED_ONCE}", TRACED_ONCE)
        return self.growth.generation(call.function, runtime.name)

    def ran(self, runtime: RuntimeCall) -> None:
        """Raise the errors that were noted while a function of the runtime ran."""
        self._fresh.whole = []
        self.functions_run.add(runtime.copy or runtime.name)
        self._raise_what_was_noted()

    def ran_whole(self, call: Call, runtime: RuntimeCall) -> None:
        """Have a step run in segments from now on that needed more than it may, compiled as one."""
        for room in self._fresh.whole:
            memory, forbid = room.device.memory(), self.growth.forbid_whole
            if memory is not None and memory[1] > room.nbytes and forbid(call.function, runtime.name):
                took = f"{mib(memory[1])} where {mib(room.nbytes)} are allowed"
                now = "in segments" if self._engine.config.xla == "auto" else "without XLA"
                self._engine.books.warn(f"{room.step} runs {now} from now on: as one it took {took}")

    def run(self, call: Call, step: Callable[..., Any]) -> Any:
        """Run the outermost call, with stand-ins for its iterators; try it again where a plan may help."""
        function = call.function
        if self._engine.refusal() is None:
            self.unseen.called(function)
        self._feed(function, call)

        def once() -> Any:
            with self.watch.aside():
                args, kwargs = call.feed.arguments()
            return step(*args, **kwargs)

        try:
            done = self._tried(call, once, self.rescue, function, function._name)
        finally:
            if call.feed.takes_several:
                self.growth.plan_together(function)
            call.feed.forget()
        self._engine.resources.fusion.step_done()
        return done

    def run_session(self, run: SessionRun, step: Callable[[int], Any]) -> Any:
        """Run a step of a session, counted and logged; try it again where a plan may help."""
        call, rescue = run.call, self._rescue_of(run)
        function: SessionStep = call.function
        shapes = run.whole_batches(None if function.ran else self._session_batch_size(run))
        call.batches = self.growth.at_least(function, shapes)
        self._renew_if_grown(call, None)
        if not function.ran and function.trains and not function.is_optimized:
            self._engine.books.warn(f"{function._name} is not planned: {NOT_OPTIMIZED}")

        def once() -> Any:
            generation = self.growth.generation(function, "")
            if self._engine.refusal() is None and not self.sessions.leaves(run.graph):
                with self.sessions.aside():
                    rescue.begins_in_session(call, function.values, is_new=generation not in function.ran)
            made = step(generation)
            function.ran.add(generation)
            return made

        graph, is_alone = run.graph, run.is_alone
        return self._tried(call, once, rescue, graph, "session run", idle=False, is_alone=is_alone)

    # --- inside ------------------------------------------------------------------------------------------

    def _batch_size(self, call: Call) -> int | None:
        """Find the batch size of a call: from the configuration, else its datasets, else Keras."""
        if self._engine.config.batch_size is not None:
            return self._engine.config.batch_size
        size = call.batch_size()
        if size or call.batches:
            return size
        latest = self.batch_sizes.latest
        return call.specified_size() if latest is None else latest

    def _feed(self, function: Any, call: Call) -> None:
        """Decide where the call's batches come from; have the step planned again if they have grown."""
        call.feed = self.feeder.feed(
            function,
            call.arguments,
            may_retry=self.rescue.is_ready,
            settles=self.rescue.settles(function),
            watched=self.growth.watches_shapes(function),
            told=partial(self._batch_size, call),
        )
        if call.feed.sizes_open:
            given = self._engine.config.batch_size
            call.batches = self.growth.at_least(function, call.feed.first_shapes(given))
        self._renew_if_grown(call, self._size_now(function, call))

    def _renew_if_grown(self, call: Call, size: int | None) -> None:
        """Have a step planned again whose batches have grown, and say so."""
        if grown := self.growth.outgrown(call.function, size, call.batches):
            text = f"{call.function._name} {grown}"
            many = TRACED_ONCE if call.batches else ""
            self._engine.books.warn(f"{text}; {many}" if many else text, many)

    def _size_now(self, function: Any, call: Call) -> int | None:
        """Find the size of the batches that a planned step is about to get, from Keras or its datasets."""
        told = self.batch_sizes.take()
        return call.batch_size() if told is None and self.growth.watches_size(function) else told

    def _tried(
        self,
        call: Call,
        step: Callable[[], Any],
        rescue: Rescue,
        owner: Any,
        logged: str,
        *,
        idle: bool = True,
        is_alone: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Run the step, and try it again after each failure that another plan may mend.

        Args:
            call: The call.
            step: Runs it once.
            rescue: What is kept to run it again.
            owner: The function, or the graph of a session.
            logged: The name of the step in the log of steps.
            idle: Whether the log has a line of it although it moves nothing.
            is_alone: Tells whether no other step may have changed its variables since it began.
        """
        log, engine, function = self.log, self._engine, call.function
        while True:
            once = self._timed(owner, partial(self._counted, step))
            try:
                done = once() if log is None else log.run(owner, logged, once, idle=idle)
            except tf.errors.OpError as error:
                failure = call.feed.failure or error
                if (other := self._other_than_device_memory(failure)) is not None:
                    raise other from (None if other is failure else error)
                with self.sessions.aside():
                    is_retried = rescue.prepare(call, is_alone=is_alone())
                if not is_retried:
                    raise self._explained(failure, owner, function._name, rescue.refusal) from error
            else:
                rescue.succeeded(call)
                return done
            self.growth.renew(function, "")
            engine.books.collector.retries += 1
            engine.books.warn(rescue.message)
            log = None

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
            self._raise_what_was_noted()
        return result

    def _may_be_whole(self, call: Call, runtime: RuntimeCall) -> bool:
        """Tell whether XLA can compile what it was to compile, for all that is known."""
        copy, may = self._functions.copy_of(runtime.name), self.growth.may_be_whole
        if copy is None or not may(call.function, runtime.name):
            return False
        return copy.types <= compiled_types(self._engine.resources.devices[0].type)

    def _why_no_xla(self) -> str | None:
        """Return why XLA compiles no step here, whole or in segments; ``None`` where it may."""
        config, used = self._engine.config, self._engine.resources
        if config.policy not in LEAVES_WHAT_FITS and config.xla == "whole":
            return f"policy {config.policy!r} {SWAPS_ALL}"
        if config.xla == "off":
            return OFF
        if context.is_async():
            return "eager execution is asynchronous (tf.config.experimental.set_synchronous_execution)"
        if config.xla == "auto" and (refused := segments_refused(config)) is not None:
            return refused
        if used.host.is_on:
            return "XLA compiles no function whose variables may lie on the host"
        return why_no_xla(used.devices[0])

    def _tell_of_segments(self, seconds: float) -> None:
        """Note how long the first run of steps took that XLA compiles."""
        if any(one.segments or one.whole for one in self._fresh.stats):
            logger.info("the first run, in which XLA compiles the step, took %.1f s", seconds)
            self._engine.books.collector.first_run(self._fresh.stats, seconds)

    def _raise_what_was_noted(self) -> None:
        """Raise the first error that an edit has noted.

        The edit itself could not raise it, for TensorFlow called it. The error hides one of the step itself.
        """
        noted = [*self._fresh.noted, *self._noted_elsewhere]
        self._fresh.noted, self._noted_elsewhere = [], []
        noted.sort(key=lambda error: isinstance(error, Exception))
        if noted:
            raise noted[0]

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

    def _watch_steps_of(self, owner: Any) -> None:
        """Have the steps of a function or a session's graph kept, logged and told."""
        for watcher in (self.history, self.log, self.status):
            if watcher is not None:
                watcher.planned(owner)

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

    def _explained(self, error: Any, owner: Any, name: str, refusal: str) -> Exception:
        collector = self._engine.books.collector
        if collector.latest is not None and not self.history.holds_step(owner):
            limit = self._engine.fullest_device.limit_bytes
            return _with_lines(error, explain_unplanned(name, limit))
        swaps = self._engine.config.recompute != "only"
        streams = self._engine.resources.host.is_on
        report = self._engine.report()
        explanation = explain_out_of_memory(collector.planned_of(name), report, swaps=swaps, streams=streams)
        return _with_lines(error, explanation, refusal)


def _largest_feeds(run: SessionRun) -> dict[str, tuple[int, ...]]:
    """Return the shapes to plan for of what a session is fed."""
    return dict(zip(sorted(run.feeds), run.call.batches, strict=True))


def _with_lines(error: Any, *lines: str) -> Exception:
    text = "\n".join(line for line in (error.message, *lines) if line)
    explained: Exception = tf.errors.ResourceExhaustedError(error.node_def, error.op, text)
    return explained


def segments_refused(config: LMSConfig) -> str | None:
    """Return why no step can run in segments with a configuration; ``None`` where they can."""
    against = {
        "policy='threshold'": config.policy == "threshold",
        "optimizer_state='host'": config.optimizer_state == "host",
        "variables='host'": config.variables == "host",
    }
    found = next((name for name, holds in against.items() if holds), None)
    return None if found is None else f"xla='auto' does not work with {found}; leave one of them out"


def _open_arguments(work: Work, hints: ShapeHints) -> list[int]:
    """Return the numbers of the arguments whose shape the graph leaves open."""
    table = work.table
    if table is None:
        return []
    found = []
    for node, op_type in enumerate(table.types):
        if op_type == "_Arg":
            number = table.nodes[node].attr["index"].i
            shapes = table.nodes[node].attr["_output_shapes"].list.shape
            if number in hints.arguments and any(_is_open(shape) for shape in shapes):
                found.append(number)
    return found


def _is_open(shape: Any) -> bool:
    return shape.unknown_rank or any(dim.size < 0 for dim in shape.dim)


def function_name(name: str) -> str:
    """Return the user's name of a function of the runtime: ``step`` for ``__inference_step_42``."""
    for prefix in ("__inference_", "__forward_", "__backward_"):
        if name.startswith(prefix):
            bare, _, number = name.removeprefix(prefix).rpartition("_")
            return bare if number.isdigit() else name
    return name
