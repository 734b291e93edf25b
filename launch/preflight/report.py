"""What a host answers before a job, and the lines in which the answer travels home.

A launcher mixes the output of its processes with greetings of login shells and messages of its own, cuts it
into pieces and puts tags before lines. So an answer travels as short lines, each marked with a word that only
this probe knows, numbered, and checked as a whole. What arrives is data from outside.
"""

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launch.discover.saved import from_json, to_json
from launch.model.busy import GpuUse
from launch.model.errors import TopologyError
from launch.model.text import printable
from launch.model.topology import Machine
from launch.preflight.occupancy import Occupancy
from launch.receipts.file import MAX_LINE_BYTES, PART_CHARS

PACKAGES = ("Python", "lmsrun", "TensorFlow", "Horovod")
"""Whose versions all hosts of a job should share."""
MARK = b"\x1elmsrun-host "
MAX_ANSWER_BYTES = 4 << 20
"""The largest answer of one host, unpacked; that of a large machine has 30 KB."""
_MAX_PARTS = 1024
_MAX_TEXT = 200

Kind = Literal["own", "gathered", "no-mpi"]
"""``own``: a host's answer by itself; ``gathered``: the same, by MPI; ``no-mpi``: why it could not."""
_LINE = re.compile(
    rb"(own|gathered|no-mpi) (\d{1,6}) (\d{1,4})/(\d{1,4}) ([A-Za-z0-9+/=]{0,%d})" % PART_CHARS
)


@dataclass(frozen=True)
class HostReport:
    """What one host answered. ``trouble`` says why nothing is known of it; None: all went well."""

    host: str
    machine: Machine | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    occupancy: Occupancy = Occupancy()
    names: tuple[str, ...] = ()
    """What the host calls itself, first what its batch system calls it."""
    finds_itself: bool | None = None
    """Whether its own name leads to an address; None is unknown."""
    trouble: str | None = None


def pack_answer(answer: Mapping[str, Any]) -> bytes:
    """Pack an answer to be sent."""
    return zlib.compress(json.dumps(answer).encode())


def write_lines(nonce: str, kind: Kind, rank: int, content: bytes) -> bytes:
    """Render the lines that carry ``content``, to be written at once or one by one."""
    text = base64.b64encode(content)
    parts = [text[start : start + PART_CHARS] for start in range(0, len(text), PART_CHARS)] or [b""]
    head = MARK + f"{nonce} {kind} {rank} ".encode()
    return b"".join(
        head + f"{number}/{len(parts)} ".encode() + part + b"\n" for number, part in enumerate(parts)
    )


class AnswerReader:
    """Takes answers out of a stream, whatever else is in it; memory stays bounded. Use one a stream."""

    def __init__(self, nonce: str, hosts: int) -> None:
        self._start = MARK + nonce.encode() + b" "
        self._hosts = hosts
        self._rest = b""
        self._parts: dict[tuple[Kind, int], dict[int, bytes]] = {}
        self._counts: dict[tuple[Kind, int], int] = {}

    def feed(self, data: bytes) -> None:
        """Take in what has arrived."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read_line(line)
        self._rest = rest[-MAX_LINE_BYTES:]

    def packed(self) -> dict[int, bytes]:
        """Collect the answers that are whole, by the number of the process; what MPI brought comes first."""
        answers = {rank: content for _, rank, content in self._whole("own")}
        return {**answers, **{rank: content for _, rank, content in self._whole("gathered")}}

    @property
    def gathered(self) -> bool:
        """Whether MPI connected all hosts."""
        return len(list(self._whole("gathered"))) == self._hosts

    @property
    def without_mpi(self) -> tuple[str, ...]:
        """Why MPI could not be tried, as some hosts said."""
        return tuple(
            printable(content.decode(errors="replace"))[:_MAX_TEXT] for _, _, content in self._whole("no-mpi")
        )

    def _whole(self, kind: Kind) -> Iterator[tuple[Kind, int, bytes]]:
        for (found, rank), parts in self._parts.items():
            if found == kind and len(parts) == self._counts[found, rank]:
                text = b"".join(parts[number] for number in range(len(parts)))
                yield kind, rank, base64.b64decode(text)

    def _read_line(self, line: bytes) -> None:
        _, mark, text = line.partition(self._start)
        match = _LINE.fullmatch(text.rstrip(b"\r")) if mark else None
        if match is None:
            return
        kind: Kind = match[1].decode()  # type: ignore[assignment]  # one of the pattern's three
        rank, number, count = (int(word) for word in match.groups()[1:4])
        if rank >= self._hosts or not number < count <= _MAX_PARTS or not _is_base64(match[5]):
            return
        if self._counts.setdefault((kind, rank), count) == count:
            self._parts.setdefault((kind, rank), {}).setdefault(number, match[5])


def _is_base64(text: bytes) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error:
        return False
    return True


def build_answer(
    machine: Machine,
    versions: Mapping[str, str | None],
    occupancy: Occupancy,
    names: Sequence[str],
    finds_itself: bool | None,
) -> dict[str, Any]:
    """Build the answer of a host that could read its machine."""
    return {
        "topology": to_json(machine),
        "versions": dict(versions),
        "load": occupancy.load,
        "jobs": occupancy.jobs,
        "ranks": occupancy.ranks,
        "gpus": [[use.pci_bus_id, use.used_bytes, use.processes] for use in occupancy.gpus],
        "names": list(names),
        "finds_itself": finds_itself,
    }


def parse_answer(host: str, content: bytes) -> HostReport:
    """Read what a host sent; whatever is wrong with it becomes the report's trouble."""
    try:
        answer = json.loads(_unpack(content))
        if "trouble" in answer:
            return HostReport(host, trouble=_short(answer["trouble"]))
        return HostReport(
            host=host,
            machine=from_json(answer["topology"]),
            versions={name: _version(answer["versions"].get(name)) for name in PACKAGES},
            occupancy=_read_occupancy(answer),
            names=tuple(_short(name) for name in answer["names"][:4]),
            finds_itself=answer["finds_itself"] if isinstance(answer["finds_itself"], bool) else None,
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        zlib.error,
    ) as error:
        return HostReport(host, trouble=f"its answer is damaged: {_short(error)}")
    except TopologyError as error:
        return HostReport(host, trouble=f"its topology is damaged: {_short(error)}")


def _unpack(content: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(content, MAX_ANSWER_BYTES)
    if not unpacking.eof:
        raise ValueError(f"it is cut off, or larger than {MAX_ANSWER_BYTES >> 20} MiB")
    return text


def _read_occupancy(answer: Mapping[str, Any]) -> Occupancy:
    return Occupancy(
        load=None if answer["load"] is None else float(answer["load"]),
        jobs=_count(answer["jobs"]),
        ranks=_count(answer["ranks"]),
        gpus=tuple(
            GpuUse(_short(gpu), _count(used), _count(processes)) for gpu, used, processes in answer["gpus"]
        ),
    )


def _count(value: Any) -> int:
    if not 0 <= int(value) < 1 << 63:
        raise ValueError("a count has more than 63 bits")
    return int(value)


def _version(value: object) -> str | None:
    return value[:40] if isinstance(value, str) and value.isprintable() else None


def _short(text: object) -> str:
    return printable(str(text))[:_MAX_TEXT]
