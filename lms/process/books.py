"""Record the graphs that were planned, left alone and warned of, for the report."""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lms.config import LMSConfig, idle_rules
from lms.errors import LMSError, LMSWarning
from lms.intercept.edit_guards import level_of_user
from lms.ir.graph import Graph, GraphError
from lms.ir.name_filters import Unmatched
from lms.ir.swap_plan import SwapPlan
from lms.passes.work import Task, Work
from lms.planner.segments import WHOLE
from lms.process.shape_names import shapes_of
from lms.reader.node_table import ROOT
from lms.reader.step_reader import Step
from lms.report.collector import Collector
from lms.report.guest import Guest
from lms.report.render import mib
from lms.report.stats import UNROLL, GraphStats, OpenSizes, Planned, counted
from lms.rewriter.streamable import SMALL
from lms.swaps.swap_planner import usable_bytes

logger = logging.getLogger("lms")

LEFT_TO_XLA = "it fits; XLA compiles it whole"
"""Why nothing is edited in a step that its user has XLA compile."""


class Books:
    """Records every graph for the report, and warns the user.

    Args:
        config: What was asked for.
    """

    def __init__(self, config: LMSConfig) -> None:
        self._config = config
        self.collector = Collector()
        self._unmatched: set[Unmatched] = set()
        self._warned: set[str] = set()

    def warn(self, text: str, remedy: str = "") -> None:
        """Warn once in the process of ``text``, or once of all texts that share a ``remedy``."""
        told = remedy or text
        if told not in self._warned:
            self._warned.add(told)
            self.collector.warnings.append(text)
            warnings.warn(text, LMSWarning, stacklevel=level_of_user())

    def tell_of_moved(self, task: Task, works: Sequence[Work]) -> None:
        """Warn that variables of a step move to the host, because it does not fit with all on the device."""
        many = counted(sum(work.streamed.state + work.streamed.weights for work in works), "variable")
        moved = mib(sum(work.streamed.nbytes for work in works))
        self.warn(
            f"{task.name} does not fit with all variables on the device: {many} ({moved}) lie "
            "on the host between steps from now on; optimizer_state='device' and variables='device' keep them"
            f"{', and XLA, which is off from now on' if task.compiled else ''}"
        )

    def tell_of_kept(self, name: str, obstacle: str, kept: Iterable[Mapping[str, int]]) -> None:
        """Warn which variables of a step stay on the device although it does not fit, and why."""
        if obstacle:
            self.warn(f"{name}: {obstacle}")
        for reasons in kept:
            self._tell_of_kept(name, reasons)

    def _tell_of_kept(self, name: str, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            if reason != SMALL:
                self.warn(f"{name}: {counted(count, 'variable')} cannot lie on the host: {reason}")

    def leave(self, name: str, why: str, ops: int) -> None:
        """Note in a warning and in the report that a step is not edited."""
        self.warn(f"{name} stays as it is: {why}")
        self.skip(name, why, ops)

    def skip(self, name: str, why: str, ops: int) -> None:
        """Note in the report that a step is not edited."""
        self.collector.graphs.append(GraphStats(name, False, why, ops))

    def record(self, work: Work, guest: Guest | None) -> GraphStats | None:
        """Record a planned frame of a graph, and warn of what the user should know."""
        if work.later is not None and work.table is not None:
            ops, why = len(work.table.nodes), LEFT_TO_XLA if work.whole else "nothing is edited"
            stats = GraphStats(
                *(work.task.name, False, why, ops, _place(work), work.task.function), whole=work.whole
            )
            self.collector.postpone(stats, partial(self._record_later, work.later))
            return stats
        made = self._described(work, guest)
        if made is not None:
            self.collector.add(*made)
            if guest is not None:
                guest.planned(made[0])
        return made[0] if made else None

    def _record_later(self, later: Callable[[], Work]) -> tuple[GraphStats, Planned] | None:
        try:
            return self._described(later(), None)
        except (GraphError, LMSError) as error:
            logger.info("a step that fits cannot be described: %s", error)
            return None

    def _described(self, work: Work, guest: Guest | None) -> tuple[GraphStats, Planned] | None:
        """Return the figures of a planned frame, and warn of what the user should know."""
        step, decided = work.step, work.decision
        if step is None or decided is None or work.graph is None:
            return None
        name, made = work.task.name, decided.plan
        open_sizes = OpenSizes.of(step.unknown, known=work.task.hints.knows_batch)
        self._tell_unplanned(name, open_sizes, step.list_loops)
        self._tell_unmatched(work.unmatched, name, guest)
        self._tell_of_kept(name, work.streamed.stay)
        base = work.residents.nbytes
        stats = replace(
            GraphStats.of(name, made, work.edits, base, base + decided.peak_bytes, open_sizes, work.streamed),
            ops=len(step.graph.ops),
            fusion_bytes=work.residents.fusion,
            measured_ops=sum(op.name in decided.case.costs.profile_s for op in work.graph.ops),
            plan_s=work.seconds.get("plan", 0.0),
            edit_s=sum(work.seconds.values()),
            seconds=tuple(work.seconds.items()),
            loops=len(step.list_loops),
            lists=len(work.stacked.tensors),
            asked_policy=self._config.policy,
            varies=step.varies,
            place=_place(work),
            function=work.task.function,
            plan=work.task.plan,
            beside=work.task.beside,
        )
        if work.whole:
            stats = replace(stats, why=LEFT_TO_XLA, whole=True)
        elif decided.segmentation is not None:
            held = decided.segmentation
            stats = replace(stats, segments=len(held.segments), compiled_ops=held.compiled)
            if made.is_empty:
                stats = replace(stats, why="nothing is swapped; XLA compiles it in segments")
        elif work.task.compiled:
            why = "no plan in which XLA compiles some of its ops fits, or is as fast"
            if self._config.xla == "whole":
                why = _why_not_whole(work, step, made)
            elif not made.feasible:
                why += "; with xla='off' TensorFlow fuses more of its ops, which may take less memory"
            self.warn(f"{name} runs without XLA: {why}")
        logger.info("%s: %s", stats.name, stats.why)
        self._tell_of_rules()
        if self._config.debug:
            _log_decisions(decided.graph, made)
        whole = work.device.limit_bytes
        before = "" if whole is None or base < whole / 2 else _before(base, whole)
        self._tell_of_plan(name, made, before, has_unknown=bool(step.unknown))
        limit = work.limit_bytes
        if limit is not None and work.lacks_room_in_pieces:
            why = "" if decided.case.costs.maps_pages else "free memory lies in pieces, so "
            self.warn(
                f"{name} may run out of memory: {why}its buffers need "
                f"{decided.peak_bytes / 2**20:.1f} MiB where {limit / 2**20:.1f} MiB are left, and no plan "
                "was found that needs less; a smaller batch would help"
            )
        elif limit is not None and decided.doubt:
            self.warn(
                f"{name} may run out of memory: its buffers fit in the {limit / 2**20:.1f} MiB that are "
                f"left, but not {decided.doubt}; a smaller batch would help"
            )
        planned = Planned(
            name,
            decided.graph,
            made,
            base,
            open_sizes,
            work.graph,
            decided.case.costs,
            work.device.type,
            shapes_of(step, work.outputs),
            work.streamed.nbytes,
            work.task.function,
            work.limit_bytes,
        )
        return stats, planned

    def _tell_of_rules(self) -> None:
        if idle := idle_rules(self._config):
            self.warn(
                f"{', '.join(idle)}: of no effect with policy {self._config.policy!r}, for these are rules "
                "of policy 'threshold'; set policy='threshold' (LMS_POLICY=threshold), or leave them out"
            )

    def _tell_of_plan(self, name: str, made: SwapPlan, before: str, *, has_unknown: bool) -> None:
        if not made.feasible:
            self.warn(f"{name}: {made.notes[0] if made.notes else 'the budget cannot be met'}{before}")
        elif self._means_to_swap(made) and not (made.swaps or made.recomputed or has_unknown):
            self.warn(f"{name}: nothing can be swapped: every tensor is small, short-lived or must stay")

    def _tell_unplanned(self, name: str, open_sizes: OpenSizes | None, loops: Sequence[str]) -> None:
        """Warn of tensors that no plan covers, unless the step's loops are the reason."""
        if open_sizes is not None and not (loops and open_sizes.by_data):
            stay = "such tensors stay on the device and are in no planned peak"
            self.warn(f"{name}: {open_sizes}; {stay}", open_sizes.remedy)
        if loops:
            which = f"{counted(len(loops), 'loop')} (such as {loops[0]}) {'keep' if loops[1:] else 'keeps'}"
            kept = f"what {which} for the backward pass is in no plan and is not swapped"
            self.warn(f"{name}: {kept}; {UNROLL}", UNROLL)

    def _tell_unmatched(self, names: Sequence[Unmatched], graph_name: str, guest: Guest | None) -> None:
        """Warn once of each name in the configuration's filters that a graph lacks, or tell the guest."""
        if guest is not None:
            guest.unmatched(names)
            return
        for missed in names:
            if missed not in self._unmatched:
                self._unmatched.add(missed)
                self.warn(f"{graph_name}: {missed.text}")

    def _means_to_swap(self, made: SwapPlan) -> bool:
        """Tell whether the policy swaps tensors even where the step fits."""
        if self._config.recompute == "only":
            return False
        return made.policy == "all" or (made.policy == "threshold" and self._config.n_tensors != 0)


def _before(base: int, whole: int) -> str:
    """Say what a device holds before a step, where that is much of it."""
    return (
        f"; variables, and what else is there before the step, take {mib(base)} of the device's {mib(whole)}"
    )


def _why_not_whole(work: Work, step: Step, made: SwapPlan) -> str:
    """Say why XLA does not compile a step as one."""
    room, most = usable_bytes(work.task.config, work.limit_bytes), int(WHOLE * made.peak_before_bytes)
    why = "as one it may not fit"
    if step.unknown or step.list_loops:
        why = "the sizes of some of its tensors are not known before it runs"
    elif room is not None and most > room:
        why = f"as one it may take {mib(most)} where {mib(room)} may be used"
    return f"{why}; xla='auto' (LMS_XLA=auto) compiles it in segments between swaps"


def _place(work: Work) -> tuple[str, str]:
    """Return the device and the frame of a work."""
    return work.device.name, work.table.frames[work.frame or ROOT].name if work.table else ""


def _log_decisions(graph: Graph, made: SwapPlan) -> None:
    """Log one line per tensor: when it is swapped, or why it stays."""
    for swap in made.swaps:
        back = ", ".join(graph.ops[swap_in.trigger].name for swap_in in swap.swap_ins)
        name, after = graph.tensor_name(swap.tensor), graph.ops[swap.after].name
        logger.debug("%s: out after %s, back after %s", name, after, back)
    for rejected in made.rejected:
        logger.debug("%s: stays: %s", graph.tensor_name(rejected.tensor), rejected.reason)
