"""What becomes of the ranks of an elastic job: those that were bound anew, and those that joined later."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.receipts.file import MOVED, short_text
from launch.receipts.judge import read_object, to_number, to_texts


@dataclass(frozen=True)
class Move:
    """One rank in a new place. ``was_local`` None: its program has just started there."""

    rank: int
    host: str
    pid: int | None
    size: int | None
    local: tuple[int, int] | None
    """Local rank, and the ranks of this host."""
    was_rank: int | None
    was_local: tuple[int, int] | None
    cpus: str
    mem_policy: str
    mem_nodes: str
    verified: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the rank has another number or other neighbours, and not only more or fewer peers."""
        return (self.rank, self.local) != (self.was_rank, self.was_local)


def read_moves(directory: Path, known: Set[str]) -> list[tuple[str, Move | None]]:
    """Read the files of moves that have come beside those ``known`` by name, in the order in which they came.

    None: what is in the file is no move; files arrive whole, so it will not become one.
    """
    arrived = []
    for path in directory.glob(f"rank-*.{MOVED}.*.json"):
        if path.name in known:
            continue
        content = read_object(path) or {}
        rank = to_number(content.get("rank"))
        move = None if rank is None else _parse(rank, content)
        arrived.append((path.lstat().st_mtime_ns, path.name, move))
    return [(name, move) for _, name, move in sorted(arrived, key=lambda entry: entry[:2])]


def describe_move(move: Move) -> str:
    """One line for people."""
    if move.was_local is None:
        what = f"rank {move.rank} on {move.host} joined"
    else:
        now = f"rank {move.rank} on {move.host}" + _among(move.local)
        what = f"{now} is bound anew (it was rank {move.was_rank}{_among(move.was_local)})"
    memory = " ".join(filter(None, [move.mem_policy, move.mem_nodes]))
    verdict = (
        "verified" if move.verified else f"not verified: {'; '.join(move.reasons) or 'nothing was bound'}"
    )
    notes = f" ({'; '.join(move.notes)})" if move.notes else ""
    return f"{what}: CPUs {move.cpus or 'unknown'}, memory {memory or 'unknown'}, {verdict}{notes}"


def to_object(move: Move) -> dict[str, Any]:
    """Convert a move to its form in ``receipts.json``."""
    return {**vars(move), "reasons": list(move.reasons), "notes": list(move.notes)}


def _among(local: tuple[int, int] | None) -> str:
    return f", number {local[0]} of {local[1]} there" if local else ""


def _parse(rank: int, content: Mapping[str, Any]) -> Move:
    was = content.get("was")
    before: Mapping[str, Any] = was if isinstance(was, dict) else {}
    return Move(
        rank=rank,
        host=short_text(content.get("host")) or "?",
        pid=to_number(content.get("pid")),
        size=to_number(content.get("size")),
        local=_local(content),
        was_rank=to_number(before.get("rank")),
        was_local=_local(before),
        cpus=short_text(content.get("cpus")) or "",
        mem_policy=short_text(content.get("mem_policy")) or "",
        mem_nodes=short_text(content.get("mem_nodes")) or "",
        verified=content.get("verified") is True,
        reasons=to_texts(content.get("reasons")),
        notes=to_texts(content.get("notes")),
    )


def _local(content: Mapping[str, Any]) -> tuple[int, int] | None:
    rank, size = to_number(content.get("local_rank")), to_number(content.get("local_size"))
    return None if rank is None or size is None else (rank, size)
