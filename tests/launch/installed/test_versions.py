"""Versions of packages: TensorFlow comes in distributions of several names."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SOURCE = """
import sys
sys.path[:0] = sys.argv[1:]
from launch.installed.versions import read_tensorflow_version, read_version
from launch.preflight.answer import read_versions
from launch.supervise.receipt_watch import _read_versions
from lmsrun.wheels.build_horovod import read_toolchain
found = {read_tensorflow_version(), read_versions()["TensorFlow"], _read_versions().get("tensorflow")}
print(*found, read_toolchain({}).tensorflow, read_version("horovod"))
"""


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow_cpu", "intel_tensorflow"])
def test_all_records_know_tensorflow_by_each_of_its_distributions(name: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{name}-2.18.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.18.1\n")
    command = [sys.executable, "-I", "-S", "-c", SOURCE, str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2.18.1", "2.18.1", "None"], done.stderr


def test_building_horovod_names_the_same_distributions() -> None:
    """The file for building runs by path, too, and so keeps a list of its own."""
    from launch.installed import versions
    from lmsrun.wheels import build_horovod

    assert build_horovod.TENSORFLOW_DISTRIBUTIONS == versions.TENSORFLOW_DISTRIBUTIONS
