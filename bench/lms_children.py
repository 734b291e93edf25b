"""Runs cases of the Large Model Support benchmarks in processes of their own, and searches the largest."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from lms_case import CPU, Case

SCRIPT = Path(__file__).resolve().parent / "lms_case.py"
OUT_OF_MEMORY = (
    "OOM",
    "ResourceExhausted",
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "bad_alloc",
    "memory object",  # oneDNN: could not create one
    "ALLOC_FAILED",  # cuDNN and cuBLAS
    "No algorithm worked",  # a convolution on a GPU without room for its scratch
    "scratch space",  # the same, for an algorithm that had room when it was chosen
)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""How the CPU device's kernels end a process when an allocation fails; with a GPU these are faults. Any other
signal came from outside."""

STACKS_S, STACKS_CHARACTERS = 60, 8000
"""The seconds in which a case without an end has to say where its threads are, and what is told of that."""

FARTHEST = 256
"""The most times the larger of two small amounts to which a line through their peaks is followed."""

Found = dict[str, Any]
Attempt = Callable[[int], Found | None]
Point = tuple[float, float]
"""Amount and peak."""


class CaseError(Exception):
    """A case failed; the text says what was run and how it ended."""


class OutOfMemoryError(CaseError):
    """A paced case has run out of its device's memory."""


class NothingFitsError(CaseError):
    """Not even the smallest size fits."""


@dataclass(frozen=True)
class Runner:
    """How cases are started."""

    python: str = sys.executable
    legacy_keras: bool = False
    timeout_s: float = 900.0

    def environ(self, case: Case) -> dict[str, str]:
        """Build the environment of a case; the CPU device gets its limit here."""
        environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONFAULTHANDLER": "1"}
        environ["TF_USE_LEGACY_KERAS"] = "1" if self.legacy_keras else "0"
        if case.device == CPU:
            environ |= {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(case.limit_mb)}
            environ["CUDA_VISIBLE_DEVICES"] = ""
        elif case.maps_pages:
            environ["TF_GPU_ALLOCATOR"] = "cuda_malloc_async"
        return environ

    def argv(self, case: Case) -> list[str]:
        """Build the command of a case."""
        return [self.python, str(SCRIPT), json.dumps(asdict(case))]

    def run(self, case: Case) -> Found | None:
        """Run a case; ``None`` when it ran out of memory, which may end a process by a signal.

        Raises:
            CaseError: If it failed for another reason, or took too long: then with the stacks of its threads.
        """
        with subprocess.Popen(
            self.argv(case),
            env=self.environ(case),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired as late:
                raise CaseError(
                    f"{told(case)}: no end after {self.timeout_s:.0f} s\n{_stacks(process)}"
                ) from late
            except BaseException:
                process.kill()
                raise
        found = _result(case, process.returncode, output, errors)
        say(f"{told(case)}: {'fits' if found is not None else 'does not fit'}")
        return found


def _stacks(process: subprocess.Popen[str]) -> str:
    """End a process that takes too long; return what it said last: where its threads are."""
    process.send_signal(signal.SIGABRT)
    try:
        _, errors = process.communicate(timeout=STACKS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "it did not say where its threads are"
    return _end_of(errors, STACKS_CHARACTERS)


def _end_of(errors: str, characters: int) -> str:
    """Return the end of what a process wrote, without the list of modules behind its threads' stacks."""
    return errors.partition("\nExtension modules: ")[0][-characters:]


def _result(case: Case, code: int, output: str, errors: str) -> Found | None:
    if code == 0:
        found: Found = json.loads(output.splitlines()[-1])
        return found
    if ran_out(code, errors, case.device):
        return None
    raise CaseError(f"{told(case)} ended with {code}:\n{_end_of(errors, 2000)}")


def ran_out(code: int, errors: str, device: str = CPU) -> bool:
    """Whether a process that ended with ``code`` had no memory left on ``device``."""
    crashed = -code in CRASHES and device == CPU
    return crashed or (code > 0 and any(sign in errors for sign in OUT_OF_MEMORY))


class Paced:
    """A case that takes a step when told to, so that two of them can take turns.

    It is killed when a step takes longer than the runner allows a case.
    """

    def __init__(self, runner: Runner, case: Case) -> None:
        self._case, self._timeout_s, self._late = case, runner.timeout_s, False
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            runner.argv(replace(case, paced=True)),
            env=runner.environ(case),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._read_step()  # the first, which traces, is taken without being told

    def step(self) -> float:
        """Take a step; returns its seconds.

        Raises:
            OutOfMemoryError: If it had no memory left for that.
            CaseError: If it has ended otherwise, or takes too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._read_step()

    def close(self) -> Found:
        """End the case; returns what it found."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        with self._watched():
            lines = self._process.stdout.read().splitlines()
        if self._process.wait() or not lines:
            self._fail()
        found: Found = json.loads(lines[-1])
        return found

    def kill(self) -> None:
        """End the case at once, if it still runs."""
        self._process.kill()
        self._process.wait()

    def _read_step(self) -> float:
        assert self._process.stdout is not None
        with self._watched():
            line = self._process.stdout.readline()
        if not line:
            self._fail()
        return float(json.loads(line)["step_s"])

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Kill the case when what is done here takes too long."""
        watchdog = threading.Timer(self._timeout_s, self._kill_late)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def _kill_late(self) -> None:
        self._late = True
        self._process.kill()

    def _fail(self) -> NoReturn:
        code = self._process.wait()
        if self._late:
            raise CaseError(f"{told(self._case)}: no step within {self._timeout_s:.0f} s")
        self._errors.seek(0)
        errors = self._errors.read()
        kind = OutOfMemoryError if ran_out(code, errors, self._case.device) else CaseError
        raise kind(f"{told(self._case)} ended with {code} in mid-run:\n{_end_of(errors, 1000)}")


def told(case: Case) -> str:
    """Describe a case in a few words."""
    if case.copy_mb:
        return f"copies of {case.copy_mb} MiB"
    return f"{case.model} {case.policy} {case.units}"


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


def line_meets(limit_bytes: int, one: Point, other: Point) -> float:
    """Find at which amount the line through the peaks of two runs meets the limit.

    It is followed to ``FARTHEST`` times the larger amount: of two small steps the larger one may need less.
    """
    (amount, peak), (more, higher) = sorted((one, other))
    farthest = FARTHEST * more
    if higher <= peak:
        return farthest if higher <= limit_bytes else amount
    return min(farthest, amount + (limit_bytes - peak) * (more - amount) / (higher - peak))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def largest(attempt: Attempt, guess: int, tolerance: float = 0.06) -> Found:
    """Find the largest number of units that works, to within ``tolerance`` (or one unit); return its result.

    From ``guess`` the search takes one small step, up or down; where that is not enough, twice as large ones.

    Raises:
        NothingFitsError: If not even one unit works.
    """
    good: Found | None = None
    low, high, units, stride = 0, 0, max(1, guess), min(tolerance, 0.5)
    while not high or high - low > max(1, int(low * tolerance)):
        result = attempt(units)
        if result is None:
            high = units
        else:
            good, low = result, units
        if high == 1:
            raise NothingFitsError("not even one unit fits")
        if low and high:
            units = (low + high) // 2
        else:
            units = max(1, int(units * (1 + stride)), low + 1) if low else max(1, int(units * (1 - stride)))
            stride = min(2 * stride, 0.8)
    assert good is not None, "the search ends between a size that works and one that does not"
    return good
