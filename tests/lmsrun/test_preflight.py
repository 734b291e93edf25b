"""Which command asks the hosts, for every launcher and batch system, and who is asked at all."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import SPECS, machine

from launch.backends.choice import LauncherChoice
from launch.cluster.allocation import Allocation
from launch.cluster.hosts import Host
from launch.model.errors import LmsrunError
from launch.plan_host.planner import HostRequest
from lmsrun import preflight
from lmsrun.options import LaunchOptions
from lmsrun.place import Place
from lmsrun.preflight import Probed, probe_hosts, refuse_troubles
from lmsrun.resolve import ResolvedJob

HOSTS = (Host("far-a", 2), Host("far-b", 2))
VERSIONS = {
    "openmpi": "mpirun (Open MPI) 4.1.4",
    "openmpi5": "mpirun (Open MPI) 5.0.3",
    "mpich": "HYDRA build details:\n    Version: 4.0.2",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build",
}
# In place of the launcher: notes what it was told, and says why it starts nothing.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "$VERSION"; exit; fi
printf '%s\\n' "$@" > "$0.argv"
env > "$0.env"
echo 'no route to far-b' >&2
exit 1
"""


def allocation(system: str, csm: bool = False) -> Allocation:
    return Allocation(system, "7", HOSTS, (None, None), csm)  # type: ignore[arg-type]


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "launcher"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


def ask(
    launcher: str,
    given: Allocation | None,
    stand_in: Path | None,
    is_plan: bool = False,
    dry: bool = False,
    **options: object,
) -> Probed:
    found = {launcher: str(stand_in)} if stand_in else {}
    place = Place(LauncherChoice(launcher, "as asked"), HOSTS, False, given, found)
    known = {"allow_run_as_root": True, "probe_timeout": 30.0, "dry_run": is_plan or dry}
    settings = LaunchOptions(**{**known, **options})  # type: ignore[arg-type]
    environ = {"PATH": "/bin:/usr/bin", "TMPDIR": "/tmp", "SECRET_TOKEN": "x", "VERSION": VERSIONS["openmpi"]}
    environ["VERSION"] = VERSIONS.get(str(options.get("mpirun")), VERSIONS["openmpi"])
    request = HostRequest(("train.py",), 1, 1)
    job = ResolvedJob(settings, environ, place, machine(SPECS["dgx"]), request, is_plan=is_plan)
    return probe_hosts(job, place)


CASES = {
    "srun in Slurm": ("srun", allocation("slurm"), "mpirun"),
    "flux run in a Flux job": ("flux", allocation("flux"), "mpirun"),
    "jsrun under CSM": ("jsrun", allocation("lsf", csm=True), "mpirun"),
    "Open MPI 4 in LSF": ("mpirun", allocation("lsf"), "openmpi"),
    "Open MPI 4 in PBS": ("mpirun", allocation("pbs"), "openmpi"),
    "Open MPI 5 in PBS": ("mpirun", allocation("pbs"), "openmpi5"),
    "Open MPI 4 in an MPIJob": ("mpirun", allocation("mpijob"), "openmpi"),
    "Intel MPI in an MPIJob": ("mpirun", allocation("mpijob"), "intel"),
    "MPICH in PBS": ("mpirun", allocation("pbs"), "mpich"),
}


def test_one_process_a_host_is_started_by_the_launcher_of_the_job(
    stand_in: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "build_worker", lambda *_: ("PYTHON", "LMSRUN", "probe-host", "NONCE"))
    said = []
    for title, (launcher, given, mpi) in CASES.items():
        probed = ask(launcher, given, stand_in, mpirun=mpi)
        assert "far-b  no route to far-b" in probed.troubles, "what a launcher says of a host is kept"
        assert probed.bad_hosts == 2 and not probed.machines
        environ = Path(f"{stand_in}.env").read_text()
        assert "SECRET_TOKEN" not in environ and "SLURM_OVERLAP=1" in environ
        said.append(f"# {title}\n{shlex.join(Path(f'{stand_in}.argv').read_text().splitlines())}\n")
    golden("probes.txt", "\n".join(said))


@pytest.mark.parametrize(
    ("is_plan", "options", "assumed"),
    [(True, {}, True), (False, {"host_probe": False}, True), (False, {"topology": "saved.json"}, False)],
)
def test_who_is_not_asked(stand_in: Path, is_plan: bool, options: dict[str, object], assumed: bool) -> None:
    probed = ask("srun", allocation("slurm"), stand_in, is_plan, **options)
    assert (probed.machines, probed.troubles) == ({}, ())
    assert bool(probed.warnings) == assumed
    assert not Path(f"{stand_in}.argv").exists()


def test_hosts_that_get_no_rank_are_not_asked(stand_in: Path) -> None:
    ask("srun", allocation("slurm"), stand_in, num_proc=2)
    assert "--nodelist=far-a" in Path(f"{stand_in}.argv").read_text().splitlines()


def test_a_launcher_that_is_missing_is_said_at_once() -> None:
    with pytest.raises(LmsrunError, match="srun is not in PATH"):
        ask("srun", allocation("slurm"), None)
    with pytest.raises(LmsrunError, match="srun is not in PATH"):
        ask("srun", allocation("slurm"), None, host_probe=False)


def test_a_dry_run_for_a_launcher_that_is_elsewhere_says_that_nobody_was_asked() -> None:
    assert ask("srun", allocation("slurm"), None, dry=True) == Probed(
        {},
        warnings=(
            "the hosts were not asked, because srun is not in PATH; hosts are assumed to be like this one",
        ),
    )


def test_troubles_end_the_job_before_it_starts() -> None:
    refuse_troubles(Probed({}), 2)
    with pytest.raises(LmsrunError, match="1 of 2 hosts cannot be used; nothing was started"):
        refuse_troubles(Probed({}, ("b  no answer",), bad_hosts=1), 2)
