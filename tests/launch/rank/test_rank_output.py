"""A rank under another launcher keeps its own output: every byte, in a file and on the launcher's stream."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from jobs import LMSRUN, wait_until

from launch.model.errors import UsageError
from launch.receipts.file import format_lines
from launch.system.output_file import open_output

MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "LMSRUN_NUMA": "off",
}


def argv_of(source: str) -> list[str]:
    return [*LMSRUN, "worker", "--", sys.executable, "-c", source]


def environ_with(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LMS", "OMPI", "PMI"))}
    return {**kept, **MPI, "LMSRUN_OUTPUT_DIR": str(folder), **more}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def work(folder: Path, source: str, **more: str) -> "subprocess.CompletedProcess[bytes]":
    environ = environ_with(folder, **more)
    return subprocess.run(argv_of(source), env=environ, capture_output=True, timeout=300, check=False)


def test_no_byte_is_lost_and_none_is_mixed(tmp_path: Path) -> None:
    source = """
import os, sys
for piece in range(200):
    os.write(1, bytes([piece % 256]) * 9973)
    os.write(2, b"\\x1e%d\\r" % piece)
print("env", [name for name in os.environ if "RANK_OUTPUT" in name])
"""
    done = work(tmp_path / "new" / "out", source)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 200 * 9973 and done.stdout.endswith(b"env []\n")
    assert (tmp_path / "new" / "out" / "rank-3.stdout").read_bytes() == done.stdout
    assert (tmp_path / "new" / "out" / "rank-3.stderr").read_bytes() == done.stderr


def test_receipts_on_their_way_home_are_no_output(tmp_path: Path) -> None:
    line = format_lines("job", 3, "init", {"rank": 3}).decode()
    source = f"import sys; sys.stderr.write('before' + {line!r} + 'after'); sys.exit(7)"
    done = work(tmp_path, source, LMSRUN_RECEIPT_LINES="1", LMSRUN_JOB_ID="job")
    assert done.returncode == 7
    assert done.stderr.count(b"\x1elmsrun-receipt job 3 ") == 3, "start, init and end all go to the launcher"
    assert (tmp_path / "rank-3.stderr").read_bytes() == b"beforeafter"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_and_exit_codes_pass_through(tmp_path: Path, number: int) -> None:
    job = subprocess.Popen(
        argv_of("import time; print('here', flush=True); time.sleep(60)"),
        env=environ_with(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == b"here\n"
    job.send_signal(number)
    # Python turns an interrupt into an end of its own, by that very signal.
    assert job.wait(300) == 128 + number
    assert (tmp_path / "rank-3.stdout").read_bytes() == b"here\n"


def test_a_daemon_that_holds_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    source = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(30)
print("gone", flush=True)
os._exit(3)
"""
    job = subprocess.Popen(argv_of(source), env=environ_with(tmp_path), stdout=subprocess.DEVNULL)
    assert job.wait(25) == 3
    assert (tmp_path / "rank-3.stdout").read_bytes() == b"gone\n"


def test_a_reader_that_goes_away_ends_the_program_as_ever(tmp_path: Path) -> None:
    source = "import signal; signal.signal(13, signal.SIG_DFL)\nwhile True: print('y' * 999, flush=True)"
    job = subprocess.Popen(
        argv_of(source), env=environ_with(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(300) == 128 + signal.SIGPIPE


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = work(tmp_path / "file", "print('never')")
    assert (done.returncode, done.stdout) == (2, b"")
    text = done.stderr.decode()
    assert text.startswith(f"lmsrun: cannot write to the output folder {tmp_path / 'file'} on ")
    assert text.count("\n") == 1


def test_a_pipe_in_the_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-3.stdout")
    done = work(tmp_path, "print('never')")
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"lmsrun: {tmp_path}/rank-3.stdout is no file, and output is to be kept there; ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_failure_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "rank-3.stdout").symlink_to("/dev/full")
    receipts = tmp_path / "receipts"
    receipts.mkdir()
    done = work(tmp_path, "print('on' * 9999)", LMSRUN_RECEIPT_LINES="1", LMSRUN_RECEIPT_DIR=str(receipts))
    assert (done.returncode, done.stdout) == (1, b"on" * 9999 + b"\n")
    end = json.loads((receipts / "rank-3.end.json").read_text())
    assert f"could not write {tmp_path}/rank-3.stdout ({os.strerror(errno.ENOSPC)})" in end["how"]


def test_daemons_that_write_without_pause_are_not_waited_for(tmp_path: Path) -> None:
    source = """
import os, signal
signal.signal(13, signal.SIG_DFL)  # Their end comes with the pipe's.
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        while True:
            os.write(1, b"y" * 4096)
os.write(1, b"last")
os._exit(3)
"""
    job = subprocess.Popen(argv_of(source), env=environ_with(tmp_path), stdout=subprocess.DEVNULL)
    assert job.wait(300) == 3
    assert b"last" in (tmp_path / "rank-3.stdout").read_bytes()


def test_a_stream_that_the_launcher_has_made_non_blocking_loses_nothing(tmp_path: Path) -> None:
    source = "import os\nfor piece in range(100): os.write(1, bytes([piece]) * 9973)"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    job = subprocess.Popen(argv_of(source), env=environ_with(tmp_path), stdout=writing)
    os.close(writing)
    wait_until(lambda: count_waiting(reading) >= 60_000, "the pipe is full", 30)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    assert job.wait(300) == 0
    assert said == b"".join(bytes([piece]) * 9973 for piece in range(100))
    assert (tmp_path / "rank-3.stdout").read_bytes() == said


def count_waiting(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_output_of_another_job_is_not_overwritten(tmp_path: Path) -> None:
    assert work(tmp_path, "print('first')").returncode == 0
    again = work(tmp_path, "print('second')")
    assert again.returncode == 2 and b"rank-3.stdout holds the output of another job" in again.stderr
    assert (tmp_path / "rank-3.stdout").read_text() == "first\n"
    assert work(tmp_path, "print('again')", SLURM_RESTART_COUNT="1").returncode == 0
    assert (tmp_path / "rank-3.stdout").read_text() == "first\nagain\n"
    assert work(tmp_path, "print('second')", LMSRUN_JOB_ID="a", LMSRUN_RECEIPT_LINES="1").returncode == 0


def test_a_signal_is_not_passed_on_to_whoever_has_the_programs_number_next(tmp_path: Path) -> None:
    """The program fills stderr and fails, so that its shim hangs in its last line."""
    source = f"""
import os
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x")
except BlockingIOError:
    os.set_blocking(2, True)
open({str(tmp_path / "full")!r}, "w").close()
os._exit(7)
"""
    environ = environ_with(tmp_path, LMSRUN_RECEIPT_LINES="1")
    del environ["LMSRUN_OUTPUT_DIR"]
    job = subprocess.Popen(argv_of(source), env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until((tmp_path / "full").exists, "the program leaves", 30)
    (keeper,) = children_of(job.pid)
    wait_until(lambda: not children_of(keeper), "the program is gone", 30)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=300)
    assert job.returncode == 7 and b"exited with code 7" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_another_users_link_is_not_followed(tmp_path: Path) -> None:
    link = tmp_path / "rank-0.stdout"
    (tmp_path / "precious").write_text("old")
    link.symlink_to(tmp_path / "precious")
    os.close(open_output(link, os.O_APPEND))
    os.lchown(link, 65534, 65534)
    with pytest.raises(UsageError, match="is a link of another user"):
        open_output(link)
    assert (tmp_path / "precious").read_text() == "old"


def test_a_rank_that_no_supervisor_takes_runs_by_itself(tmp_path: Path) -> None:
    """It knocks, and is sent away: an end of the connection without a welcome is nobody's death."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "control"))
        door.listen()
        go = str(tmp_path / "go")
        source = f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.01)\nprint('on')"
        environ = environ_with(tmp_path, LMSRUN_CONTROL=str(tmp_path / "control"))
        job = subprocess.Popen(
            argv_of(source), env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        door.accept()[0].close()
        (tmp_path / "go").touch()
        assert job.communicate(timeout=300)[0] == b"on\n"
        assert job.returncode == 0
