"""The size of the largest cache is what Eigen finds: what the processor tells, else a default."""

import os
import shutil
from pathlib import Path

import pytest

from lms.native.prebuilt import find_prebuilt
from lms.native.processor_cache import SOURCE, ask_linux, ask_processor, read_l3_bytes, told_or_default

MIB = 1 << 20


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="Eigen asks processors of this kind alone")
def test_the_processor_is_asked() -> None:
    """That it is Eigen's number is tested with the scratch of kernels, in ``tests/lms/device``."""
    if (asked := ask_processor(SOURCE)) is None:
        pytest.skip("not built with the package: no C compiler, or no make setup")
    assert asked >= 0
    assert read_l3_bytes() == (asked or 2 * MIB)


def test_what_was_not_built_is_not_asked(tmp_path: Path) -> None:
    source = tmp_path / "cache.c"
    assert ask_processor(source) is None
    (tmp_path / "_cache.abi3.so").write_bytes(b"no library")
    assert ask_processor(source) is None
    for path in find_prebuilt(SOURCE):
        (tmp_path / path.name).unlink()
        shutil.copy(path, tmp_path)
        assert ask_processor(source) == ask_processor(SOURCE)


def test_linux_lists_the_caches(tmp_path: Path) -> None:
    assert ask_linux(tmp_path) == 0
    for number, (level, size) in enumerate((("1", "32K"), ("2", "2048K"), ("3", "107520K"))):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert ask_linux(tmp_path) == 105 * MIB
    (tmp_path / "index2" / "size").write_text("unknown\n")
    assert ask_linux(tmp_path) == 0


def test_eigen_has_a_default_where_the_processor_does_not_tell() -> None:
    assert told_or_default("x86_64", 105 * MIB) == 105 * MIB
    assert [told_or_default(machine, 0) for machine in ("x86_64", "ppc64le", "aarch64")] == [
        2 * MIB,
        4 * MIB,
        MIB // 2,
    ]
