"""The probe before a job over two hosts of ssh: what differs, what is wrong where, and what only looks so.

``ssh_hosts.py`` says how the hosts are made; a host's login script stands for what a site does to its logins.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_run import SHOW_RANK, needs
from ssh_hosts import SshHosts, on_hosta

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

LAUNCHERS = {
    "openmpi": ("--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--allow-run-as-root"),
    "mpich": ("--launcher", "mpirun", "--mpirun", "mpirun.mpich"),
    "horovodrun": ("--launcher", "horovodrun"),
}
BOTH = ("-H", "hosta:1,hostb:1")
NOISE = """
yes 'welcome to this machine' | head -c 10000000
printf '\\036lmsrun-host 0123456789abcdef own 0 0/1 eJwDAAAAAAE=\\n no newline'
"""


@pytest.fixture
def login(hosts: SshHosts) -> Iterator[SshHosts]:
    """The hosts, whose login scripts are plain again afterwards."""
    yield hosts
    hosts.set_login("hostb")


def options(name: str) -> tuple[str, ...]:
    words = LAUNCHERS[name]
    if "--mpirun" in words:
        needs(words[words.index("--mpirun") + 1])
    else:
        pytest.importorskip("horovod")
    return words


def test_hosts_that_differ_are_planned_as_they_are(login: SshHosts, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("needs two CPUs")
    login.set_login("hostb", f"taskset -pc {min(os.sched_getaffinity(0))} $$ > /dev/null")
    done = on_hosta(login, tmp_path, "run", *options("openmpi"), "--dry-run", "-H", "hosta,hostb", "true")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(?m)^(\d+) +(host[ab]) +", done.stdout)
    assert rows == [*((str(rank), "hosta") for rank in range(cores)), (str(cores), "hostb")]
    assert "hosts differ, and each is planned as it is" in done.stdout
    assert "assumed" not in done.stdout


def test_a_plan_asks_when_told_to(hosts: SshHosts, tmp_path: Path) -> None:
    words = ("plan", "--json", "-H", "hosta:1,hostb", "train.py")
    asked = on_hosta(hosts, tmp_path, *words, LMSRUN_HOST_PROBE="1")
    assert asked.returncode == 0, asked.stderr
    plan = json.loads(asked.stdout)
    assert plan["world_size"] == 1 + len(os.sched_getaffinity(0))
    assert not [warning for warning in plan["warnings"] if "assumed" in warning]
    untold = on_hosta(hosts, tmp_path, *words)
    assert "hosts are assumed to be like this one" in json.loads(untold.stdout)["warnings"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_host_that_refuses_is_found_before_the_start(
    hosts: SshHosts, launcher: str, tmp_path: Path
) -> None:
    hosts.stop_sshd("hostb")
    try:
        words = (*options(launcher), "-H", "hosta:1,hostb:1,hostc:1")
        done = on_hosta(hosts, tmp_path, "run", *words, "--", str(SHOW_RANK), str(tmp_path), "ok")
        assert done.returncode == 2
        assert "hostb  ssh: connect to host hostb port 22: Connection refused" in done.stderr
        assert "hostc  ssh: Could not resolve hostname" in done.stderr
        assert "2 of 3 hosts cannot be used; nothing was started" in done.stderr
        assert not list(tmp_path.glob("rank-*"))
    finally:
        hosts.start_sshd("hostb")
        hosts.wait_until_reachable()


def test_a_host_that_hangs_costs_a_known_time(login: SshHosts, tmp_path: Path) -> None:
    login.set_login("hostb", "sleep 1000")
    started = time.monotonic()
    words = ("run", *options("openmpi"), "--probe-timeout", "10", *BOTH)
    done = on_hosta(login, tmp_path, *words, "--", str(SHOW_RANK), str(tmp_path), "ok")
    assert done.returncode == 2
    assert "no answer in 10 s" in done.stderr and "nothing was started" in done.stderr
    assert time.monotonic() - started < 60, "mpirun's time, then ssh's, then what a busy machine adds"
    assert login.processes("hostb", "probe-host") == []


@pytest.mark.parametrize("launcher", ["openmpi", "horovodrun"])
def test_noise_of_a_login_is_no_answer(login: SshHosts, launcher: str, tmp_path: Path) -> None:
    login.set_login("hostb", NOISE)
    done = on_hosta(login, tmp_path, "run", *options(launcher), "--dry-run", *BOTH, "true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on 2 hosts")


def test_another_version_is_wrong_there(login: SshHosts, tmp_path: Path) -> None:
    for name, version in (("lmsrun", "9.9"), ("horovod", "0.1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    login.set_login("hostb", f"export PYTHONPATH='{tmp_path}'")
    done = on_hosta(login, tmp_path, "run", *options("openmpi"), *BOTH, "true")
    assert done.returncode == 2
    assert "hostb  lmsrun 9.9; this host has " in done.stderr
    assert "hostb  Horovod 0.1; this host has " in done.stderr
    assert "1 of 2 hosts cannot be used" in done.stderr


def test_more_ranks_than_a_host_has_cores(hosts: SshHosts, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    words = ("run", *options("openmpi"), "-H", f"hosta:1,hostb:{cores + 7}", "--dry-run")
    done = on_hosta(hosts, tmp_path, *words, "true")
    assert done.returncode == 2
    assert f"hostb  {cores + 7} ranks for {cores} usable core" in done.stderr
    wanted = on_hosta(hosts, tmp_path, *words, "--oversubscribe", "true")
    assert wanted.returncode == 0, wanted.stderr


def test_hosts_that_mpi_cannot_connect(hosts: SshHosts, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = ("run", *options("openmpi"), *BOTH, "--mpi-args=--mca btl self")
    done = on_hosta(hosts, tmp_path, *words, "--", str(SHOW_RANK), str(tmp_path), "ok")
    assert done.returncode == 2
    assert "MPI does not connect the hosts: At least one pair of MPI processes are unable" in done.stderr
    assert not list(tmp_path.glob("rank-*"))
