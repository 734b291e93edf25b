"""A forecast's largest batch is where memory ends, and what it does not know it says."""

from dataclasses import replace

import pytest

from lms.forecast import forecaster
from lms.forecast.forecaster import MODES, Forecast, Forecaster, Target
from lms.forecast.step import TracedStep
from lms.forecast.ways import LEAST, Variant, plain_way, repeated_variants, swapping_ways
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.op_traits import STREAM_ENTER, STREAM_IN, STREAM_LAST, STREAM_LEAVE, STREAM_OUT
from lms.simulate.cost_model import Costs
from lms.simulate.devices import GPUS
from lms.swaps.case import Case

MIB = 1 << 20
LAYERS = 16
WEIGHT, STATE = 4 * MIB, 8 * MIB
"""Of each layer: 64 and 128 MiB of all."""


def network(batch: int, states: int = 0, weights: int = 0) -> Graph:
    """A chain of layers with its backward pass; each tensor has a MiB an example.

    So many layers stream their optimizer's state, and so many their weights, too.
    """
    build = GraphBuilder()
    (last,) = build.add("data", "IteratorGetNext", outputs=[batch * MIB], outside=True)
    made, leaves = [last], []
    for layer in range(LAYERS):
        read = [last, *streamed_in(build, f"forward_{layer}", WEIGHT, layer < weights)]
        (last,) = build.add(f"layer_{layer}", "MatMul", inputs=read, outputs=[batch * MIB])
        (last,) = build.add(f"relu_{layer}", "Relu", inputs=[last], outputs=[batch * MIB], in_place=())
        made.append(last)
    (slope,) = build.add("gradient_tape/loss", "Mul", inputs=[last], outputs=[batch * MIB], in_place=())
    for layer in reversed(range(LAYERS)):
        name = f"gradient_tape/layer_{layer}"
        (slope,) = build.add(
            f"{name}/relu", "ReluGrad", inputs=[slope, made[layer + 1]], outputs=[batch * MIB], in_place=()
        )
        inputs = [made[layer], slope]
        (gradient,) = build.add(f"{name}/weight", "MatMul", inputs=inputs, outputs=[4096])
        read = [slope, *streamed_in(build, f"backward_{layer}", WEIGHT, layer < weights)]
        (slope,) = build.add(f"{name}/image", "MatMul", inputs=read, outputs=[batch * MIB])
        for kind, nbytes, streams in (("state", STATE, layer < states), ("weight", WEIGHT, layer < weights)):
            if streams:
                leaves.append(updated(build, f"{kind}_{layer}", nbytes, gradient))
    build.add("end", "NoOp", controls=leaves, chainable=False)
    return build.build(kept=[slope])


def streamed_in(build: GraphBuilder, name: str, nbytes: int, streams: bool) -> tuple[int, ...]:
    """Bring a variable to the device, if it streams."""
    if not streams:
        return ()
    (handle,) = build.add(f"{name}/handle", "VarHandleOp", outputs=[8])
    (value,) = build.add(f"{name}/value", "ReadVariableOp", inputs=[handle], outputs=[nbytes])
    return build.add(f"{name}/fetch", STREAM_IN, inputs=[value], outputs=[nbytes])


def updated(build: GraphBuilder, name: str, nbytes: int, gradient: int) -> int:
    """Update a variable that comes to the device for that; return the op that makes it the host's again."""
    (handle,) = build.add(f"{name}/variable", "VarHandleOp", outputs=[8])
    (come,) = streamed_in(build, name, nbytes, True)
    enter = [handle, come]
    (held,) = build.add(f"{name}/enter", STREAM_ENTER, inputs=enter, outputs=[0], aliases=(1,))
    build.add(f"{name}/update", "ResourceApplyGradientDescent", inputs=[handle, gradient, held])
    behind = [len(build._ops) - 1]
    (last,) = build.add(
        f"{name}/last", STREAM_LAST, inputs=[handle, held], outputs=[nbytes], controls=behind, aliases=(1,)
    )
    (out,) = build.add(f"{name}/out", STREAM_OUT, inputs=[last], outputs=[nbytes], outside=True)
    build.add(f"{name}/leave", STREAM_LEAVE, inputs=[handle, out, held])
    return len(build._ops) - 1


def step(batch: int, other: bool = True, streams: bool = True) -> TracedStep:
    def moved(of_state: float, of_weights: float) -> TracedStep:
        numbers = int(of_state * LAYERS), int(of_weights * LAYERS)
        graphs = network(batch, *numbers), network(2 * batch, *numbers) if other else None
        nbytes = numbers[0] * STATE + numbers[1] * WEIGHT
        return replace(plain, graph=graphs[0], other=graphs[1], moved_bytes=nbytes)

    graphs = network(batch), network(2 * batch) if other else None
    plain = TracedStep(graphs[0], batch, graphs[1], LAYERS * WEIGHT, LAYERS * STATE)
    return replace(plain, with_variables_moved=moved if streams else lambda *_: None)


def forecasts(step: TracedStep, limit_bytes: int) -> list[Forecast]:
    target = Target(limit_bytes, GPUS["L4"].costs, GPUS["L4"].half_costs)
    return list(Forecaster(step, [target]).forecasts(target))


def test_a_batch_that_does_not_fit_without_a_plan_is_told_so_of_the_device_at_hand() -> None:
    plenty = Target(4096 * MIB, GPUS["L4"].costs, GPUS["L4"].half_costs, "CPU")
    need = next(iter(Forecaster(step(16), [plenty]).forecasts(plenty)))
    assert need.mode == "off" and need.fits
    here = replace(plenty, limit_bytes=int(0.8 * need.peak_bytes))
    off, swap, *_ = Forecaster(step(16), [here]).forecasts(here)
    assert not off.fits and off.peak_bytes >= 0.95 * need.peak_bytes and (off.largest_batch or 0) < 16
    assert swap.fits and swap.peak_bytes <= here.limit_bytes


def test_the_largest_batch_is_where_memory_ends() -> None:
    limit = 1024 * MIB
    found = {one.mode: one for one in forecasts(step(4), limit)}
    assert tuple(found) == MODES
    room = limit - 192 * MIB
    off = found["off"].largest_batch
    assert off is not None
    case_peak = found["off"].peak_bytes - 192 * MIB
    assert off == int(room / (case_peak / 4))  # every tensor grows with the batch
    assert found["swap"].largest_batch > 1.5 * off
    assert found["hybrid"].largest_batch >= found["swap"].largest_batch
    assert found["host state"].largest_batch > found["hybrid"].largest_batch
    assert found["off"].fits and found["off"].largest_step_s
    for mode in ("swap", "hybrid", "host state"):
        assert found[mode].step_s >= found["off"].step_s


@pytest.mark.slow
@pytest.mark.parametrize(("device_type", "threads"), [(None, 1), ("CPU", 1), ("CPU", 4)])
def test_a_run_by_itself_moves_no_more_variables_than_it_must(device_type: str | None, threads: int) -> None:
    peaks = []
    for limit in (1024 * MIB, 200 * MIB, 160 * MIB, 100 * MIB, 40 * MIB):
        costs = replace(GPUS["L4"].costs, threads=threads)
        target = Target(limit, costs, GPUS["L4"].half_costs, device_type)
        found = {one.mode: one for one in Forecaster(step(1), [target]).forecasts(target)}
        hybrid, host, auto = found["hybrid"], found["host state"], found["auto"]
        assert auto.fits and auto.peak_bytes <= limit
        assert auto.largest_batch == max(hybrid.largest_batch or 0, host.largest_batch or 0)
        assert hybrid.fits == (auto.peak_bytes == hybrid.peak_bytes) == (limit > 192 * MIB)
        assert auto.peak_bytes >= host.peak_bytes and auto.step_s <= 1.001 * host.step_s
        peaks.append(auto.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_variables_that_stream_take_the_time_of_the_link() -> None:
    slow = GPUS["L4"].costs.with_link(1e9)
    target = Target(100 * MIB, slow, slow)
    found = {one.mode: one for one in Forecaster(step(1), [target]).forecasts(target)}
    both_ways = 3 * LAYERS * WEIGHT + LAYERS * STATE  # weights for both passes and the update
    assert found["host state"].step_s > both_ways / 1e9 > 10 * found["off"].step_s


@pytest.mark.slow
@pytest.mark.parametrize("limit", [80 * MIB, 140 * MIB])
def test_where_variables_move_ops_are_recomputed_as_in_a_run(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swaps alone fit, too, and wait for a slow link: they take seven times as long in 80 MiB."""
    monkeypatch.setitem(globals(), "WEIGHT", MIB // 4)
    monkeypatch.setitem(globals(), "STATE", MIB // 2)
    slow = GPUS["L4"].costs.with_link(2e9)
    found = [
        {one.mode: one for one in Forecaster(step(8), [target]).forecasts(target)}["host state"]
        for target in (Target(limit, slow, slow), Target(limit, slow, slow, "GPU"))
    ]
    elsewhere, here = found
    assert elsewhere.fits and here.fits
    assert elsewhere.step_s <= 3.0 * here.step_s  # a run looks at more choices


@pytest.mark.parametrize("limit", [60, 100, 175, 180, 190])
def test_a_batch_that_fits_is_no_larger_than_the_largest(limit: int) -> None:
    target = Target(limit * MIB, GPUS["L4"].costs, GPUS["L4"].half_costs)
    auto = {one.mode: one for one in Forecaster(step(1), [target]).forecasts(target)}["auto"]
    assert auto.fits and (auto.largest_batch or 0) >= 1


def test_where_no_variable_can_move_a_run_says_so() -> None:
    target = Target(100 * MIB, GPUS["L4"].costs, GPUS["L4"].half_costs)
    given = step(1, streams=False)
    found = {one.mode: one for one in Forecaster(given, [target]).forecasts(target)}
    for mode in ("host state", "auto"):
        assert not found[mode].fits and replace(found[mode], note="") == replace(found["hybrid"], mode=mode)
    assert "no variable can stream" in found["host state"].note


def test_what_grows_is_a_line_in_the_batch() -> None:
    assert step(4).of(12) == network(12)
    assert step(4).of(3) == network(3)


def test_a_batch_that_is_not_known_is_said_to_be_unknown() -> None:
    for one in forecasts(step(4, other=False), GPUS["L4"].limit_bytes):
        assert one.largest_batch is None and one.largest_step_s is None


def test_a_device_that_is_too_small_fits_nothing() -> None:
    gpu = replace(GPUS["L4"], memory_gib=0.1)
    for one in forecasts(step(4), gpu.limit_bytes):
        assert not one.fits or one.mode in ("host state", "auto")


def base(batch: int) -> Variant:
    return Variant(step(4), batch, Case.of(step(4).of(batch), LEAST, Costs()))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_plan_for_one_batch_knows_its_memory_at_another(batch: int) -> None:
    ways = [plain_way(step(4)), *swapping_ways(base(16))]
    ways += [way for variant in repeated_variants(base(16)) for way in swapping_ways(variant)]
    assert len(ways) > 5
    for way in ways:
        there = way.variant.at(batch)
        swaps = [
            swap._replace(nbytes=there.case.graph.tensors[swap.tensor].nbytes or 0) for swap in way.swaps
        ]
        peak = there.case.buffers.timeline(way.order, tuple(swaps)).peak_bytes
        assert way.peak_bytes(batch) == pytest.approx(peak, rel=0.001)
        most = way.largest(peak)
        assert way.peak_bytes(most) <= peak < way.peak_bytes(most + 1) + MIB // 256


def test_a_large_step_gets_every_other_choice_of_what_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [one.choice for one in repeated_variants(base(16))]
    monkeypatch.setattr("lms.forecast.ways.MANY_OPS", 1)
    few = [one.choice for one in repeated_variants(base(16))]
    assert 1 <= len(few) < len(every) and all((choice or 0) % 2 for choice in few)
    assert [one.choice for one in repeated_variants(base(16), only=[2])] == [2], (
        "what another step has chosen"
    )


def test_arithmetic_that_an_op_states_grows_with_the_batch() -> None:
    one, two = (
        replace(
            network(batch),
            ops=tuple(op._replace(flops=1e12 * batch) for op in network(batch).ops),
        )
        for batch in (4, 8)
    )
    traced = TracedStep(one, 4, two, 0, 0)
    assert traced.of(16).ops[3].flops == 16e12
    assert sum(traced.op_seconds(16, Costs())) == pytest.approx(sum(Costs().op_seconds(traced.of(16))))


def test_a_batch_that_does_not_fit_is_planned_for_the_device() -> None:
    limit = 192 * MIB + 40 * MIB
    found = {one.mode: one for one in forecasts(step(4), limit)}
    assert not found["off"].fits
    for mode in ("swap", "hybrid"):
        assert found[mode].fits and found[mode].peak_bytes <= limit
        assert found[mode].step_s > found["off"].step_s
    assert found["hybrid"].step_s <= found["swap"].step_s


def test_the_curve_reaches_the_peak() -> None:
    for one in forecasts(step(4), 1024 * MIB):
        assert one.curve and one.largest_step_s
        assert [when for when, _ in one.curve] == sorted(when for when, _ in one.curve)
        assert one.curve[-1][0] <= one.largest_step_s
        assert 0.85 * 1024 * MIB < max(nbytes for _, nbytes in one.curve) <= 1024 * MIB


def test_devices_share_what_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    analyses: list[int] = []
    of = Case.of
    monkeypatch.setattr(Case, "of", lambda *given: (analyses.append(1), of(*given))[1])
    limits = [GPUS[name].limit_bytes for name in ("L4", "H100", "V100-16")]
    targets = [Target(limit, GPUS["L4"].costs, GPUS["L4"].half_costs) for limit in limits]
    forecaster = Forecaster(step(4), targets)
    for target in targets:
        known = len(analyses)
        list(forecaster.forecasts(target))
    assert len(analyses) == known, "a further device analyses the step again"


def gradients(batch: int = 1) -> Graph:
    """Gradients of a chain of layers: each has a filter's gradient that takes long, and nothing waits for."""
    build = GraphBuilder()
    (slope,) = build.add("begin", "Fill", outputs=[8 * MIB * batch])
    for layer in range(LAYERS):
        build.add(f"filter_{layer}", "Conv2DBackpropFilter", inputs=[slope], outputs=[4096], flops=1e13)
        name = f"image_{layer}"
        (slope,) = build.add(
            name, "Conv2DBackpropInput", inputs=[slope], outputs=[8 * MIB * batch], flops=1e11
        )
    return build.build(kept=[slope])


def unplanned(limit_bytes: int, threads: int) -> Forecast:
    costs = GPUS["L4"].costs
    costs = replace(costs, threads=threads)
    target = Target(limit_bytes, costs, costs, "CPU")
    traced = TracedStep(gradients(), 1, gradients(2), 0, 0)
    return next(Forecaster(traced, [target]).forecasts(target))


def test_a_peak_on_several_threads_is_the_most_of_several_runs() -> None:
    one, two = (unplanned(1024 * MIB, threads) for threads in (1, 2))
    assert one.fits and two.fits
    assert one.peak_bytes < 24 * MIB <= two.peak_bytes


def test_a_step_that_may_run_out_by_chance_does_not_fit() -> None:
    limit = 22 * MIB
    assert unplanned(limit, 1).fits
    found = unplanned(limit, 2)
    assert not found.fits and found.peak_bytes > limit


def test_a_plan_that_may_fail_by_chance_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = forecaster.decide
    monkeypatch.setattr(forecaster, "decide", lambda *given: replace(made(*given), doubt="by chance"))
    found = unplanned(1024 * MIB, 2)
    assert not found.fits and found.peak_bytes > 1024 * MIB


def test_the_largest_batch_of_the_device_at_hand_is_one_that_a_run_would_fit() -> None:
    one, two = (unplanned(161 * MIB, threads) for threads in (1, 2))
    assert one.largest_batch == 10, "two buffers of 8 MiB an example"
    assert two.largest_batch is not None and 5 <= two.largest_batch <= 6, "three, when a thread lags behind"
