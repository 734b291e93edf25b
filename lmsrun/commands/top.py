"""``lmsrun top``: follow the running jobs of this user on this host."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.model.errors import JobError, UsageError
from launch.monitor.sample import JobSample, Monitor, find_jobs
from launch.receipts.running_note import RunningNote
from lmsrun.command_steps import answer_wish, read_sources, say
from lmsrun.file_checks import check_can_be_replaced
from lmsrun.neighbours import find_places
from lmsrun.options import LaunchOptions
from lmsrun.render.live import can_draw, render_block, render_screen
from lmsrun.render.prometheus import write_metrics
from lmsrun.sources.command_line import parse_argv
from lmsrun.watching import ENDING

USAGE = "lmsrun top [options] [PID]"
ABOUT = (
    "Follow running jobs: their GPUs, CPUs, memory and steps. Without PID all jobs of this user on this "
    "host, else the one that process PID, a lmsrun, has started. Shown are use of GPU and CPU, device memory "
    "against the plan, bytes swapped, time of a step, whether threads still run where the plan put them, "
    "and the last line of each rank that keeps its output in files (--output-dir). On a terminal a table, "
    "elsewhere a block of plain text a period. Ctrl-C ends it."
)
EXAMPLES = (
    ("lmsrun top", "all jobs, until Ctrl-C"),
    ("lmsrun top --once", "one look, as text"),
    ("lmsrun top -q --metrics /var/lib/node_exporter/lmsrun.prom", "for Prometheus alone"),
)
OPERAND = "PID"

_SHARE = 0.01
"""Of one core: where looking costs more, it is done less often."""
Show = Callable[[Sequence[JobSample]], None]


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Show jobs until Ctrl-C, or until the job that was named has ended."""
    parsed = parse_argv("top", argv)
    if answer_wish("top", parsed):
        return 0
    pid = _parse_pid(parsed.program)
    is_mine = pid == os.getppid()  # started by run, which says all: the job is about to come
    request = None if is_mine else read_sources(parsed, environ)
    options = request.options if request else LaunchOptions(**parsed.values)
    if request and options.quiet and not options.metrics:
        raise UsageError(f"{request.origins['quiet']} has top print nothing; needed --metrics FILE")
    if options.metrics:
        check_can_be_replaced(options.metrics, "--metrics")
    monitor = Monitor()

    def find() -> Sequence[RunningNote]:
        return find_jobs(find_places(options.jobs_dir, environ), pid)

    def look() -> list[JobSample]:
        return [monitor.look(note) for note in find()]

    if pid is not None and not is_mine and not find():
        raise UsageError(
            f"process {pid} is no running lmsrun of this user; needed one of those that lmsrun top shows"
        )
    if options.once:
        look()
        time.sleep(min(options.period, 1.0))  # rates need two looks
        jobs = look()
        if not options.quiet:
            print(render_block(jobs, time.time()), flush=True)
        Metrics(options.metrics).write(jobs)
        return 0
    return _follow(look, options, pid, is_mine)


def _parse_pid(words: Sequence[str]) -> int | None:
    if not words:
        return None
    if len(words) > 1 or not (words[0].isascii() and words[0].isdigit() and len(words[0]) < 20):
        raise UsageError(f"top: found {' '.join(words)!r}; needed nothing, or the PID of a lmsrun")
    return int(words[0])


def _follow(
    look: Callable[[], list[JobSample]], options: LaunchOptions, pid: int | None, is_mine: bool
) -> int:
    # Blocked and waited for: a handler that wakes a waiting thread can meet the lock that this thread holds.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    draws = not options.quiet and can_draw(sys.stdout)
    metrics = Metrics(options.metrics)
    with (_screen if draws else _log)(options) as show:
        while True:
            before_s = time.process_time()
            jobs = look()
            if pid is not None and not jobs and not is_mine:
                break
            if is_mine and os.getppid() != pid:
                break
            if jobs or pid is None:
                show(jobs)
                metrics.keep(jobs)
            pause_s = max(options.period, (time.process_time() - before_s) / _SHARE)
            if signal.sigtimedwait(ENDING, pause_s) is not None:
                break
    metrics.end()
    return 0


@contextmanager
def _log(options: LaunchOptions) -> Iterator[Show]:
    """Show blocks of plain text, or nothing."""
    was_idle = False

    def show(jobs: Sequence[JobSample]) -> None:
        nonlocal was_idle
        if not options.quiet and (jobs or not was_idle):
            print(render_block(jobs, time.time()), flush=True)
        was_idle = not jobs

    yield show


@contextmanager
def _screen(_options: LaunchOptions) -> Iterator[Show]:
    """Show a table that is drawn anew."""
    from rich.live import Live

    with Live(auto_refresh=False) as live:

        def show(jobs: Sequence[JobSample]) -> None:
            live.update(render_screen(jobs, live.console.width, live.console.height), refresh=True)

        yield show


class Metrics:
    """Keeps the file of metrics, if one is named; that it cannot be written is said once, until it can."""

    def __init__(self, name: str | None) -> None:
        self._name, self._path = name, Path(name).resolve() if name else None
        self._has_failed = False

    def write(self, jobs: Sequence[JobSample]) -> None:
        """Write the file.

        Raises:
            JobError: If it cannot be written.
        """
        if self._path is not None:
            try:
                write_metrics(self._path, jobs)
            except OSError as error:
                raise JobError(f"cannot write {self._name}: {error.strerror}") from None

    def keep(self, jobs: Sequence[JobSample]) -> None:
        """Write the file, or say why not."""
        try:
            self.write(jobs)
            self._has_failed = False
        except JobError as error:
            if not self._has_failed:
                say(str(error))
            self._has_failed = True

    def end(self) -> None:
        """Leave no metric that outlives its job."""
        self.keep([])
        if self._has_failed and self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
