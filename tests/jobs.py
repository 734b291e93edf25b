"""Starts real jobs with the real command, and looks for what they leave behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LMSRUN = (sys.executable, str(ROOT / "lmsrun" / "__main__.py"))
STUB = ROOT / "tests" / "launch" / "supervise" / "stub_rank.py"
_MARK = "JOB_TEST_MARK"  # Not LMSRUN_*: an unknown one of those is an error.


@dataclass
class Job:
    """One running ``lmsrun run``; every process of it is known by a variable that all inherit."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    mark: str
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def guard(self) -> int:
        """The process that outlives a kill by name: the front's only child."""
        return _only_child(self.process.pid)

    @property
    def supervisor(self) -> int:
        """The process that owns the ranks: the guard's only child."""
        return _only_child(self.guard)

    @property
    def last_line(self) -> str:
        return self.stderr.decode().rstrip("\n").rpartition("\n")[2]

    def wait_ready(self, ranks: int = 2) -> None:
        """Wait until the ranks' programs say that they run."""
        wait_until(lambda: len(list(self.folder.glob("ready-*"))) >= ranks, "ranks are ready", 60)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 60) -> int:
        """Wait for the end; returns the exit code as a shell would say it."""
        self.stdout, self.stderr = self.process.communicate(timeout=timeout_s)
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def assert_nothing_left(self) -> None:
        """Not one process of the job, and no folder of receipts."""
        wait_until(lambda: not self.processes(), lambda: f"left: {self.processes()}", 3)
        wait_until(lambda: not list(self.folder.glob("lmsrun-*")), "the receipts' folder is gone", 3)

    def processes(self) -> dict[int, str]:
        """What still runs of the job, pid to command line; zombies have no environment."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ")
                        found[int(entry.name)] = command.decode()
                except OSError:
                    continue
        return found


def _only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@dataclass
class JobStarter:
    """Starts jobs whose temporary folder is the test's, and ends them when the test is over."""

    folder: Path
    jobs: list[Job] = field(default_factory=list)

    def __call__(
        self,
        *program: object,
        np: int = 2,
        options: Sequence[object] = ("--numa", "off"),
        command: Sequence[str] = (*LMSRUN, "run"),
        stdout: int = subprocess.PIPE,
        environ: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Job:
        mark = uuid.uuid4().hex
        kept = ("LMSRUN_JOBS_DIR",)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("LMS") or name in kept
        }
        own = {_MARK: mark, "TMPDIR": str(self.folder), "STUB_FOLDER": str(self.folder)}
        argv = [*command, "-np", np, "--oversubscribe", *options, "--", *(program or (STUB,))]
        process = subprocess.Popen(
            [str(word) for word in argv],
            env={**inherited, **own, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            preexec_fn=before,  # noqa: PLW1509 - no threads in the tests
        )
        self.jobs.append(Job(process, self.folder, mark))
        return self.jobs[-1]

    def close(self) -> None:
        """Kill what a failed test left."""
        for job in self.jobs:
            for pid in job.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            job.process.wait(10)
            for pipe in (job.process.stdout, job.process.stderr):
                if pipe is not None:
                    pipe.close()


def wait_until(true: Callable[[], bool], what: str | Callable[[], str], limit_s: float) -> None:
    """Poll until ``true()``; fails with ``what`` after the limit."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, what() if callable(what) else f"waited {limit_s} s until {what}"
        time.sleep(0.02)
