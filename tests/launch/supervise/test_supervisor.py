"""Jobs of real processes: how they end, and that nothing of them is left."""

import json
import os
import platform
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LMSRUN, STUB, Job, JobStarter, wait_until

from launch.ending.job_end import ONE_SIGNAL_S

pytestmark = pytest.mark.ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


@pytest.mark.parametrize("code", [1, 7, 255])
def test_exit_code_of_the_failing_rank(start: JobStarter, code: int) -> None:
    job = start(STUB, "0:sleep=600", f"1:exit={code}")
    assert job.finish() == code
    assert job.last_line == f"lmsrun: rank 1 on localhost (no GPU) exited with code {code}"
    job.assert_nothing_left()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_signal_of_the_failing_rank(start: JobStarter, name: str) -> None:
    number = signal.Signals[name]
    job = start(STUB, "0:sleep=600", f"1:die={name}")
    assert job.finish() == 128 + number
    assert job.last_line.startswith(
        f"lmsrun: rank 1 on localhost (no GPU) was killed by {name} (signal {int(number)})"
    )
    job.assert_nothing_left()


def test_all_well(start: JobStarter) -> None:
    job = start(STUB, "show", "complain=fine")
    assert job.finish() == 0
    out = job.stdout.decode().splitlines()
    for rank in range(2):
        assert (
            f"[{rank}] RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "
            "MASTER_ADDR=127.0.0.1 HOROVOD_CONTROLLER=gloo" in out
        )
        assert f"[{rank}] stdin /dev/null port True" in out
        assert f"[{rank}] signals True set()" in out
        assert f"[{rank}] fine" in job.stderr.decode().splitlines()
    job.assert_nothing_left()


def test_the_first_failure_counts_and_later_ones_do_not(start: JobStarter) -> None:
    job = start(STUB, "0:exit_on=SIGTERM/9", "0:ready", "0:sleep=600", "1:wait_for=ready-0", "1:exit=7")
    assert job.finish() == 7
    assert "rank 1" in job.last_line


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_to_the_launcher_are_passed_on(start: JobStarter, number: signal.Signals) -> None:
    job = start(STUB, "daemon", "ready", "sleep=600")
    job.wait_ready()
    job.signal(number)
    assert job.finish() == 128 + number
    assert job.last_line.startswith(f"lmsrun: ended by {number.name}; rank")
    job.assert_nothing_left()


def test_ranks_that_end_well_on_a_signal_make_the_job_end_well(start: JobStarter) -> None:
    job = start(STUB, "exit_on=SIGTERM/0", "ready", "sleep=600")
    job.wait_ready()
    job.signal(signal.SIGTERM)
    assert job.finish() == 0
    assert job.last_line == "lmsrun: ended by SIGTERM"


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(start: JobStarter) -> None:
    job = start(
        *(STUB, "0:ignore=SIGTERM", "0:ready", "0:sleep=600", "1:wait_for=ready-0", "1:exit=3"),
        options=("--numa", "off", "--grace-period", "0.5"),
    )
    assert job.finish() == 3
    job.assert_nothing_left()


def test_the_second_sigint_kills_at_once(start: JobStarter) -> None:
    job = start(
        *(STUB, "ignore=SIGINT", "ignore=SIGTERM", "ready", "sleep=600"),
        options=("--numa", "off", "--grace-period", "300"),
    )
    job.wait_ready()
    job.signal(signal.SIGINT)
    time.sleep(ONE_SIGNAL_S + 0.2)
    assert job.process.poll() is None
    job.signal(signal.SIGINT)
    assert job.finish(20) == 130
    assert "was killed by SIGKILL (signal 9)" in job.last_line
    job.assert_nothing_left()


def test_an_interrupt_of_every_process_of_a_job_is_one(start: JobStarter) -> None:
    """A service manager signals them all; lmsrun's own processes pass it on to each other besides."""
    job = start(
        *(STUB, "ignore=SIGINT", "ready", "wait_for=go"),
        options=("--numa", "off", "--grace-period", "300"),
    )
    job.wait_ready()
    for pid in job.processes():
        os.kill(pid, signal.SIGINT)
    time.sleep(2 * ONE_SIGNAL_S)
    (job.folder / "go").touch()
    assert job.finish(20) == 0
    assert "ended by SIGINT" in job.last_line
    job.assert_nothing_left()


def test_ignored_hangup_stays_ignored(start: JobStarter) -> None:
    def ignore_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    job = start(STUB, "ready", "wait_for=go", before=ignore_hangup)
    job.wait_ready()
    job.signal(signal.SIGHUP)
    (job.folder / "go").touch()
    assert job.finish() == 0


def test_grandchildren_and_daemons_end_with_the_job(start: JobStarter) -> None:
    job = start(STUB, "daemon", "ready", options=("--numa", "off", "--grace-period", "1"))
    assert job.finish() == 0
    job.assert_nothing_left()


@pytest.mark.parametrize("victims", ["front", "guard", "supervisor", "front supervisor"])
def test_sigkill_to_the_launcher_leaves_no_process(start: JobStarter, victims: str) -> None:
    job = start(STUB, "daemon", "ready", "sleep=600")
    job.wait_ready()
    pids = {"front": job.process.pid, "guard": job.guard, "supervisor": job.supervisor}
    for name in victims.split():
        os.kill(pids[name], signal.SIGKILL)
    assert job.finish() == 137
    if "front" not in victims:
        assert "was killed by SIGKILL; the job was ended" in job.stderr.decode()
    elif "supervisor" not in victims:
        assert job.last_line == "lmsrun: lmsrun itself was killed; the job was ended"
    assert "rank" not in job.last_line
    job.assert_nothing_left()


def test_the_guard_does_not_stand_under_the_launchers_name(start: JobStarter) -> None:
    job = start(STUB, "ready", "sleep=600")
    job.wait_ready()
    guard = Path(f"/proc/{job.guard}")
    wait_until(lambda: (guard / "comm").read_text() == "job-guard\n", "the guard has its name", 10)
    assert (guard / "cmdline").read_bytes().rstrip(b"\0") == b"job-guard"
    job.signal(signal.SIGTERM)
    assert job.finish() == 143


def test_a_launcher_started_by_exec_spares_its_shells_children(start: JobStarter) -> None:
    job = start(
        STUB, "ready", command=("sh", "-c", 'sleep 600 >/dev/null 2>&1 & exec "$@"', "sh", *LMSRUN, "run")
    )
    assert job.finish() == 0
    left = job.processes()
    assert [command.strip() for command in left.values()] == ["sleep 600"]


def test_lines_of_ranks_are_never_mixed_nor_lost(start: JobStarter) -> None:
    job = start(STUB, "flood=3000/200")
    assert job.finish() == 0
    lines = job.stdout.decode().splitlines()
    for rank, letter in enumerate("ab"):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {number} {letter * 200}" for number in range(3000)]
    assert len(lines) == 6000


def test_a_slow_reader_holds_the_ranks_back_and_loses_nothing(start: JobStarter) -> None:
    job = start(STUB, "flood=30000/1000", "0:ready", np=1)
    time.sleep(1.5)
    assert not (job.folder / "ready-0").exists(), "30 MB were taken in without a reader"
    status = Path(f"/proc/{job.supervisor}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_kib < 100 << 10
    assert job.finish() == 0
    assert job.stdout.count(b"\n") == 30000


@pytest.mark.parametrize(("pause_s", "grace_s"), [(0.2, 1), (0.2, 0), (None, 1)])
def test_a_job_that_is_told_to_end_waits_for_its_reader_no_longer_than_for_a_rank(
    start: JobStarter, pause_s: float | None, grace_s: int
) -> None:
    """A batch system asks once, and a pager is nobody who would ask again; a slow reader goes on reading."""
    words = ("--numa", "off", "--grace-period", grace_s)
    job = start(STUB, "flood=5000/100", "ready", "sleep=600", options=words)
    job.wait_ready()
    job.signal(signal.SIGTERM)
    if pause_s is None:
        assert job.process.wait(20) == 143
    else:
        time.sleep(pause_s)
        assert job.process.stdout is not None
        while job.process.stdout.read(1 << 18):
            time.sleep(pause_s)
    assert job.finish() in ({143} if grace_s else {143, 137})
    said = [line for line in job.stderr.decode().splitlines() if "nobody has read" in line]
    lost = ["lmsrun: error: nobody has read the output for 1 s; the rest of it is lost"]
    assert said == (lost if pause_s is None else [])
    job.assert_nothing_left()


def test_output_that_nobody_read_is_kept_in_files_and_changes_no_code(
    start: JobStarter, tmp_path: Path
) -> None:
    words = ("--numa", "off", "--grace-period", "1", "--output-dir", "out")
    job = start(STUB, "exit_on=SIGTERM/0", "flood=5000/100", "ready", "sleep=600", np=1, options=words)
    job.wait_ready(1)
    job.signal(signal.SIGTERM)
    assert job.process.wait(20) == 0
    assert job.finish() == 0
    said = "lmsrun: error: nobody has read the output for 1 s; the rest of it is only in the files"
    assert said in job.stderr.decode().splitlines()
    assert (tmp_path / "out/latest/rank-0.stdout").read_bytes().count(b"\n") == 5000
    assert json.loads((tmp_path / "out/latest/receipts.json").read_text())["exit_code"] == 0


def test_a_reader_that_goes_away_ends_the_job(start: JobStarter) -> None:
    job = start(STUB, "flood=1000000/100", "sleep=600")
    assert job.process.stdout is not None
    assert job.process.stdout.readline()
    job.process.stdout.close()
    job.process.stdout = None
    assert job.finish() == 141
    job.assert_nothing_left()


def test_a_full_disk_is_one_line(start: JobStarter) -> None:
    with open("/dev/full", "wb") as full:
        job = start(STUB, r"say=lost\n", "sleep=600", stdout=full.fileno())
        assert job.finish() == 1
    assert job.last_line == "lmsrun: cannot write the ranks' output: No space left on device"
    job.assert_nothing_left()


def test_output_folder(start: JobStarter, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    job = start(
        STUB, r"say=\x00\xff whole\rline", "complain=err", options=("--numa", "off", "--output-dir", folder)
    )
    assert job.finish() == 0
    files = {f"rank-{rank}.{name}" for rank in range(2) for name in ("stdout", "stderr")}
    (run_folder,) = (path for path in folder.iterdir() if not path.is_symlink())
    assert re.fullmatch(r"stub_rank-\d{8}-\d{6}-[0-9a-f]{4}", run_folder.name)
    assert os.readlink(folder / "latest") == run_folder.name
    assert {path.name for path in run_folder.iterdir()} == files | {"receipts.json", "job.json"}
    for rank in range(2):
        assert (run_folder / f"rank-{rank}.stdout").read_bytes() == b"\x00\xff whole\rline"
        assert (run_folder / f"rank-{rank}.stderr").read_bytes() == b"err\n"


def test_an_output_folder_that_fills_up_is_said_and_fails_the_job(start: JobStarter, tmp_path: Path) -> None:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    folder = tmp_path / "out"
    job = start(STUB, "flood=3000/100", options=("--numa", "off", "--output-dir", folder), before=limit_files)
    assert job.finish() == 1
    assert "error: cannot write rank-0.stdout: File too large; the file ends here" in job.stderr.decode()
    assert job.stdout.count(b"\n") == 6000


def test_receipts_that_cannot_be_saved_fail_the_job(start: JobStarter, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    job = start(STUB, "ready", "wait_for=go", options=("--numa", "off", "--output-dir", folder))
    job.wait_ready()
    (run_folder := (folder / "latest").resolve() / "receipts.json").mkdir()
    (tmp_path / "go").touch()
    assert job.finish() == 1
    assert job.last_line == f"lmsrun: error: cannot write {run_folder}: Is a directory"
    assert not list(run_folder.parent.glob(".*"))


def test_an_output_folder_that_is_a_file_starts_nothing(start: JobStarter) -> None:
    job = start(STUB, "ready", options=("--numa", "off", "--output-dir", STUB))
    assert job.finish() == 2
    assert job.last_line == f"lmsrun: the output folder {STUB} is no folder; choose another --output-dir"


def test_an_output_folder_that_cannot_be_made_starts_nothing(start: JobStarter) -> None:
    job = start(STUB, "ready", options=("--numa", "off", "--output-dir", "/proc/none"))
    assert job.finish() == 2
    assert len(job.stderr.decode().splitlines()) == 1
    assert not (job.folder / "ready-0").exists()


def test_a_job_writes_over_nothing(start: JobStarter, tmp_path: Path) -> None:
    """Whatever lies in the output folder, also what somebody else has put there, is left as it is."""
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "precious").write_text("old")
    for name in ("rank-0.stdout", "receipts.json", "latest"):
        (folder / name).symlink_to(tmp_path / "precious")
    os.mkfifo(folder / "rank-1.stderr")
    for word in ("first", "second"):
        job = start(STUB, f"say={word}", options=("--numa", "off", "--output-dir", folder))
        assert job.finish() == 0
        assert (folder / "latest" / "rank-0.stdout").read_text() == word
    said = sorted(path.read_text() for path in folder.glob("stub_rank-*/rank-0.stdout"))
    assert said == ["first", "second"]
    assert (tmp_path / "precious").read_text() == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_an_output_folder_that_is_another_users_link_starts_nothing(
    start: JobStarter, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    os.lchown(tmp_path / "out", 65534, 65534)
    job = start(STUB, "ready", options=("--numa", "off", "--output-dir", tmp_path / "out"))
    assert job.finish() == 2
    assert "out is a link of user 65534, who may lead it anywhere" in job.last_line
    assert not list((tmp_path / "elsewhere").iterdir())


def test_receipts_tell_of_the_job(start: JobStarter, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    options = ("--numa", "off", "--output-dir", folder, "-x", "MY_TOKEN=s3cret")
    job = start(STUB, "1:complain=no data", "1:exit=3", options=options)
    assert job.finish() == 3
    told = json.loads((folder / "latest" / "receipts.json").read_text())
    assert (told["exit_code"], told["exit_codes"]["1"]) == (3, 3)
    assert told["cause"]["line"] == "rank 1 on localhost (no GPU) exited with code 3"
    assert told["cause"]["rank"] == 1 and told["cause"]["last_lines"] == ["no data"]
    assert told["host"] == os.uname().nodename
    assert told["versions"]["python"] == platform.python_version()
    assert told["started"] <= told["ended"]
    assert told["command"][-1] == "1:exit=3"
    assert "MY_TOKEN=***" in told["command"]
    assert "s3cret" not in json.dumps(told)


@pytest.mark.parametrize(("program", "code"), [("./missing.py", 127), ("./missing", 127), ("./plain", 126)])
def test_a_program_that_cannot_run_is_said(start: JobStarter, program: str, code: int) -> None:
    (start.folder / "plain").write_text("not a program")
    job = start(program)
    # The command line itself notices most of these; a rank whose folder differs says it as a shell would.
    assert job.finish() in (code, 2)
    assert program.removeprefix("./") in job.stderr.decode()
    assert "Traceback" not in job.stderr.decode()


@pytest.mark.parametrize("numa", ["strict", "auto"])
def test_a_binding_lost_during_init_is_seen_and_ends_a_strict_job(start: JobStarter, numa: str) -> None:
    job = start(STUB, "1:lose_binding", "sleep=1.5", options=("--numa", numa))
    code = job.finish()
    if code == 2:
        pytest.skip(f"this machine cannot bind two ranks strictly: {job.last_line}")
    assert code == (1 if numa == "strict" else 0)
    table = job.stderr.decode()
    assert "NO: CPUs 0-4095 after hvd.init(), planned" in table
    if numa == "strict":
        assert job.last_line.startswith(
            "lmsrun: --numa strict: rank 1 on localhost (no GPU) is not verified: CPUs"
        )
    job.assert_nothing_left()


def test_one_rank_passes_its_output_as_it_comes(start: JobStarter) -> None:
    job = start(STUB, "say=half a line", "ready", "wait_for=go", np=1)
    assert job.process.stdout is not None
    assert os.read(job.process.stdout.fileno(), 100) == b"half a line"
    (job.folder / "go").touch()
    assert job.finish() == 0


def test_stop_and_continue_reach_the_ranks(start: JobStarter) -> None:
    job = start(STUB, "ready", "wait_for=go")
    job.wait_ready()
    job.signal(signal.SIGTSTP)
    ranks = [
        pid for pid, command in job.processes().items() if "stub_rank" in command and pid not in _ours(job)
    ]
    wait_until(lambda: all(_state(pid) == "T" for pid in (job.process.pid, *ranks)), "all are stopped", 5)
    job.signal(signal.SIGCONT)
    (job.folder / "go").touch()
    assert job.finish() == 0


def _ours(job: Job) -> set[int]:
    return {job.process.pid, job.supervisor}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_without_device_memory_is_told_so_in_the_last_line(start: JobStarter) -> None:
    job = start(STUB, "1:complain=OOM when allocating tensor", "1:exit=3", "0:sleep=60")
    assert job.finish() == 3
    assert "rank 1 on localhost" in job.last_line
    assert job.last_line.endswith("exited with code 3; the device ran out of memory")
