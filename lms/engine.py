"""The engine: looks at each traced graph, plans it, edits it where that helps, and keeps the books."""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.saved_model import save_context

from lms.batches import Feeder
from lms.config import LMSConfig, idle_rules
from lms.constants import find_constants
from lms.creation import is_thrown_away
from lms.device import Device, is_out_of_memory, pending_variable_sizes, read_device
from lms.enable import RESTS, LMSWarning, tensorflow_is_initialised
from lms.equal_terms import settle, undo
from lms.errors import UnreadableError
from lms.fetches import keep_fetches_apart
from lms.fitting import pool_bytes
from lms.fusion import FusionBuffer
from lms.graph import Graph, GraphError
from lms.grappler import OptimizerSettings, doubtful_options
from lms.growth import Growth
from lms.guards import collector_paused, level_of_user, readable_or_left_alone
from lms.host_reads import Decision, decide
from lms.host_side import with_host_side
from lms.inline import Call, Watch, is_recording
from lms.keras import BatchSizes
from lms.layout import choose_layout
from lms.link import costs_of_device
from lms.loops import loops_with_lists
from lms.moved_constants import move_constants
from lms.own_memory import give_own_memory
from lms.report import explain_out_of_memory
from lms.retry import Rescue
from lms.rewrite import Edits, RewriteError, is_edited, rewrite
from lms.selection import Unmatched, select
from lms.session import SessionWatch
from lms.shapes import ShapeHints, complete_shapes
from lms.small_pool import SmallPool
from lms.stats import Collector, GraphStats, OpenSizes, Planned, Report, counted
from lms.step import is_update
from lms.step_log import StepLog
from lms.swap_plan import SwapPlan
from lms.tf_graph import GraphView, has_backward_pass, read_graph
from lms.transports.base import StoreStats, Transport
from lms.transports.choose import choose_transport, require_store
from lms.unseen import Unseen

logger = logging.getLogger("lms")

FEWEST_OPS = 24
"""A graph of fewer ops has no step in it."""

FULL_STORE = "LMS store:"
"""How the message of the swap op begins when the store is full, and not the device: more swaps would not
help, and the message says what does."""


UNROLL = "layers such as LSTM take unroll=True for inputs of one length: their turns become ops of the step"
TRACED_ONCE = "to trace it once, begin with the longest batch or pad all to one length"
"""What a user can do about a loop, and about batches of many lengths."""


class Guest(Protocol):
    """Who hears of every graph that is looked at: IBM's classes."""

    refusal: str
    """Why no graph is to be edited; empty where they are."""

    def is_over(self) -> bool:
        """Whether its training has ended, by an error that nobody told it of."""

    def leave(self) -> None:
        """Go, and switch LMS off where it is on for guests alone."""

    def unmatched(self, names: Sequence[Unmatched]) -> None:
        """What filters of the configuration name and a graph does not have.

        Raises:
            LMSArgumentError: If the graph is not to be edited then.
        """

    def planned(self, stats: GraphStats) -> None:
        """A graph has been planned, and edited where that helps."""


class Engine:
    """LMS in this process: reads, plans and edits each graph, and keeps the books.

    Args:
        config: What to do.
        environ: The process's variables.

    Raises:
        PlaceError: If a file, folder or device that ``config`` names cannot be used.
    """

    def __init__(self, config: LMSConfig, environ: Mapping[str, str]) -> None:
        require_store(config)
        self.config, self._environ = config, environ
        self.collector = Collector()
        self.batch_sizes = BatchSizes()
        self.growth, self.feeder = Growth(), Feeder()
        self.watch, self.unseen = Watch(self), Unseen(self.warn)
        self.rescue = Rescue(config)
        self.fusion = FusionBuffer(environ, late=tensorflow_is_initialised())
        self.optimizer = OptimizerSettings(config.arithmetic_optimization)
        self.sessions = SessionWatch(self, config.arithmetic_optimization)
        self._device: Device | None = None
        self._assumed_limit: int | None = None
        self._transport: Transport | None = None
        self.small_pool = SmallPool()
        self._warned: set[str] = set()
        self._unmatched: set[Unmatched] = set()
        self.guest: Guest | None = None
        self.lent = False
        """Whether LMS is on for guests alone; else a job or script has enabled it."""
        self.at_rest = True
        """Whether it is not installed: it edits nothing, and knows what it did."""
        self.steps = StepLog(config.stats_file, environ, self._counters) if config.stats_file else None

    @property
    def device(self) -> Device:
        """The device whose memory is planned, read when it is first needed."""
        if self._device is None:
            self._device = read_device(self._environ)
            if self._device.others:
                self.warn(
                    "several GPUs are visible to this process and LMS plans the memory of the first alone; "
                    "start one process a GPU (lmsrun -np N)"
                )
        if self._assumed_limit is not None:
            return replace(self._device, limit_bytes=self._assumed_limit)
        return self._device

    @property
    def transport(self) -> Transport:
        """Where swapped bytes go, made when it is first needed."""
        if self._transport is None:
            self._transport = choose_transport(self.config, self.device.type, self._environ)
            if self._transport.note:
                self.warn(self._transport.note)
        return self._transport

    @property
    def active_transport(self) -> Transport | None:
        """The transport, once something has been swapped."""
        return self._transport

    def assume_limit(self, limit_bytes: int | None) -> None:
        """Plan for a device of another size than the real one; None: for the real one again."""
        self._assumed_limit = limit_bytes

    def report(self) -> Report:
        """What was done so far."""
        return self.collector.report(self.device, self._transport)

    def warn(self, text: str, remedy: str = "") -> None:
        """Warn once in the process of ``text``, or of all for which there is one ``remedy``."""
        told = remedy or text
        if told not in self._warned:
            self._warned.add(told)
            self.collector.warnings.append(text)
            warnings.warn(text, LMSWarning, stacklevel=level_of_user())

    def tell_of_options(self) -> None:
        """Warn of what of TensorFlow's options, as they are now, works against a plan."""
        for text in doubtful_options(self._environ):
            self.warn(text)

    def __call__(self, func_graph: Any) -> None:
        """The transform: called by TensorFlow with each traced graph, before it is made a function."""
        self.rescue.traced(func_graph)
        ops = func_graph.get_operations()
        if len(ops) < FEWEST_OPS or not has_backward_pass(ops) or is_edited(func_graph):
            return
        if save_context.in_save_context() or is_thrown_away(func_graph, self.watch.call.functions):
            return
        if is_recording():
            self._skip(func_graph, func_graph.name, "a gradient tape around the function is recording")
            return
        if self._is_refused(func_graph, func_graph.name):
            return
        call = self.watch.call
        if self.steps is not None and call.functions:
            self.steps.planned(call.functions[0])
        hints = self._hints(call)
        told = hints.batch_size if self.config.batch_size is None else None
        self.growth.planned(call.functions, told, call.batches)
        self.offer(func_graph, func_graph.name, hints, call)

    def offer(self, tf_graph: Any, name: str, hints: ShapeHints, call: Call | None = None) -> Edits | None:
        """Edit ``tf_graph`` if that can be: what trained without LMS trains with it, after a warning."""
        if self._is_refused(tf_graph, name):
            return None
        try:
            return self.edit(tf_graph, name, hints, call)
        except (GraphError, RewriteError, UnreadableError) as error:
            self.warn(f"{name} stays as it is: {error}")
            self._skip(tf_graph, name, str(error))
            return None

    def leave(self, tf_graph: Any, name: str, why: str) -> None:
        """Note in a warning and in the report that ``tf_graph`` is not edited."""
        self.warn(why)
        self._skip(tf_graph, name, why)

    def _is_refused(self, tf_graph: Any, name: str) -> bool:
        self._see_off()
        why = RESTS if self.at_rest and self.lent else "" if self.guest is None else self.guest.refusal
        if why:
            self._skip(tf_graph, name, why)
        return bool(why)

    def _see_off(self) -> None:
        """Have a guest leave whose training has failed: what comes now is another one."""
        if self.guest is not None and self.guest.is_over():
            self.guest.leave()

    def edit(
        self, tf_graph: Any, name: str, hints: ShapeHints, call: Call | None = None, outputs: Any = None
    ) -> Edits | None:
        """Plan ``tf_graph`` and edit it where that helps; returns what was added.

        Raises:
            LMSError: If the graph cannot be planned, or the store cannot hold what would be swapped.
            GraphError: If it is no order of ops at all.
        """
        self.tell_of_options()
        with collector_paused():
            edits, settled = None, [*settle(tf_graph), *move_constants(tf_graph)]
            try:
                edits = self._edit(tf_graph, name, hints, call, outputs)
            finally:
                if edits is None:
                    undo(settled)
            return edits

    def _edit(
        self, tf_graph: Any, name: str, hints: ShapeHints, call: Call | None, outputs: Any
    ) -> Edits | None:
        started = time.perf_counter()
        device_type = self.device.type
        with readable_or_left_alone(self.config.debug):
            view = read_graph(tf_graph, device_type, complete_shapes(tf_graph, hints), outputs)
            view = with_host_side(view) if device_type == "GPU" else view
            layout = choose_layout(tf_graph, view.ops, self.device, self.optimizer.layout, self._environ)
            selection = select(layout.with_scratch(view), self.config)
        open_sizes = OpenSizes.of(view.unknown, hints)
        loops = loops_with_lists(view.ops)
        self._tell_unplanned(name, view, open_sizes, loops)
        self._tell_unmatched(selection.unmatched, name)
        constants = find_constants(selection.graph, view.ops)
        view = replace(view, graph=constants.graph)
        give_own_memory(tf_graph)
        in_use, _ = self.device.memory() or (0, 0)
        fusion = self.fusion.pending_bytes(tf_graph, device_type, in_use)
        pending = pending_variable_sizes(tf_graph)
        base = in_use + sum(pending) + fusion + constants.nbytes
        base += layout.reserve_bytes(view)
        limit = None if self.device.limit_bytes is None else max(1, self.device.limit_bytes - base)
        planned_at = time.perf_counter()
        with readable_or_left_alone(self.config.debug):
            costs = costs_of_device(self.device, self.config.bandwidth_gb_s)
            decided = decide(view.graph, self.rescue.config, device_type, limit, costs)
            if not isinstance(tf_graph, FuncGraph):
                decided = decided.with_plan(keep_fetches_apart(decided.graph, decided.plan), limit)
            plan_s = time.perf_counter() - planned_at
            made, peak = decided.plan, base + decided.peak_bytes
        edits = None
        if not made.is_empty:
            self.transport.require_room(made.bytes_out)
            edits = rewrite(tf_graph, view, made, self.transport, decided.relocation)
            layout.settle(self.optimizer)
            self.small_pool.make(pool_bytes(decided.case.buffers, made, limit), self.device.name, pending)
        stats = GraphStats.of(name, made, edits, base, peak, open_sizes)
        stats = replace(stats, ops=len(view.ops), fusion_bytes=fusion, plan_s=plan_s, loops=len(loops))
        asked, seconds = self.config.policy, time.perf_counter() - started
        timed = replace(stats, asked_policy=asked, edit_s=seconds)
        self._record(timed, view, decided)
        if call is not None:
            self.rescue.planned(call, tf_graph, made)
        self.device.reset_peak()
        return edits

    def xla_dropped(self, function: Any) -> None:
        """See :class:`lms.inline.Observer`."""
        self._see_off()
        if self.at_rest:  # and XLA on again
            return
        self.warn(
            f"XLA is off for {function._name}: it fuses the step, and no swap would survive that; "
            "to keep jit_compile=True there, call lms.disable() before it is traced"
        )

    def called(self, function: Any) -> None:
        """See :class:`lms.inline.Observer`."""
        self._see_off()
        if not self.at_rest:
            self.unseen.called(function)

    def run(self, function: Any, call: Call, step: Callable[..., Any]) -> Any:
        """See :class:`lms.inline.Observer`."""
        if self.at_rest:
            args, kwargs = call.arguments
            return step(*args, **kwargs)
        self._feed(function, call)
        try:
            done = self._tried(function, call, step)
            self.rescue.succeeded()
        finally:
            self.rescue.done()
            call.feed.forget()
        self.fusion.step_done()
        return done

    def _feed(self, function: Any, call: Call) -> None:
        """Decide where the call's batches come from; forget a plan that was made for smaller ones."""
        watched = self.growth.watches_shapes(function)
        told = partial(self._told_size, call)
        call.feed = self.feeder.feed(
            function, call.arguments, may_retry=self.rescue.is_ready, watched=watched, told=told
        )
        if call.feed.sizes_open:
            call.batches = self.growth.at_least(function, call.feed.first_shapes(self.config.batch_size))
        if grown := self.growth.outgrown(function, self._size_now(function, call), call.batches):
            many_lengths = TRACED_ONCE if call.batches else ""
            text = f"{function._name} {grown}"
            self.warn(f"{text}; {many_lengths}" if many_lengths else text, many_lengths)

    def _size_now(self, function: Any, call: Call) -> int | None:
        """The size of the batches that a planned step is about to get: from Keras, or from its datasets."""
        told = self.batch_sizes.take()
        return call.hints().batch_size if told is None and self.growth.watches_size(function) else told

    def _told_size(self, call: Call) -> int | None:
        return self._hints(call).batch_size

    def _tried(self, function: Any, call: Call, step: Callable[..., Any]) -> Any:
        """The result of the step, tried again after each failure that another plan may mend."""
        log = self.steps
        while True:
            with self.watch.aside():
                args, kwargs = call.feed.arguments()
            once = partial(step, *args, **kwargs)
            try:
                return once() if log is None else log.run(function, function._name, once)
            except tf.errors.OpError as error:
                failure = call.feed.failure or error
                if not is_out_of_memory(failure) or FULL_STORE in failure.message:
                    raise failure from None
                if not self.rescue.prepare():
                    raise self._explained(failure) from error
            self.collector.retries += 1
            self.warn(self.rescue.message)
            log = None

    def _counters(self) -> tuple[StoreStats | None, int | None]:
        memory, transport = self.device.memory(), self._transport
        counted = transport is not None and transport.name != "device"
        return transport.stats() if transport and counted else None, None if memory is None else memory[1]

    def _explained(self, error: Any) -> Exception:
        latest = self.collector.planned[-1] if self.collector.planned else None
        lines = [error.message, explain_out_of_memory(latest, self.report()), self.rescue.refusal]
        text = "\n".join(line for line in lines if line)
        explained: Exception = tf.errors.ResourceExhaustedError(error.node_def, error.op, text)
        return explained

    def _hints(self, call: Call) -> ShapeHints:
        if self.config.batch_size is not None:
            return ShapeHints(call.batches, self.config.batch_size)
        hints = call.hints()
        if hints.calls or hints.batch_size:
            return hints
        latest = self.batch_sizes.latest
        return replace(hints, batch_size=call.specified_size() if latest is None else latest)

    def _tell_unplanned(
        self, name: str, view: GraphView, open_sizes: OpenSizes | None, loops: Sequence[str]
    ) -> None:
        """Warn of what is in no plan, unless it is part of a step that tells of it, or comes of its loops."""
        part = view.is_body and not any(is_update(op.type) for op in view.graph.ops)
        if open_sizes is not None and not part and not (loops and open_sizes.by_data):
            stay = "such tensors stay on the device and are in no planned peak"
            self.warn(f"{name}: {open_sizes}; {stay}", open_sizes.remedy)
        if loops:
            which = f"{counted(len(loops), 'loop')} (such as {loops[0]})"
            kept = f"what {which} keep for the backward pass is in no plan and is not swapped"
            self.warn(f"{name}: {kept}; {UNROLL}", UNROLL)

    def _tell_unmatched(self, names: Sequence[Unmatched], graph_name: str) -> None:
        """One warning for each name in the configuration's filters that a graph lacks."""
        if self.guest is not None:
            self.guest.unmatched(names)
            return
        for missed in names:
            if missed not in self._unmatched:
                self._unmatched.add(missed)
                self.warn(f"{graph_name}: {missed.text}")

    def _skip(self, tf_graph: Any, name: str, why: str) -> None:
        self.collector.graphs.append(GraphStats(name, False, why, len(tf_graph.get_operations())))

    def _record(self, stats: GraphStats, view: GraphView, decided: Decision) -> None:
        self.collector.graphs.append(stats)
        made = decided.plan
        planned = Planned(stats.name, decided.graph, made, stats.base_bytes, stats.open_sizes, view.graph)
        self.collector.planned.append(planned)
        logger.info("%s: %s", stats.name, stats.why)
        if idle := idle_rules(self.config):
            self.warn(
                f"{', '.join(idle)}: of no effect with policy {self.config.policy!r}, for these are rules of "
                "policy 'threshold'; set policy='threshold' (LMS_POLICY=threshold), or leave them out"
            )
        if self.config.debug:
            self._log_decisions(decided.graph, made)
        if self.guest is not None:
            self.guest.planned(stats)
        if not made.feasible:
            self.warn(f"{stats.name}: {made.notes[0] if made.notes else 'the budget cannot be met'}")
        elif self._means_to_swap(made) and not (made.swaps or view.unknown or view.is_body):
            self.warn(
                f"{stats.name}: nothing can be swapped: every tensor is small, short-lived or must stay"
            )

    def _means_to_swap(self, made: SwapPlan) -> bool:
        """Whether a plan without swaps is not what was asked for."""
        return made.policy == "all" or (made.policy == "threshold" and self.config.n_tensors != 0)

    def _log_decisions(self, graph: Graph, made: SwapPlan) -> None:
        """One line a tensor: what happens to it, or why nothing does."""
        for swap in made.swaps:
            back = ", ".join(graph.ops[swap_in.trigger].name for swap_in in swap.swap_ins)
            name, after = graph.tensor_name(swap.tensor), graph.ops[swap.after].name
            logger.debug("%s: out after %s, back after %s", name, after, back)
        for rejected in made.rejected:
            logger.debug("%s: stays: %s", graph.tensor_name(rejected.tensor), rejected.reason)
