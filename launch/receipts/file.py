"""One receipt as a rank writes it, and how it compares with the plan.

The shim imports this at the start of every rank, so it imports little.
"""

import json
import os
from collections.abc import Mapping

from launch.model.idset import IdSet, format_ids, parse_ids
from launch.model.text import printable

END = "end"
"""The stage of a rank that failed: ``rank``, ``host``, ``code``, ``how``."""
MOVED = "moved"
"""Begins a stage's name in an elastic job: ``moved.PID.0`` at the start, higher when bound anew."""
MARK = b"\x1elmsrun-receipt "
"""Starts a receipt that travels as lines of stderr, for want of a folder that leads to the launcher."""
PART_CHARS = 640
"""Of what a marked line carries. srun takes at most 1,024 bytes of a task's output in one piece, and only
such pieces stay whole among those of other tasks."""
MAX_LINE_BYTES = 1000
"""The longest marked line."""


def write_receipt(
    directory: str | os.PathLike[str], rank: int, stage: str, content: Mapping[str, object]
) -> None:
    """Write one stage of one rank, so that a reader sees all of it or nothing.

    Raises:
        OSError: If the directory is gone or full.
    """
    name = f"rank-{rank}.{stage}.json"
    draft = os.path.join(directory, f".{name}.{os.getpid()}")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(json.dumps(dict(content)))
    os.replace(draft, os.path.join(directory, name))


def send_receipt(environ: Mapping[str, str], rank: int, stage: str, content: Mapping[str, object]) -> bool:
    """Send a receipt the way that leads to the launcher: its folder, or marked lines of stderr.

    Returns:
        Whether anybody waits for it.

    Raises:
        OSError: If the way is blocked.
    """
    folder, lines = environ.get("LMSRUN_RECEIPT_DIR"), environ.get("LMSRUN_RECEIPT_LINES")
    # A launcher that hands on its whole environment names its own host's folder to ranks elsewhere too.
    if folder and not (lines and not os.path.isdir(folder)):
        write_receipt(folder, rank, stage, content)
    elif lines:
        text = format_lines(environ.get("LMSRUN_JOB_ID", ""), rank, stage, content)
        for line in text.splitlines(keepends=True):
            os.write(2, line)
    return bool(folder or lines)


def format_lines(job_id: str, rank: int, stage: str, content: Mapping[str, object]) -> bytes:
    """Format the lines that carry one receipt; only the ranks of this job know the random id in them."""
    text = json.dumps(dict(content))
    parts = [text[start : start + PART_CHARS] for start in range(0, len(text), PART_CHARS)]
    head = MARK + f"{job_id} {rank} {stage} ".encode()
    return b"".join(head + f"{number}/{len(parts)} {part}\n".encode() for number, part in enumerate(parts))


def compare_binding(
    cpus: IdSet, mem_policy: str, mem_nodes: IdSet, found: Mapping[str, object], when: str
) -> list[str]:
    """Where ``found`` (fields of a receipt) differs from what was planned, as short reasons."""
    reasons = []
    found_cpus = short_text(found.get("cpus"))
    if cpus and found_cpus != format_ids(cpus):
        reasons.append(f"CPUs {found_cpus or 'unknown'} {when}, planned {format_ids(cpus)}")
    if mem_policy == "none":
        return reasons
    policy, nodes = short_text(found.get("mem_policy")), short_text(found.get("mem_nodes"))
    if (policy, nodes) != (mem_policy, format_ids(mem_nodes)):
        seen = " ".join(filter(None, [policy or "unknown", nodes]))
        reasons.append(f"memory policy {seen} {when}, planned {mem_policy} {format_ids(mem_nodes)}")
    return reasons


def short_text(value: object) -> str | None:
    """Make a text short and printable; None for what is no text: receipts end up on a terminal."""
    if not isinstance(value, str):
        return None
    return printable(value[:300])


def parse_expected_ids(value: object) -> IdSet:
    """Ids of an ``LMSRUN_EXPECT`` field.

    Raises:
        ValueError: If it is not an id list.
    """
    if not isinstance(value, str):
        raise ValueError(f"not an id list: {value!r}")  # noqa: TRY004 - damaged text, like any other
    return parse_ids(value)
