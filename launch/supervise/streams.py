"""The ranks' output on its way to the launcher's own: whole lines, tagged, never mixed, never lost."""

import errno
import fcntl
import itertools
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from launch.model.text import shown_line

MAX_LINE_BYTES = 1 << 16
"""A longer line is shown in pieces of this size (the rank's own file has it whole)."""

MAX_PENDING_BYTES = 1 << 20
"""When a reader is this far behind, the ranks' pipes are left to fill: they wait, nothing is lost."""

_SAFE_WRITE_BYTES = 4096
"""PIPE_BUF: what a pipe that polls as writable takes without blocking. O_NONBLOCK would not do: it belongs to
the open file, which the user's shell shares."""

_LARGE_WRITE_BYTES = 1 << 16
"""What goes at once where no write blocks: a pipe's usual capacity."""

_NEW_TERMINAL = os.makedev(5, 2)
"""Opening /dev/ptmx, the other side of a terminal, makes another terminal."""

PIPE_BYTES = 1 << 18
"""Wished capacity of a rank's pipe: a rank writes on while we are busy with another. Users may have 1 MiB."""


LAST_BYTES = 2048
"""What is kept of a stream, to be said once more when its rank has failed."""


_order = itertools.count(1)


def read_clock() -> bytes:
    """Tell the time of day, to a millisecond."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d} ".encode()


class Sieve(Protocol):
    """Takes out of a stream what is not meant for people."""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on."""

    def finish(self) -> bytes:
        """Return what was held back, at the end of the stream."""


class Sink:
    """A file descriptor of ours that is written to only when it takes bytes without blocking."""

    def __init__(self, fd: int) -> None:
        self.fd, self._chunk_bytes = _open_to_write(fd)
        self.error: OSError | None = None
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether there is something to write."""
        return self._pending_bytes > 0

    @property
    def full(self) -> bool:
        """Whether what feeds this sink should pause."""
        return self._pending_bytes > MAX_PENDING_BYTES

    def write(self, data: bytes) -> None:
        """Queue bytes; after an error they are dropped, so that ranks never block on a dead reader."""
        if data and self.error is None:
            self._pending.append(data)
            self._pending_bytes += len(data)

    def pump(self) -> None:
        """Write what goes now; call when poll says writable."""
        if not self._pending:
            return
        data = b"".join(self._pending) if self._pending_bytes <= self._chunk_bytes else self._pending[0]
        try:
            written = os.write(self.fd, data[: self._chunk_bytes])
        except BlockingIOError:
            return
        except OSError as error:
            self.error = error
            self._clear()
            return
        if self._pending_bytes <= self._chunk_bytes:
            self._clear()
            self._keep(data[written:])
        else:
            self._pending.popleft()
            self._pending_bytes -= len(data)
            self._keep(data[written:])

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._pending.appendleft(rest)
            self._pending_bytes += len(rest)

    def _clear(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    def give_up(self) -> None:
        """Drop what waits, and what is still to come: nobody reads it."""
        self.error = TimeoutError(errno.ETIMEDOUT, "nobody reads it")
        self._clear()

    @property
    def closed_by_reader(self) -> bool:
        """Whether the reader went away, as ``| head`` does."""
        return self.error is not None and self.error.errno in (errno.EPIPE, errno.ECONNRESET)


def _open_to_write(fd: int) -> tuple[int, int]:
    """Open the descriptor to write to; tell how many bytes go at once without blocking for long.

    A pipe or a terminal is opened a second time: O_NONBLOCK then belongs to us alone. One of another user's
    cannot be.
    """
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            return fd, _LARGE_WRITE_BYTES
        # A terminal that nobody reads (^S, a dead ssh) may poll as writable and take less than the safe size.
        is_terminal = os.isatty(fd) and status.st_rdev != _NEW_TERMINAL
        if is_terminal or stat.S_ISFIFO(status.st_mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            return os.open(f"/proc/self/fd/{fd}", flags), _LARGE_WRITE_BYTES
    except OSError:
        pass
    return fd, _SAFE_WRITE_BYTES


class Console:
    """Puts the lines of several streams into one sink, one line at a time.

    A piece that ends in a carriage return (a progress bar) leaves its line open for the same stream to draw
    over. Other streams' bars are held back meanwhile, and only their last state is shown, when their line
    ends.
    """

    def __init__(self, sink: Sink, words_fd: int | None = None) -> None:
        """Write to ``sink``; what the launcher itself says also to the file ``words_fd``, if there is one."""
        self.sink, self._words_fd = sink, words_fd
        self._open_by: object = None

    def put(self, source: "TaggedStream", piece: bytes) -> None:
        """Write one piece, which ends in a newline or a carriage return."""
        if piece.endswith(b"\r"):
            self._put_progress(source, piece)
        elif piece == b"\n" and self._open_by is source:
            self.sink.write(piece)
            self._open_by = None
        else:
            if piece == b"\n" and source.held:
                piece = source.held[:-1] + b"\n"
            self._close_line(source)
            self.sink.write(source.prefix + piece)
        if not piece.endswith(b"\r"):
            source.held = b""

    def show(self, source: "TaggedStream", data: bytes) -> None:
        """Write what a stream has brought; its lines at once where no bar is being drawn."""
        lines = b"" if self._open_by is not None or source.held else source.cut_plain(data)
        if not lines:
            for piece in source.cut(data):
                self.put(source, piece)
        elif prefix := source.prefix:
            self.sink.write(prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n")
        else:
            self.sink.write(lines)

    def put_raw(self, data: bytes) -> None:
        """Write bytes of the only stream as they come."""
        self.sink.write(data)
        self._open_by = None if data.endswith(b"\n") else self

    def note(self, text: str) -> None:
        """Write lines of the launcher itself."""
        self._close_line(None)
        line = text.encode(errors="backslashreplace") + b"\n"
        self.sink.write(line)
        if self._words_fd is not None:
            with suppress(OSError):  # a copy for people, of what the sink has as well
                os.write(self._words_fd, line)

    def finish(self) -> None:
        """End a line that a progress bar left open."""
        if isinstance(self._open_by, TaggedStream):
            self._close_line(None)

    def _put_progress(self, source: "TaggedStream", piece: bytes) -> None:
        if len(piece) == 1:
            return
        if self._open_by is None or self._open_by is source:
            self.sink.write(source.prefix + piece)
            self._open_by, source.held = source, b""
        else:
            source.held = piece

    def _close_line(self, source: object) -> None:
        if self._open_by is not None and self._open_by is not source:
            self.sink.write(b"\n")
        self._open_by = None


@dataclass
class TaggedStream:
    """One output stream of one rank, cut into lines."""

    tag: bytes
    held: bytes = b""
    rest: bytes = b""
    clock: Callable[[], bytes] | None = None
    """Gives the time to put in front of the tag."""

    @property
    def prefix(self) -> bytes:
        """What a line that is shown now begins with."""
        return self.tag if self.clock is None else self.clock() + self.tag

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces that are complete now: each ends in a newline or a lone carriage return."""
        *lines, rest = (self.rest + data).split(b"\n")
        self.rest = b""
        for line in lines:
            yield from self._cut_line(line, b"\n")
        yield from self._cut_rest(rest)

    def cut_plain(self, data: bytes) -> bytes:
        """All lines that are complete now, where none is a bar and none too long; else nothing is taken."""
        text = self.rest + data
        end = text.rfind(b"\n") + 1
        if not end or len(text) - end > MAX_LINE_BYTES or b"\r" in text or _may_hold_long_line(text[:end]):
            return b""
        self.rest = text[end:]
        return text[:end]

    def finish(self) -> Iterator[bytes]:
        """Yield what is left at the end, as a line."""
        if self.rest or self.held:
            rest, self.rest = self.rest, b""
            yield rest + b"\n"

    def _cut_line(self, line: bytes, end: bytes) -> Iterator[bytes]:
        ending = end
        if line.endswith(b"\r"):
            line, ending = line[:-1], b"\r\n"
        *bars, last = line.split(b"\r")
        for bar in bars:
            yield from _bounded(bar + b"\r")
        yield from _bounded(last + (end if bars and not last else ending))

    def _cut_rest(self, rest: bytes) -> Iterator[bytes]:
        *bars, last = rest.split(b"\r")
        for bar in bars:
            yield from _bounded(bar + b"\r")
        while len(last) > MAX_LINE_BYTES:
            yield last[:MAX_LINE_BYTES] + b"\n"
            last = last[MAX_LINE_BYTES:]
        self.rest = last


def _may_hold_long_line(text: bytes) -> bool:
    """Whether some line may exceed ``MAX_LINE_BYTES``: a stretch of half of it holds no end of a line."""
    half = MAX_LINE_BYTES // 2
    return any(text.find(b"\n", at, at + half) < 0 for at in range(0, len(text) - half, half))


def _bounded(piece: bytes) -> Iterator[bytes]:
    while len(piece) > MAX_LINE_BYTES + 2:
        yield piece[:MAX_LINE_BYTES] + b"\n"
        piece = piece[MAX_LINE_BYTES:]
    yield piece


@dataclass
class RankStream:
    """The pipe of one stream of one rank: to a console, and byte for byte to a file."""

    fd: int
    console: Console
    tagged: TaggedStream | None
    """None: bytes pass as they come."""
    file_fd: int | None = None
    file_name: str = ""
    file_error: OSError | None = field(default=None)
    open: bool = True
    sieve: Sieve | None = None
    """Sees the bytes first, and says which of them are output."""
    last: bytes = b""
    """The end of what has passed."""
    passed: int = 0
    """When it has passed, as a place in the order of all streams' output; 0: never."""

    def pump(self, limit: int = PIPE_BYTES) -> bool:
        """Read once and pass it on; False when nothing was there or the stream has ended."""
        try:
            data = os.read(self.fd, limit)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._pass(data if self.sieve is None else self.sieve.feed(data))
        return True

    def close(self) -> None:
        """Show what is left and let go of the pipe and the file."""
        if not self.open:
            return
        self.open = False
        if self.sieve is not None:
            self._pass(self.sieve.finish())
        if self.tagged is not None:
            for piece in self.tagged.finish():
                self.console.put(self.tagged, piece)
        os.close(self.fd)
        if self.file_fd is not None:
            os.close(self.file_fd)

    def _pass(self, data: bytes) -> None:
        if data:
            self.last = data[-LAST_BYTES:] if len(data) >= LAST_BYTES else (self.last + data)[-LAST_BYTES:]
            self.passed = next(_order)
            self._save(data)
            self._show(data)

    def _show(self, data: bytes) -> None:
        if self.tagged is None:
            self.console.put_raw(data)
            return
        self.console.show(self.tagged, data)

    def _save(self, data: bytes) -> None:
        if self.file_fd is None or self.file_error is not None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.file_fd, view) :]
        except OSError as error:
            self.file_error = error


def read_last_lines(text: bytes, count: int = 6) -> list[str]:
    """Read the last lines of a stream's end that say something, without what would change a terminal."""
    lines = [shown_line(line.decode(errors="replace"), keep="\t") for line in text.split(b"\n")]
    # The first may be the rest of a longer one.
    whole = lines[1:] if len(text) >= LAST_BYTES and len(lines) > 1 else lines
    return [line for line in whole if line.strip()][-count:]


def open_consoles(stdout_fd: int, stderr_fd: int, words_fd: int | None = None) -> tuple[Console, Console]:
    """Consoles for both descriptors: the same one when both lead to one place, so that lines stay whole."""
    out = Console(Sink(stdout_fd), words_fd)
    try:
        same = os.path.samestat(os.fstat(stdout_fd), os.fstat(stderr_fd))
    except OSError:
        same = False
    return out, out if same else Console(Sink(stderr_fd), words_fd)


def open_pipe() -> tuple[int, int]:
    """Open a pipe for a rank's output, as large as the kernel lets this user have it."""
    reading, writing = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def poll(reading: list[int], writing: list[int], timeout_s: float | None) -> set[int]:
    """Poll descriptors; return those that are ready (or broken), which regular files always are."""
    poller = select.poll()
    for fd in reading:
        poller.register(fd, select.POLLIN)
    for fd in writing:
        poller.register(fd, select.POLLOUT)
    wait_ms = None if timeout_s is None else max(0.0, timeout_s * 1000)
    return {fd for fd, _ in poller.poll(wait_ms)}
