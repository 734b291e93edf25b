"""A rank that another launcher has started, whose launcher ends it before the supervisor has taken it in."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import pytest
from jobs import wait_until

from launch.channel.events import Carried, Ended, Ending, Event, Joined
from launch.channel.messages import VARIABLE
from launch.channel.server import RankChannel
from launch.rank import keeper
from launch.supervise.oom_kills import MemoryCounters

LMSRUN = Path(__file__).resolve().parents[3] / "lmsrun" / "__main__.py"
JOB = "5ec7e7"
ENDS_ITSELF = (
    "trap 'touch asked; sleep 0.3; exit 7' TERM; echo $$ >part; mv part up; while :; do sleep 0.1; done"
)
GOES_ON = "trap 'touch asked' TERM; echo $$ >part; mv part up; while :; do sleep 0.1; done"

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[RankChannel]:
    found = RankChannel(JOB, 1, 2.0, carries_output=True)
    yield found
    found.close()


@pytest.fixture
def start(channel: RankChannel, tmp_path: Path) -> Iterator[Start]:
    """Start a rank's shim; the supervisor's end of the channel answers when it is served."""
    address = channel.listen_here(tmp_path)
    world = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    sizes = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
    environ = {**os.environ, **world, **sizes, VARIABLE: address, "LMSRUN_JOB_ID": JOB, "LMSRUN_NUMA": "off"}
    started: list[subprocess.Popen[bytes]] = []

    def begin(script: str) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, str(LMSRUN), "worker", "--", "sh", "-c", script]
        started.append(subprocess.Popen(argv, cwd=tmp_path, env=environ, stdout=subprocess.PIPE))
        wait_until((tmp_path / "up").exists, "the program is up", 20)
        return started[0]

    yield begin
    channel.close()
    for each in started:
        each.kill()
        each.wait(300)


@pytest.mark.parametrize(
    ("script", "status"), [(ENDS_ITSELF, 7 << 8), (GOES_ON, signal.SIGKILL)], ids=["ends", "goes on"]
)
def test_the_grace_period_holds_before_the_welcome(
    channel: RankChannel, start: Start, tmp_path: Path, script: str, status: int
) -> None:
    shim = start(script)
    shim.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "asked").exists, "the program was asked to end", 10)
    events: list[Event] = []

    def has_ended() -> bool:
        events.extend(channel.serve(channel.filenos()))
        return any(isinstance(event, Ended) for event in events)

    wait_until(has_ended, lambda: f"heard {events}", 10)
    assert events == [Joined(0), Ending(0), Ended(0, int(status), "")]
    channel.let_go()
    assert shim.wait(300) == 0


def test_nothing_is_left_when_nobody_is_there(channel: RankChannel, start: Start, tmp_path: Path) -> None:
    shim = start(GOES_ON)
    shim.kill()
    wait_until((tmp_path / "asked").exists, "the program was asked to end", 10)
    channel.close()
    program = Path("/proc", (tmp_path / "up").read_text().strip())
    wait_until(lambda: not program.exists(), "the program is gone", 10)


class Listening:
    """Serves the channel beside a test, and keeps what it has heard."""

    def __init__(self, channel: RankChannel) -> None:
        self.events: list[Event] = []
        self._channel, self._over = channel, Flag()
        self._thread = Thread(target=self._serve)

    def __enter__(self) -> "Listening":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._over.wait(0.005):
            self.events += self._channel.serve(self._channel.filenos())

    def stream(self, name: str) -> int:
        """Give the descriptor of a stream that has come."""
        fd = next(each.fd for each in self.events if isinstance(each, Carried) and each.name == name)
        os.set_blocking(fd, True)
        return fd

    def has_ended(self) -> bool:
        return any(isinstance(event, Ended) for event in self.events)


def capacity() -> int:
    """Return how many bytes a connection holds that nobody reads, at most."""
    nbytes = 0
    ours, theirs = socket.socketpair()
    with ours, theirs, suppress(BlockingIOError):
        ours.setblocking(False)
        while True:
            nbytes += ours.send(bytes(1 << 16))
    return nbytes


def test_last_words_come_before_the_news_of_the_end(
    channel: RankChannel, start: Start, tmp_path: Path
) -> None:
    """More than the connection holds, and less than that and the pipe: the rest waits with the keeper."""
    nbytes = capacity() + 60_000
    with Listening(channel) as listening:
        shim = start(f"echo >up; head -c {nbytes} /dev/zero; touch done; exit 3")
        stream = listening.stream("stdout")
        wait_until((tmp_path / "done").exists, "all is written", 10)
        time.sleep(0.3)
        assert not listening.has_ended()
        while nbytes:
            read = os.read(stream, nbytes)
            assert read, f"{nbytes} bytes are lost"
            nbytes -= len(read)
        wait_until(listening.has_ended, lambda: f"heard {listening.events}", 10)
        channel.let_go()
        assert shim.wait(300) == 0
        assert os.read(stream, 4096) == b""
    assert listening.events[-1] == Ended(0, 3 << 8, "")
    assert shim.stdout is not None and shim.stdout.read() == b"", "the launcher gets none of it"


def test_what_the_program_leaves_running_goes_on_writing(channel: RankChannel, start: Start) -> None:
    with Listening(channel) as listening:
        start("(sleep 1; echo late) & echo first; echo >up; exit 0")
        stream = listening.stream("stdout")
        wait_until(listening.has_ended, lambda: f"heard {listening.events}", 10)
        assert os.read(stream, 4096) == b"first\n"
        assert os.read(stream, 4096) == b"late\n"


def test_a_reader_that_waits_keeps_no_signal_from_the_program(
    channel: RankChannel, start: Start, tmp_path: Path
) -> None:
    flood = "head -c 5000000 /dev/zero & wait"
    with Listening(channel) as listening:
        start(f"trap 'touch asked; exit 7' TERM; echo >up; {flood}")
        stream = listening.stream("stdout")
        wait_until(lambda: len(os.read(stream, 1)) == 1, "output is under way", 10)
        channel.signal(0, signal.SIGTERM)
        wait_until((tmp_path / "asked").exists, "the program was asked to end", 10)
        wait_until(listening.has_ended, lambda: f"heard {listening.events}", 10)
    assert listening.events[-1] == Ended(0, 7 << 8, "")


@pytest.mark.parametrize(
    ("status", "kills", "why"),
    [
        (signal.SIGKILL, (0, 1), "; the kernel's out-of-memory killer struck (the cgroup)"),
        (signal.SIGKILL, (1, 1), ""),
        (signal.SIGKILL, (), "; often that is the kernel's out-of-memory killer"),
        (signal.SIGSEGV, (0, 1), ""),
    ],
)
def test_a_kill_of_the_kernels_is_told(
    monkeypatch: pytest.MonkeyPatch, status: int, kills: tuple[int, ...], why: str
) -> None:
    counters = iter([MemoryCounters({"the cgroup": kill}) for kill in kills] or [MemoryCounters()] * 2)
    monkeypatch.setattr(keeper, "read_memory_counters", lambda: next(counters))
    kept = keeper.Keeper(0, (), None, -1, -1)
    kept._take_end(status)
    assert kept.why == why
