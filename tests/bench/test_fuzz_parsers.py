"""Every parser under mutated input, for a moment; bench/fuzz.py does it by the million."""

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "bench" / "fuzz.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lmsrun_bench_fuzz", FUZZ)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fuzz = load()
MOMENT = argparse.Namespace(runs=10**9, seconds=2, seed=7)


def test_the_table_names_every_target() -> None:
    assert tuple(fuzz.build_targets()) == fuzz.TARGETS


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_mutated_input_is_read_or_refused(name: str) -> None:
    assert fuzz.mutate(fuzz.build_targets()[name], MOMENT) > 100


def test_a_parser_that_raises_is_found() -> None:
    def raises(data: bytes) -> None:
        assert b"sys/" not in data

    with pytest.raises(AssertionError):
        fuzz.mutate(fuzz.Target(raises, (b"sys/a",)), MOMENT)


def test_a_parser_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 3))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(AssertionError, match="too slow"):
        fuzz.mutate(fuzz.Target(lambda data: None, (b"a",)), argparse.Namespace(runs=9, seconds=0, seed=7))


def test_guided_by_coverage(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    argv = [sys.executable, str(FUZZ), "--target", "tree", "--runs", "500", "--corpus", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert "500 runs" in done.stdout
    # Inputs that reached new code were kept beside the seed.
    assert len(list((tmp_path / "tree").iterdir())) > 1
