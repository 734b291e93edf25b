"""Large Model Support on a CUDA machine: models of full size under a memory limit, against none and XLA.

    python bench/gpu_lms.py --out gpu.json              # all models; goes on where it stopped
    python bench/gpu_lms.py --out gpu.json --models resnet50 --minutes 60
    python bench/gpu_lms.py --out gpu.json --at-once 4  # four sizes side by side: the card holds four limits
    python bench/gpu_lms.py --out gpu.json --table      # only prints what is there
    python bench/gpu_lms.py --quick                     # a tiny model: tries this script, measures nothing
    python bench/gpu_lms.py --device cpu --quick        # the same without a GPU

For each model: the largest batch (or picture) without LMS; there and at twice that, at the multiple that IBM
published, with an allocator that maps pages, in unified memory, and compiled by XLA, the time of a unit
relative to no LMS, what the timed simulator says of it, the peak against the plan, the bytes that a step
moves, as planned and as TensorFlow's profiler saw them, and how much of the copying hid behind compute.

Each case is a process of its own; what it found is written at once, and no case begins after ``--minutes``: a
later call goes on from there. The first cases of all models come before the second of any. Nobody else may
use the GPU meanwhile: what they leave no room for counts as not fitting. ``docs/measurements.md`` says where
this has been run.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_table import Row, render  # noqa: E402
from lms_case import CPU, GPU, MIB, Case  # noqa: E402
from lms_children import CaseError, Found, Runner, line_meets, say  # noqa: E402
from lms_document import Document, write_whole  # noqa: E402
from models import ZOOS, Model  # noqa: E402

SCHEMA = "lmsrun.bench-gpu/2"
PROBES = (2, 4)
"""Two small sizes; the line through their peaks says where the search begins."""
RUNGS = (1.2, 1.1, 1.0, 0.9, 0.8, 0.7)
"""Of the guess: the sizes that are tried."""
NEAR = 0.12
"""The share by which the smallest size that does not fit may be above the largest that does."""
SMALLER = 0.95
"""Of a size that fitted for two steps and not for all that are timed."""
MOST_UNITS = 1 << 30
"""More than any search tries."""
STEPS, TRACED_STEPS = 8, 2
COPY_MB, COPIES_MB = 256, 4096
"""Of one copy, and the limit of the device while copies are timed."""
TINY_LIMIT_MB = 32
GPU_NAMES = """
import json, tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
names = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
print(json.dumps({"tensorflow": tf.__version__, "cuda": tf.test.is_built_with_cuda(), "gpus": names}))
"""
DEFAULTS = {field.name: field.default for field in fields(Case)}


class OutOfTimeError(Exception):
    """No further case may begin."""


class Runs(Protocol):
    """Run cases: :class:`lms_children.Runner`, or what a test has in its place."""

    def run(self, case: Case) -> Found | None:
        """Return what a case found; ``None`` where it ran out of memory."""


@dataclass(frozen=True)
class Setting:
    """What all models have in common."""

    device: str = GPU
    zoo: str = "full"
    models: tuple[str, ...] = tuple(ZOOS["full"])
    limit_mb: int | None = None
    """For all models; ``None``: each has its own."""


class Kept:
    """Runs cases and keeps what they found, or how they failed: none runs again."""

    def __init__(self, runner: Runs, document: Document, path: Path | None, minutes: float, at_once: int = 1):
        self.document, self.at_once = document, at_once
        self._runner, self._path = runner, path
        self._ends = time.monotonic() + 60 * minutes
        self._lock = threading.Lock()

    def run(self, case: Case) -> Found | None:
        """Return what a case found; ``None`` where it ran out of memory.

        Raises:
            OutOfTimeError: If it has not run yet, and no case may begin any more.
            CaseError: If it failed for another reason than memory.
        """
        cases, key = self.document["cases"], key_of(case)
        if key not in cases:
            if time.monotonic() > self._ends:
                raise OutOfTimeError
            try:
                found = self._runner.run(case)
            except CaseError as error:
                say(str(error))
                found = {"error": str(error).splitlines()[0]}
            with self._lock:
                cases[key] = found
                self.save()
        held: Found | None = cases[key]
        if held is not None and "error" in held:
            raise CaseError(held["error"])
        return held

    def run_all(self, cases: Sequence[Case]) -> list[Found | None]:
        """Run some cases side by side, as many at once as the card holds; what they take means nothing."""
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(self.run, cases))

    def save(self) -> None:
        """Write the document."""
        if self._path is not None:
            write_whole(self._path, self.document)


def key_of(case: Case) -> str:
    """Return the name of a case: what differs from the defaults."""
    return json.dumps({name: value for name, value in asdict(case).items() if value != DEFAULTS[name]})


def main() -> int:
    """Run what is missing, print the table."""
    options = _parse(sys.argv[1:])
    out = Path(options.out) if options.out else None
    try:
        document = _document(options, out)
    except (ValueError, CaseError) as error:
        print(f"gpu_lms: {error}", file=sys.stderr)
        return 2
    runner = Runner(legacy_keras=options.tf_keras, timeout_s=options.case_seconds)
    kept = Kept(runner, document, out, 0.0 if options.table else options.minutes, options.at_once)
    try:
        print(render(document, measure(_setting(options), kept)))
    except KeyboardInterrupt:
        print("gpu_lms: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _document(options: argparse.Namespace, out: Path | None) -> Document:
    """Return the document to go on with, or a new one.

    Raises:
        ValueError: If what is asked for cannot be done here; the text says what to try.
        CaseError: If there is no TensorFlow.
    """
    if options.device == "cpu" and not options.quick:
        raise ValueError("found --device cpu; models of full size need a GPU; try --device cpu --quick")
    document = read(out)
    if options.table and not document:
        raise ValueError(f"found no document at {out}; --table needs one; try --out FILE without --table")
    if not options.table:
        machine = read_machine(sys.executable)
        if options.device == "gpu" and not machine["gpus"]:
            built = "with" if machine["cuda"] else "without"
            raise ValueError(
                f"found no GPU (TensorFlow {machine['tensorflow']}, built {built} CUDA); needed one CUDA GPU "
                "that it sees; try nvidia-smi, pip install 'tensorflow[and-cuda]', or --device cpu --quick"
            )
        here = {"schema": SCHEMA, "machine": machine, "quick": options.quick, "tf_keras": options.tf_keras}
        if document and here != {name: document.get(name) for name in here}:
            raise ValueError(
                f"{out} is of another machine, TensorFlow, Keras or kind of run; try another --out"
            )
        document = document or {**here, "cases": {}}
    if options.retry_failed:
        cases = document["cases"]
        document["cases"] = {key: found for key, found in cases.items() if "error" not in (found or {})}
    return document


def read(path: Path | None) -> Document:
    """Read the document of an earlier call; empty where there is none.

    Raises:
        ValueError: If the file is none of this benchmark's, or no file; the text says what to try.
    """
    if path is None or not (path.exists() or path.is_symlink()):
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] == SCHEMA and all(_is_kept(found) for found in document["cases"].values()):
            return dict(document)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} is no document of this benchmark (needed schema {SCHEMA}); try another --out")


def _is_kept(found: object) -> bool:
    return found is None or isinstance(found, dict)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ZOOS["full"], help="default: all")
    parser.add_argument("--limit-gib", type=_positive, help="default: each model's own, 8 or 16")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tf-keras", action="store_true", help="tf_keras in place of Keras 3")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument(
        "--at-once",
        type=int,
        choices=range(1, 17),
        metavar="N",
        default=1,
        help="cases side by side that are not timed",
    )
    parser.add_argument("--minutes", type=_positive, default=8.0, help="begin no case after that")
    parser.add_argument("--case-seconds", type=_positive, default=600.0, help="most that a case may take")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--retry-failed", action="store_true", help="run cases that failed once more")
    parser.add_argument("--out", help="file for the JSON document")
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text}; needed a number above 0")
    return number


def read_machine(python: str) -> Found:
    """TensorFlow's version and the names of the GPUs that it sees, asked in another process.

    Raises:
        CaseError: If that Python has no TensorFlow that can be imported.
    """
    done = subprocess.run([python, "-c", GPU_NAMES], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CaseError(
            f"{python} cannot say what TensorFlow sees ({why}); try pip install 'tensorflow[and-cuda]'"
        )
    machine: Found = json.loads(done.stdout.splitlines()[-1])
    return machine


def _setting(options: argparse.Namespace) -> Setting:
    device = CPU if options.device == "cpu" else GPU
    limit = int(options.limit_gib * 1024) if options.limit_gib else None
    if options.quick:
        return Setting(device, "tiny", tuple(ZOOS["tiny"]), limit or TINY_LIMIT_MB)
    return Setting(device, models=tuple(options.models or ZOOS["full"]), limit_mb=limit)


def measure(setting: Setting, kept: Kept) -> list[Row]:
    """Measure models in turn, a way at a time, until no case may begin; return the rows that there are."""
    rows: dict[str, list[Row]] = {name: [] for name in setting.models}
    late = False
    copies = Case(setting.zoo, "", device=setting.device, copy_mb=COPY_MB, limit_mb=COPIES_MB)
    try:
        kept.document["copies"] = kept.run(copies)
    except (CaseError, OutOfTimeError):
        kept.document["copies"] = None
    left = {name: Bench(setting, kept, name).ways() for name in setting.models}
    while left:
        for name, ways in [*left.items()]:
            try:
                rows[name].append(next(ways))
            except StopIteration:
                del left[name]
            except CaseError as error:
                rows[name].append((name, "none", {"error": str(error)}))
                del left[name]
            except OutOfTimeError:
                del left[name]
                late = True
    if late:
        say("gpu_lms: time is up; the same command goes on from here")
    return [row for found in rows.values() for row in found]


@dataclass(frozen=True)
class Bench:
    """One model under the limit."""

    setting: Setting
    kept: Kept
    name: str

    @property
    def model(self) -> Model:
        """Its description."""
        return ZOOS[self.setting.zoo][self.name]

    @property
    def limit_mb(self) -> int:
        """The device's memory, MiB."""
        return self.setting.limit_mb or self.model.limit_mb

    def ways(self) -> Iterator[Row]:
        """Yield the rows, the most telling first.

        Raises:
            CaseError: If the smallest size does not fit, or a case fails for another reason than memory.
            OutOfTimeError: If no case may begin any more.
        """
        most, base = self._lasting(self._largest())
        base["time_ratio"] = 1.0
        yield self.name, "none", base
        amount = self.model.amount(most)
        twice, goal = self._units(2 * amount), self._units((self.model.target or 0.0) * amount)
        on_gpu = self.setting.device == GPU
        has_driver = on_gpu and self.kept.document["machine"]["cuda"]
        for name, policy, units, more in (
            ("auto", "auto", twice, {}),
            ("auto, pages", "auto", twice if on_gpu else 0, {"maps_pages": True}),
            ("unified memory", "off", twice if has_driver else 0, {"managed": True}),
            ("all", "all", twice, {}),
            ("auto", "auto", goal if goal > twice else 0, {}),
            ("XLA", "off", most, {"compiled": True}),
            ("auto, XLA", "auto", twice, {"compiled": True}),
        ):
            if units:
                try:
                    found = self._timed(policy, units, **more)
                except CaseError as error:
                    yield self.name, name, {"error": str(error)}
                    continue
                if found is not None:
                    one = (each["step_s"] / each["amount"] for each in (found, base))
                    found["time_ratio"] = next(one) / next(one)
                    found["multiple"] = found["amount"] / amount
                    if not more.get("compiled"):
                        found["hidden_by_time"] = hidden_by_time(found, base, self.kept.document["copies"])
                yield self.name, name, found

    def _case(self, policy: str, units: int, **more: Any) -> Case:
        return Case(
            self.setting.zoo,
            self.name,
            units=units,
            policy=policy,
            limit_mb=self.limit_mb,
            device=self.setting.device,
            **more,
        )

    def _timed(self, policy: str, units: int, **more: Any) -> Found | None:
        """Take some steps, the last ones under the profiler."""
        case = self._case(policy, units, steps=STEPS, trace_steps=TRACED_STEPS, **more)
        found = self.kept.run(case)
        if found is None:
            return None
        return found | {"amount": self.model.amount(units), "step_s": median(found["steps_s"][2:])}

    def _largest(self) -> int:
        """Find a size that fits for two steps without LMS, to a tenth.

        Raises:
            CaseError: If not even one unit fits.
        """
        small, more = self.kept.run_all([self._case("all", units, steps=2) for units in PROBES])
        if small is None or more is None:
            raise CaseError(f"{self.name}: {PROBES[1]} units do not fit even with LMS; raise --limit-gib")
        points = ((self.model.amount(found["units"]), found["peak_before_bytes"]) for found in (small, more))
        guess, low, high = self._units(line_meets(self.limit_mb * MIB, *points)), 0, MOST_UNITS
        while high > 1:
            sizes = sorted({max(1, int(guess * rung)) for rung in RUNGS}, reverse=True)
            sizes = [units for units in sizes if low < units < high]
            if low and (not sizes or high - low <= max(1, int(NEAR * low))):
                return low
            for first in range(0, len(sizes), self.kept.at_once):
                some = sizes[first : first + self.kept.at_once]
                found = self.kept.run_all([self._case("off", units, steps=2) for units in some])
                fits = [units for units, one in zip(some, found, strict=True) if one is not None]
                low = max([low, *fits])
                high = min([high, *(units for units in some if low < units)])
                if fits:
                    break
            guess = (low + high) // 2 if low and high < MOST_UNITS else 3 * low // 2 if low else high // 2
        raise CaseError(f"{self.name}: not even one unit fits without LMS; raise --limit-gib")

    def _lasting(self, units: int) -> tuple[int, Found]:
        """Find the largest size to time: what fits for two steps at the limit need not fit for more.

        Raises:
            CaseError: If no size fits that long.
        """
        while units:
            if (found := self._timed("off", units)) is not None:
                return units, found
            units = int(units * SMALLER)
        raise CaseError(f"{self.name}: nothing that fitted for two steps fits for more")

    def _units(self, amount: float) -> int:
        """Find the most units that are no more than the amount; at least one."""
        return max(1, bisect_right(range(1, MOST_UNITS), amount, key=self.model.amount))


def hidden_by_time(found: Found, base: Found, copies: Found | None) -> float | None:
    """Compute the share of the copies' time that a step does not take longer for them.

    ``(compute alone + copies alone - step) / copies alone``: compute alone is the step without LMS, scaled to
    the size; copies alone are the bytes of the plan at the rates that were measured for each way. It needs no
    trace, but it counts what swapping else costs (order, smaller overlap of kernels) as copies that wait.
    """
    if copies is None or not copies["in_bytes_per_s"] or "bytes_out" not in found:
        return None
    compute_s = base["step_s"] / base["amount"] * found["amount"]
    copies_s = found["bytes_out"] / copies["out_bytes_per_s"] + found["bytes_in"] / copies["in_bytes_per_s"]
    return (compute_s + copies_s - found["step_s"]) / copies_s if copies_s else None


if __name__ == "__main__":
    sys.exit(main())
