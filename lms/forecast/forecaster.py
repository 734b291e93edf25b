"""Forecast what a step would need on devices: the largest batch and the step's time, by what LMS may do.

Two readings of one traced step, for two batches, give the size of each tensor as a line: so the step of any
batch is known without another trace. Ways to run it are planned once, for a large batch, and their memory is
a line in the batch, too (:mod:`lms.forecast.ways`): all devices share them. Where the traced batch does not
fit a device, it is planned for that one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
from lms.planner.fragmentation import predicted_peak
from lms.planner.hybrid import decide
from lms.planner.planner import Case, plan_case
from lms.simulate.cost_model import Costs
from lms.simulate.executor import peaks_by_chance
from lms.simulate.step_time import clock

MODES = ("off", "swap", "recompute", "hybrid", "host state", "auto", "mixed precision")
"""``host state``: all variables lie in host memory between steps. ``auto``: what a run does by itself."""
RECOMPUTE: Mapping[str, Recompute] = {
    "off": "off",
    "swap": "off",
    "recompute": "only",
    "hybrid": "auto",
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
BOUND = "memory of two groups of variables, time of the link or of compute"
"""How a step is worked out with variables on the host."""
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


class Forecaster:
    """Forecasts a step on devices.

    Args:
        step: The step.
        targets: The devices; what is planned once is planned for about their size.
    """

    def __init__(self, step: TracedStep, targets: Iterable[Target]) -> None:
        self._step, self._plain = step, plain_way(step)
        self._ready: dict[Variant, Variant] = {}
        """Variants at the traced batch, by the variant at the reference."""
        room = max((one.limit_bytes - step.resident_bytes for one in targets), default=0)
        self._reference = max(step.batch, self._plain.largest(room)) if step.other is not None else step.batch

    def forecasts(self, target: Target) -> Iterator[Forecast]:
        """Yield the forecast of each mode on a device."""
        step = self._step
        resident = max(step.resident_bytes, target.in_use_bytes + step.constant_bytes)
        usable = int((target.limit_bytes - resident) * (1 - MARGIN))
        yield self._off(target, resident)
        yield self._planned("swap", target, resident, usable, self._swaps)
        yield self._planned("recompute", target, resident, usable, self._recomputes)
        hybrid = self._planned("hybrid", target, resident, usable, self._hybrids)
        host = self._moved("host state", target, resident, 1.0, 1.0)
        yield from (hybrid, host, self._auto(target, resident, hybrid, host))
        yield self._mixed(target, resident)

    # --- without a plan ----------------------------------------------------------------------------------

    def _off(self, target: Target, resident: int, mode: str = "off", scale: float = 1.0) -> Forecast:
        way, batch = self._plain, self._step.batch
        costs = target.costs if scale == 1 else target.half_costs
        room = target.limit_bytes - resident
        largest = way.largest(int(room / scale))
        peak, seconds = int(way.peak_bytes(batch) * scale), way.run(batch, costs, scale).now_s
        fits = peak <= room
        if target.device_type and scale == 1 and room > 0:
            peak, seconds, fits = self._as_run("off", target, room, batch)
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
        batch = largest or self._step.batch
        run = way.run(batch, costs, scale)
        curve = tuple((seconds, resident + nbytes) for seconds, nbytes in way.curve(batch, run, scale))
        largest_s = run.now_s if largest else None
        is_more = largest == LARGEST_BATCH
        return Forecast(
            mode, largest, fits, resident + peak_bytes, step_s, largest_s, is_more=is_more, curve=curve
        )

    # --- with plans ----------------------------------------------------------------------------------------

    def _planned(
        self, mode: str, target: Target, resident: int, usable: int, ways: Sequence[Way]
    ) -> Forecast:
        batch, costs, plain = self._step.batch, target.costs, self._plain
        largest_way = self._largest(ways, usable, costs)
        largest = None if self._step.other is None else largest_way.largest(usable)
        room = target.limit_bytes - resident
        if target.device_type and mode in RECOMPUTE and room > 0:
            peak, seconds, fits = self._as_run(mode, target, room, batch)
            if largest is not None:
                largest = self._largest_as_run(mode, target, room, largest)
            return self._told(mode, largest_way, largest, fits, resident, peak, seconds, costs)
        if plain.peak_bytes(batch) <= usable:
            peak, seconds = plain.peak_bytes(batch), plain.run(batch, costs).now_s
        else:
            chosen = self._traced(mode, usable, costs, ways)
            peak, seconds = chosen.peak_bytes(batch), chosen.run(batch, costs).now_s
        return self._told(mode, largest_way, largest, peak <= usable, resident, peak, seconds, costs)

    def _largest_as_run(self, mode: str, target: Target, room: int, by_bytes: int) -> int:
        """Return the largest batch that fits as a run there would plan it.

        Free memory lies in pieces, and steps differ: so less may fit than the bytes say. Of a large step only
        some batches are planned; where none of these fits, the next smaller one is returned unplanned.
        """
        tries = max(1, min(len(SMALLER) - 1, MOST_OPS // max(1, len(self._step.graph.ops))))
        for share in SMALLER[:tries]:
            batch = int(by_bytes * share)
            if not batch or self._as_run(mode, target, room, batch)[2]:
                return batch
        return int(by_bytes * SMALLER[tries])

    def _as_run(self, mode: str, target: Target, room: int, batch: int) -> tuple[int, float, bool]:
        """Plan a batch as a run there would.

        Returns:
            The bytes of its own tensors, its time, and whether it fits. On several threads the peak is a
            matter of chance: the bytes are the most of several runs, and it fits where all of them do.
        """
        graph, device_type = self._step.of(batch), target.device_type or "GPU"
        if mode == "off":  # with a budget that is always met, whatever the device has
            made = decide(
                graph, LMSConfig(policy="budget", budget_bytes=1 << 60), device_type, None, target.costs
            )
            made = replace(made, peak_bytes=predicted_peak(made.case, made.plan, room))
        else:
            config = LMSConfig(policy="auto", recompute=RECOMPUTE[mode])
            made = decide(graph, config, device_type, room, target.costs)
        run = clock(made.plan.order, made.plan.swaps, made.case.costs, made.case.seconds)
        fits = made.peak_bytes <= room
        if target.costs.threads > 1 and fits:
            found = tuple(peaks_by_chance(made.case.buffers, made.plan, made.case.costs, room))
            if None in found:
                return room + 1, run.now_s, False
            return max(peak or 0 for peak in found), run.now_s, True
        return made.peak_bytes, run.now_s, fits

    def _largest(self, ways: Sequence[Way], usable: int, costs: Costs) -> Way:
        """Return the fastest of the ways to run nearly the largest batch."""
        sizes = [(way.largest(usable), way) for way in ways]
        most = max(size for size, _ in sizes)
        if not most:
            return min(ways, key=lambda way: way.peak_bytes(self._step.batch))
        near = [(size, way) for size, way in sizes if size >= most * NEAR]
        return min(near, key=lambda one: one[1].run(one[0], costs).now_s / one[0])[1]

    def _traced(self, mode: str, usable: int, costs: Costs, ways: Sequence[Way]) -> Way:
        """Plan the traced batch for a device; of several plans the fastest that fits, or the least."""
        batch = self._step.batch

        def score(way: Way) -> tuple[int, float]:
            return max(0, way.peak_bytes(batch) - usable), way.run(batch, costs).now_s

        rated = sorted(ways, key=score)
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
        return Way(variant, made.order, made.swaps)

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
        return list(repeated_variants(self._base))

    @cached_property
    def _swaps(self) -> Sequence[Way]:
        return [*swapping_ways(self._base)]

    @cached_property
    def _recomputes(self) -> Sequence[Way]:
        return [ordered_way(self._base), *map(ordered_way, self._repeated)]

    @cached_property
    def _hybrids(self) -> Sequence[Way]:
        both = (way for variant in self._repeated for way in swapping_ways(variant))
        return [*self._swaps, *self._recomputes, *both]

    # --- variables on the host ---------------------------------------------------------------------------

    def _moved(self, mode: str, target: Target, resident: int, state: float, weights: float) -> Forecast:
        """Forecast a step with these shares of an optimizer's state and of the weights on the host."""
        step, costs = self._step, target.costs
        largest_state = int(step.largest_bytes * step.state_bytes / max(1, step.weights_bytes))
        # Two groups of a weight and its state, or of state alone, and the weights of the next op.
        groups = 2 * largest_state + (4 * step.largest_bytes if weights else 0)
        gone = int(state * step.state_bytes + weights * step.weights_bytes)
        there = min(resident, resident - gone + groups)
        usable = int((target.limit_bytes - there) * (1 - MARGIN))
        found = self._planned(mode, target, there, usable, self._hybrids)
        back = costs.in_seconds(int(3 * weights * step.weights_bytes + state * step.state_bytes))
        link_s = max(back, costs.out_seconds(gone))
        largest_s = found.largest_step_s
        return replace(
            found,
            step_s=max(found.step_s, link_s),
            largest_step_s=None if largest_s is None else max(largest_s, link_s),
            bound=BOUND,
        )

    def _auto(self, target: Target, resident: int, hybrid: Forecast, host: Forecast) -> Forecast:
        """Forecast a run with no setting: where a plan does not fit, more and more variables move."""
        states = HOST_SHARES[True] if self._step.state_bytes else ()
        found = hybrid
        for state, weights in [*((one, 0.0) for one in states), *((1.0, one) for one in HOST_SHARES[False])]:
            if found.fits:
                break
            found = self._moved("auto", target, resident, state, weights)
        most = max(hybrid, host, found, key=lambda one: one.largest_batch or 0)
        return replace(
            found,
            mode="auto",
            largest_batch=most.largest_batch,
            largest_step_s=most.largest_step_s,
            is_more=most.is_more,
            curve=most.curve,
            bound=most.bound or found.bound,
        )
