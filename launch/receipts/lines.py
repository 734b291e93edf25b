"""Receipts from hosts that share no folder with the launcher: a few marked lines each on the rank's stderr.

Every launcher carries stderr home over its own channel, so this needs no port and no protocol of ours. A
line starts with a control character and the job's random id, which only this job's ranks know; it is taken
out again before a person or a file sees it. To the launcher it is data from outside, as receipts in files
are.
"""

import os
import re
from pathlib import Path

from launch.receipts.file import END, MARK, MAX_LINE_BYTES, MOVED, PART_CHARS
from launch.receipts.judge import MAX_RECEIPT_BYTES, STAGES

_MAX_PARTS = -(-MAX_RECEIPT_BYTES // PART_CHARS)
_MAX_WAITING = 1 << 16
"""Parts that wait for the rest of their receipt, of all ranks together."""
_PART = re.compile(rb"([0-9]{1,6})/([0-9]{1,6})")
_MAX_TAG_BYTES = 80
_TAG = re.compile(rb"(?:\[[\w,.:-]+\](?:<std(?:out|err)>)?:?|\w+:) ?\Z")
"""What launchers put before a line: Open MPI ``[1,0]<stderr>:``, Hydra ``[0]``, srun ``0:``."""
MAX_MOVES = 1 << 14
"""Moves that one stream may bring: each look at the folder goes through all of them."""
MAX_RECEIPTS = 1 << 18
"""All receipts that one stream may bring; a job of 27,648 ranks has four or five of each."""
_STAGE = re.compile(rf"{'|'.join((*STAGES, END))}|{MOVED}\.[0-9]{{1,9}}\.[0-9]{{1,6}}")


class ReceiptSieve:
    """Takes receipt lines out of a stream and leaves them in the receipts' folder. Use one a stream.

    Without a folder they are taken out and dropped: somebody else sees the same stream.
    """

    def __init__(self, job_id: str, folder: Path | None) -> None:
        self._job_id, self._folder = job_id.encode(), folder
        self._held = b""
        self._kept = self._moves = self._waiting = 0
        self._parts: dict[tuple[str, int], dict[int, bytes]] = {}

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on; hold what may be the start of a receipt until its line is whole."""
        data, passed = self._held + data, b""
        while (start := data.find(MARK)) >= 0:
            before, after = data[:start], data[start:]
            line, newline, rest = after.partition(b"\n")
            if not newline and len(line) <= MAX_LINE_BYTES:
                self._held = after
                return passed + before
            if self._keep(line[len(MARK) :]):
                before = _without_tag(before)
            else:
                before += line + newline
            passed, data = passed + before, rest
        whole = len(data) - _partial_mark(data)
        self._held = data[whole:]
        return passed + data[:whole]

    def finish(self) -> bytes:
        """Return what was held back and turned out to be no receipt."""
        rest, self._held = self._held, b""
        return rest

    def _keep(self, line: bytes) -> bool:
        """Keep one part of a receipt, if it is of this job; the first of a rank and stage wins."""
        words = line.rstrip(b"\r").split(b" ", 4)
        if len(words) != 5 or words[0] != self._job_id or len(line) > MAX_LINE_BYTES:
            return False
        rank, stage = words[1].decode(errors="replace"), words[2].decode(errors="replace")
        is_rank = rank.isascii() and rank.isdigit() and len(rank) < 9
        place = _PART.fullmatch(words[3])
        if not is_rank or not _STAGE.fullmatch(stage) or place is None:
            return False
        if self._folder is not None and self._is_room(stage):
            name = f"rank-{int(rank)}.{stage}.json"
            content = self._join(name, int(place[1]), int(place[2]), words[4])
            if content is not None:
                self._write(self._folder / name, content)
        return True

    def _join(self, name: str, number: int, count: int, part: bytes) -> bytes | None:
        """Join the receipt once all of its parts are here."""
        if count == 1:
            return part if number == 0 else None
        if not number < count <= _MAX_PARTS or self._waiting >= _MAX_WAITING:
            return None
        parts = self._parts.setdefault((name, count), {})
        self._waiting += number not in parts
        parts.setdefault(number, part)
        if len(parts) < count:
            return None
        del self._parts[name, count]
        self._waiting -= count
        return b"".join(parts[place] for place in range(count))

    def _is_room(self, stage: str) -> bool:
        """Whether one more may be kept: a rank must not fill the launcher's disk, or its time."""
        return self._kept < MAX_RECEIPTS and (self._moves < MAX_MOVES or not stage.startswith(MOVED))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(path, flags, 0o600)
        except OSError:
            return
        self._kept += 1
        self._moves += f".{MOVED}." in path.name
        with open(fd, "wb") as file:
            file.write(content)


def _partial_mark(data: bytes) -> int:
    """How many bytes at the end of ``data`` could begin a mark."""
    return next(
        (size for size in range(min(len(MARK) - 1, len(data)), 0, -1) if data.endswith(MARK[:size])), 0
    )


def _without_tag(before: bytes) -> bytes:
    """Drop the tag that a launcher put in front of the receipt's line."""
    start = before.rfind(b"\n") + 1
    last = before[start:]
    match = _TAG.search(last) if len(last) <= _MAX_TAG_BYTES else None
    return before[: start + match.start()] if match else before
