"""The probe with real children in a launcher's place: answers, silence, noise, and nothing left behind."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.model.errors import UsageError
from launch.preflight.answer import main as answer
from launch.preflight.answer import read_versions
from launch.preflight.ask import ask_by_launcher, ask_by_ssh, assign, build_ssh, build_worker, new_nonce
from launch.preflight.report import HostReport

HOSTS = ("a", "b")
ENVIRON = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}


def started_by(script: str, nonce: str, timeout_s: float = 60) -> list[str]:
    """A shell script as the launcher; it gets the answering command as its arguments."""
    return ["sh", "-c", script, "launcher", *build_worker(nonce, timeout_s, "lines")]


def ask(script: str, timeout_s: float = 60, hosts: tuple[str, ...] = HOSTS) -> tuple[HostReport, ...]:
    nonce = new_nonce()
    return ask_by_launcher(
        started_by(script, nonce, timeout_s), ENVIRON, hosts, nonce, timeout_s, "lines"
    ).reports


BOTH = """
for rank in 0 1; do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 "$@" &
done
wait
"""


def test_every_host_answers_with_its_machine_and_versions() -> None:
    first, second = ask(BOTH)
    assert (first.host, second.host, first.trouble, second.trouble) == ("a", "b", None, None)
    for report in (first, second):
        assert report.machine is not None
        assert report.machine.allowed.cpus == os.sched_getaffinity(0)
        assert report.versions == read_versions()
        assert report.names == (os.uname().nodename,)


def test_noise_and_another_probes_answers_are_passed_over() -> None:
    noise = """
    yes 'welcome to this machine' | head -c 10000000
    yes 'a warning of a login shell' | head -c 1000000 >&2
    printf '\\036lmsrun-host 0123456789abcdef own 0 0/1 AAAA\\nno newline'
    """
    reports = ask(noise + BOTH)
    assert [report.trouble for report in reports] == [None, None]


def test_a_launcher_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    first, second = ask(f"sleep 1000 & echo $! > {tmp_path}/pid; trap '' TERM; wait; wait", timeout_s=1)
    assert first.trouble == second.trouble == "no answer in 1 s"
    assert time.monotonic() - started < 30
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("a child of the launcher lives on")


def test_what_a_launcher_says_of_a_host_is_that_hosts_trouble() -> None:
    first, second = ask(
        "echo 'ssh: connect to host b port 22: Connection refused' >&2; echo sorry >&2; exit 255"
    )
    assert first.trouble == "it did not answer either"
    assert second.trouble == "ssh: connect to host b port 22: Connection refused"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", "it exited with code 3"),
        ("printf 'no \\033[2Jway\\n-----\\n' >&2; exit 1", "no [2Jway"),
        ("exit 0", "it exited with code 0"),
    ],
)
def test_a_launcher_that_fails_says_why(script: str, said: str) -> None:
    assert {report.trouble for report in ask(script)} == {said}


def test_a_launcher_that_is_not_there() -> None:
    (report,) = ask_by_launcher(["/nowhere/srun"], ENVIRON, ("a",), new_nonce(), 5, "lines").reports
    assert report.trouble == "/nowhere/srun cannot be run: No such file or directory"


def test_a_stream_that_outlives_the_launcher_is_not_waited_for() -> None:
    started = time.monotonic()
    reports = ask("sleep 50 & " + BOTH.replace("wait", "wait %2 %3"))
    assert [report.trouble for report in reports] == [None, None]
    assert time.monotonic() - started < 45


def named(*names: str) -> HostReport:
    return HostReport("?", names=names)


def test_an_answer_belongs_to_the_host_of_its_name() -> None:
    hosts = ("n2.site", "n1")
    found = assign(hosts, {0: named("N1.example.org"), 1: named("n2")})
    assert found == {
        "n1": replace(named("N1.example.org"), host="n1"),
        "n2.site": replace(named("n2"), host="n2.site"),
    }
    slurm = assign(hosts, {0: named("n1", "vm"), 1: named("n2", "vm")})
    assert set(slurm) == set(hosts) and slurm["n1"].names[0] == "n1"


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (("10.0.0.2", "10.0.0.1"), ("x", "y")),
        (("a", "b"), ("vm", "vm")),
        (("a", "b"), ("a", "a")),
        (("gpu.east", "gpu.west"), ("gpu", "gpu")),
        (("fe80::1", "fe80::2"), ("gpu", "login")),
    ],
)
def test_where_names_do_not_tell_the_number_does(hosts: tuple[str, str], names: tuple[str, str]) -> None:
    found = assign(hosts, {rank: replace(named(name), trouble=str(rank)) for rank, name in enumerate(names)})
    assert [found[host].trouble for host in hosts] == ["0", "1"]


def test_an_interrupt_ends_the_probe_at_once(tmp_path: Path) -> None:
    script = (
        "import signal, sys; sys.path[:0] = sys.argv[1:2]\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        "from launch.preflight.ask import ask_by_ssh\n"
        "print('asking', flush=True)\n"
        "ask_by_ssh(['a', 'b', 'c'], 60)\n"
    )
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parents[3])],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None and child.stdout.readline() == b"asking\n"
    started = time.monotonic()
    threading.Timer(1, child.send_signal, [2]).start()
    try:
        child.wait(50)
    finally:
        child.kill()
        child.stdout.close()
    assert time.monotonic() - started < 40


def test_a_host_that_waits_for_its_turn_has_as_long_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '#!/bin/sh\nshift 5\n[ $1 = silent ] && exec sleep 1000\nexec sh -c "$2"\n'
    (tmp_path / "ssh").write_text(script)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    silent, late = ask_by_ssh(["silent", "late"], 10, at_once=1)
    assert (silent.trouble, late.trouble) == ("no answer in 10 s", None)


def test_ssh_gets_no_option_and_no_shell_word_from_a_host() -> None:
    argv = build_ssh("b", build_worker("00ff", 20, "lines"), 20)
    assert argv[-3:-1] == ["--", "b"]
    assert argv[-1].endswith("lmsrun/__main__.py probe-host 00ff 20 lines")


@pytest.mark.parametrize("argv", [[], ["x"], ["00ff", "soon", "lines"], ["00ff", "5", "pickle"]])
def test_a_person_is_told_that_this_is_no_command_of_theirs(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="see lmsrun topo and check"):
        answer(argv, {})
