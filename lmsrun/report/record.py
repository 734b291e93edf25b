"""What a run folder tells of a job: its plan, its machines, its receipts and its ranks' own reports.

Ranks write into the folder, and it may come from elsewhere: every file is data from outside.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.discover.saved import from_json, to_json
from launch.model.errors import LmsrunError, UsageError
from launch.model.topology import Machine
from launch.monitor.sample import find_jobs
from launch.receipts.judge import RankReceipt
from launch.receipts.judge import from_json as receipts_from_json
from launch.supervise.job import RECEIPTS
from lmsrun.draw.marks import Mark, marks_from_json

JOB = "job.json"
SCHEMA = "lmsrun.job-plan/1"
LARGEST_BYTES = 64 << 20
LARGEST_REPORT_BYTES = 1 << 20
MOST_RANKS = 4096
"""The reports that are read."""
_REPORT = re.compile(r"rank-([0-9]{1,8})\.lms\.json")


@dataclass(frozen=True)
class Record:
    """A job as its folder tells it; what is not there is empty, and ``notes`` say so."""

    folder: Path
    receipts: tuple[RankReceipt, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    """``receipts.json`` as it is: command, host, versions, times, exit codes and why the job failed."""
    marks: tuple[Mark, ...] = ()
    machines: Mapping[str, Machine] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reports: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By rank what Large Model Support wrote there."""
    notes: tuple[str, ...] = ()
    name: str = ""
    """The job's."""
    is_running: bool = False
    """Whether the job was seen to run on this host."""


def job_to_json(name: str, plan: Mapping[str, Any], machines: Mapping[str, Machine]) -> dict[str, Any]:
    """Describe a plan as ``lmsrun plan --json`` prints it, with each machine once for all hosts alike."""
    hosts: dict[Machine, list[str]] = {}
    for host, machine in machines.items():
        hosts.setdefault(machine, []).append(host)
    alike = [{"hosts": names, "topology": to_json(machine)} for machine, names in hosts.items()]
    return {"schema": SCHEMA, "name": name, "plan": plan, "machines": alike}


def read_record(folder: Path, places: Sequence[Path] = ()) -> Record:
    """Read a run folder; of a job that was started again, its last attempt.

    Args:
        folder: The job's.
        places: Where the private folders of running jobs may be.

    Raises:
        UsageError: If the folder holds no job, or nothing of one that can be read.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is no folder; needed the folder of a job, as --output-dir DIR makes it (DIR/latest)"
        )
    attempts = sorted(folder.glob("restart-*"), key=lambda path: (len(path.name), path.name))
    last = next((path for path in reversed(attempts) if (path / RECEIPTS).is_file()), folder)
    notes = [f"shown is {last.name}, the last attempt"] if last != folder else []
    missing: list[str] = []
    receipts = _read_object(last / RECEIPTS, LARGEST_BYTES, missing)
    job = _read_object(folder / JOB, LARGEST_BYTES, missing)
    if receipts is None and job is None:
        raise UsageError(
            f"{folder}: {' and '.join(missing)}; needed the folder of a job, as --output-dir DIR makes it "
            "(DIR/latest)"
        )
    is_running = _is_running({folder, last}, places)
    if receipts is None and is_running:
        notes.append(f"the ranks have not all started: {missing[0]}")
    elif receipts is None:
        notes.append(f"{missing[0]}: what the ranks found is unknown")
    if job is None:
        notes.append(f"{missing[-1]}: plan and machine are unknown")
    marks, machines, warnings = _read_job(job, notes)
    ranks, reports = _read_receipts(receipts, notes), _read_reports(last, notes)
    if not (marks or machines or ranks or reports or is_running or (receipts or {}).get("command")):
        raise UsageError(
            f"{folder}: {'; '.join(notes)}; needed the folder of a job, as --output-dir DIR makes it "
            "(DIR/latest)"
        )
    return Record(
        folder,
        ranks,
        receipts or {},
        marks,
        machines,
        warnings,
        reports,
        tuple(notes),
        str((job or {}).get("name", ""))[:100],
        is_running and (receipts or {}).get("ended") is None,
    )


def _is_running(folders: Set[Path], places: Sequence[Path]) -> bool:
    own = {folder.resolve() for folder in folders}
    return any(note.output_dir and note.output_dir.resolve() in own for note in find_jobs(places))


def _read_receipts(told: Mapping[str, Any] | None, notes: list[str]) -> tuple[RankReceipt, ...]:
    if told is None:
        return ()
    try:
        return receipts_from_json(told)
    except ValueError as error:
        notes.append(f"{RECEIPTS}: {error}")
        return ()


def _read_job(
    job: Mapping[str, Any] | None, notes: list[str]
) -> tuple[tuple[Mark, ...], Mapping[str, Machine], tuple[str, ...]]:
    if job is None:
        return (), {}, ()
    try:
        if job.get("schema") != SCHEMA:
            found = f"schema {str(job['schema'])[:40]!r}" if "schema" in job else "no schema"
            raise ValueError(f"found {found}; needed {SCHEMA!r}")  # noqa: TRY301
        plan = job["plan"]
        marks = marks_from_json(plan["ranks"])
        machines = {
            str(host): machine
            for entry in job["machines"]
            for machine in [from_json(entry["topology"])]
            for host in entry["hosts"]
        }
        warnings = tuple(str(text) for text in plan["warnings"][:64])
    except (ValueError, KeyError, TypeError, AttributeError, LmsrunError) as error:
        notes.append(f"{JOB} cannot be read ({error}): plan and machine are unknown")
        return (), {}, ()
    return marks, machines, warnings


def _read_reports(folder: Path, notes: list[str]) -> Mapping[int, Mapping[str, Any]]:
    matches = ((path, _REPORT.fullmatch(path.name)) for path in folder.iterdir())
    named = {int(match[1]): path for path, match in matches if match}
    found: dict[int, Mapping[str, Any]] = {}
    for rank in sorted(named)[:MOST_RANKS]:
        document = _read_object(named[rank], LARGEST_REPORT_BYTES, notes)
        if document is not None:
            found[rank] = document
    return found


def _read_object(path: Path, largest: int, notes: list[str]) -> Mapping[str, Any] | None:
    """Read an object; ``None``, and a note that says why, where there is none or it cannot be read."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            data = file.read(largest + 1)
        content = json.loads(data) if len(data) <= largest else None
    except FileNotFoundError:
        notes.append(f"there is no {path.name}")
        return None
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
        return None
    except (ValueError, RecursionError):
        notes.append(f"{path.name} cannot be read (it is damaged: no JSON)")
        return None
    if len(data) > largest:
        notes.append(f"{path.name} cannot be read (it is larger than {largest >> 20} MiB)")
    elif not isinstance(content, dict):
        notes.append(f"{path.name} cannot be read (it is damaged: no JSON object)")
    return content if isinstance(content, dict) else None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to is empty, and not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def known_ranks(record: Record) -> Sequence[int]:
    """Every rank of which anything is known."""
    ranks = {mark.rank for mark in record.marks} | {receipt.rank for receipt in record.receipts}
    return sorted(ranks | record.reports.keys())
