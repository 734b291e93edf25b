"""Follow the runs of sessions of compat.v1: what they know, and which plan they run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lms.calls.attempts import Attempts
from lms.calls.outside_memory import OutsideMemory
from lms.calls.planning_engine import PlanningEngine
from lms.intercept.batch_growth import TRACED_ONCE, Growth
from lms.intercept.keras_batch_size import BatchSizes
from lms.intercept.oom_retry import Rescue
from lms.intercept.sessions import SessionRun, SessionStep, SessionWatch
from lms.intercept.side_effects import functions_draw_from_seed
from lms.optimizer.plugin import Request
from lms.passes.work import Task, Work
from lms.reader.shapes import ShapeHints

NOT_OPTIMIZED = (
    "TensorFlow does not optimize the graph of a session with place_pruned_graph, which InteractiveSession "
    "sets; make a tf.compat.v1.Session"
)


class SessionSteps:
    """Watches the runs of sessions for one engine.

    Args:
        engine: The engine that plans the steps.
        attempts: Runs them.
        growth: Remembers what they were planned for.
        batch_sizes: The sizes of Keras's batches.
        rescue: What is kept to run a step again, where no guest has a graph planned.
        outside: Compares what else lies on the devices with their plans.
    """

    def __init__(
        self,
        engine: PlanningEngine,
        attempts: Attempts,
        growth: Growth,
        batch_sizes: BatchSizes,
        rescue: Rescue,
        outside: OutsideMemory,
    ) -> None:
        self._engine, self._attempts, self._growth = engine, attempts, growth
        self._batch_sizes, self._rescue = batch_sizes, rescue
        self._outside = outside
        self.watch = SessionWatch(self, engine.options)

    def task(self, request: Request, run: SessionRun) -> Task | None:
        """Describe a graph of a session's run; ``None`` where it is to be left alone."""
        if self.watch.leaves(run.graph):
            return None
        charge = self.watch.charge_of(run.graph)
        size, step = self._session_batch_size(run), run.call.function
        config = self._rescue_of(run).config_for(step)
        assumed = charge.assumed_batch if charge else None
        hints = ShapeHints(batch_size=size or assumed, feeds=_largest_feeds(run))
        guest, limit = (charge.guest, charge.limit_bytes) if charge else (None, None)
        task = Task(request, step._name, config, hints, shared=run.shared, guest=guest, limit_bytes=limit)
        plan, beside = self._growth.generation(step), self._growth.beside(step)
        return replace(task, plan=plan, beside=beside, predicates=step.predicates)

    def keeps_conditions(self, keeps: bool) -> None:
        """Note whether the graph of a session's run keeps its conditions, because it fits with them."""
        if (run := self.watch.run) is not None:
            run.call.function.keeps_conditions = keeps

    def planned(self, run: SessionRun, work: Work, *, fits: bool, covered: bool, edited: bool) -> None:
        """Note that a frame of a run's graph has been planned."""
        self._attempts.watch_steps_of(run.graph)
        call, table = run.call, work.table
        if table is None or work.task.is_body:
            return
        draws = functions_draw_from_seed(run.graph, table)
        if call.begun is not None:  # else its variables' values are not known
            self._rescue_of(run).planned(
                call, table, (), fits=fits, covered=covered, edited=edited, is_body=False, draws=draws
            )
        self._growth.planned(call.function, call.batches, draws=draws)
        self._outside.planned(call.function, "", work)

    def run_session(self, run: SessionRun, step: Callable[[int], Any]) -> Any:
        """Run a step of a session, counted and logged; try it again where a plan may help."""
        call, rescue = run.call, self._rescue_of(run)
        function: SessionStep = call.function
        shapes = run.whole_batches(None if function.ran else self._session_batch_size(run))
        call.batches = self._growth.at_least(function, shapes)
        if grown := self._growth.outgrown(function, call.batches):
            self._engine.books.warn(f"{function._name} {grown}; {TRACED_ONCE}", TRACED_ONCE)
        if run.is_alone() and (more := self._outside.outgrown(function, "")):
            self._engine.books.warn(f"{function._name} {more}")
        if not function.ran and function.trains and not function.is_optimized:
            self._engine.books.warn(f"{function._name} is not planned: {NOT_OPTIMIZED}")

        def once() -> Any:
            generation = self._growth.generation(function)
            if self._engine.refusal() is None and not self.watch.leaves(run.graph):
                with self.watch.aside():
                    rescue.begins_in_session(call, function.values, is_new=generation not in function.ran)
            made = step(generation)
            function.ran.add(generation)
            return made

        graph, is_alone = run.graph, run.is_alone
        return self._attempts.run(
            *(call, once, rescue, graph, "session run"),
            aside=self.watch.aside,
            idle=False,
            is_alone=is_alone,
        )

    def _rescue_of(self, run: SessionRun) -> Rescue:
        charge = self.watch.charge_of(run.graph)
        return self._rescue if charge is None else charge.rescue

    def _session_batch_size(self, run: SessionRun) -> int | None:
        given = self._rescue_of(run).config_for(run.call.function).batch_size
        return given or self._batch_sizes.of_graph(run.graph)


def _largest_feeds(run: SessionRun) -> dict[str, tuple[int, ...]]:
    """Return the shapes to plan for of what a session is fed."""
    return dict(zip(sorted(run.feeds), run.call.batches, strict=True))
