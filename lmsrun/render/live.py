"""Running jobs as a table for a terminal, and as plain text of 80 columns for a log."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from launch.model.text import count_of
from launch.monitor.sample import JobSample, RankSample

if TYPE_CHECKING:
    from rich.console import Group

_HEADS = ("rank", "GPU", "CPU", "memory/plan", "swapped/s", "step", "steps", "binding", "last line")
_WIDTHS = (4, 4, 5, 11, 9, 7, 6, 8)
"""Of all columns but the last, which gets what is left."""
WIDTH = 80
HEIGHT = 24
NO_JOB = "no running job of this user on this host"
_BY_WORTH = ("rank", "memory/plan", "step", "binding", "CPU", "GPU", "swapped/s", "steps", "last line")
"""Which columns a narrow terminal keeps: those that fit, in this order."""
_LEAST_LINE = 12
"""Of a last line that is worth its column."""


def render_block(jobs: Sequence[JobSample], now_s: float, width: int = WIDTH) -> str:
    """Plain text of one moment, no line of it wider than ``width``."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s))
    if not jobs:
        return f"{when}  {NO_JOB}"
    lines = []
    for job in jobs:
        lines.append(_cut(f"{when}  {_title(job)}", width))
        lines += [_line(row, width) for row in (_HEADS, *map(_row, job.ranks))]
        lines += [
            _cut(f"rank {rank.rank} is not where it was put: {rank.drift}", width) for rank in _astray(job)
        ]
    return "\n".join(lines)


def can_draw(stream: TextIO | None) -> bool:
    """Tell whether a table can be drawn anew there: on a terminal that can do more than print."""
    if stream is None or not stream.isatty():
        return False
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal


def fitting_columns(width: int) -> list[int]:
    """Choose the columns that a terminal has room for, whole, as places in the table's heads."""
    chosen, left = [], width
    for head in _BY_WORTH:
        at = _HEADS.index(head)
        needed = (_WIDTHS[at] if at < len(_WIDTHS) else _LEAST_LINE) + 1
        if needed > left:
            break
        chosen.append(at)
        left -= needed
    return sorted(chosen)


def fitting_ranks(jobs: Sequence[JobSample], height: int) -> list[int]:
    """Choose how many ranks of each job a terminal has room for, below titles and above what has moved."""
    left = height - sum(2 + len(_astray(job)) for job in jobs)
    if sum(len(job.ranks) for job in jobs) > left:
        left -= 1  # For the line that counts the others.
    chosen = []
    for position, job in enumerate(jobs, 1):
        for_others = len(jobs) - position
        chosen.append(max(1, min(len(job.ranks), left - for_others)))
        left -= chosen[-1]
    return chosen


def render_screen(jobs: Sequence[JobSample], width: int = WIDTH, height: int = HEIGHT) -> "Group":
    """Draw the same for a terminal, with rich; a narrow one gets fewer columns, a low one fewer ranks."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not jobs:
        return Group(Text(NO_JOB))
    columns = fitting_columns(width)
    parts: list[Text | Table] = []
    shown = fitting_ranks(jobs, height)
    for job, count in zip(jobs, shown, strict=True):
        table = Table(box=None, padding=(0, 1, 0, 0), expand=len(_HEADS) - 1 in columns)
        for at in columns:
            head, least = _HEADS[at], _WIDTHS[at] if at < len(_WIDTHS) else None
            table.add_column(
                head,
                no_wrap=True,
                overflow="ellipsis",
                min_width=least,
                ratio=1 if least is None else None,
                justify="left" if head in ("binding", "last line") else "right",
                header_style="bold",
            )
        for rank in job.ranks[:count]:
            row = [Text(cell) for cell in _row(rank)]
            if rank.drift:
                row[7].stylize("bold red")
            table.add_row(*(row[at] for at in columns))
        parts += [Text(_title(job), style="bold", no_wrap=True, overflow="ellipsis"), table]
        parts += [
            Text(f"rank {rank.rank} is not where it was put: {rank.drift}", style="red")
            for rank in _astray(job)
        ]
    if hidden := sum(len(job.ranks) for job in jobs) - sum(shown):
        said = f"{count_of(hidden, 'rank')} more; `lmsrun top --once` shows all"
        parts.append(Text(said, style="bold", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _title(job: JobSample) -> str:
    return f"job {job.pid}, {count_of(len(job.ranks), 'rank')}: {job.title}"


def _astray(job: JobSample) -> list[RankSample]:
    return [rank for rank in job.ranks if rank.drift]


def _row(rank: RankSample) -> tuple[str, ...]:
    memory = "-" if rank.memory_bytes is None else show_bytes(rank.memory_bytes)
    plan = "-" if rank.planned_bytes is None else show_bytes(rank.planned_bytes)
    return (
        str(rank.rank),
        _percent(rank.gpu_percent),
        _percent(rank.cpu_percent),
        f"{memory}/{plan}" if rank.memory_bytes is not None or rank.planned_bytes is not None else "-",
        "-" if rank.swap_bytes_s is None or rank.has_ended else show_bytes(rank.swap_bytes_s),
        "-" if rank.step_s is None or rank.has_ended else _seconds(rank.step_s),
        "-" if rank.steps is None else str(rank.steps),
        "ended" if rank.has_ended else {None: "-", "": "kept"}.get(rank.drift, "MOVED"),
        rank.last_line,
    )


def _line(row: Sequence[str], width: int) -> str:
    cells = [
        cell.ljust(size) if head == "binding" else cell.rjust(size)
        for cell, size, head in zip(row, _WIDTHS, _HEADS, strict=False)
    ]
    return _cut(" ".join([*cells, row[-1]]).rstrip(), width)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def show_bytes(value: float) -> str:
    """At most five characters: ``0``, ``512K``, ``17.1M``, ``2048G``."""
    for unit in ("", "K", "M", "G"):
        if value < 1000:
            return f"{value:.0f}{unit}" if not unit or value >= 100 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"
