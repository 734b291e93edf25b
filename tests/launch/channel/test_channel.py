"""The channel between ranks' keepers and the supervisor: who is let in, and what is heard."""

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import wait_until

from launch.channel import client, server
from launch.channel.client import Supervisor, find_supervisor, open_stream
from launch.channel.events import Carried, Ended, Ending, Event, Joined, Lost
from launch.channel.messages import VARIABLE, Reader, encode
from launch.channel.server import RankChannel
from launch.system.process_load import Load

JOB = "5ec7e7"


class Listening:
    """A channel for two ranks, served when asked."""

    def __init__(self, folder: Path, over_tcp: bool, is_elastic: bool = False) -> None:
        self.channel = RankChannel(JOB, 2, 4.5, is_elastic, carries_output=not is_elastic)
        address = self.channel.listen_for(["localhost"]) if over_tcp else self.channel.listen_here(folder)
        self.environ = {VARIABLE: address, "LMSRUN_JOB_ID": JOB}
        self.events: list[Event] = []

    def join(self, rank: int, **other: str) -> Supervisor:
        supervisor = find_supervisor({**self.environ, **other}, rank)
        assert supervisor is not None
        return supervisor

    def knock(self) -> Supervisor:
        """Connect, and say nothing."""
        address = self.environ[VARIABLE]
        connect = client._connect_here if address.startswith("/") else client._connect_there
        connection = connect(address)
        assert connection is not None
        return Supervisor(connection)

    def heard(self, count: int) -> list[Event]:
        wait_until(lambda: len(self.serve()) >= count, lambda: f"heard {self.events}", 10)
        return self.events

    def serve(self) -> list[Event]:
        self.events += self.channel.serve(self.channel.filenos())
        return self.events


@pytest.fixture(params=[False, True], ids=["here", "tcp"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listening]:
    found = Listening(tmp_path, request.param)
    yield found
    found.channel.close()


def test_a_rank_joins_hears_and_tells(listening: Listening) -> None:
    rank = listening.join(1)
    assert listening.heard(1) == [Joined(1)]
    listening.channel.signal(1, 15)
    listening.channel.signal(0, 15)  # Nobody there.
    listening.channel.let_go()
    told: list[dict[str, object]] = []
    while len(told) < 3:
        told += rank.receive()
    assert told == [{"grace_s": 4.5}, {"signal": 15}, {"leave": True}]
    rank.tell({"ending": True})
    rank.tell({"ended": 256, "why": "; so"})
    assert listening.heard(3)[1:] == [Ending(1), Ended(1, 256, "; so")]


def test_a_rank_elsewhere_tells_what_it_is_at(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = listening.join(1)
    assert rank.sees_us == listening.environ[VARIABLE].startswith("/")
    bad = ([1, 2.0, 1.0], [True, float("nan"), 1.0], [True, 1.0], [False, 2.0, 3], {"cpu_s": 1.0}, None)
    for load in ([True, 1.5, 7.25], *bad):
        rank.tell({"load": load})
    rank.tell({"ending": True})
    assert listening.heard(2) == [Joined(1), Ending(1)]
    assert listening.channel.loads() == {1: Load(True, 1.5, 7.25)}
    monkeypatch.setattr(server, "_OLD_S", 0.0)
    assert listening.channel.loads() == {}, "old ones say nothing"


def open_while_served(listening: Listening, rank: int, name: str, job: str = JOB) -> socket.socket | None:
    """Open a stream as a rank does that waits for the answer in a process of its own."""
    environ = {**listening.environ, "LMSRUN_JOB_ID": job}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(open_stream, environ, rank, name)
        wait_until(lambda: (listening.serve(), asked.done())[1], "the rank has its answer", 10)
    return asked.result()


def test_output_comes_over_a_connection_of_its_own(listening: Listening) -> None:
    rank_itself = listening.join(1)
    listening.heard(1)
    stream = open_while_served(listening, 1, "stderr")
    assert stream is not None
    carried = listening.events[1]
    assert isinstance(carried, Carried) and (carried.rank, carried.name) == (1, "stderr")
    stream.sendall(b"\xff\n{")
    stream.close()
    with open(carried.fd, "rb") as file:
        assert file.read() == b"\xff\n{", "it is no message, and all of it has come"
    assert listening.serve()[2:] == [], "the end of the stream is not that of the rank"
    assert rank_itself.open


@pytest.mark.parametrize(
    ("rank", "name", "job"), [(0, "stdout", JOB), (1, "stdin", JOB), (1, "stdout", "guessed")]
)
def test_output_of_strangers_is_not_taken(listening: Listening, rank: int, name: str, job: str) -> None:
    rank_itself = listening.join(1)
    listening.heard(1)
    assert open_while_served(listening, rank, name, job) is None
    assert listening.events == [Joined(1)]
    assert rank_itself.open


def test_a_job_without_room_for_output_leaves_it_to_the_launcher(tmp_path: Path) -> None:
    listening = Listening(tmp_path, over_tcp=False, is_elastic=True)
    rank_itself = listening.join(1)
    listening.heard(1)
    assert open_while_served(listening, 1, "stdout") is None
    assert listening.events == [Joined(1)]
    listening.channel.close()
    assert rank_itself.open


def test_a_rank_that_goes_without_a_word_is_lost(listening: Listening) -> None:
    rank = listening.join(0)
    listening.heard(1)
    rank._socket.close()
    assert listening.heard(2)[1:] == [Lost(0)]


@pytest.mark.parametrize(
    ("rank", "job"), [(0, "guess"), (2, JOB), (-1, JOB), (0, "")], ids=["job", "rank", "negative", "none"]
)
def test_strangers_are_not_let_in(listening: Listening, rank: int, job: str) -> None:
    stranger = listening.join(rank, LMSRUN_JOB_ID=job)
    stranger.tell({"ended": 0})
    wait_until(lambda: not listening.serve() and not _is_open(stranger), "it is sent away", 10)
    assert listening.events == []


def test_who_was_refused_is_heard_no_more(listening: Listening) -> None:
    stranger = listening.knock()
    stranger._socket.sendall(encode({"job": "guess", "rank": 0}) + encode({"job": JOB, "rank": 0}))
    wait_until(lambda: not listening.serve() and not _is_open(stranger), "it is sent away", 10)
    listening.join(0)
    assert listening.heard(1) == [Joined(0)]


def test_a_second_of_the_same_rank_is_not_let_in(listening: Listening) -> None:
    first = listening.join(0)
    listening.heard(1)
    second = listening.join(0)
    wait_until(lambda: bool(listening.serve()) and not _is_open(second), "it is sent away", 10)
    first.tell({"ended": 0})
    assert listening.heard(2) == [Joined(0), Ended(0, 0, "")]


def test_the_silent_are_dropped_by_their_age_and_not_their_number(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SILENCE_S", 1000.0)
    silent = [listening.knock() for _ in range(100)]
    for _ in silent:
        listening.serve()
    assert all(map(_is_open, silent))
    rank = listening.join(0)
    assert listening.heard(1) == [Joined(0)]
    monkeypatch.setattr(server, "_SILENCE_S", 0.0)
    wait_until(
        lambda: len(listening.serve()) == 1 and not any(map(_is_open, silent)), "they are sent away", 10
    )
    assert _is_open(rank)


def test_who_says_nothing_makes_room_where_there_is_none(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = listening.knock()
    wait_until(lambda: not listening.serve() and len(listening.channel.filenos()) == 2, "it is there", 10)
    rank = listening.join(0)
    with monkeypatch.context() as full:
        full.setattr(socket.socket, "accept", _find_no_room)
        listening.serve()
    assert not _is_open(silent)
    assert listening.heard(1) == [Joined(0)] and _is_open(rank)


def test_all_addresses_have_one_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [0.0], []

    def drop(address: tuple[str, int], timeout: float) -> socket.socket:
        limits.append(timeout)
        now[0] += timeout
        raise TimeoutError

    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(client.socket, "create_connection", drop)
    assert find_supervisor({VARIABLE: "a 1,b 2,c 3,d 4"}, 0) is None
    assert sum(limits) == pytest.approx(2.0) and min(limits) == pytest.approx(0.5)


def test_elastic_ranks_may_begin_with_a_number_that_another_had(tmp_path: Path) -> None:
    listening = Listening(tmp_path, over_tcp=False, is_elastic=True)
    ranks = [listening.join(number) for number in (0, 0, 7)]
    assert listening.heard(3) == [Joined(0), Joined(1), Joined(7)]
    assert all(_is_open(rank) for rank in ranks)
    listening.channel.close()


@pytest.mark.parametrize("said", [b"{\n", b"[]\n", b"x" * 9000, b'{"rank": true}\n', b"\xff\n"])
def test_what_is_no_message_ends_the_connection(listening: Listening, said: bytes) -> None:
    peer = listening.join(1)
    listening.heard(1)
    peer._socket.sendall(said)
    peer._socket.shutdown(socket.SHUT_WR)
    assert listening.heard(2)[1:] == [Lost(1)]


@pytest.mark.parametrize(
    "said",
    [
        b'{"job":"\\ud800","rank":0}\n',
        b'{"job":"\xc3\xa9","rank":0}\n',
        b"[" * 4000 + b"\n",
        b"[" * 60000 + b"\n",
    ],
    ids=["surrogate", "not ascii", "deep", "long"],
)
def test_a_stranger_cannot_end_the_job(listening: Listening, said: bytes) -> None:
    stranger = listening.knock()
    stranger._socket.sendall(said)
    wait_until(lambda: not listening.serve() and not _is_open(stranger), "it is sent away", 10)
    rank = listening.join(0)
    assert listening.heard(1) == [Joined(0)] and _is_open(rank)


@pytest.mark.parametrize(
    "line", [b'{"why": "' + b"x" * 4096 + b'"}\n', b"[" * 4000 + b"\n"], ids=["long", "deep"]
)
def test_a_reader_refuses_what_is_too_long_or_too_deep(line: bytes) -> None:
    with pytest.raises(ValueError, match="a line of|Expecting"):
        Reader().feed(line)


def test_a_reader_puts_pieces_together() -> None:
    reader = Reader()
    assert reader.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert reader.feed(b": 2}\n") == [{"b": 2}]


def _find_no_room(_: socket.socket) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def _is_open(supervisor: Supervisor) -> bool:
    supervisor._socket.setblocking(False)
    try:
        return bool(supervisor._socket.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
