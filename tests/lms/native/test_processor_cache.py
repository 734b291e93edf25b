"""The size of the largest cache is what the processor tells, else what Linux does, else Eigen's guess."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lms.native import processor_cache
from lms.native.processor_cache import l3_bytes

MIB = 1 << 20


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which Linux lists caches; nothing was built with the package."""
    monkeypatch.setattr(processor_cache, "SOURCE", tmp_path / "cache.c")
    monkeypatch.setattr(processor_cache, "CACHES", tmp_path)
    return tmp_path


def on(machine: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """What is found on a machine."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    return l3_bytes.__wrapped__()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="Eigen asks processors of this kind alone")
def test_the_processor_is_asked() -> None:
    """Linux has the same number, or on processors of AMD a part of it."""
    found, read = processor_cache._asked(), processor_cache._read(Path("/sys/devices/system/cpu/cpu0/cache"))
    if not any(processor_cache.find_prebuilt(processor_cache.SOURCE)):
        pytest.skip("not built with the package: no C compiler, or no make setup")
    assert found >= read
    assert not found % (512 << 10)
    assert l3_bytes() == found or not found


def test_linux_is_asked_without_a_compiler(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (level, size) in enumerate((("1", "32K"), ("2", "2048K"), ("3", "107520K"))):
        (linux / f"index{number}").mkdir()
        (linux / f"index{number}" / "level").write_text(f"{level}\n")
        (linux / f"index{number}" / "size").write_text(f"{size}\n")
    assert on("x86_64", monkeypatch) == 105 * MIB
    assert on("ppc64le", monkeypatch) == 4 * MIB, "there Eigen asks nobody"
    (linux / "index3").mkdir()
    (linux / "index2" / "size").write_text("unknown\n")
    assert on("x86_64", monkeypatch) == 2 * MIB


def test_eigen_guesses_where_nobody_tells(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {machine: on(machine, monkeypatch) for machine in ("x86_64", "ppc64le", "aarch64")}
    assert found == {"x86_64": 2 * MIB, "ppc64le": 4 * MIB, "aarch64": MIB // 2}


def test_a_file_that_cannot_be_loaded_is_passed_over(linux: Path) -> None:
    (linux / "_cache.abi3.so").write_bytes(b"no library")
    assert processor_cache._asked() == 0
