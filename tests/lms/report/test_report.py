"""The picture of a step: what stands in it."""

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
from lms.config import LMSConfig
from lms.device.device import Device
from lms.errors import LMSError
from lms.ir.graph import GraphBuilder
from lms.ir.swap_plan import Recomputed
from lms.reader.shapes import ShapeHints
from lms.report.render import explain_out_of_memory, explain_unplanned, plot_memory, require_drawable
from lms.report.stats import GraphStats, OpenSizes, Planned, Report
from lms.rewriter.streaming import Streamed
from lms.rewriter.writer import Edits
from lms.swaps.swap_planner import plan
from lms.transports.base import StoreStats

MIB = 1 << 20


def planned() -> Planned:
    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[MIB])
    made = []
    for index in range(4):
        name = f"a_model_with_a_long_name/block_{index}/convolution"
        made += [value := build.add(name, "Conv2D", inputs=[value], outputs=[8 * MIB])[0]]
    (gradient,) = build.add("loss", "Loss", inputs=[value], outputs=[1024])
    for index in reversed(range(4)):
        (gradient,) = build.add(f"b{index}", "ConvGrad", inputs=[made[index], gradient], outputs=[1024])
    graph = build.build(kept=[gradient])
    return Planned("a step", graph, plan(graph, LMSConfig(policy="all")), 3 * MIB, None, graph)


def test_what_is_recomputed_is_told_with_bytes_and_time() -> None:
    base = planned()
    made = replace(base.plan, recomputed=Recomputed(ops=3, tensors=2, nbytes=16 * MIB, seconds=0.0021))
    stats = GraphStats.of("a step", made, Edits((), 0, 0, 0), base.base_bytes, 9 * MIB)
    report = Report(Device("CPU:0", None), "host", (stats,), None, StoreStats())
    words = " ".join(str(report).split())
    assert "recomputed 2 tensors (16.0 MiB) by 3 ops, about 2.1 ms a step" in words
    assert "2 recomputed (16.0 MiB)" in stats.why


def test_the_picture_names_what_is_alive_at_the_peak(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_memory(planned(), tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "before: peak 35 MiB" in drawn and "after: peak 19 MiB" in drawn
    assert "8.0 MiB .../block_1/convolution:0" in drawn
    assert "3.0 MiB in use before the step" in drawn and "3 tensors swapped" in drawn


def test_a_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_memory(planned(), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LMSError, match="ends in .png or .svg"):
        plot_memory(planned(), tmp_path / "memory.pdf")
    with pytest.raises(LMSError, match=r"found 5; needed in lms.plot\(\): the name of a .png or .svg file"):
        plot_memory(planned(), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/memory.png", "there is no folder"),
        ("folder.svg", "it is a folder"),
        ("file/a.png", "is no folder"),
    ],
)
def test_a_place_that_cannot_be_drawn_into_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(LMSError, match=f"cannot write '.*': .*{why}.*; needed in lms.plot"):
        require_drawable(tmp_path / name)


def test_a_disk_without_room_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", full)
    with pytest.raises(LMSError, match="memory.png': No space left on device"):
        plot_memory(planned(), tmp_path / "memory.png")


OPEN = OpenSizes(3, "rows:0")


def report_of(*graphs: GraphStats) -> Report:
    return Report(Device("CPU:0", 64 * MIB), "host", graphs, 30 * MIB, StoreStats())


def stats_of(name: str, open_sizes: OpenSizes | None) -> GraphStats:
    made = planned().plan
    return replace(GraphStats.of(name, made, None, 3 * MIB, 22 * MIB, open_sizes), edited=True)


def test_a_peak_is_not_told_while_sizes_are_open() -> None:
    known, unknown = stats_of("known", None), stats_of("a step", OPEN)
    assert (unknown.planned_peak_bytes, unknown.peak_before_bytes, unknown.floor_bytes) == (None, None, None)
    report = report_of(known, unknown)
    assert report.planned_peak_bytes is None and report.peak_error is None
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    why = "the sizes of 3 tensors (such as rows:0) are open; set batch_size (LMS_BATCH_SIZE)"
    assert f"peak - {why}" in lines and f"planned peak - {why}" in lines
    assert "peak 35.0 MiB before, 22.0 MiB planned" in lines and "measured peak 30.0 MiB" in lines
    outside = "in it 3.0 MiB from outside of the step (variables, constants, data, buffers)"
    assert f"{outside}, 16.0 MiB of its tensors, 3.0 MiB that the allocator needs beyond these" in lines
    assert outside in lines  # of open sizes no sum is told


def test_the_largest_plan_of_all_traces_of_a_function_counts() -> None:
    small = replace(stats_of("a step", None), planned_peak_bytes=9 * MIB, function="step_2")
    large = replace(stats_of("a step", None), function="step_1")
    assert report_of(large, small).planned_peak_bytes == 22 * MIB
    assert report_of(large, replace(small, function="step_1")).planned_peak_bytes == 9 * MIB
    compiled_again = replace(report_of(large, small), gone=frozenset({"step_1"}))
    assert compiled_again.planned_peak_bytes == 9 * MIB
    ended = replace(report_of(large, small), gone=frozenset({"step_1", "step_2"}))
    assert ended.planned_peak_bytes == 9 * MIB, "the latest, where none is left"


def test_plans_for_other_batches_that_may_run_again_count() -> None:
    first = replace(stats_of("a step", None), plan=0)
    second = replace(first, planned_peak_bytes=9 * MIB, plan=1)
    assert report_of(first, second).planned_peak_bytes == 9 * MIB, "it replaces the first"
    beside = replace(second, beside=frozenset({0}))
    assert report_of(first, beside).planned_peak_bytes == 22 * MIB
    third = replace(first, planned_peak_bytes=12 * MIB, plan=2, beside=frozenset({1}))
    assert report_of(first, beside, third).planned_peak_bytes == 12 * MIB


def test_what_has_no_plan_is_not_explained_by_that_of_a_step() -> None:
    assert explain_unplanned("one_step_on_data", 40 * MIB) == (
        "LMS: one_step_on_data ran out of memory (limit 40.0 MiB). It has no plan: it trains nothing, as "
        "evaluate and predict do, or LMS left it unedited and warned of it. Take a smaller batch there."
    )


def test_the_latest_plan_of_a_graph_counts() -> None:
    again = report_of(stats_of("a step", OPEN), stats_of("a step", None))
    assert (
        again.planned_peak_bytes == 22 * MIB and "batch_size" not in str(again).partition("planned peak")[2]
    )


def test_variables_on_the_host_do_not_read_as_nothing_done() -> None:
    streamed = Streamed(
        state=16, nbytes=64 * MIB, bytes_in=64 * MIB, bytes_out=64 * MIB, copies_out=16, nodes=("n",)
    )
    made = replace(planned().plan, swaps=(), recomputed=None)
    stats = GraphStats.of("a step", made, Edits((), 0, 0, 0), 3 * MIB, 22 * MIB, None, streamed)
    lines = [" ".join(line.split()) for line in str(report_of(replace(stats, executed=16))).splitlines()]
    text = "\n".join(lines)
    assert "16 variables on the host between steps\n" in text and "0 tensors" not in text
    assert "35.0 MiB with the variables on the host and nothing swapped, 22.0 MiB planned" in text
    assert "executed 16 swap-outs in the first run, 16 of them planned for variables" in lines
    assert any(line.endswith("the first copy of the variables in it") for line in lines)


def test_horovods_buffer_is_named_in_the_peak() -> None:
    stats = replace(stats_of("a step", None), fusion_bytes=16 * MIB)
    planned_row = str(report_of(stats)).partition("planned peak")[2].splitlines()[0]
    assert "22.0 MiB, 16.0 MiB of it Horovod's buffer (HOROVOD_FUSION_THRESHOLD), 42.0 MiB" in planned_row
    assert "Horovod" not in str(report_of(stats_of("a step", None)))


def test_copies_that_nobody_counts_are_not_told_as_none() -> None:
    report = report_of(stats_of("a step", None))
    assert re.search(r"moved so far +0.0 MiB out, 0.0 MiB in", str(report)) and "held at most" in str(report)
    on_gpu, unswapped = replace(report, transport="device"), replace(report, transport="none")
    assert re.search(r"moved so far +- TensorFlow makes the copies and counts none", str(on_gpu))
    assert "held at most" not in str(on_gpu) and "moved so far" not in str(unswapped)


def test_what_the_data_decides_is_not_blamed_on_the_batch_size() -> None:
    names = ("chosen:0", "more:0")
    assert OpenSizes.of((), known=True) is None
    assert "are open; set batch_size" in str(OpenSizes.of(names, known=False))
    said = "the sizes of 2 tensors (such as chosen:0) depend on the data, or on open sizes beside"
    assert str(OpenSizes.of(names, known=True)).startswith(said)
    assert "pad all to one" in str(OpenSizes.of(names, known=True))
    assert str(OpenSizes.of(names[:1], known=False)).startswith("the size of 1 tensor (chosen:0) is open; ")


def test_the_size_of_the_batch_is_known_of_a_call_a_batch_or_a_feed() -> None:
    for hints in (
        ShapeHints(batch_size=8),
        ShapeHints(arguments={0: (8, 3)}),
        ShapeHints(batches=((8, 3),)),
        ShapeHints(feeds={"x": (8, 3)}),
    ):
        assert hints.knows_batch
    assert not ShapeHints(arguments={0: ()}, batches=((),)).knows_batch


def test_a_loop_is_named_where_its_lists_are_in_no_plan() -> None:
    """What it keeps has open sizes, too, but no length of an input is open."""
    step = replace(planned(), open_sizes=OPEN)
    text = explain_out_of_memory(step, report_of(replace(stats_of("a step", OPEN), loops=2)))
    assert "needs is not known: what 2 loops keep for the backward pass is in no plan" in text
    assert text.endswith(
        "Layers such as LSTM take unroll=True for inputs of one length: their turns become ops of the step."
    )


def test_running_out_of_memory_with_open_sizes_tells_no_numbers_of_the_known_part(tmp_path: Path) -> None:
    step = replace(planned(), open_sizes=OPEN)
    text = explain_out_of_memory(step, report_of(stats_of("a step", OPEN)))
    assert "What a step needs is not known: the sizes of 3 tensors" in text and "for the step" not in text
    assert "for the step" in explain_out_of_memory(planned(), report_of())
    pytest.importorskip("matplotlib")
    plot_memory(step, tmp_path / "memory.svg")
    assert "not drawn: 3 of unknown size" in (tmp_path / "memory.svg").read_text()


def test_equal_traces_of_a_step_are_one_row() -> None:
    first, other = stats_of("a step", None), replace(stats_of("a step", None), ops=7)
    rows = [
        line.split(maxsplit=1)[1]
        for line in str(report_of(first, other, first)).splitlines()
        if " graph " in line
    ]
    assert [row.partition(": ")[0] for row in rows] == ["a step (planned 2 times)", "a step"]


def test_the_policy_is_what_the_user_chose() -> None:
    step = replace(stats_of("a step", None), policy="budget", budget_bytes=312 * MIB)
    assert "policy auto (budget 312.0 MiB), " in str(report_of(replace(step, asked_policy="auto")))
    assert "policy budget, " in str(report_of(replace(step, asked_policy="budget")))
    least = replace(step, policy="all", asked_policy="auto")  # as a plan that needed the least memory
    assert "policy auto (all), " in str(report_of(least))


def test_a_measured_peak_above_the_plan_is_explained() -> None:
    report = report_of(replace(stats_of("a step", None), planned_peak_bytes=26 * MIB))
    assert "+15.4% against planned; where it has room the allocator gives" in str(report)
    beside = replace(report, warnings=("another step stays as it is: it cannot be read",))
    assert "+15.4% against planned; what stays as it is (see the warnings) has no plan" in str(beside)
    far = report_of(replace(stats_of("a step", None), planned_peak_bytes=10 * MIB))
    assert "against planned; what ran outside of the planned steps" in str(far)
    on_gpu = str(replace(report, device=Device("GPU:0", 64 * MIB)))
    assert "+15.4% against planned; kernels' scratch memory is in no plan; cuDNN" in on_gpu
    near = report_of(replace(stats_of("a step", None), planned_peak_bytes=29 * MIB))
    assert "+3.4% against planned)" in str(near)


@pytest.mark.parametrize(
    ("policy", "advice"),
    [("auto", "larger margin"), ("all", "swaps all that it can already"), ("threshold", "'auto' or 'all'")],
)
def test_who_runs_out_of_memory_is_told_what_was_not_tried(policy: str, advice: str) -> None:
    step = planned()
    step = replace(step, plan=replace(step.plan, policy=policy, floor_bytes=step.plan.peak_bytes - 1))
    *_, last = explain_out_of_memory(step, report_of()).splitlines()
    assert advice in last and "smaller batch" in last
    assert ("LMS_POLICY=all" in last) == (policy != "all")


@pytest.mark.parametrize(
    ("made_by", "advice"), [("all", "try 'auto' (LMS_POLICY=auto)"), ("budget", "were both tried")]
)
def test_who_asks_for_the_least_memory_is_told_whether_auto_was_tried(made_by: str, advice: str) -> None:
    step = planned()
    step = replace(step, plan=replace(step.plan, policy=made_by))
    *_, last = explain_out_of_memory(step, report_of(), policy="all").splitlines()
    assert advice in last and "smaller batch" in last


def test_a_report_takes_its_document_to_another_process() -> None:
    report = replace(report_of(), document=lambda one: {"retries": one.retries})
    sent = pickle.loads(pickle.dumps(report))  # noqa: S301 - our own bytes
    assert sent == report and str(sent) == str(report) and sent.to_json() == {"retries": report.retries}
    assert pickle.loads(pickle.dumps(report_of())).to_json() == report_of().to_json()  # noqa: S301


@pytest.mark.parametrize(("budget", "helps"), [(9 * MIB, True), (9 * MIB - 1, False)])
def test_a_larger_margin_is_advised_where_a_plan_fits_with_it(budget: int, helps: bool) -> None:
    step = planned()
    made = replace(step.plan, policy="auto", floor_bytes=8 * MIB, peak_bytes=8 * MIB + 1, budget_bytes=budget)
    *_, last = explain_out_of_memory(replace(step, plan=made), report_of()).splitlines()
    assert ("LMS_MARGIN=0.2" in last) == helps and "LMS_POLICY=all" in last


def test_who_runs_out_of_memory_where_no_plan_fits_is_told_so() -> None:
    step = planned()
    small = replace(step.plan, policy="budget", budget_bytes=step.plan.peak_bytes - 1)
    *_, last = explain_out_of_memory(replace(step, plan=small), report_of()).splitlines()
    assert last == "No plan needs less: take a smaller batch, or a device with more memory."


def test_who_runs_out_of_memory_under_the_least_plan_is_not_told_to_plan_for_less() -> None:
    step = planned()
    least = replace(step.plan, policy="auto", floor_bytes=step.plan.peak_bytes)
    *_, last = explain_out_of_memory(replace(step, plan=least), report_of()).splitlines()
    assert last == "No plan needs less: take a smaller batch, or a device with more memory."


@pytest.mark.parametrize(
    ("limit", "streams", "told"), [(8, False, True), (8, True, False), (80, False, False)]
)
def test_who_has_no_room_for_variables_is_told_that_the_host_has(
    limit: int, streams: bool, told: bool
) -> None:
    report = replace(report_of(), device=Device("CPU:0", limit * MIB))
    text = explain_out_of_memory(planned(), report, streams=streams)  # 3 MiB are in use before
    assert ("LMS_OPTIMIZER_STATE=host, LMS_VARIABLES=host" in text) == told


@pytest.mark.parametrize(("streams", "told"), [(False, "LMS_VARIABLES=host"), (True, "a smaller model")])
def test_who_runs_out_of_memory_before_any_step_is_told_of_variables(streams: bool, told: str) -> None:
    text = explain_out_of_memory(None, replace(report_of(), graphs=()), streams=streams)
    assert told in text and "LMS_POLICY" not in text and "batch" not in text


@pytest.mark.parametrize(
    ("spare", "told"),
    [(0, ""), (7, ", 7.0 MiB that the allocator needs beyond these")],
)
def test_who_runs_out_of_memory_is_told_of_the_pieces(spare: int, told: str) -> None:
    """Else a step of 8 MiB beside 3 seems to fit in 16."""
    step = planned()
    whole = step.plan.peak_bytes + step.base_bytes + spare * MIB
    stats = replace(stats_of(step.name, None), planned_peak_bytes=whole)
    assert f"in use before{told}; " in explain_out_of_memory(step, report_of(stats))


def test_who_runs_out_of_memory_without_swaps_is_told_to_allow_them() -> None:
    text = explain_out_of_memory(planned(), report_of(), swaps=False)
    assert "no plan without swaps needs less than" in text
    assert "LMS_RECOMPUTE=auto" in text.splitlines()[-1]


def test_only_tensors_of_some_size_are_named() -> None:
    text = explain_out_of_memory(planned(), report_of())
    assert re.search(r"8\.0 MiB  a_model_with_a_long_name/block_\d/convolution:0", text)
    assert " 0.0 MiB  " not in text


def test_what_onednn_keeps_beside_an_output_is_named_in_words() -> None:
    build = GraphBuilder()
    (image,) = build.add("image", "Placeholder", outputs=[MIB])
    pooled, places = build.add("pool", "MaxPool", inputs=[image], outputs=[MIB, MIB // 4])
    halves = build.add("halves", "Split", inputs=[pooled], outputs=[MIB // 2, MIB // 2])
    graph = build.build(kept=[places, *halves])
    assert graph.tensor_name(pooled) == "pool:0" and graph.tensor_name(halves[1]) == "halves:1"
    assert graph.tensor_name(places) == "pool (places of its maxima, kept for the gradient)"


def test_a_step_that_xla_compiles_whole_is_told_beside_an_edited_one() -> None:
    whole, edited = (stats_of(name, None) for name in ("left whole", "edited"))
    whole = replace(whole, edited=False, whole=True, why="it fits; XLA compiles it whole")
    other = replace(whole, name="left alone", whole=False, why="nothing is edited")
    text = str(report_of(whole, other, edited))
    assert re.search(r"left whole +it fits; XLA compiles it whole", text) and "left alone" not in text
    since = replace(edited, name="left whole")
    assert "compiles it whole" not in str(report_of(whole, since, edited))
