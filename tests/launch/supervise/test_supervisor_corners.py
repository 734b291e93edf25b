"""The supervisor where something else is wrong already: few files, no processes, a job that is ending."""

import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import ROOT, STUB, JobStarter, wait_until

pytestmark = pytest.mark.ranks

DRIVER = """
import os, signal, sys
from launch.cluster.job import Command
from launch.model.errors import LmsrunError
from launch.supervise.job import JobOptions
from launch.model.plan import LaunchPlan, RankPlan
from launch.supervise.supervisor import run_job

def job(argv, command=None, elastic=False, **options):
    ranks = tuple(
        RankPlan(
            rank, rank, "here", None, None, frozenset({rank}), "none", frozenset(), None,
            {"STUB_FOLDER": os.environ["TMPDIR"]}, argv,
        )
        for rank in range(2)
    )
    made = None if command is None else Command(tuple(command), elastic=elastic)
    plan = LaunchPlan(2, "test", ranks, ())
    return run_job(plan, JobOptions(command=made, **options), lambda receipts: "the table")
"""
FAKE_LAUNCHER = """
import json, os, signal, sys, time
folder = os.environ["LMSRUN_RECEIPT_DIR"]

def leave(name, **content):
    draft = os.path.join(folder, ".draft")
    with open(draft, "w") as file:
        json.dump({"rank": 1, "host": "there", **content}, file)
    os.rename(draft, os.path.join(folder, name))

def end(*_):
    leave("rank-1.end.json", code=137, how="was killed by SIGKILL (signal 9)")
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
if sys.argv[1] == "unverified":
    leave("rank-1.start.json", verified=False, cpus="0", reasons=["refused"])
    time.sleep(60)
leave("rank-1.end.json", code=7, how="exited with code 7")
sys.exit(1)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def drive(code: str, folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run supervised jobs from a script, without the command line."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMS")}
    return subprocess.run(
        [sys.executable, "-c", DRIVER + code, *args],
        env={**environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def limit_files(soft: int, hard: int | None = None) -> Callable[[], None]:
    def limit() -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most if hard is None else hard))

    return limit


def test_many_ranks_do_not_run_out_of_files_and_get_the_callers_limit(start: JobStarter) -> None:
    options = ("--numa", "off", "--output-dir", start.folder / "out")
    job = start("sh", "-c", "ulimit -Sn", np=6, options=options, before=limit_files(20))
    assert job.finish() == 0, job.stderr
    assert sorted(job.stdout.decode().splitlines()) == [f"[{rank}] 20" for rank in range(6)]


def test_too_few_files_are_said_before_anything_starts(start: JobStarter) -> None:
    job = start(STUB, "ready", np=6, before=limit_files(20, 20))
    assert job.finish() == 1
    assert job.last_line.startswith("lmsrun: 20 files may be open at once; needed ")
    assert not list(job.folder.glob("ready-*"))


def test_no_more_processes_is_one_error_and_leaves_nothing_changed(tmp_path: Path) -> None:
    code = """
def refuse():
    raise BlockingIOError(11, "Resource temporarily unavailable")

os.fork = refuse
before = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD)
try:
    job(("true",))
except LmsrunError as error:
    print(error)
assert before == (signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD))
"""
    done = drive(code, tmp_path)
    assert done.stdout.startswith("the system starts no more processes (Resource temporarily"), done.stderr
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_be_forked_ends_the_job_with_the_same_words(tmp_path: Path) -> None:
    code = """
forks = []
fork = os.fork

def refuse_the_second():
    forks.append(1)
    if len(forks) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = refuse_the_second
sys.exit(job(("sleep", "600")))
"""
    done = drive(code, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("lmsrun: the system starts no more processes (Resource temporarily")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("numa", "kind", "code", "line"),
    [
        ("strict", "unverified", 1, "lmsrun: --numa strict: rank 1 on here (no GPU) is not verified"),
        ("auto", "failing", 7, "lmsrun: rank 1 on here (no GPU) exited with code 7"),
    ],
)
def test_what_ended_the_job_here_outranks_what_its_ranks_say_of_being_killed(
    tmp_path: Path, numa: str, kind: str, code: int, line: str
) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(FAKE_LAUNCHER)
    call = "sys.exit(job((), [sys.executable, *sys.argv[2:]], numa=sys.argv[1]))"
    done = drive(call, tmp_path, numa, str(script), kind)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(line)


def test_an_interrupt_does_not_put_off_the_end_of_a_job_that_is_ending(start: JobStarter) -> None:
    job = start(
        *(STUB, "0:ignore=SIGTERM", "0:ignore=SIGINT", "0:ready", "0:sleep=600", "1:wait_for=go", "1:exit=3"),
        options=("--numa", "off", "--grace-period", "2"),
    )
    job.wait_ready(1)
    (job.folder / "go").touch()
    began = time.monotonic()
    time.sleep(1.5)
    job.signal(signal.SIGINT)
    assert job.finish() == 3
    assert time.monotonic() - began < 3.2
    assert "SIGINT: passed on to the ranks, which are being ended already" in job.stderr.decode()
    job.assert_nothing_left()


@pytest.mark.parametrize("how", ["saves", "ignores"])
def test_what_a_script_has_started_has_the_grace_period_and_no_more(start: JobStarter, how: str) -> None:
    trap = "sleep 1; touch saved; exit" if how == "saves" else ""
    inner = f"trap '{trap}' TERM; touch ready-0; while :; do sleep 0.1; done"
    (start.folder / "inner.sh").write_text(inner)
    job = start("sh", "-c", "sh inner.sh; echo end", np=1, options=("--numa", "off", "--grace-period", "3"))
    wait_until((start.folder / "ready-0").exists, "the script runs", 20)
    began = time.monotonic()
    job.signal(signal.SIGTERM)
    assert job.finish() == 128 + signal.SIGTERM
    assert (start.folder / "saved").exists() == (how == "saves")
    assert (1 if how == "saves" else 3) < time.monotonic() - began < 10
    job.assert_nothing_left()


def test_ctrl_c_on_any_line_of_the_start_leaves_no_folder(tmp_path: Path) -> None:
    code = """
def interrupt_at(wanted):
    lines, front = 0, os.getpid()
    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename.rpartition("/")[2] not in ("job.py", "supervisor.py"):
            return None
        lines += event == "line"
        if event == "line" and lines == wanted and os.getpid() == front:
            os.kill(front, signal.SIGINT)
        return trace
    sys.settrace(trace)
    try:
        job(("/bin/true",))
    except KeyboardInterrupt:
        pass
    sys.settrace(None)
    os._exit(lines >= wanted)

signal.signal(signal.SIGINT, signal.default_int_handler)
wanted = 1
while True:
    child = os.fork()
    if child == 0:
        interrupt_at(wanted)
    interrupted = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if left := os.listdir(os.environ["TMPDIR"]):
        sys.exit(f"line {wanted} left {left}")
    if not interrupted:
        print(wanted)
        break
    wanted += 1
"""
    done = drive(code, tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stderr
    assert int(done.stdout) > 40, "every line has had its turn"


def test_output_does_not_set_the_pace_of_reading_receipts(tmp_path: Path) -> None:
    code = """
from launch.supervise.receipt_watch import ReceiptWatch

look = ReceiptWatch.look
def counted(self, *args):
    os.write(count, b".")
    look(self, *args)

ReceiptWatch.look = counted
count = os.open(os.path.join(os.environ["TMPDIR"], "looks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.exit(job((sys.executable, *sys.argv[1:])))
"""
    began = time.monotonic()
    done = drive(code, tmp_path, str(STUB), "flood=3000/100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 6000
    assert (tmp_path / "looks").stat().st_size <= (time.monotonic() - began) / 0.1 + 3


def test_a_rendezvous_that_cannot_be_served_is_said_at_once(start: JobStarter) -> None:
    broken = start.folder / "broken" / "horovod"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        "import time; time.sleep(0.5); raise ImportError('built for another Python')"
    )
    (start.folder / "knock.py").write_text(
        "import contextlib, os, socket, time\n"
        "port = int(os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'])\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n"
        "with contextlib.suppress(OSError): socket.create_connection(('127.0.0.1', port)).recv(1)\n"
        "time.sleep(600)\n"  # A word of the rank would wake the supervisor.
    )
    job = start(
        "./knock.py",
        np=1,
        options=("--numa", "off", "--receipt-timeout", "0"),
        environ={"PYTHONPATH": str(broken.parent)},
    )
    assert job.process.stderr is not None
    fd = job.process.stderr.fileno()
    os.set_blocking(fd, False)
    said = bytearray()

    def hears(text: bytes) -> Callable[[], bool]:
        def heard() -> bool:
            try:
                said.extend(os.read(fd, 65536))
            except BlockingIOError:
                pass
            return text in said

        return heard

    wait_until(hears(b"verified"), "the table is out", 20)
    (job.folder / "go").touch()
    wait_until(hears(b"built for another Python"), lambda: f"said: {said!r}", 10)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.parametrize(("imports_s", "timeout_s"), [(0, 120), (3, 1)])
def test_nobody_waits_for_a_rank_that_left_before_hvd_init(
    start: JobStarter, tmp_path: Path, imports_s: int, timeout_s: int
) -> None:
    """Rank 0 comes to the rendezvous as Horovod does, and waits; rank 1 has nothing to do there.

    Rank 0 may come when receipts are no longer looked at, or when they still are.
    """
    program = tmp_path / "half.py"
    program.write_text("""
import http.client, os, time
if os.environ["RANK"] == "0":
    meeting = http.client.HTTPConnection("127.0.0.1", int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    meeting.connect()
    time.sleep(float(os.environ["IMPORTS_S"]))
    meeting.request("PUT", "/global/0", b"address")
    meeting.getresponse().read()
    time.sleep(90)
""")
    options = ("--numa", "off", "--receipt-timeout", str(timeout_s))
    job = start(program, options=options, environ={"IMPORTS_S": str(imports_s)})
    assert job.finish(50) == 1, job.stderr.decode()
    assert job.last_line == (
        "lmsrun: rank 1 on localhost (no GPU) exited with code 0 before hvd.init(), where others wait for it"
    )
    job.assert_nothing_left()


def test_what_an_elastic_job_told_at_its_very_end_is_said_and_saved(tmp_path: Path) -> None:
    source = """cd "$LMSRUN_RECEIPT_DIR"
printf '{"rank": 1, "host": "there", "pid": 9}' > rank-1.moved.9.0.json
sleep 0.06  # behind the first look at the receipts, before the next
"""
    call = """
from pathlib import Path
sys.exit(job((), ["sh", "-c", sys.argv[2]], elastic=True, output_dir=Path(sys.argv[1])))"""
    (tmp_path / "out").mkdir()
    done = drive(call, tmp_path, str(tmp_path / "out"), source)
    assert done.returncode == 0, done.stderr
    assert "lmsrun: rank 1 on there joined: CPUs unknown" in done.stderr
    (move,) = json.loads((tmp_path / "out" / "receipts.json").read_text())["moves"]
    assert (move["rank"], move["pid"]) == (1, 9)


def test_a_launcher_may_clean_up_at_a_sigquit(tmp_path: Path) -> None:
    """Open MPI 4 dies of it, and leaves its folder of the job behind."""
    call = """
launcher = "trap 'echo cleaned up; exit 1' TERM; kill -QUIT %d; while :; do sleep 0.1; done" % os.getpid()
sys.exit(job((), ["sh", "-c", launcher]))"""
    done = drive(call, tmp_path)
    assert (done.returncode, done.stdout) == (128 + signal.SIGQUIT, "cleaned up\n"), done.stderr


def test_a_job_that_stands_still_is_told_and_ended_when_asked(start: JobStarter) -> None:
    stall = ("--numa", "off", "--stall-timeout", "0.5")
    job = start(STUB, "ready", "0:wait_for=go", "1:die=SIGSTOP", options=stall)
    job.wait_ready()
    assert job.process.stderr is not None
    while b"warning: no output" not in (line := job.process.stderr.readline()):
        assert line, "it was not told"
    assert line.rstrip().endswith(b" s: rank 1 is stopped (SIGSTOP)")
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert job.last_line.endswith("; rank 1 is stopped (SIGSTOP)")
    ended = start(STUB, "ready", "0:wait_for=go", "1:die=SIGSTOP", options=(*stall, "--stall-kill"))
    assert ended.finish() == 124
    assert "s: rank 1 is stopped (SIGSTOP)" in ended.last_line
    ended.assert_nothing_left()


@pytest.mark.parametrize("how", ["saves", "ignores"])
def test_what_a_rank_leaves_behind_has_the_grace_period_and_is_counted(start: JobStarter, how: str) -> None:
    trap = "sleep 1; echo saved; touch saved; exit" if how == "saves" else ""
    (start.folder / "inner.sh").write_text(f"trap '{trap}' TERM; touch ready-0; while :; do sleep 0.1; done")
    (start.folder / "outer.sh").write_text(
        "setsid sh inner.sh & while [ ! -e ready-0 ]; do sleep 0.01; done; echo over"
    )
    job = start("sh", "outer.sh", np=1, options=("--numa", "off", "--grace-period", "2"))
    began = time.monotonic()
    assert job.finish() == 0
    assert (start.folder / "saved").exists() == (how == "saves")
    assert job.stdout.decode() == ("over\nsaved\n" if how == "saves" else "over\n")
    assert re.fullmatch(r"lmsrun: warning: ended [12] process(es)? that ranks had left behind", job.last_line)
    assert (1 if how == "saves" else 2) < time.monotonic() - began < 10
    job.assert_nothing_left()


def test_a_signal_does_not_wait_for_what_ranks_have_left_behind(start: JobStarter) -> None:
    (start.folder / "inner.sh").write_text("trap '' TERM; touch ready-0; while :; do sleep 0.1; done")
    outer = "sh inner.sh & while [ ! -e ready-0 ]; do sleep 0.01; done; touch ready-1"
    job = start("sh", "-c", outer, np=1, options=("--numa", "off", "--grace-period", "50"))
    job.wait_ready(2)
    time.sleep(0.5)
    job.signal(signal.SIGTERM)
    assert job.finish(20) == 0
    job.assert_nothing_left()


def test_what_ends_by_itself_right_after_its_rank_is_no_leftover(start: JobStarter) -> None:
    job = start("sh", "-c", "(exec sleep 0.05) & exit 0", np=1)
    assert job.finish() == 0
    assert "left behind" not in job.stderr.decode()
