"""Forecast what a step would need on devices: the largest batch and the step's time, by what LMS may do.

Two readings of one traced step, for two batches, give the size of each tensor as a line: so the step of any
batch is known without another trace. Ways to run it are planned once, for a large batch, and their memory is
a line in the batch, too (:mod:`lms.forecast.ways`): all devices share them. Where the traced batch does not
fit a device, it is planned for that one.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from lms.config import HOST_SHARES, LMSConfig, Recompute
from lms.forecast.step import TracedStep
from lms.forecast.ways import (
    LARGEST_BATCH,
    LEAST,
    Variant,
    Way,
    ordered_way,
    plain_way,
    repeated_variants,
    swapping_ways,
)
from lms.planner.hybrid import decide
from lms.planner.room import predicted_peak
from lms.simulate.cost_model import Costs
from lms.simulate.executor import peaks_by_chance
from lms.swaps.case import Case
from lms.swaps.swap_planner import plan_case

MODES = ("off", "swap", "recompute", "hybrid", "host state", "auto", "mixed precision")
"""``host state``: all variables lie in host memory between steps. ``auto``: what a run does by itself."""
RECOMPUTE: Mapping[str, Recompute] = {
    "off": "off",
    "swap": "off",
    "recompute": "only",
    "hybrid": "auto",
    "host state": "auto",
    "auto": "auto",
}
"""The setting ``recompute`` by mode."""
MARGIN = 0.1
"""The share of the memory that plans leave, as policy ``auto`` does."""
NEAR = 0.97
"""Of ways that train nearly the largest batch, the fastest one is taken."""
PLANNED = 2
"""How many choices of what to recompute are planned for a batch that does not fit without."""
SMALLER = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""The shares of the batch that fits by its bytes that are planned as a run would, until one fits."""
MOST_OPS = 30_000
"""The ops that are planned for that, by mode: seven plans for a net of 4,000 ops, two for one of 12,000."""
NONE_STREAMS = (
    "the same as hybrid: no variable can stream (used in a loop or by a function that is called, or smaller "
    "than min_tensor_bytes)"
)
HALF = 0.5
"""The bytes of a number in half precision against those in single precision."""


@dataclass(frozen=True)
class Forecast:
    """The forecast for one way to run a step on one device."""

    mode: str
    largest_batch: int | None
    """0: not even one example fits; ``None``: not known, as where the trace tells no batch."""
    fits: bool
    """Whether the traced batch fits."""
    peak_bytes: int
    """Of the whole device, at the traced batch."""
    step_s: float
    """At the traced batch."""
    largest_step_s: float | None
    """At the largest batch."""
    bound: str = ""
    """What is not planned but worked out."""
    note: str = ""
    """A remark for people; empty where there is none."""
    is_more: bool = False
    """Whether batches above the largest were not looked for."""
    curve: Sequence[tuple[float, int]] = field(default=(), repr=False)
    """Seconds and bytes of the device over a step with the largest batch, or else with the traced one."""


@dataclass(frozen=True)
class Target:
    """A device to forecast for."""

    limit_bytes: int
    """What TensorFlow can allocate there."""
    costs: Costs
    half_costs: Costs
    """The same in half precision."""
    device_type: str | None = None
    """``CPU`` or ``GPU`` where the traced graph is the very one that runs there, and is planned as that."""
    in_use_bytes: int = 0
    """What lies on such a device before the step."""


class _Run(NamedTuple):
    """The memory and the time of a batch on a device."""

    peak_bytes: int
    """Of the step's own tensors."""
    seconds: float
    fits: bool
    planned_bytes: int
    """The peak of its plan, where ops run one after the other."""


class Forecaster:
    """Forecasts a step on devices.

    Args:
        step: The step.
        targets: The devices; what is planned once is planned for about their size.
        unmoved: The forecaster of the step with all variables on the device, where some stream in ``step``:
            its batch is planned here, too, and of the choices of what to repeat its best one.
    """

    def __init__(
        self, step: TracedStep, targets: Sequence[Target], unmoved: "Forecaster | None" = None
    ) -> None:
        self._step, self._plain = step, plain_way(step)
        self._ready: dict[Variant, Variant] = {}
        """Variants at the traced batch, by the variant at the reference."""
        self._moved: dict[tuple[float, float], Forecaster | None] = {}
        """Of the step in which these shares of an optimizer's state and of the weights stream."""
        self._targets = targets
        self._repeats: Collection[int] | None = None
        """The choices of what to repeat that are planned; ``None``: all."""
        self._reference: int = step.batch
        """The batch for which ways are planned once."""
        if unmoved is not None:
            self._reference, self._repeats = unmoved._reference, unmoved._best_repeats
            return
        room = max((one.limit_bytes - step.resident_bytes for one in targets), default=0)
        if step.other is not None:
            self._reference = max(step.batch, self._plain.largest(room))

    def forecasts(self, target: Target) -> Iterator[Forecast]:
        """Yield the forecast of each mode on a device."""
        yield self._off(target, self._resident(target))
        yield self._better("swap", target)
        yield self._planned("recompute", target)
        hybrid = self._better("hybrid", target)
        moved = self._with_moved(1.0, 1.0)
        host = replace(hybrid, mode="host state", note=NONE_STREAMS)
        if moved is not None:
            host = moved._planned("host state", target)
        yield from (hybrid, host, self._auto(target, hybrid, host))
        yield self._mixed(target, self._resident(target))

    def _resident(self, target: Target) -> int:
        """Return the bytes that lie on a device before the step."""
        step = self._step  # what is in use counts all variables, and no constants
        return max(step.resident_bytes, target.in_use_bytes - step.moved_bytes + step.constant_bytes)

    def _usable(self, target: Target) -> int:
        """Return the bytes that a plan may use."""
        return int((target.limit_bytes - self._resident(target)) * (1 - MARGIN))

    # --- without a plan ----------------------------------------------------------------------------------

    def _off(self, target: Target, resident: int, mode: str = "off", scale: float = 1.0) -> Forecast:
        way, batch = self._plain, self._step.batch
        costs = target.costs if scale == 1 else target.half_costs
        room = target.limit_bytes - resident
        largest = way.largest(int(room / scale))
        peak, seconds = int(way.peak_bytes(batch) * scale), way.run(batch, costs, scale).now_s
        fits = peak <= room
        if target.device_type and scale == 1 and room > 0:
            peak, seconds, fits, _ = self._as_run("off", target, room, batch)
            if self._step.other is not None:
                largest = self._largest_as_run("off", target, room, largest)
        return self._told(
            mode,
            way,
            None if self._step.other is None else largest,
            fits,
            resident,
            peak,
            seconds,
            costs,
            scale,
        )

    def _mixed(self, target: Target, resident: int) -> Forecast:
        found = self._off(target, resident, "mixed precision", HALF)
        return replace(found, bound="float32 tensors halved, no swaps")

    def _told(
        self,
        mode: str,
        way: Way,
        largest: int | None,
        fits: bool,
        resident: int,
        peak_bytes: int,
        step_s: float,
        costs: Costs,
        scale: float = 1.0,
    ) -> Forecast:
        if largest is not None and fits:
            largest = max(largest, self._step.batch)
        batch = largest or self._step.batch
        run = way.run(batch, costs, scale)
        curve = tuple((seconds, resident + nbytes) for seconds, nbytes in way.curve(batch, run, scale))
        largest_s = run.now_s if largest else None
        is_more = largest == LARGEST_BATCH
        return Forecast(
            mode, largest, fits, resident + peak_bytes, step_s, largest_s, is_more=is_more, curve=curve
        )

    # --- with plans ----------------------------------------------------------------------------------------

    def _better(self, mode: str, target: Target) -> Forecast:
        """Return the forecast of the better plan: for the step as it is, or with lists of loops swapped.

        The first is enough where the traced batch fits, as in a run; the second may take larger batches.
        """
        plain = self._planned(mode, target)
        if self._stacked is None:
            return plain
        stacked = self._stacked._planned(mode, target)
        most = max(plain, stacked, key=lambda one: one.largest_batch or 0)
        found = plain if plain.fits or not stacked.fits else stacked
        return replace(
            found,
            largest_batch=most.largest_batch,
            largest_step_s=most.largest_step_s,
            is_more=most.is_more,
            curve=most.curve,
        )

    @cached_property
    def _stacked(self) -> "Forecaster | None":
        """The forecaster of the step in which the lists of its loops can be swapped."""
        step = self._step.stacked
        return None if step is None else Forecaster(step, self._targets)

    def _planned(self, mode: str, target: Target) -> Forecast:
        usable, costs, resident = self._usable(target), target.costs, self._resident(target)
        room = target.limit_bytes - resident
        largest_way = self._largest(self._ways(mode), usable, costs)
        largest = None if self._step.other is None else largest_way.largest(usable)
        peak, seconds, fits, _ = self._at_traced_batch(mode, target)
        if target.device_type and room > 0 and largest is not None:
            largest = self._largest_as_run(mode, target, room, largest)
        return self._told(mode, largest_way, largest, fits, resident, peak, seconds, costs)

    def _ways(self, mode: str) -> Sequence[Way]:
        """Return the ways to run the step that a mode may take."""
        if mode == "swap":
            return self._swaps
        return self._recomputes if mode == "recompute" else self._hybrids

    def _at_traced_batch(self, mode: str, target: Target) -> _Run:
        """Return what :meth:`_as_run` does, for the traced batch and any device."""
        batch, usable, costs = self._step.batch, self._usable(target), target.costs
        room = target.limit_bytes - self._resident(target)
        if target.device_type and room > 0:
            return self._as_run(mode, target, room, batch)
        needs_none = self._plain.peak_bytes(batch) <= usable and not self._step.moved_bytes
        chosen = self._plain if needs_none else self._traced(mode, usable, costs)
        peak = chosen.peak_bytes(batch)
        return _Run(peak, chosen.run(batch, costs).now_s, peak <= usable, peak)

    def _largest_as_run(self, mode: str, target: Target, room: int, by_bytes: int) -> int:
        """Return the largest batch that fits as a run there would plan it.

        Free memory lies in pieces, and steps differ: so less may fit than the bytes say. Of a large step only
        some batches are planned; where none of these fits, the next smaller one is returned unplanned.
        """
        tries = max(1, min(len(SMALLER) - 1, MOST_OPS // max(1, len(self._step.graph.ops))))
        for share in SMALLER[:tries]:
            batch = int(by_bytes * share)
            if not batch or self._as_run(mode, target, room, batch).fits:
                return batch
        return int(by_bytes * SMALLER[tries])

    def _as_run(self, mode: str, target: Target, room: int, batch: int) -> _Run:
        """Plan a batch as a run there would.

        On several threads the peak is a matter of chance: the bytes are the most of several runs, and it fits
        where all of them do.
        """
        graph, device_type, costs = self._step.of(batch), target.device_type or "GPU", target.costs
        if costs.resident_bytes is not None:
            costs = replace(costs, resident_bytes=max(0, costs.resident_bytes - self._step.moved_bytes))
        if mode == "off":  # with a budget that is always met, whatever the device has
            made = decide(graph, LMSConfig(policy="budget", budget_bytes=1 << 60), device_type, None, costs)
            made = replace(made, peak_bytes=predicted_peak(made.case, made.plan, room))
        else:
            config = LMSConfig(policy="auto", recompute=RECOMPUTE[mode])
            made = decide(graph, config, device_type, room, costs)
        seconds, fits = made.case.makespan_s(made.plan), made.peak_bytes <= room
        found: tuple[int | None, ...] = (made.peak_bytes,)
        if costs.threads > 1 and fits:
            found = tuple(peaks_by_chance(made.case.buffers, made.plan, made.case.costs, (room,)))
        if fits and (made.doubt or None in found):
            return _Run(room + 1, seconds, False, made.peak_bytes)
        return _Run(max(peak or 0 for peak in found), seconds, fits, made.peak_bytes)

    def _largest(self, ways: Sequence[Way], usable: int, costs: Costs) -> Way:
        """Return the fastest of the ways to run nearly the largest batch."""
        sizes = [(way.largest(usable), way) for way in ways]
        most = max(size for size, _ in sizes)
        if not most:
            return min(ways, key=lambda way: way.peak_bytes(self._step.batch))
        near = [(size, way) for size, way in sizes if size >= most * NEAR]
        return min(near, key=lambda one: one[1].run(one[0], costs).now_s / one[0])[1]

    def _traced(self, mode: str, usable: int, costs: Costs) -> Way:
        """Plan the traced batch for a device; of several plans the fastest that fits, or the least.

        Where variables move and nothing else has to, one plan serves all devices: of a large step each takes
        seconds.
        """
        batch = self._step.batch
        if self._step.moved_bytes and self._streams_alone.peak_bytes(batch) <= usable:
            return self._streams_alone

        def score(way: Way) -> tuple[int, float]:
            return max(0, way.peak_bytes(batch) - usable), way.run(batch, costs).now_s

        rated = sorted(self._ways(mode), key=score)
        if mode == "recompute":
            return rated[0]
        wanted = [self._plain.variant]
        if mode != "swap":
            repeated = (way.variant for way in rated if way.variant.repeated is not None)
            wanted += [self._at_traced(one) for one in [*dict.fromkeys(repeated)][:PLANNED]]
        return min((*(self._fitted(one, usable, costs) for one in wanted), rated[0]), key=score)

    @staticmethod
    def _fitted(variant: Variant, usable: int, costs: Costs) -> Way:
        config = replace(LEAST, policy="budget", budget_bytes=max(1, usable), margin=0.0)
        made = plan_case(replace(variant.case, costs=costs), config, None)
        return Way.of(variant, made)

    @cached_property
    def _streams_alone(self) -> Way:
        """The traced batch with memory to spare: nothing moves but variables."""
        return self._fitted(self._plain.variant, 1 << 60, Costs())

    def _at_traced(self, variant: Variant) -> Variant:
        if variant not in self._ready:
            self._ready[variant] = variant.at(self._step.batch)
        return self._ready[variant]

    @cached_property
    def _base(self) -> Variant:
        """The step at the batch for which ways are planned once."""
        graph = self._step.of(self._reference)
        return Variant(self._step, self._reference, Case.of(graph, LEAST, Costs()))

    @cached_property
    def _repeated(self) -> Sequence[Variant]:
        return list(repeated_variants(self._base, self._repeats))

    @cached_property
    def _swaps(self) -> Sequence[Way]:
        return [*swapping_ways(self._base)]

    @cached_property
    def _recomputes(self) -> Sequence[Way]:
        return [ordered_way(self._base), *map(ordered_way, self._repeated)]

    @cached_property
    def _hybrids(self) -> Sequence[Way]:
        both = (way for variant in self._repeated for way in swapping_ways(variant))
        unplanned = () if self._step.moved_bytes else self._recomputes  # only plans say when variables move
        return [*self._swaps, *unplanned, *both]

    # --- variables on the host ---------------------------------------------------------------------------

    def _with_moved(self, of_state: float, of_weights: float) -> "Forecaster | None":
        """Return the forecaster of the step in which variables stream; ``None`` where none can."""
        shares = of_state, of_weights
        if shares not in self._moved:
            read = self._step.with_variables_moved
            step = None if read is None else read(*shares)
            self._moved[shares] = None if step is None else Forecaster(step, self._targets, self)
        return self._moved[shares]

    @cached_property
    def _best_repeats(self) -> Collection[int] | None:
        """The choice of what to repeat that gives most devices their largest batch; ``None``: no one does."""
        best = (self._largest(self._hybrids, self._usable(one), one.costs) for one in self._targets)
        counted = Counter(way.variant.choice for way in best if way.variant.choice is not None)
        return [choice for choice, _ in counted.most_common(1)] or None

    def _auto(self, target: Target, hybrid: Forecast, host: Forecast) -> Forecast:
        """Forecast a run with no setting.

        Where a plan does not fit, more and more variables move, until one leaves the margin free.
        """
        found = hybrid
        lacking = 0 if found.fits else max(1, found.peak_bytes - target.limit_bytes)
        moved_bytes = 0
        states = HOST_SHARES[True] if self._step.state_bytes else ()
        for shares in [*((one, 0.0) for one in states), *((1.0, one) for one in HOST_SHARES[False])]:
            if not lacking:
                break
            moved = self._with_moved(*shares)
            if shares == (1.0, 1.0):
                found = host
            elif moved is not None and moved._step.moved_bytes - moved_bytes >= lacking:
                peak, seconds, fits, planned = moved._at_traced_batch("auto", target)
                found = replace(host, peak_bytes=moved._resident(target) + peak, step_s=seconds, fits=fits)
                lacking = max(0, planned - moved._usable(target))
                moved_bytes = moved._step.moved_bytes
        most = max(hybrid, host, found, key=lambda one: one.largest_batch or 0)
        return replace(
            found,
            mode="auto",
            largest_batch=most.largest_batch,
            largest_step_s=most.largest_step_s,
            is_more=most.is_more,
            curve=most.curve,
            note="",
        )
