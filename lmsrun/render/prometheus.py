"""Running jobs in the text format of Prometheus, for the textfile collector of its node exporter."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from launch.cluster.batch_script import job_name
from launch.model.plan import MODULE
from launch.monitor.sample import JobSample, RankSample
from launch.system.output_file import replace_file

_METRICS: tuple[tuple[str, str, str, Callable[[RankSample], float | None]], ...] = (
    ("cpu_ratio", "gauge", "CPUs that the rank uses", lambda rank: _over(rank.cpu_percent, 100)),
    ("gpu_ratio", "gauge", "use of the rank's GPU, from 0 to 1", lambda rank: _over(rank.gpu_percent, 100)),
    (
        "device_memory_peak_bytes",
        "gauge",
        "most device memory in use since the step was planned",
        lambda rank: rank.memory_bytes,
    ),
    (
        "device_memory_planned_bytes",
        "gauge",
        "device memory that the plan of the step comes to",
        lambda rank: rank.planned_bytes,
    ),
    ("device_memory_limit_bytes", "gauge", "device memory that there is", lambda rank: rank.limit_bytes),
    ("swapped_out_bytes_total", "counter", "bytes swapped to the host", lambda rank: rank.bytes_out),
    ("swapped_in_bytes_total", "counter", "bytes swapped back", lambda rank: rank.bytes_in),
    ("steps_total", "counter", "training steps", lambda rank: rank.steps),
    ("step_seconds", "gauge", "seconds of a step of late", lambda rank: rank.step_s),
    (
        "binding_kept",
        "gauge",
        "1 if every thread of the rank may run only where the plan put it",
        lambda rank: None if rank.drift is None else float(not rank.drift),
    ),
)


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def render_metrics(jobs: Sequence[JobSample]) -> str:
    """All jobs; what is unknown of a rank has no line."""
    lines = [
        "# HELP lmsrun_jobs running jobs of this user on this host",
        "# TYPE lmsrun_jobs gauge",
        f"lmsrun_jobs {len(jobs)}",
    ]
    for name, kind, about, read in _METRICS:
        values = [
            f'lmsrun_rank_{name}{{job="{job.pid}",program="{_escape(_program(job))}",rank="{rank.rank}",'
            f'host="{_escape(rank.host)}"}} {value:.9g}'
            for job in jobs
            for rank in job.ranks
            if (value := read(rank)) is not None
        ]
        if values:
            lines += [f"# HELP lmsrun_rank_{name} {about}", f"# TYPE lmsrun_rank_{name} {kind}", *values]
    return "\n".join(lines) + "\n"


def _program(job: JobSample) -> str:
    """Name it as its folders and batch jobs are: what differs with each run makes a series of its own."""
    lexer = shlex.shlex(job.title, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    with suppress(ValueError):  # A long title is cut, perhaps within quotes.
        words.extend(lexer)
    return job_name(words) if words and words != [MODULE] else "unknown"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_metrics(path: Path, jobs: Sequence[JobSample]) -> None:
    """Replace a file as a whole: its reader sees the old metrics or the new.

    Raises:
        OSError: If it cannot be written.
    """
    replace_file(path, render_metrics(jobs), 0o644)
