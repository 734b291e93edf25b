"""What a job's private folder says of the job itself, for whoever of the same user looks at it as it runs."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launch.model.busy import gpu_key
from launch.model.errors import LmsrunError
from launch.model.idset import IdSet, format_ids, parse_ids
from launch.model.plan import RankPlan
from launch.model.text import printable
from launch.receipts.judge import read_object

NAME = "running.json"
SCHEMA = "lmsrun.running/1"
FOLDER_PREFIX = "lmsrun-"
"""How the private folder of a job begins, in the folder for temporary files."""
_TITLE = 120


@dataclass(frozen=True)
class PlannedRank:
    """Where a rank was put."""

    rank: int
    host: str
    cpus: IdSet
    gpu: str | None
    """Its address or UUID."""


@dataclass(frozen=True)
class RunningNote:
    """A job as it was started."""

    folder: Path
    pid: int
    """The command that the user typed."""
    title: str
    output_dir: Path | None
    ranks: tuple[PlannedRank, ...]


def write_running_note(
    folder: Path, title: str, output_dir: Path | None, ranks: Iterable[RankPlan], pid: int
) -> None:
    """Write the note of a job that is about to start.

    Raises:
        OSError: If the folder is full.
    """
    content = {
        "schema": SCHEMA,
        "pid": pid,
        "title": title[:_TITLE],
        "output_dir": str(output_dir.absolute()) if output_dir is not None else None,
        "ranks": [
            [plan.rank, plan.host, format_ids(plan.cpus), gpu_key(plan.gpu) if plan.gpu else None]
            for plan in ranks
        ],
    }
    draft = folder / f".{NAME}"
    draft.write_text(json.dumps(content), encoding="ascii")
    os.replace(draft, folder / NAME)


def read_running_note(folder: Path) -> RunningNote | None:
    """Read the note of a job; None where there is none, or it is damaged."""
    content = read_object(folder / NAME)
    if content is None or content.get("schema") != SCHEMA:
        return None
    try:
        ranks = tuple(
            PlannedRank(
                int(rank), printable(str(host)), parse_ids(str(cpus)), printable(str(gpu)) if gpu else None
            )
            for rank, host, cpus, gpu in content["ranks"]
        )
        output_dir = content["output_dir"]
        return RunningNote(
            folder,
            int(content["pid"]),
            printable(str(content["title"])),
            Path(str(output_dir)) if output_dir else None,
            ranks,
        )
    except (KeyError, TypeError, ValueError, LmsrunError):
        return None
