"""The table of ``bench/bits.py``, and what it calls wrong."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
MIB = 1 << 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    spec = importlib.util.spec_from_file_location("bench_bits", BENCH / "bits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_bits", module)
    spec.loader.exec_module(module)
    return module


def entry(case: str = "encoder", **modes: Any) -> dict[str, Any]:
    plain = {"digest": "a", "peak_bytes": 8 * MIB}
    most = {"digest": "a", "tensors": 7, "planned_peak_bytes": 3 * MIB, "measured_peak_bytes": 4 * MIB}
    made = {"plain": plain, "again": plain, "all": most, **modes}
    return {"tensorflow": "2.21.0", "keras": "3", "case": case, "steps": 20, "modes": made}


def chunk(**found: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"differ": {}, "failed": {}, "left to chance": {}}
    random = {"policy": "all", "count": 100, "tensors": 900, **empty, **found}
    return {"tensorflow": "2.21.0", "keras": "3", "case": "random all 0 to 99", "random": random}


def test_a_row_tells_verdict_tensors_and_peaks(script: ModuleType) -> None:
    no_room = {"limit_mb": 9, "no_room": "crashed with signal 11"}
    budget = {"digest": "b", "tensors": 2}
    *_, row = script.render([entry(budget=budget, auto=no_room)]).strip().splitlines()
    assert row == (
        "| 2.21.0, 3 | encoder | 20 | same | 7 | 8.0, 3.0, 4.0 | other bits | 2 | no room (9 MiB) |  |"
    )


def test_other_bits_errors_and_failures_are_wrong(script: ModuleType) -> None:
    assert [*script.faults(entry())] == []
    assert [*script.faults(entry(auto={"limit_mb": 9, "no_room": "?"}))] == []
    who = "encoder, TensorFlow 2.21.0, Keras 3"
    assert [*script.faults(entry(again={"digest": "b"}))] == [f"{who}, again: other bits"]
    assert [*script.faults(entry(budget={"error": "ValueError: no"}))] == [f"{who}, budget: ValueError: no"]
    failed = {**entry(), "failed": "crashed with signal 11"}
    assert [*script.faults(failed)] == [f"{who}: crashed with signal 11"]


def test_applications_and_random_graphs_are_a_line_each(script: ModuleType) -> None:
    names = ("applications/VGG16", "applications/Xception")
    some = [entry(names[0]), entry(names[1], all={"digest": "b"})]
    chunks = [chunk(), chunk(differ={"17": 1e-8}, **{"left to chance": {"3": 1e-8}})]
    first, second = script.render([*some, *chunks]).splitlines()[-2:]
    assert first == "`keras.applications`, TensorFlow 2.21.0, Keras 3: 1 of 2 the same; not Xception"
    assert second.startswith(
        "random graphs, TensorFlow 2.21.0, `all`: 200 trained, 1,800 tensors swapped, 1 "
    )
    assert [*script.faults(chunks[1])] == [
        "random all 0 to 99, TensorFlow 2.21.0, Keras 3: seed 17 differs by 1e-08"
    ]
