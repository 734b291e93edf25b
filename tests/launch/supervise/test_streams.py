"""Output on its way from ranks to the launcher's own: whole lines, bars, bounds."""

import os
import select
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.supervise.streams import (
    MAX_LINE_BYTES,
    Console,
    RankStream,
    Sink,
    TaggedStream,
    open_consoles,
    read_last_lines,
)


def shown(console: Console) -> bytes:
    """All that a console has been given, through a real pipe."""
    reading, writing = os.pipe()
    console.sink.fd = writing
    text = b""
    while console.sink.waiting:
        console.sink.pump()
        text += os.read(reading, 1 << 16)
    os.close(reading)
    os.close(writing)
    return text


def put(console: Console, stream: TaggedStream, data: bytes) -> None:
    for piece in stream.cut(data):
        console.put(stream, piece)


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\0", b"\n").replace(b"\1", b"\r")), st.data())
def test_how_a_stream_is_chunked_does_not_change_its_text(data: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    stream, pieces = TaggedStream(b""), []
    for start, end in pairwise([0, *cuts, len(data)]):
        pieces += list(stream.cut(data[start:end]))
    pieces += list(stream.finish())
    ended = data + (b"\n" if data and not data.endswith((b"\n", b"\r")) else b"")
    assert b"".join(pieces) == ended
    assert all(piece.endswith((b"\n", b"\r")) for piece in pieces)


TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n", b"\r", b"x" * (MAX_LINE_BYTES // 2)]), max_size=9)


@given(st.lists(st.tuples(st.integers(0, 1), TEXT), max_size=8))
def test_lines_shown_at_once_are_as_one_by_one(writes: list[tuple[int, list[bytes]]]) -> None:
    consoles = Console(Sink(-1)), Console(Sink(-1))
    streams = [(TaggedStream(tag), TaggedStream(tag)) for tag in (b"[0] ", b"")]
    for rank, pieces in writes:
        consoles[0].show(streams[rank][0], b"".join(pieces))
        put(consoles[1], streams[rank][1], b"".join(pieces))
    for fast, slow in streams:
        assert (fast.rest, fast.held) == (slow.rest, slow.held)
    assert shown(consoles[0]) == shown(consoles[1])


def test_a_pipe_takes_all_it_has_room_for_at_once() -> None:
    """Four KiB a turn made 100 MB take 24 s."""
    reading, writing = os.pipe()
    sink = Sink(writing)
    sink.write(b"x" * 200_000)
    sink.pump()
    assert len(os.read(reading, 1 << 20)) >= 1 << 16
    assert os.get_blocking(writing)  # The open file is the user's shell's, too.
    for fd in {reading, writing, sink.fd}:
        os.close(fd)


def test_a_full_pipe_blocks_nobody() -> None:
    reading, writing = os.pipe()
    sink = Sink(writing)
    sink.write(b"x" * 300_000)
    for _ in range(10):
        sink.pump()
    assert sink.waiting
    assert sink.error is None
    for fd in {reading, writing, sink.fd}:
        os.close(fd)


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=40)), max_size=20))
def test_lines_of_three_streams_stay_whole(writes: list[tuple[int, bytes]]) -> None:
    console = Console(Sink(-1))
    streams = [TaggedStream(f"[{rank}] ".encode()) for rank in range(3)]
    sent = [b"", b"", b""]
    for rank, data in writes:
        clean = data.replace(b"\r", b"?").replace(b"\t", b"\n")
        sent[rank] += clean
        put(console, streams[rank], clean)
    for stream in streams:
        for piece in stream.finish():
            console.put(stream, piece)
    lines = shown(console).split(b"\n")
    for rank in range(3):
        tag = f"[{rank}] ".encode()
        own = [line[len(tag) :] for line in lines if line.startswith(tag)]
        wanted = sent[rank].split(b"\n")
        assert own == (wanted[:-1] if wanted[-1] == b"" else wanted)


def test_a_bar_is_drawn_over_by_its_own_stream_only() -> None:
    console, first, second = Console(Sink(-1)), TaggedStream(b"[0] "), TaggedStream(b"[1] ")
    put(console, first, b"\r10%\r")
    put(console, second, b"\r20%\r30%\r")
    put(console, first, b"40%\r")
    put(console, second, b"100%\r\n")
    put(console, first, b"100%\r")
    put(console, first, b"\n")
    assert shown(console) == b"[0] 10%\r[0] 40%\r\n[1] 100%\r\n[0] 100%\r\n"


def test_a_held_bar_is_shown_when_its_line_ends() -> None:
    console, first, second = Console(Sink(-1)), TaggedStream(b"[0] "), TaggedStream(b"[1] ")
    put(console, first, b"10%\r")
    put(console, second, b"99%\r")
    put(console, second, b"\n")
    console.note("lmsrun: a note")
    assert shown(console) == b"[0] 10%\r\n[1] 99%\nlmsrun: a note\n"


def test_a_note_never_lands_in_the_middle_of_a_line() -> None:
    console = Console(Sink(-1))
    console.put_raw(b"half a line")
    console.note("lmsrun: a note")
    console.put_raw(b"the rest\n")
    assert shown(console) == b"half a line\nlmsrun: a note\nthe rest\n"


def test_a_huge_line_is_shown_in_pieces() -> None:
    console, stream = Console(Sink(-1)), TaggedStream(b"[0] ")
    for _ in range(50):
        put(console, stream, b"x" * 10_000)
        assert len(stream.rest) <= MAX_LINE_BYTES
    put(console, stream, b"\n")
    lines = shown(console).split(b"\n")
    assert max(map(len, lines)) <= MAX_LINE_BYTES + 4
    assert sum(line.count(b"x") for line in lines) == 500_000


def test_a_sink_says_that_its_reader_went_away() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    sink = Sink(writing)
    sink.write(b"text")
    sink.pump()
    assert sink.closed_by_reader
    sink.write(b"more")
    assert not sink.waiting
    os.close(writing)


def test_two_descriptors_of_one_place_share_a_console(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    other = os.dup(writing)
    out, err = open_consoles(writing, other)
    assert out is err
    out, err = open_consoles(writing, os.open(tmp_path, os.O_RDONLY))
    assert out is not err
    for fd in (reading, writing, other, err.sink.fd):
        os.close(fd)


@pytest.mark.parametrize("tagged", [None, TaggedStream(b"[0] ")])
def test_a_stream_goes_to_its_file_byte_for_byte(tagged: TaggedStream | None, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    file_fd = os.open(tmp_path / "copy", os.O_WRONLY | os.O_CREAT)
    console = Console(Sink(-1))
    stream = RankStream(reading, console, tagged, file_fd)
    os.write(writing, b"\xff\x00 one\rtwo")
    os.close(writing)
    while stream.pump():
        pass
    assert not stream.open
    assert (tmp_path / "copy").read_bytes() == b"\xff\x00 one\rtwo"
    assert b"\xff\x00 one" in shown(console)


def test_last_lines_are_told_without_what_drives_a_terminal() -> None:
    said = (
        b"\x1b[1m 9/10\x1b[0m loss 1\r\x1b[1m10/10\x1b[0m loss 2\n\n\tat\r\n\x1b[31mValueError\x1b[0m: no\n"
    )
    assert read_last_lines(said) == ["10/10 loss 2", "\tat", "ValueError: no"]


@pytest.mark.parametrize("length", [1, 99, 400])
def test_a_terminal_that_nobody_reads_blocks_nobody(length: int) -> None:
    """It polls as writable as long as it takes a byte, and ``^S`` may stay for hours."""
    reading, terminal = os.openpty()
    sink = Sink(terminal)
    sink.write((b"x" * length + b"\n") * (200_000 // length))

    def write() -> None:
        while select.select([], [sink.fd], [], 0)[1]:
            sink.pump()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(10)
    assert not writer.is_alive() and sink.waiting
    os.close(reading)
    os.close(terminal)
    os.close(sink.fd)
