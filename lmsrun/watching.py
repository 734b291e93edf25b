"""``--live`` and ``--metrics``: ``lmsrun top`` looks at a job in a process of its own, as long as it runs."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.model.errors import UsageError
from launch.supervise.streams import Sink, poll
from lmsrun.options import LaunchOptions
from lmsrun.render.live import can_draw
from lmsrun.render.prometheus import write_metrics

if TYPE_CHECKING:
    from launch.supervise.job import JobOptions

ENDING = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that end a look at jobs."""
CONSOLE = "console.log"
"""What would have been printed, in the output folder, while a table has the terminal."""
_PATIENCE_S = 3.0
"""Limits how long a terminal may take nothing once the job was told to end: SIGKILL may come next."""
_MAIN = Path(__file__).with_name("__main__.py")


def check_live(options: LaunchOptions) -> None:
    """Refuse a table that would leave no place for what the ranks print.

    Raises:
        UsageError: Saying what to add.
    """
    if _draws(options) and not options.output_dir:
        raise UsageError(
            "--live shows a table in place of the ranks' output; needed a folder for that: --output-dir DIR"
        )


def _draws(options: LaunchOptions) -> bool:
    return options.live and can_draw(sys.stderr)


@contextmanager
def watched(
    options: LaunchOptions, supervised: "JobOptions", heard: Set[signal.Signals]
) -> Iterator["JobOptions"]:
    """Have a job looked at while the block runs; gives the options to run it with.

    On a terminal a table takes the place of the output, which goes to files; what lmsrun itself had to say is
    printed at the end. A terminal that takes nothing is waited for; not for long if the job was told to end.

    Args:
        options: What to look at.
        supervised: How the job would run without a look at it.
        heard: The signals to end that the job got; read when the block is over.
    """
    draws = _draws(options) and supervised.output_dir is not None
    words = tempfile.TemporaryFile(dir=supervised.output_dir) if draws else None
    if words is not None and supervised.output_dir is not None:
        console = supervised.output_dir / CONSOLE
        fd = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        supervised = replace(
            supervised,
            stdout_fd=fd,
            stderr_fd=fd,
            words_fd=words.fileno(),
            tag_output=True if supervised.tag_output is not False else None,
        )
    # What ends it while it starts waits until it looks for signals: then it leaves the metrics of no job.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        watcher = subprocess.Popen(_command(options), stdin=subprocess.DEVNULL, stdout=2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield supervised
    finally:
        patience_s = _PATIENCE_S if heard - {signal.SIGINT} else None
        _end(watcher, options, patience_s)
        if words is not None:
            os.close(supervised.stdout_fd)
            with words:
                words.seek(0)
                said = words.read()
            if sys.stderr is not None:
                _print_at_end(said, patience_s)


def _end(watcher: "subprocess.Popen[bytes]", options: LaunchOptions, patience_s: float | None) -> None:
    """End the look; who sits in a write to a terminal that takes nothing is killed, and leaves no metrics."""
    watcher.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            watcher.wait(patience_s)
    finally:
        watcher.kill()  # Nothing, if it has ended.
        if watcher.wait() == -signal.SIGKILL and options.metrics:
            with suppress(OSError):
                write_metrics(Path(options.metrics), [])


def _print_at_end(said: bytes, patience_s: float | None) -> None:
    """Print what lmsrun itself had to say; a terminal that was closed does not cost the job's exit code."""
    sink = Sink(sys.stderr.fileno())
    sink.write(said)
    while sink.waiting and poll([], [sink.fd], patience_s):
        sink.pump()


def _command(options: LaunchOptions) -> list[str]:
    metrics = [f"--metrics={options.metrics}"] if options.metrics else []
    quiet = "--no-quiet" if options.live else "--quiet"
    return [
        sys.executable,
        str(_MAIN),
        "top",
        quiet,
        f"--period={options.period}",
        f"--jobs-dir={options.jobs_dir}",
        *metrics,
        str(os.getpid()),
    ]
