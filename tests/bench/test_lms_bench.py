"""The benchmarks of Large Model Support: their search, how they read traces, a real run of each part."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


@pytest.fixture
def children(bench_path: None) -> ModuleType:
    import lms_children

    return lms_children


@pytest.fixture
def printed(bench_path: None) -> ModuleType:
    import lms_table

    return lms_table


@pytest.fixture
def script(bench_path: None) -> Iterator[ModuleType]:
    """``bench/lms.py`` under another name than that of the package."""
    spec = importlib.util.spec_from_file_location("bench_lms", BENCH / "lms.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_lms"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_lms"]


@pytest.mark.parametrize("limit", [1, 2, 13, 100, 337])
@pytest.mark.parametrize("guess", [1, 20, 100, 400])
def test_the_search_finds_the_largest(children: ModuleType, limit: int, guess: int) -> None:
    tried: list[int] = []

    def attempt(units: int) -> dict[str, Any] | None:
        tried.append(units)
        return {"units": units} if units <= limit else None

    found = children.largest(attempt, guess)["units"]
    assert found <= limit <= found + max(1, int(found * 0.06))
    assert len(tried) == len(set(tried)) <= 18


def test_a_good_guess_costs_two_runs(children: ModuleType) -> None:
    tried: list[int] = []

    def attempt(units: int) -> dict[str, Any] | None:
        tried.append(units)
        return {"units": units} if units <= 102 else None

    assert children.largest(attempt, 100)["units"] == 100 and tried == [100, 106]


def test_nothing_fits(children: ModuleType) -> None:
    with pytest.raises(children.NothingFitsError, match="not even one unit"):
        children.largest(lambda units: None, 40)


def test_the_line_meets_the_limit(children: ModuleType) -> None:
    assert children.line_meets(1000, (6, 160.0), (2, 120.0)) == 90
    assert children.line_meets(1000, (6, 120.5), (2, 120.0)) == 6 * children.FARTHEST
    assert children.line_meets(1000, (6, 119.0), (2, 120.0)) == 6 * children.FARTHEST, "less for more"
    assert children.line_meets(100, (6, 119.0), (2, 120.0)) == 2, "neither fits"


def test_a_book_keeps_what_it_held(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    first = script.Book(path)
    first.entry("2.21.0", "3", "unet3d", 200)["without"] = {"units": 13}
    first.save()
    again = script.Book(path)
    assert again.entry("2.21.0", "3", "unet3d", 200)["without"] == {"units": 13}
    again.entry("2.15.1", "2", "unet3d", 200)
    again.save()
    assert [entry["tensorflow"] for entry in script.Book(path).entries] == ["2.21.0", "2.15.1"]
    assert list(tmp_path.iterdir()) == [path]


def test_another_document_is_refused(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"schema": "other"}')
    with pytest.raises(SystemExit, match="no document of this benchmark"):
        script.Book(path)


class Machine:
    """In the place of the runner: what a case would find if memory were all that mattered."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, int]] = []

    def run(self, case: Any) -> dict[str, Any] | None:
        self.cases.append((case.policy, case.units))
        peaks = {policy: (40 + each * case.units) * 2**20 for policy, each in GROWTH_MIB.items()}
        found = {"units": case.units, "peak_before_bytes": peaks["off"], "edit_s": 0.2, "ops": 3000}
        found["planned_peak_bytes"] = peaks[case.policy]
        return found if peaks[case.policy] <= case.limit_mb * 2**20 else None


GROWTH_MIB = {"off": 10, "all": 1, "auto": 1.2}


def test_largest_batches_are_found_and_kept(script: ModuleType) -> None:
    machine, entry, saved = Machine(), {"limit_mb": 400, "target": 6.0}, []
    bench = script.Bench(machine, "resnet50", 400)
    script.measure_memory(entry, bench, script.POLICIES, lambda: saved.append(len(entry)))
    units = {policy: found["units"] for policy, found in entry["with"].items()}
    assert 34 <= entry["without"]["units"] <= 36
    assert 339 <= units["all"] <= 360 and 282 <= units["auto"] <= 300
    assert {policy: found["units"] for policy, found in entry["double"].items()} == {
        policy: 2 * entry["without"]["units"] for policy in script.POLICIES
    }
    assert len(machine.cases) <= 18 and len(saved) == 3
    without, machine.cases = entry["without"], []
    script.measure_memory(entry, bench, ["auto"])
    assert entry["without"] is without and all(policy != "off" for policy, _ in machine.cases)


def test_one_case_a_policy_shows_that_the_goal_is_met(script: ModuleType, printed: ModuleType) -> None:
    entry: dict[str, Any] = {"limit_mb": 400, "target": 6.0, "without": {"units": 35}}
    machine = Machine()
    script.measure_memory(entry, script.Bench(machine, "resnet50", 400), script.POLICIES, goal_only=True)
    assert {policy: found["units"] for policy, found in entry["with"].items()} == {"all": 210, "auto": 210}
    assert printed.multiple(entry) == 6.0 and len(machine.cases) == 6
    assert entry["goal_only"], "the table must not call it the largest"
    assert entry["failed"] == {}


@pytest.mark.parametrize("goal_only", [True, False])
def test_a_model_that_fits_with_lms_alone_is_a_row(
    script: ModuleType, printed: ModuleType, goal_only: bool
) -> None:
    class Small(Machine):
        def run(self, case: Any) -> dict[str, Any] | None:
            return None if case.policy == "off" else super().run(case)

    held: dict[str, Any] = {"limit_mb": 400, "target": 6.0}
    bench = script.Bench(Small(), "resnet50", 400)
    script.measure_memory(held, bench, script.POLICIES, goal_only=goal_only)
    assert held["without"] == {"units": 0} and held["failed"] == held["double"] == {}
    assert 339 <= held["with"]["all"]["units"] <= 360 and not held["goal_only"]
    assert printed.multiple(held) is None
    with pytest.raises(script.CaseError, match="not even one unit fits without LMS"):
        script.measure_time(held, bench)


class Faulty(Machine):
    """One whose policy ``all`` crashes with larger batches, for another reason than memory."""

    def run(self, case: Any) -> dict[str, Any] | None:
        from lms_children import CaseError

        if case.policy == "all" and case.units > 100:
            raise CaseError(f"all {case.units} ended with 1:\nTypeError: a fault")
        return super().run(case)


@pytest.mark.parametrize("order", [["all", "auto"], ["auto", "all"]])
def test_a_policy_that_misses_the_goal_does_not_end_the_others(
    script: ModuleType, printed: ModuleType, order: list[str]
) -> None:
    held: dict[str, Any] = {"limit_mb": 400, "target": 10.0, "without": {"units": 35}}
    held["with"] = {"auto": {"units": 1000}}
    machine = Machine()
    script.measure_memory(held, script.Bench(machine, "resnet50", 400), order, goal_only=True)
    assert held["with"].keys() == {"all"} and printed.multiple(held) == 10.0
    assert held["failed"] == {"auto": "350 units do not fit"}
    held |= {"tensorflow": "2.21.0", "keras": "3", "model": "resnet50", "with": {}}
    assert printed.misses([held]) == ["TensorFlow 2.21.0, Keras 3, resnet50: auto: 350 units do not fit"]
    script.measure_memory(
        held | {"target": 6.0}, script.Bench(machine, "resnet50", 400), order, goal_only=True
    )
    assert held["failed"] == {}, "measured anew"


@pytest.mark.parametrize("goal_only", [True, False])
def test_a_policy_that_crashes_does_not_end_the_others(
    script: ModuleType, printed: ModuleType, goal_only: bool
) -> None:
    held: dict[str, Any] = {"limit_mb": 400, "target": 6.0, "without": {"units": 35}}
    script.measure_memory(held, script.Bench(Faulty(), "resnet50", 400), script.POLICIES, goal_only=goal_only)
    (policy,) = held["with"]
    assert policy == "auto" and printed.multiple(held) >= 6.0
    assert held["failed"].keys() == {"all"} and "TypeError: a fault" in held["failed"]["all"]


class Gpu:
    """In the place of the runner of ``gpu_lms.py``: a step takes 1 s a unit, and 0.2 s more with swaps."""

    def __init__(self, **most: int) -> None:
        self.most = {"off": 37, **most}
        self.cases: list[tuple[str, int, int]] = []

    def run(self, case: Any) -> dict[str, Any] | None:
        from dataclasses import asdict

        if case.copy_mb:
            rates = {
                f"{way}_bytes_per_s": 1e9 * value for way, value in (("out", 10), ("in", 20), ("both", 25))
            }
            return rates | {"transport": "device"}
        self.cases.append((case.policy, case.units, case.steps))
        if case.units > self.most.get(case.policy, 10_000) and not case.managed:
            return None
        pace = 0.5 if case.compiled else 4.0 if case.managed else 1.0
        each = pace * (1.0 if case.policy == "off" else 1.2) * case.units
        found = asdict(case) | {
            "steps_s": [9.0, 5.0] + [each] * 3,
            "peak_bytes": 100 * case.units,
            "trace": None,
        }
        if case.policy == "off":
            return found
        trace = {"share": 0.75, "steps": 2, "bytes_out": 2**30, "bytes_in": 2**31}
        return found | {
            "bytes_out": int(2e9 * case.units),
            "bytes_in": int(4e9 * case.units),
            "trace": trace,
            "peak_before_bytes": (40 + 10 * case.units) << 20,
            "planned_peak_bytes": 100 * case.units,
            "recomputed_ops": 7,
            "simulated_s": 1.14 * case.units,
        }


MACHINE = {"tensorflow": "2.21.0", "cuda": True, "gpus": ["A GPU"]}


def kept(runner: Any, path: Path | None = None, minutes: float = 9.0, at_once: int = 1) -> Any:
    import gpu_lms

    document: dict[str, Any] = {"schema": gpu_lms.SCHEMA, "machine": MACHINE, "quick": False, "cases": {}}
    if path is not None and path.exists():
        document = json.loads(path.read_text())
    return gpu_lms.Kept(runner, document, path, minutes, at_once)


def gpu_setting(*models: str) -> Any:
    import gpu_lms

    return gpu_lms.Setting("GPU:0", "full", models or ("resnet50",), 400)


@pytest.mark.parametrize("at_once", [1, 6])
def test_the_table_of_a_gpu(bench_path: None, at_once: int) -> None:
    import gpu_lms

    runs = kept(Gpu(), at_once=at_once)
    rows = gpu_lms.measure(gpu_setting(), runs)
    most = rows[0][2]["units"]
    assert 34 <= most <= 37
    ways = [(way, found["units"]) for _, way, found in rows]
    assert ways == [
        ("none", most),
        ("auto", 2 * most),
        ("auto, pages", 2 * most),
        ("unified memory", 2 * most),
        ("all", 2 * most),
        ("auto", int(4.9 * most)),
        ("XLA", most),
        ("auto, XLA", 2 * most),
    ]
    head, copies, columns, first, second, _, managed, *_, xla, compiled, _ = gpu_lms.render(
        runs.document, rows
    ).splitlines()
    assert head == "A GPU; TensorFlow 2.21.0"
    assert copies == "copies (device): 10.0 GB/s out, 20.0 in, 25.0 both at once"
    assert columns.split()[:3] == ["model", "way", "units"]
    cells = [cell.strip() for cell in second.split("  ") if cell.strip()]
    assert cells == [
        "resnet50",
        "auto",
        str(2 * most),
        "2.0x",
        "4.9x",
        f"{2400 * most} ms",
        "1.20",
        "-5%",
        "+0.0%",
        "7",
        f"{4e9 * most / 2**30:.2f} / {8e9 * most / 2**30:.2f}",
        "0.50 / 1.00",
        "75%",
        "50%",  # 0.4 s of copies a unit, of which 0.2 s show
    ]
    assert "1.00" in first and "4.00" in managed and "0.50" in xla and "0.60" in compiled


def test_unified_memory_needs_a_driver(bench_path: None) -> None:
    import gpu_lms

    runs = kept(Gpu())
    runs.document["machine"] = MACHINE | {"cuda": False}
    assert "unified memory" not in [way for _, way, _ in gpu_lms.measure(gpu_setting(), runs)]


def test_a_case_with_an_allocator_that_maps_pages_asks_for_it(bench_path: None) -> None:
    from lms_case import Case
    from lms_children import Runner

    for device, maps, wanted in (
        ("GPU:0", True, "cuda_malloc_async"),
        ("GPU:0", False, ""),
        ("CPU:0", True, ""),
    ):
        environ = Runner().environ(Case("full", "resnet50", device=device, maps_pages=maps))
        assert environ.get("TF_GPU_ALLOCATOR", "") == wanted


def test_a_case_that_has_run_does_not_run_again(bench_path: None, tmp_path: Path) -> None:
    import gpu_lms

    path, first = tmp_path / "out" / "gpu.json", Gpu()
    rows = gpu_lms.measure(gpu_setting(), kept(first, path))
    again = Gpu()
    assert gpu_lms.measure(gpu_setting(), kept(again, path, minutes=0.0)) == rows
    assert first.cases and not again.cases
    path.write_text(json.dumps({**json.loads(path.read_text()), "cases": {}}))
    assert gpu_lms.measure(gpu_setting(), kept(again, path, minutes=0.0)) == [] and not again.cases


def test_the_first_way_of_every_model_comes_before_the_second_of_any(bench_path: None) -> None:
    import gpu_lms

    class Ends(Gpu):
        def run(self, case: Any) -> dict[str, Any] | None:
            if case.policy == "auto":
                raise gpu_lms.OutOfTimeError
            return super().run(case)

    rows = gpu_lms.measure(gpu_setting("resnet50", "resnet152"), kept(Ends()))
    assert [(model, way) for model, way, _ in rows] == [("resnet50", "none"), ("resnet152", "none")]


@pytest.mark.parametrize("most", [1, 2, 22, 37, 100, 300])
def test_the_largest_without_lms_is_found_from_any_guess(bench_path: None, most: int) -> None:
    """The peaks of the probes say 36."""
    import gpu_lms

    runner = Gpu(off=most)
    found = gpu_lms.measure(gpu_setting(), kept(runner))[0][2]["units"]
    assert found <= most <= found + max(1, 0.12 * found)
    searched = [case for case in runner.cases if case[0] == "off" and case[2] == 2]
    assert len(searched) <= 20


def test_a_size_that_fits_for_two_steps_only_is_not_the_one_that_is_timed(bench_path: None) -> None:
    import gpu_lms

    class Narrow(Gpu):
        def run(self, case: Any) -> dict[str, Any] | None:
            lasts = case.policy != "off" or not case.trace_steps or case.units <= 33
            return super().run(case) if lasts else None

    _, way, found = gpu_lms.measure(gpu_setting(), kept(Narrow()))[0]
    assert way == "none" and 30 <= found["units"] <= 33


def test_one_model_that_fails_is_a_line_of_the_table(bench_path: None) -> None:
    import gpu_lms

    runs = kept(Gpu(all=3))
    rows = gpu_lms.measure(gpu_setting("resnet50", "resnet152"), runs)
    text = "resnet50: 4 units do not fit even with LMS; raise --limit-gib"
    assert rows[0] == ("resnet50", "none", {"error": text})
    assert f"failed: {text}" in gpu_lms.render(runs.document, rows)


def test_a_case_that_fails_is_kept_and_the_others_run(bench_path: None, tmp_path: Path) -> None:
    import gpu_lms
    from lms_children import CaseError

    class Faulty(Gpu):
        def run(self, case: Any) -> dict[str, Any] | None:
            found = super().run(case)
            if case.compiled or case.copy_mb or (case.model, case.steps) == ("resnet152", 8):
                raise CaseError("it ended with 1:\nTypeError: a fault")
            return found

    path, first, again = tmp_path / "gpu.json", Faulty(), Faulty()
    models = gpu_setting("resnet152", "resnet50")
    rows = gpu_lms.measure(models, kept(first, path))
    ways = [(model, way, (found or {}).get("error")) for model, way, found in rows]
    fault = "it ended with 1:"
    assert ways == [
        ("resnet152", "none", fault),
        ("resnet50", "none", None),
        ("resnet50", "auto", None),
        ("resnet50", "auto, pages", None),
        ("resnet50", "unified memory", None),
        ("resnet50", "all", None),
        ("resnet50", "auto", None),
        ("resnet50", "XLA", fault),
        ("resnet50", "auto, XLA", fault),
    ]
    assert gpu_lms.measure(models, kept(again, path, minutes=0.0)) == rows and not again.cases
    assert "failed: it ended with 1:" in gpu_lms.render(kept(again, path).document, rows)


def test_rows_behind_a_missing_case_are_in_the_table(bench_path: None, tmp_path: Path) -> None:
    import gpu_lms

    path = tmp_path / "gpu.json"
    rows = gpu_lms.measure(gpu_setting("resnet152"), kept(Gpu(), path))
    both = gpu_lms.measure(gpu_setting("resnet50", "resnet152"), kept(Gpu(), path, minutes=0.0))
    assert both == rows


def test_a_way_that_does_not_fit_is_a_line_of_the_table(bench_path: None) -> None:
    import gpu_lms

    runs = kept(Gpu(auto=100))
    rows = gpu_lms.measure(gpu_setting(), runs)
    assert [way for _, way, found in rows if found is None] == ["auto"]
    assert "does not fit" in gpu_lms.render(runs.document, rows)


def test_times_need_batches(script: ModuleType) -> None:
    with pytest.raises(script.CaseError, match="--what memory first"):
        script.measure_time({}, script.Bench(Machine(), "resnet50", 400))


class Fragile:
    """In the place of a paced case: one of 10 units runs out of memory in its third step; 20 crash."""

    def __init__(self, runner: Any, case: Any) -> None:
        self.case, self.steps = case, 0

    def step(self) -> float:
        from lms_children import CaseError, OutOfMemoryError

        self.steps += 1
        if self.case.units == 10 and self.steps == 3:
            raise OutOfMemoryError("out of memory")
        if self.case.units == 20:
            raise CaseError("resnet50 off 20 ended with 1 in mid-run:\nTypeError: a fault")
        return 0.5 * float(self.case.units)

    def kill(self) -> None:
        pass

    def close(self) -> dict[str, Any]:
        return dict.fromkeys(
            ("planned_peak_bytes", "measured_peak_bytes", "counted_bytes_out", "counted_bytes_in", "copy_s"),
            0,
        )


def test_training_without_lms_goes_on_smaller_when_it_fails_late(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "Paced", Fragile)
    entry: dict[str, Any] = {"without": {"units": 10}, "double": {}, "with": {"all": {"units": 60}}}
    script.measure_time(entry, script.Bench(Machine(), "resnet50", 400), rounds=3)
    found = entry["time"]["all at most"]
    assert (found["units"], found["units_without"], found["ratio"]) == (60, 9, 1.0)


def test_a_crash_without_lms_is_not_taken_for_a_lack_of_memory(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have been tried again on ever smaller batches, and the times be those of the smallest."""
    monkeypatch.setattr(script, "Paced", Fragile)
    entry: dict[str, Any] = {"without": {"units": 20}, "double": {}, "with": {"all": {"units": 60}}}
    with pytest.raises(script.NoBaselineError, match="^without LMS: resnet50 off 20 .*\n.*TypeError"):
        script.measure_time(entry, script.Bench(Machine(), "resnet50", 400), rounds=3)
    assert entry["time"] == {}


def test_running_out_of_memory_for_ever_ends_the_row(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hopeless(Fragile):
        def step(self) -> float:
            raise script.OutOfMemoryError("out of memory")

    monkeypatch.setattr(script, "Paced", Hopeless)
    entry: dict[str, Any] = {"without": {"units": 40}, "double": {}, "with": {"all": {"units": 60}}}
    with pytest.raises(script.NoBaselineError, match="3 times smaller: out of memory"):
        script.measure_time(entry, script.Bench(Machine(), "resnet50", 400), rounds=3)


@pytest.mark.parametrize(
    ("code", "errors", "memory"),
    [
        (-11, "", True),
        (-6, "could not create a memory object", True),
        (1, "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM", True),
        (1, "TypeError: a fault", False),
        (-9, "", False),
        (-15, "OOM", False),
        (0, "OOM", False),
    ],
)
def test_what_counts_as_out_of_memory(children: ModuleType, code: int, errors: str, memory: bool) -> None:
    assert children.ran_out(code, errors) == memory


def test_a_crash_beside_a_gpu_is_a_fault(children: ModuleType) -> None:
    assert not children.ran_out(-6, "F gpu_util.cc: GPU->CPU Memcpy failed", "GPU:0")
    assert children.ran_out(1, "ResourceExhaustedError: OOM", "GPU:0")


def entry() -> dict[str, Any]:
    peaks = {"measured_peak_bytes": 115, "planned_peak_bytes": 100}
    moved = {"counted_bytes_out": 2**30, "counted_bytes_in": 2**29}
    return {
        "tensorflow": "2.21.0",
        "keras": "3",
        "model": "resnet50",
        "limit_mb": 400,
        "target": 6.0,
        "without": {"units": 34},
        "with": {"all": {"units": 170} | peaks, "auto": {"units": 165} | peaks | {"measured_peak_bytes": 99}},
        "double": {"all": moved, "auto": None},
        "edit": {"edit_s": 0.2, "ops": 3147},
        "time": {
            "all at most": {"ratio": 1.4, "lowest": 1.2, "highest": 1.5},
            "auto at most": {"ratio": 1.1, "lowest": 1.0, "highest": 1.2},
            "auto at 2x": {"error": "resnet50 auto 68 ended with -11"},
        },
    }


def test_the_table_has_what_was_measured(printed: ModuleType) -> None:
    cells = [cell.strip() for cell in printed.render([entry()]).splitlines()[1].split("  ") if cell.strip()]
    assert cells == [
        *("2.21.0, Keras 3", "resnet50", "400 MiB", "34", "170", "165", "5.0x", "6x"),
        *("failed", "-", "1.10 (1.00-1.20)", "1.40 (1.20-1.50)"),
        *("-1.0%", "+15.0%", "-", "1.50", "200 ms, 3,147 ops"),
    ]


def test_a_goal_that_fits_is_no_largest_batch(printed: ModuleType) -> None:
    assert ">= 5.0x" in printed.render([entry() | {"goal_only": True}])


def test_missed_goals_are_said(printed: ModuleType) -> None:
    where = "TensorFlow 2.21.0, Keras 3, resnet50"
    assert printed.misses([entry()]) == [
        f"{where}: 5.0x instead of 6x",
        f"{where}: all at most: 1.40 (1.20-1.50) of the time a unit (goal 1.3)",
        f"{where}: auto at 2x: failed of the time a unit (goal 1.3)",
        f"{where}: all: measured peak +15.0% against planned (goal 10%)",
    ]


SYNTHETIC_TRACE = """
import dataclasses, json, pathlib, sys
sys.path.append(sys.argv[1])
from lms_trace import overlap_of, read_space
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

space = XSpace()
host = space.planes.add(name="/host:CPU")
host.event_metadata[1].name = "conv:Conv2D"
line = host.lines.add(name="tf_Compute/1", timestamp_ns=0)
line.events.add(metadata_id=1, offset_ps=0, duration_ps=9_000_000)
gpu = space.planes.add(name="/device:GPU:0")
for number, name in enumerate(("MemcpyD2H", "MemcpyH2D", "sgemm_128", "Memset"), 1):
    gpu.event_metadata[number].name = name
gpu.stat_metadata[1].name = "memcpy_details"
gpu.stat_metadata[2].name = "kind_src:pinned kind_dst:device size:500 dest:0 async:1"

def stream(name, start_ns, *events):
    line = gpu.lines.add(name=name, timestamp_ns=start_ns)
    for kind, first_us, last_us in events:
        event = line.events.add(metadata_id=kind)
        event.offset_ps, event.duration_ps = first_us * 10**6, (last_us - first_us) * 10**6
        if kind == 1:
            event.stats.add(metadata_id=1, str_value="kind_src:device kind_dst:pinned size:300 dest:0")
        if kind == 2:
            event.stats.add(metadata_id=1, ref_value=2)

stream("Stream #7(Compute)", 0, (3, 0, 10), (4, 10, 20), (3, 20, 30))
stream("Stream #13(MemcpyD2H)", 5_000, (1, 0, 10), (1, 20, 21))
stream("Stream #14(MemcpyH2D)", 0, (2, 14, 22))
stream("TensorFlow Ops", 0, (3, 0, 100))
folder = pathlib.Path(sys.argv[2]) / "plugins" / "profile" / "run"
folder.mkdir(parents=True)
(folder / "machine.xplane.pb").write_bytes(space.SerializeToString())
found = overlap_of(read_space(sys.argv[2]))
print(json.dumps(dataclasses.asdict(found) | {"share": found.share}))
"""


@pytest.mark.tensorflow
def test_a_made_up_trace_of_a_gpu_is_read(tmp_path: Path) -> None:
    """Made up after TensorFlow's sources, with whole microseconds: no GPU was there to write a real one."""
    command = [sys.executable, "-c", SYNTHETIC_TRACE, str(BENCH), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["source"], found["bytes_out"], found["bytes_in"]) == ("GPU", 600, 500)
    seconds = {key: pytest.approx(found[key] * 1e6) for key in ("compute_s", "out_s", "in_s", "copies_s")}
    assert seconds == {"compute_s": 20, "out_s": 11, "in_s": 8, "copies_s": 18}
    assert found["hidden_s"] == pytest.approx(8e-6)  # 5 to 10, 20 to 22 and 25 to 26
    assert found["share"] == pytest.approx(8 / 18)


@pytest.mark.tensorflow
def test_the_gpu_script_runs_through_on_the_cpu_device(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_lms.py"), "--device", "cpu", "--quick", "--at-once", "2"]
    done = subprocess.run(
        [*command, "--case-seconds", "300", "--minutes", "60", "--out", str(tmp_path / "gpu.json")],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("CPU: a check of the script, no measurement; TensorFlow 2.")
    cases = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    timed = [found for found in cases.values() if found and found.get("trace_steps") == 2]
    assert [(found["policy"], found["compiled"]) for found in timed] == [
        ("off", False),
        ("auto", False),
        ("all", False),
        ("off", True),
        ("auto", True),
    ]
    none, auto, everything, _, _ = timed
    assert auto["units"] == everything["units"] == 2 * none["units"]
    assert everything["edited"] and everything["counted_bytes_out"] == everything["bytes_out"] > 0
    assert 0 < everything["simulated_s"] and everything["trace"]["source"] == "host"
    assert everything["trace"]["out_s"] > 0 and everything["trace"]["in_s"] > 0
    table = subprocess.run(
        [*command, "--table", "--out", str(tmp_path / "gpu.json")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert table.stdout == done.stdout


def test_a_table_of_nothing_and_another_document_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "gpu_lms.py"), "--table", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith("gpu_lms: found no document at")
    schema = '"schema": "lmsrun.bench-gpu/2"'
    for text in ('{"schema": "other"}', "", "[]", "{", f"{{{schema}}}", f'{{{schema}, "cases": {{"a": 1}}}}'):
        (tmp_path / "gpu.json").write_text(text)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
        assert "is no document of this benchmark" in done.stderr
    folder = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert folder.returncode == 2 and len(folder.stderr.splitlines()) == 1


@pytest.mark.tensorflow
def test_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    held = {"schema": "lmsrun.bench-gpu/2", "machine": {"gpus": ["A GPU"]}, "quick": True, "cases": {}}
    (tmp_path / "gpu.json").write_text(json.dumps(held))
    command = [sys.executable, str(BENCH / "gpu_lms.py"), "--device", "cpu", "--quick"]
    command += ["--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "is of another machine, TensorFlow, Keras or kind of run" in done.stderr


def test_full_size_on_the_cpu_is_refused() -> None:
    command = [sys.executable, str(BENCH / "gpu_lms.py"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "gpu_lms: found --device cpu; models of full size need a GPU; try --device cpu --quick\n"
    )


@pytest.mark.tensorflow
def test_without_a_gpu_one_line_says_so() -> None:
    command = [sys.executable, str(BENCH / "gpu_lms.py")]
    environ = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_lms: found no GPU (TensorFlow 2.") and "try nvidia-smi" in line


@pytest.mark.tensorflow
def test_cases_take_turns(children: ModuleType) -> None:
    from lms_case import Case

    paced = children.Paced(children.Runner(), Case("tiny", "tiny", units=4, policy="all", limit_mb=32))
    try:
        assert paced.step() > 0 and paced.step() > 0
        found = paced.close()
    finally:
        paced.kill()
    assert len(found["steps_s"]) == 3 and found["counted_bytes_out"] == found["bytes_out"] > 0


@pytest.mark.tensorflow
def test_a_case_that_does_not_fit_is_no_error(children: ModuleType) -> None:
    from lms_case import Case

    case = Case("tiny", "tiny", units=400, limit_mb=32)
    assert children.Runner().run(case) is None
    with pytest.raises(children.OutOfMemoryError, match="tiny off 400 ended with"):
        children.Paced(children.Runner(), case)


def test_paced_cases_that_crash_or_hang_are_told_apart(children: ModuleType, tmp_path: Path) -> None:
    """A stand-in for Python runs in their place."""
    from lms_case import Case

    def paced(script: str, timeout_s: float) -> Any:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return children.Paced(children.Runner(str(python), timeout_s=timeout_s), Case("tiny", "tiny"))

    for script, said in (
        ("echo 'TypeError: a fault' >&2; exit 1", "tiny off 1 ended with 1 in mid-run:\nTypeError: a fault"),
        ("kill -TERM $$", "tiny off 1 ended with -15 in mid-run"),
        ("exec sleep 60", "tiny off 1: no step within 1 s"),
    ):
        with pytest.raises(children.CaseError, match=said) as caught:
            paced(script, 1)
        assert not isinstance(caught.value, children.OutOfMemoryError)
    with pytest.raises(children.OutOfMemoryError):
        paced("kill -SEGV $$", 30)


def test_a_case_without_an_end_says_where_it_stands(children: ModuleType, tmp_path: Path) -> None:
    """Another Python program runs in its place."""
    from lms_case import Case

    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import time\ndef stands(): time.sleep(600)\nstands()'\n"
    )
    python.chmod(0o755)
    with pytest.raises(children.CaseError, match=r"tiny off 1: no end after 10 s\n(.*\n)*.* in stands"):
        children.Runner(str(python), timeout_s=10).run(Case("tiny", "tiny"))


def test_a_python_without_tensorflow_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow in here')")
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu_lms.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot say what TensorFlow sees (ImportError: no TensorFlow in here); try pip install" in line


def test_a_row_under_another_limit_is_a_row_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    book = script.Book(tmp_path / "result.json")
    book.entry("2.21.0", "2", "resnet152", 600)["without"] = {"units": 0}
    other = book.entry("2.21.0", "2", "resnet152", 1000)
    assert "without" not in other and other["limit_mb"] == 1000
    assert script.Bench(None, "resnet152", 1000).case("all", 72).limit_mb == 1000


@pytest.mark.parametrize("limit", ["0", "-5", "much"])
def test_a_limit_of_no_memory_is_refused(limit: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "lms.py"), "--limit-mb", limit],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and f"invalid _mebibytes value: '{limit}'" in done.stderr
