"""The comparison with other ways to save memory: what its table says, and that the ways train."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    return import_module("peers")


def test_the_table_compares_with_nothing(peers: ModuleType) -> None:
    entry = {
        peers.NOTHING: {"units": 40, "peak_bytes": 9, "unit_s": 0.2, "digest": "a"},
        "LMS swaps": {"units": 100, "peak_bytes": 9, "unit_s": 0.3, "digest": "a"},
        "tf.recompute_grad by hand": {"units": 90, "peak_bytes": 9, "unit_s": 0.25, "digest": "b"},
        "Grappler's memory optimizer": {"units": 40, "peak_bytes": 9, "unit_s": 0.2, "digest": ""},
        "LMS recomputes": {"units": 0},
        "keras.RematScope": {"failed": "ValueError: no"},
    }
    rows = [line.split() for line in peers.render({"wide": entry}).splitlines()]
    assert [row[-4:] for row in rows[2:5]] == [
        ["100", "2.5", "1.50", "same"],
        ["90", "2.2", "1.25", "others"],
        ["1.0", "1.00", "does", "not", "fit"][-4:],
    ]
    assert rows[5][-1] == "0" and rows[6][-3:] == ["fails:", "ValueError:", "no"]


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "way", ["tf.recompute_grad by hand", "LMS swaps", "LMS does both, variables on the host"]
)
def test_a_way_trains(peers: ModuleType, way: str) -> None:
    case = peers.Bench(peers.Runner(), "wide").case(way, 8)
    found = peers.Runner().run(replace(case, steps=2))
    assert (
        found is not None
        and found["optimizer"] == "adam"
        and found["peak_bytes"] < peers.PEERS["wide"].limit_mb << 20
    )
