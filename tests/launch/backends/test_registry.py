"""The launchers as objects: each under its name, loaded when asked for, and true to the options' table."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.backends.backend import Backend
from launch.backends.registry import FOREIGN, find_launchers, load_backend
from launch.cluster.allocation import Allocation
from launch.model.cluster_settings import ClusterSettings, find_unread
from launch.model.errors import UsageError


@pytest.mark.parametrize("name", FOREIGN)
def test_each_launcher_stands_under_its_name_and_reads_what_the_options_say(name: str) -> None:
    backend = load_backend(name)
    assert backend.name == name
    reads = not find_unread(["rankfile_out"], name)
    assert reads == (type(backend).render_rankfile is not Backend.render_rankfile)
    if not reads:
        with pytest.raises(UsageError, match=f"{name} reads no file of ranks"):
            backend.render_rankfile(())


def test_a_launcher_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys; from launch.backends.registry import FOREIGN, load_backend; load_backend('srun')\n"
        "print(*(name for name in FOREIGN if f'launch.backends.{name}' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["srun"]


def test_what_is_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("srun", "my-mpirun", "bin/horovodrun"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    found = find_launchers(ClusterSettings(mpirun="my-mpirun"), {"PATH": str(tmp_path)})
    assert found == {
        "mpirun": f"{tmp_path}/my-mpirun",
        "srun": f"{tmp_path}/srun",
        "horovodrun": f"{tmp_path}/bin/horovodrun",
    }


def test_a_launcher_says_what_it_needs() -> None:
    srun, lsf = load_backend("srun"), Allocation("lsf", "7", (), ())
    assert srun.find_obstacle(True, Allocation("slurm", "7", (), ())) is None
    with pytest.raises(
        UsageError, match="--launcher srun: this is not inside a Slurm allocation; try salloc"
    ):
        srun.refuse_obstacle(True, lsf)
    with pytest.raises(UsageError, match="srun is not in PATH; try --launcher auto, or load its module"):
        srun.refuse_obstacle(False, lsf)
