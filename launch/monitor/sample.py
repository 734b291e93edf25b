"""One look at the ranks of a running job: what they use and tell, and whether they are where they belong."""

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.discover.nvml import import_nvml
from launch.model.idset import IdSet, format_ids
from launch.model.text import count_of, shown_line
from launch.receipts.judge import read_object
from launch.receipts.running_note import FOLDER_PREFIX, PlannedRank, RunningNote, read_running_note
from launch.system.process_load import read_load
from launch.system.process_tree import read_descendants

_MOST_JOBS = 64
_MOST_THREADS = 1024
_TAIL_BYTES = 4096
_LOG = re.compile(r"[IWE]\d{4} |\d{4}-\d\d-\d\d [\d:.]+: [IWE] |WARNING: All log messages before absl")
"""How the lines of TensorFlow's own log begin, which say little of a rank but for fatal ones."""
_OLD_S = 15.0
"""How old a status is when its rates say nothing any more."""


@dataclass(frozen=True)
class RankSample:
    """A rank at one moment; None is unknown."""

    rank: int
    host: str
    cpu_percent: float | None = None
    """Of one CPU."""
    gpu_percent: float | None = None
    memory_bytes: int | None = None
    """The most of device memory in use since the step was planned."""
    planned_bytes: int | None = None
    limit_bytes: int | None = None
    bytes_out: int | None = None
    """Moved to the host so far."""
    bytes_in: int | None = None
    swap_bytes_s: float | None = None
    """Moved out and in, a second."""
    steps: int | None = None
    step_s: float | None = None
    drift: str | None = None
    """Empty: every thread may run where the plan put the rank, and nowhere else."""
    last_line: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class JobSample:
    """A job at one moment."""

    pid: int
    """The command that started it."""
    title: str
    """Its program and arguments."""
    ranks: tuple[RankSample, ...]


def find_jobs(places: Iterable[Path], pid: int | None = None) -> tuple[RunningNote, ...]:
    """Find the running jobs of this user on this host.

    Args:
        places: Folders for temporary files.
        pid: Only the job of this command.
    """
    found = []
    for place in places:
        try:
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in entries if entry.name.startswith(FOLDER_PREFIX))
        except OSError:
            continue
        for name in names:
            note = _read_own(place / name)
            if note is not None and pid in (None, note.pid):
                found.append(note)
    return tuple(found[:_MOST_JOBS])


def _read_own(folder: Path) -> RunningNote | None:
    try:
        status = folder.lstat()
    except OSError:
        return None
    # Nobody else can have written into a folder of ours that only we may enter.
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return None
    note = read_running_note(folder)
    return note if note is not None and Path(f"/proc/{note.pid}").exists() else None


class Monitor:
    """Looks at jobs again and again; rates are those since the look before."""

    def __init__(self) -> None:
        self._cpu: dict[tuple[Path, int], tuple[float, float]] = {}
        self._moved: dict[tuple[Path, int], tuple[float, int, float]] = {}
        self._host = socket.gethostname()
        self._nvml: Any = None
        self._asked_nvml = False

    def look(self, note: RunningNote) -> JobSample:
        """Look at every rank of a job."""
        return JobSample(note.pid, note.title, tuple(self._rank(note, planned) for planned in note.ranks))

    def _rank(self, note: RunningNote, planned: PlannedRank) -> RankSample:
        start = read_object(note.folder / f"rank-{planned.rank}.start.json") or {}
        status = read_object(note.folder / f"lms-status.{planned.rank}.json") or {}
        key, pid = (note.folder, planned.rank), _number(start.get("pid"))
        if planned.host != "localhost" and start.get("host") != self._host:
            pid = None  # a number of another host's
        below = read_descendants(pid) if pid else []
        return RankSample(
            planned.rank,
            planned.host,
            cpu_percent=self._cpu_percent(key, pid, below) if pid else None,
            gpu_percent=self._gpu_percent(planned.gpu) if planned.gpu and pid else None,
            memory_bytes=_number(status.get("peak_bytes")),
            planned_bytes=_number(status.get("planned_peak_bytes")),
            limit_bytes=_number(status.get("limit_bytes")),
            bytes_out=_number(status.get("bytes_out")),
            bytes_in=_number(status.get("bytes_in")),
            swap_bytes_s=self._swap_rate(key, status),
            steps=_number(status.get("steps")),
            step_s=_real(status.get("step_s")),
            drift=read_drift((pid, *below), planned.cpus) if pid and planned.cpus else None,
            last_line=read_last_line(note.output_dir, planned.rank) if note.output_dir else "",
            has_ended=pid is not None and not Path(f"/proc/{pid}").exists(),
        )

    def _cpu_percent(self, key: tuple[Path, int], pid: int, below: Sequence[int]) -> float | None:
        load, now = read_load(pid, below=below), time.monotonic()
        if load is None:
            return None
        before = self._cpu.get(key)
        self._cpu[key] = now, load.cpu_s
        if before is None or now <= before[0]:
            return None
        return max(0.0, 100 * (load.cpu_s - before[1]) / (now - before[0]))

    def _swap_rate(self, key: tuple[Path, int], status: Mapping[str, Any]) -> float | None:
        """Bytes a second between the last two statuses that differ."""
        when = _real(status.get("time"))
        moved = (_number(status.get("bytes_out")) or 0) + (_number(status.get("bytes_in")) or 0)
        if when is None:
            return None
        told, before, rate = self._moved.get(key, (0.0, 0, 0.0))
        if when > told:
            rate = max(0.0, (moved - before) / (when - told)) if told else 0.0
            self._moved[key] = when, moved, rate
        return rate if time.time() - when < _OLD_S else 0.0

    def _gpu_percent(self, gpu: str) -> float | None:
        if not self._asked_nvml:
            self._asked_nvml, self._nvml = True, _start_nvml()
        if self._nvml is None:
            return None
        try:
            by_uuid = gpu.startswith(("GPU-", "MIG-"))
            ask = (
                self._nvml.nvmlDeviceGetHandleByUUID if by_uuid else self._nvml.nvmlDeviceGetHandleByPciBusId
            )
            return float(self._nvml.nvmlDeviceGetUtilizationRates(ask(gpu)).gpu)
        except self._nvml.NVMLError:
            return None


def _start_nvml() -> Any:
    nvml = import_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def read_drift(pids: Sequence[int], planned: IdSet, proc: Path = Path("/proc")) -> str | None:
    """Where threads of a rank may run outside of its plan; empty where none may, None when it is gone.

    Args:
        pids: The rank's process, and those below it.
        planned: Its CPUs.
        proc: Where processes stand.
    """
    strays: set[int] = set()
    threads = seen = 0
    for each in pids:
        try:
            tasks = [int(name) for name in os.listdir(proc / str(each) / "task")]
        except OSError:
            if each == pids[0]:
                return None
            continue
        for task in tasks[: _MOST_THREADS - seen]:
            seen += 1
            try:
                outside = os.sched_getaffinity(task) - planned
            except OSError:
                continue
            threads += bool(outside)
            strays |= outside
    return f"{count_of(threads, 'thread')} on CPUs {format_ids(strays)}" if threads else ""


def read_last_line(output_dir: Path, rank: int) -> str:
    """Return the last line that a rank has printed, as far as its output is kept in files."""
    newest: tuple[int, Path] | None = None
    for stream in ("stdout", "stderr"):
        path = output_dir / f"rank-{rank}.{stream}"
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_size and (newest is None or status.st_mtime_ns > newest[0]):
            newest = status.st_mtime_ns, path
    if newest is None:
        return ""
    try:
        with newest[1].open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [shown for line in reversed(lines) if (shown := shown_line(line).strip())]
    return next((line for line in said if not _LOG.match(line)), said[0] if said else "")


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _real(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
