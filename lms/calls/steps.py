"""Follow the calls of training steps: collect what a call knows, choose its plan, and retry it."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from lms.calls.apart import without_peers
from lms.calls.attempts import Attempts
from lms.calls.compiled_steps import CompiledSteps
from lms.calls.old_kernels import OldKernels
from lms.calls.outside_memory import OutsideMemory
from lms.calls.planning_engine import PlanningEngine
from lms.calls.runs_apart import RunsApart
from lms.calls.session_steps import SessionSteps
from lms.device.memory_pool import hold
from lms.intercept.batch_growth import TRACED_ONCE, Growth
from lms.intercept.batch_replay import Feeder
from lms.intercept.function_calls import Call, RuntimeCall, Watch
from lms.intercept.keras_batch_size import BatchSizes
from lms.intercept.missed_steps import Unseen
from lms.intercept.oom_retry import Rescue
from lms.intercept.side_effects import draws_from_seed
from lms.intercept.variable_values import VariableValues
from lms.optimizer.plugin import Request
from lms.passes.work import Task, Work
from lms.reader.shapes import ShapeHints
from lms.report.stats import GraphStats

INTEGERS = (tf.int32, tf.int64)
MOST_NUMBERS = 64
"""The most numbers in a tensor that may decide sizes: a shape, an axis, the order of dimensions."""

TOGETHER = (
    "{} is planned for the whole device, and so is a step that another thread runs beside it: together they "
    "may run out of memory; policy='budget' and budget_bytes share the device out"
)


class Steps:
    """Watches the calls of steps for one engine.

    Args:
        engine: The engine that plans the steps.
        environ: The process's variables.

    Raises:
        PlaceError: If the file for the steps, or into the folder for TensorBoard, cannot be written.
    """

    def __init__(self, engine: PlanningEngine, environ: Mapping[str, str]) -> None:
        self._engine, config = engine, engine.config
        self.batch_sizes, self.growth, self.feeder = BatchSizes(), Growth(), Feeder()
        self.rescue = Rescue(config, engine.resources.host)
        self.runs_apart, self.old_kernels = RunsApart(self.rescue), OldKernels()
        self.values = VariableValues(engine.resources.host)
        self.unseen = Unseen(engine.books.warn, engine.refuse_unseen)
        self.compiled = CompiledSteps(engine, self.growth)
        self.attempts = Attempts(engine, environ, self.growth, self.runs_apart)
        self.outside = OutsideMemory(self.growth, engine.resources)
        self.sessions = SessionSteps(
            engine, self.attempts, self.growth, self.batch_sizes, self.rescue, self.outside
        )
        self.watch = Watch(self, self.compiled, engine.options)
        self.functions_run: set[str] = set()
        """Names of the functions of TensorFlow's runtime that ran; who wants to know empties it before."""

    def install(self) -> None:
        """Begin to watch."""
        self.watch.install()
        self.unseen.install()
        self.sessions.watch.install()
        self.values.install()
        self.batch_sizes.install()

    def uninstall(self) -> None:
        """Put TensorFlow's own methods back; the sizes of Keras's batches are noted further on."""
        self.watch.uninstall(self.compiled.without())
        self.unseen.uninstall()
        self.sessions.watch.uninstall()
        self.values.uninstall()

    # --- what the engine asks ----------------------------------------------------------------------------

    def task(self, request: Request) -> Task | None:
        """Describe a graph that TensorFlow has optimized; ``None`` where it is no step of a call."""
        if self.sessions.watch.is_aside:
            return None
        run = self.sessions.watch.run
        if run is not None:
            return self.sessions.task(request, run)
        runtime = self.watch.runtime
        if runtime is None:
            config = self._engine.config
            return Task(request, "a function", config, ShapeHints(batch_size=config.batch_size))
        if runtime.taped or "__backward_" in runtime.name:
            why = "a gradient tape around the function is recording"
            self._engine.books.skip(function_name(runtime.name), why, 0)
            return None
        if runtime.whole:
            return None
        call = self.watch.call
        config = self.rescue.config_for(call.function)
        shapes, values = {}, {}
        if self.watch.is_here:
            values = _constants_of(call.function, runtime)
            shapes = self.growth.argument_shapes(call.function, runtime.name, runtime.inputs)
        hints = ShapeHints(shapes, call.batches, self._batch_size(call), values=values)
        may_compile = self.compiled.may_compile(runtime)
        may_be_whole = may_compile and self.compiled.may_be_whole(call, runtime)
        plan = self.growth.generation(call.function, runtime.name)
        task = Task(
            request,
            function_name(runtime.name),
            config,
            hints,
            plan=plan,
            tried=call.tried,
            beside=self.growth.beside(call.function, runtime.name),
            compiled=may_compile and (may_be_whole or config.xla == "auto"),
            may_be_whole=may_be_whole,
        )
        if not self.watch.is_here:
            return task
        return replace(task, function=runtime.copy or runtime.name, inputs=runtime.inputs)

    def note(self, error: BaseException) -> None:
        """Have an error that the user must hear of raised once a step has run."""
        is_here = self.watch.is_here or self.sessions.watch.run is not None
        self.attempts.note(error, is_here=is_here)

    def fail(self, error: BaseException, *, is_body: bool) -> bool:
        """Have an error that ended the planning of a step raised, and the step planned in its next call.

        Args:
            error: What the user must hear of.
            is_body: Whether a body within the step was planned; the beginning of the step has run then.

        Returns:
            Whether the step may end before it runs. Without a function of the user's its kernels are those
            of other callers, too, and would end so for them in every call.
        """
        self.note(error)
        call, name = self.watch.call, self.watch.runtime.name if self.watch.runtime else ""
        if (run := self.sessions.watch.run) is not None:
            call, name = run.call, ""
        elif not self.watch.is_here:
            return False
        self.growth.renew_trace(call.function, name)
        self.attempts.forget_plans()
        return call.function is not None and not is_body

    def planned(self, work: Work, stats: GraphStats) -> None:
        """Note that a frame of a graph has been planned."""
        self.attempts.planned(stats)
        call, runtime, run = self.watch.call, self.watch.runtime, self.sessions.watch.run
        fits = work.decision is None or (work.decision.plan.feasible and not work.lacks_room_in_pieces)
        is_body = work.task.is_body
        if run is not None:
            self.sessions.planned(run, work, fits=fits, covered=stats.covers_all, edited=stats.edited)
            return
        if work.table is None:
            return
        if not work.whole:  # where memory runs out, XLA has freed the variables that it was to update
            self.rescue.planned(
                *(call, work.table, work.task.inputs),
                fits=fits,
                covered=stats.covers_all,
                edited=stats.edited,
                is_body=is_body,
            )
        if call.function is not None:
            if stats.edited and any(map(self.attempts.history.holds_step, self.watch.beside(call))):
                self._engine.books.warn(TOGETHER.format(stats.name), TOGETHER)
            self.attempts.watch_steps_of(call.function)
        if runtime is not None:
            hints = work.task.hints
            told = hints.batch_size if self._engine.config.batch_size is None else None
            arguments = {number: hints.arguments[number] for number in _open_arguments(work, hints)}
            draws = draws_from_seed(work.table)
            self.growth.planned(
                *(call.function, call.batches, runtime.name),
                batch_size=told,
                open_arguments=arguments,
                draws=draws,
            )
            constant_bytes = work.residents.constants
            self.old_kernels.planned(runtime.copy or runtime.name, constant_bytes, draws=draws)
            self.outside.planned(call.function, runtime.name, work)

    def apart(self, works: Sequence[Work], graph: bytes) -> bytes:
        """Return the graph of an edited step, with copies for exchanges where it runs apart first."""
        call, (work, *_) = self.watch.call, works
        if not self.watch.is_here or self.sessions.watch.run is not None or work.table is None:
            return graph
        if not (self.watch.is_only(call) and self.runs_apart.begins(call, work.table, work.task.inputs)):
            return graph
        fusion = {one.device.name: one.residents.fusion for one in works}
        call.apart.held = [hold(nbytes, device) for device, nbytes in fusion.items()]
        return without_peers(graph, sys.modules["horovod.tensorflow"].size())

    # --- what the watch tells ----------------------------------------------------------------------------

    def generation(self, call: Call, runtime: RuntimeCall) -> int:
        """Return the number of the wanted plan; a new one where batches or arguments have grown."""
        if self._engine.refusal() is None:
            self.rescue.begins(call, runtime)
        if not call.again:
            self._compare(call, runtime)
        if self.watch.is_only(call) and (more := self.outside.outgrown(call.function, runtime.name)):
            self._engine.books.warn(f"{function_name(runtime.name)} {more}")
        return self.growth.generation(call.function, runtime.name)

    def number(self, call: Call, runtime: RuntimeCall, generation: int) -> int:
        """Return the number of the options for a call that runs this plan."""
        others = self.growth.beside(call.function, runtime.name)
        is_alone = self.watch.is_only(call)
        self.old_kernels.runs(runtime.copy or runtime.name, generation, others, is_alone=is_alone)
        return self.runs_apart.number(call, runtime.name, generation)

    def ran(self, runtime: RuntimeCall) -> None:
        """Raise the errors that were noted while a function of the runtime ran."""
        self.compiled.ran()
        self.functions_run.add(runtime.copy or runtime.name)
        self.attempts.raise_what_was_noted()

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
            done = self.attempts.run(
                *(call, once, self.rescue, function, function._name),
                aside=self.sessions.watch.aside,
                is_alone=partial(self.watch.is_alone, call),
                beside=partial(self.watch.beside, call),
            )
        finally:
            if call.feed.takes_several:
                self.growth.plan_together(function)
            call.feed.forget()
        self._engine.resources.fusion.step_done()
        return done

    # --- inside ------------------------------------------------------------------------------------------

    def _batch_size(self, call: Call) -> int | None:
        """Find the batch size of a call: from the configuration, else its datasets, else Keras."""
        if self._engine.config.batch_size is not None:
            return self._engine.config.batch_size
        size = call.batch_size()
        if size or call.batches:
            return size
        return call.specified_size() or call.share_of(self.batch_sizes.latest)

    def _feed(self, function: Any, call: Call) -> None:
        """Decide where the call's batches come from, and find their shapes and size."""
        call.feed = self.feeder.feed(
            function,
            call.arguments,
            may_retry=self.rescue.is_ready(function),
            settles=self.rescue.settles(function),
            watched=self.growth.watches_shapes(function),
            told=partial(self._batch_size, call),
        )
        if call.feed.sizes_open:
            given = self._engine.config.batch_size
            call.batches_fed = call.feed.first_shapes(given)
        call.size_fed = self._size_now(function, call)

    def _compare(self, call: Call, runtime: RuntimeCall) -> None:
        """Have a step planned again if the call's batches or arguments have grown."""
        function, name, warn = call.function, runtime.name, self._engine.books.warn
        if call.batches_fed:
            call.batches = self.growth.at_least(function, call.batches_fed, name)
        if grown := self.growth.outgrown(function, call.batches, call.size_fed, name):
            text = f"{function_name(name)} {grown}"
            many = TRACED_ONCE if call.batches else ""
            warn(f"{text}; {many}" if many else text, many)
        if grown := self.growth.outgrown_arguments(function, name, runtime.inputs):
            warn(f"{function_name(name)} {grown}; {TRACED_ONCE}", TRACED_ONCE)

    def _size_now(self, function: Any, call: Call) -> int | None:
        """Find the size of the batches that a planned step is about to get, from Keras or its iterators."""
        told = call.share_of(self.batch_sizes.take())
        if told is not None or not self.growth.watches_size(function):
            return told
        return call.batch_size() or call.specified_size()


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


def _constants_of(function: Any, runtime: RuntimeCall) -> dict[int, Any]:
    """Return the integers that a function took from around it when it was traced, by number of the argument.

    These are tensors in host memory, no variables, and the function is called with the same ones each time.
    """
    traces = () if function is None else function._function_cache.values()
    graph = next((one.graph for one in traces if tf.compat.as_str(one.name) == runtime.name), None)
    if graph is None:
        return {}
    end = len(runtime.inputs) - len(graph.deferred_external_captures)
    first = end - len(graph.external_captures)
    return {
        number: one.numpy()
        for number, one in enumerate(runtime.inputs[first:end], first)
        if one.dtype in INTEGERS and one.shape.num_elements() <= MOST_NUMBERS and "CPU" in one.device
    }


def _is_open(shape: Any) -> bool:
    return shape.unknown_rank or any(dim.size < 0 for dim in shape.dim)


def function_name(name: str) -> str:
    """Return the user's name of a function of the runtime: ``step`` for ``__inference_step_42``."""
    for prefix in ("__inference_", "__forward_", "__backward_"):
        if name.startswith(prefix):
            bare, _, number = name.removeprefix(prefix).rpartition("_")
            return bare if number.isdigit() else name
    return name
