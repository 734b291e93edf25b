"""The shim as other launchers start it: by its command, with their variables."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import LMSRUN

from launch.model.errors import UsageError
from launch.model.plan import SHIM
from launch.rank import shim
from launch.rank.shim import (
    BOOTSTRAP,
    ProgramError,
    parse_expectation,
    program_environ,
    resolve_program,
    verify,
)
from launch.system.numa_policy import FoundBinding
from launch.system.program_path import find_program

WINDOWS = "its lines end as on Windows; try dos2unix"
EXPECT: dict[str, Any] = {
    "rank": 3,
    "local_rank": 1,
    "host": "localhost",
    "gpu": None,
    "numa_node": 0,
    "cpus": "",
    "mem_policy": "none",
    "mem_nodes": "",
    "bind_method": "none",
    "numa": "auto",
}
# One write a line: an unbuffered print makes two, and mpirun lets another rank's come between.
SHOW = """
import json, os, sys
sys.stdout.write(json.dumps({
    "rank": os.environ.get("RANK"), "world": os.environ.get("WORLD_SIZE"), "pid": os.getpid(),
    "cpus": sorted(os.sched_getaffinity(0)), "expect": json.loads(os.environ["LMSRUN_EXPECT"]),
    "horovod": [name for name in os.environ if name.startswith("HOROVOD_") and "AFFINITY" not in name],
}) + "\\n")
"""


def work(*argv: object, **environ: str) -> "subprocess.CompletedProcess[str]":
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("LMS", "OMPI", "PMI"))
    }
    return subprocess.run(
        [*LMSRUN, "worker", "--", *map(str, argv)],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def show(tmp_path: Path) -> Path:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    return script


def test_a_decided_rank_leaves_its_receipt_and_becomes_the_program(show: Path, tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    expect = {**EXPECT, "cpus": str(one), "bind_method": "libnuma"}
    limit = {"TF_GPU_HOST_MEM_LIMIT_IN_MB": "4096"}
    done = work(show, LMSRUN_EXPECT=json.dumps(expect), LMSRUN_RECEIPT_DIR=str(tmp_path), **limit)
    assert done.returncode == 0, done.stderr
    program = json.loads(done.stdout)
    receipt = json.loads((tmp_path / "rank-3.start.json").read_text())
    assert program["cpus"] == [one]
    assert (receipt["cpus"], receipt["verified"], receipt["reasons"]) == (str(one), True, [])
    assert (receipt["pid"], receipt["host_mem_limit_mb"]) == (program["pid"], 4096)


def test_a_script_whose_name_begins_with_a_dash_runs(
    show: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    show.rename("-c.py")
    done = work("-c.py", "-v", LMSRUN_EXPECT=json.dumps(EXPECT))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["expect"] == EXPECT


def test_a_rank_of_another_launcher_prints_no_table_of_bindings(tmp_path: Path) -> None:
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LMSRUN_VERBOSE": "1"}
    done = work("true", **own)
    assert (done.returncode, done.stdout) == (0, "")
    assert "verified" not in done.stderr
    job = subprocess.run(
        [*LMSRUN, "-np", "1", "--jobs-dir", str(tmp_path), "true"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "verified" in job.stderr


def test_a_binding_that_is_not_there_is_said_and_strict_refuses(show: Path, tmp_path: Path) -> None:
    expect = {**EXPECT, "cpus": "4000", "bind_method": "numactl"}
    done = work(show, LMSRUN_EXPECT=json.dumps(expect))
    assert done.returncode == 0
    assert "rank 3 is not bound as planned: CPUs" in done.stderr
    strict = {**expect, "numa": "strict", "bind_method": "libnuma"}
    done = work(show, LMSRUN_EXPECT=json.dumps(strict), LMSRUN_RECEIPT_DIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "lmsrun: --numa strict: rank 3 is not bound as planned: cannot bind to CPUs 4000"
    )
    assert json.loads((tmp_path / "rank-3.start.json").read_text())["verified"] is False


@pytest.mark.parametrize(
    ("environ", "program", "code", "word"),
    [
        ({}, "true", 2, "cannot tell which rank this is"),
        ({"LMSRUN_EXPECT": "{"}, "true", 2, "LMSRUN_EXPECT is damaged"),
        (
            {"LMSRUN_EXPECT": json.dumps(EXPECT)},
            "no-such-program",
            127,
            "no-such-program is not a program here",
        ),
        ({"LMSRUN_EXPECT": json.dumps(EXPECT)}, "no-such.py", 127, "no-such.py is not here"),
        ({"LMSRUN_EXPECT": json.dumps(EXPECT)}, "/etc", 126, "/etc is a folder"),
        ({"LMSRUN_EXPECT": json.dumps(EXPECT)}, "/etc/passwd", 126, "/etc/passwd is not executable"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "true", 2, "MPI_LOCALRANKID"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LMSRUN_GPUS": "99"},
            "true",
            2,
            "LMSRUN_GPUS names '99', which is not here",
        ),
    ],
)
def test_what_cannot_work_is_one_line(environ: dict[str, str], program: str, code: int, word: str) -> None:
    done = work(program, **environ)
    assert done.returncode == code
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["train.py", "training"])
def test_a_folder_in_place_of_a_program_is_called_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    with pytest.raises(shim.ProgramError, match=f"^{name} is a folder; needed a program, or a script"):
        shim.resolve_program([name], os.environ)


@pytest.mark.parametrize("name", ["train.py", "training", "./training"])
def test_a_pipe_in_place_of_a_program_is_called_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(name, 0o755)
    with pytest.raises(shim.ProgramError, match=f"^{name} is a pipe or a device; needed a file") as caught:
        shim.resolve_program([name], os.environ)
    assert caught.value.exit_code == shim.NOT_EXECUTABLE


def test_a_folder_hides_no_program_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sh").mkdir()
    assert os.path.isabs(shim.resolve_program(["sh"], os.environ)[0])


@pytest.mark.parametrize(
    ("told", "words", "said"),
    [
        ({}, (), "LMSRUN_REPLAN is missing or damaged"),
        ({"LMSRUN_REPLAN": '{"cpus": "x"}'}, (), "LMSRUN_REPLAN is missing or damaged"),
        ({}, ("x",), "plan-rank is what ranks of elastic jobs start"),
    ],
)
def test_a_moved_rank_that_cannot_be_planned_is_one_line(
    told: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    argv = [*LMSRUN, "plan-rank", *words]
    done = subprocess.run(
        argv, env={**os.environ, **told}, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("guarded", [{}, {"LMSRUN_RECEIPT_LINES": "1"}])
def test_the_program_meets_signals_as_a_shell_leaves_them(guarded: dict[str, str]) -> None:
    done = work("grep", "SigIgn", "/proc/self/status", LMSRUN_EXPECT=json.dumps(EXPECT), **guarded)
    ignored = int(done.stdout.split()[1], 16)
    assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1] == []


def test_a_folder_that_is_gone_is_no_traceback(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", str(gone), *LMSRUN, "worker", "--", "train.py"],
        env={**os.environ, "LMSRUN_EXPECT": json.dumps(EXPECT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 127
    assert done.stderr.startswith("lmsrun: train.py is not here (a folder that is no more)")
    assert len(done.stderr.splitlines()) == 1


def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(shim, "read_binding", refuse)
    with pytest.raises(SystemExit) as caught:
        shim.main(["true"], {"LMSRUN_EXPECT": json.dumps(EXPECT)})
    assert caught.value.code == 126
    assert capsys.readouterr().err == (
        "lmsrun: cannot start the rank: the system refuses: Resource temporarily unavailable\n"
    )


def test_a_name_cannot_drive_the_terminal() -> None:
    done = work("./\x1b[2J", LMSRUN_EXPECT=json.dumps(EXPECT))
    assert done.returncode == 127
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("first_line", "said"),
    [
        ("#! /no/such -x", "its first line names the interpreter '/no/such', which is not here"),
        ("#!/bin/sh\r", r"its first line names the interpreter '/bin/sh\r', which is not here; " + WINDOWS),
        ("echo hi", "neither a program for this machine nor a script that begins with #!"),
    ],
)
def test_what_the_kernel_does_not_run_is_told_why(tmp_path: Path, first_line: str, said: str) -> None:
    script = tmp_path / "script"
    script.write_text(f"{first_line}\n", newline="")
    script.chmod(0o755)
    done = work(script, LMSRUN_EXPECT=json.dumps(EXPECT), LMSRUN_RECEIPT_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (126, f"lmsrun: cannot run {script}: {said}\n")


def test_an_interpreter_that_is_here_but_lacks_its_own_is_not_called_missing(tmp_path: Path) -> None:
    for name, first_line in (("script", f"#!{tmp_path}/middle"), ("middle", "#!/no/such")):
        (tmp_path / name).write_text(f"{first_line}\n")
        (tmp_path / name).chmod(0o755)
    done = work(tmp_path / "script", LMSRUN_EXPECT=json.dumps(EXPECT))
    said = f"its first line names the interpreter '{tmp_path}/middle', which cannot be started itself"
    assert (done.returncode, done.stderr) == (126, f"lmsrun: cannot run {tmp_path}/script: {said}\n")


@pytest.mark.parametrize("given", ["</dev/zero", "<&-"])
def test_a_rank_that_is_not_to_read_has_an_input_that_ends(given: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {given}', "sh", *LMSRUN, "worker", "--", "readlink", "/proc/self/fd/0"],
        env={**os.environ, "LMSRUN_EXPECT": json.dumps(EXPECT), "LMSRUN_STDIN": "none"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "/dev/null\n"), done.stderr


def test_an_interrupt_before_the_program_is_no_traceback(tmp_path: Path) -> None:
    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)

    environ = {**os.environ, "LMSRUN_EXPECT": json.dumps(EXPECT), "LMSRUN_RECEIPT_DIR": str(tmp_path)}
    done = subprocess.run(
        [*LMSRUN, "worker", "--", "true"],
        env=environ,
        stderr=subprocess.PIPE,
        preexec_fn=interrupt,  # noqa: PLW1509 - no threads in the tests
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_mpirun_of_the_worker_is_a_whole_integration(show: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-np", "2", *LMSRUN, "worker", "--", str(show)],
        env={name: value for name, value in os.environ.items() if not name.startswith("LMS")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda found: found["rank"])
    assert [(found["rank"], found["world"]) for found in ranks] == [("0", "2"), ("1", "2")]
    assert all(found["horovod"] == [] for found in ranks), "Horovod under MPI asks MPI"
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        # Open MPI had bound each to a core; the plan divides what the whole job may use.
        assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])
        assert set(ranks[0]["cpus"]) | set(ranks[1]["cpus"]) <= allowed


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
def test_shells_between_mpirun_and_a_rank_change_no_cpus(show: Path) -> None:
    """Open MPI binds the outer shell; what the job may use, its daemon has."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    shell = ("sh", "-c", '"$@"; exit $?', "sh")
    done = subprocess.run(
        [
            "mpirun",
            *root,
            "--bind-to",
            "core",
            "-np",
            "1",
            *shell,
            *shell,
            *LMSRUN,
            "worker",
            "--",
            str(show),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("LMS")},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert set(json.loads(done.stdout)["cpus"]) == os.sched_getaffinity(0)


def test_python_programs_run_under_the_chosen_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert resolve_program([str(script), "-x"], os.environ) == [sys.executable, str(script), "-x"]
    other = shutil.which("env")
    chosen = {**os.environ, "LMSRUN_PYTHON": str(other)}
    assert resolve_program([str(script)], chosen) == [str(other), str(script)]
    with pytest.raises(ProgramError, match="give its path"):
        resolve_program([str(script)], {**os.environ, "LMSRUN_PYTHON": "/none/python"})


def test_the_bootstrap_comes_first_once() -> None:
    once = program_environ({"PYTHONPATH": f"/a:{BOOTSTRAP}:/b"})
    assert once["PYTHONPATH"] == f"{BOOTSTRAP}:/a:/b"
    assert program_environ(once) == once
    assert Path(BOOTSTRAP, "sitecustomize.py").is_file()


def test_ranks_do_not_pay_for_large_modules() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import launch.rank.shim; print(*sys.modules)"
    argv = [sys.executable, "-S", "-c", code, str(SHIM.parents[1])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert not {"typing", "dataclasses", "pathlib", "shutil", "subprocess"} & set(done.stdout.split())


def test_verification_compares_everything_that_was_planned() -> None:
    expected = parse_expectation(
        json.dumps({**EXPECT, "cpus": "0-3", "mem_policy": "bind", "mem_nodes": "0,8"})
    )
    right = FoundBinding(frozenset(range(4)), "bind", frozenset({0, 8}))
    assert verify(expected, right) == (True, [])
    verified, reasons = verify(expected, FoundBinding(frozenset(range(8)), "bind", frozenset({0})))
    assert not verified
    assert reasons == ["CPUs 0-7 at start, planned 0-3", "memory policy bind 0 at start, planned bind 0,8"]
    assert verify(parse_expectation(json.dumps(EXPECT)), right) == (False, [])


@pytest.mark.parametrize(
    "text",
    ["[]", "1", '{"rank": 0}', json.dumps({**EXPECT, "cpus": 3}), json.dumps({**EXPECT, "mem_policy": "x"})],
)
def test_a_damaged_expectation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="LMSRUN_EXPECT is damaged"):
        parse_expectation(text)


@pytest.mark.parametrize("name", ["sh", "no-such-program", "/bin/sh", "/etc/passwd", "/etc", "tests", ""])
@pytest.mark.parametrize("path", [None, "/usr/bin:/bin", "/nonexistent"])
def test_programs_are_found_where_shutil_finds_them(name: str, path: str | None) -> None:
    assert find_program(name, path) == shutil.which(name, path=path)


def test_an_empty_entry_stays_the_current_folder() -> None:
    assert program_environ({"PYTHONPATH": ":/b"})["PYTHONPATH"] == f"{BOOTSTRAP}::/b"
    assert program_environ({"PYTHONPATH": ""})["PYTHONPATH"] == BOOTSTRAP
