"""How much more fits with Large Model Support, and what it costs.

Each case is a child process on the CPU device with a hard memory limit, which stands in for a small GPU.
Prints one table, and writes one JSON document with everything that was measured.

    python bench/lms.py                                    # all models, every Keras of this TensorFlow
    python bench/lms.py --what memory --out result.json    # the largest batches: needs no quiet machine
    python bench/lms.py --what time --out result.json      # then times, at the batches found before
    python bench/lms.py --what table --out result.json     # only the tables of all that the file holds
    python bench/lms.py --python .venv-tf215/bin/python    # another TensorFlow
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from lms_case import MIB, Case  # noqa: E402
from lms_children import (  # noqa: E402
    CaseError,
    Found,
    NothingFitsError,
    OutOfMemoryError,
    Paced,
    Runner,
    largest,
    line_meets,
    say,
)
from lms_document import Document, read_document, write_part  # noqa: E402
from lms_table import POLICIES, misses, ratio_text, render  # noqa: E402
from models import MODELS  # noqa: E402

PROBES = (2, 6)
"""Two small batches; the line through their planned peaks says where the search begins."""
UNPLANNED = 0.85
"""Without LMS the executor's order and the gaps between buffers cost about this share of a plan's batch."""
MOST_STEPS_A_TURN = 3
MOST_RESTARTS = 3
STEPS = 12
"""What trains for so many steps fits. The variables' buffers grow over the first steps, and most of all where
memory is not planned: 38 images of ResNet-50 without LMS ran out of it after the third step. A plan's peak is
that of ten steps: after four, GoogLeNet-style measured 11% below it, after twenty 2%."""


def main() -> int:
    """Measure what is asked for, add it to the document, print the table."""
    options = _parse(sys.argv[1:])
    book = Book(Path(options.out) if options.out else None)
    if options.what != "table":
        for keras in options.keras or _kerases(options.python):
            for name in options.models:
                _bench(book, name, keras, options)
    print(render(book.entries))
    for miss in misses(book.entries):
        print(f"missed: {miss}")
    if options.what == "table" and options.out:
        _print_other_parts(read_document(Path(options.out)))
    return 0


def _print_other_parts(document: Document) -> None:
    """Print the tables of what the other benchmarks have put into the document."""
    import lms_edit
    import lms_sim

    if edits := document.get("edits"):
        print(f"\n{lms_edit.text(edits)}")
    if simulated := document.get("simulated"):
        print(f"\n{lms_sim.text(simulated)}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--keras", nargs="+", choices=("3", "2"), help="default: all that there are")
    parser.add_argument("--what", choices=("memory", "time", "both", "table"), default="both")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=POLICIES, help="whose largest batch to look for"
    )
    parser.add_argument(
        "--limit-mb",
        type=_mebibytes,
        help="memory of the device, MiB, instead of the one in bench/models.py",
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the cases")
    parser.add_argument(
        "--goal-only",
        action="store_true",
        help="look whether the goal's batch fits, not for the largest: a third of the time",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.06, help="how exactly the largest batch is looked for"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often two cases take turns for a time")
    parser.add_argument("--case-seconds", type=float, default=900.0, help="most that a case may take")
    parser.add_argument(
        "--out",
        help="file of the JSON document; it is added to, and keeps a largest batch without LMS",
    )
    return parser.parse_args(argv)


def _mebibytes(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _kerases(python: str) -> tuple[str, ...]:
    """``3`` needs TensorFlow 2.16; ``2`` is tf_keras, or what TensorFlow 2.15 calls ``tf.keras``."""
    return ("2",) if _version(python, "keras").startswith("2.") else ("3", "2")


def _version(python: str, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Book:
    """What has been measured: one entry a TensorFlow, Keras and model, kept in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.entries: list[Found] = []
        if path is not None:
            self.entries = read_document(path).get("results", [])

    def entry(self, tensorflow: str, keras: str, model: str, limit_mb: int) -> Found:
        """Find the entry of these four; make it if there is none."""
        key = {"tensorflow": tensorflow, "keras": keras, "model": model, "limit_mb": limit_mb}
        for entry in self.entries:
            if key.items() <= entry.items():
                return entry
        self.entries.append(key | {"unit": MODELS[model].unit, "target": MODELS[model].target})
        return self.entries[-1]

    def save(self) -> None:
        """Write what has been measured into the document."""
        if self._path is not None:
            write_part(self._path, "results", self.entries)


def _bench(book: Book, name: str, keras: str, options: argparse.Namespace) -> None:
    """Measure one model; what goes wrong is said and recorded, and the next model comes."""
    runner = Runner(options.python, keras == "2", options.case_seconds)
    limit_mb = options.limit_mb or MODELS[name].limit_mb
    entry = book.entry(_version(options.python, "tensorflow"), keras, name, limit_mb)
    entry.pop("error", None)
    bench = Bench(runner, name, limit_mb, options.tolerance)
    try:
        if options.what in ("memory", "both"):
            measure_memory(entry, bench, options.policies, book.save, goal_only=options.goal_only)
        if options.what in ("time", "both"):
            measure_time(entry, bench, options.rounds, book.save)
    except (CaseError, NoBaselineError) as error:
        entry["error"] = str(error)
        say(str(error))
    book.save()


@dataclass(frozen=True)
class Bench:
    """One model under its limit."""

    runner: Runner
    model: str
    limit_mb: int
    tolerance: float = 0.06

    def case(self, policy: str, units: int) -> Case:
        """So many units of the model."""
        return Case("small", self.model, units, policy, self.limit_mb, steps=STEPS)

    def run(self, policy: str, units: int) -> Found | None:
        """Train; ``None`` if that does not fit."""
        return self.runner.run(self.case(policy, units))

    def largest(self, policy: str, guess: int) -> Found:
        """Find the largest batch."""
        return largest(lambda units: self.run(policy, units), guess, self.tolerance)


def measure_memory(
    entry: Found,
    bench: Bench,
    policies: Sequence[str],
    save: Callable[[], None] = lambda: None,
    *,
    goal_only: bool = False,
) -> None:
    """Measure the largest batch without and with each policy; what moves, and the peaks."""
    small, more = (bench.run("all", units) for units in PROBES)
    if small is None or more is None:
        raise CaseError(f"{bench.model}: {PROBES[1]} units do not fit even with LMS; raise the limit")
    if "without" not in entry:
        guess = int(UNPLANNED * _guess(entry, small, more, peak="peak_before_bytes"))
        entry["without"] = _largest_without(bench, guess)
        save()
    without = entry["without"]
    if not without["units"]:
        goal_only = False  # a multiple of nothing is no goal
    entry["goal_only"] = goal_only
    double, most = (_fresh(entry, key, policies) for key in ("double", "with"))
    failed = _fresh(entry, "failed", [name for policy in policies for name in (policy, f"{policy} at 2x")])
    twice, goal = 2 * without["units"], math.ceil(entry["target"] * without["units"])
    for policy in policies if twice else ():
        double[policy] = _tried(failed, f"{policy} at 2x", twice, partial(bench.run, policy, twice))
    second = double.get("all") or small
    guess = max(without["units"], int(0.97 * _guess(entry, more, second, peak="planned_peak_bytes")))
    for policy in policies:
        units = goal if goal_only else most["all"]["units"] if "all" in most else guess
        search = bench.run if goal_only else bench.largest
        found = _tried(failed, policy, units, partial(search, policy, units))
        if found is not None:
            most[policy] = found
        save()
    edits = [small, more, *double.values(), *most.values()]
    entry["edit"] = min(
        ({"edit_s": one["edit_s"], "ops": one["ops"]} for one in edits if one), key=lambda one: one["edit_s"]
    )


def _largest_without(bench: Bench, guess: int) -> Found:
    """Find the largest batch without LMS; of no units where not even one fits."""
    try:
        return bench.largest("off", guess)
    except NothingFitsError:
        return {"units": 0}


def _fresh(entry: Found, key: str, names: Iterable[str]) -> Found:
    """Return what an entry holds under ``key``, after dropping what is measured anew under these names."""
    kept: Found = entry.setdefault(key, {})
    for name in names:
        kept.pop(name, None)
    return kept


def _tried(failed: Found, name: str, units: int, find: Callable[[], Found | None]) -> Found | None:
    """Try ``find``. Where it gives nothing the reason is kept, and the next is tried all the same."""
    try:
        found = find()
    except CaseError as error:
        failed[name] = str(error)
        say(f"{name}: {error}")
        return None
    if found is None:
        failed[name] = f"{units} units do not fit"
    return found


def _guess(entry: Found, one: Found, other: Found, *, peak: str) -> int:
    points = ((found["units"], found[peak] or found["peak_bytes"]) for found in (one, other))
    return max(1, int(line_meets(entry["limit_mb"] * MIB, *points)))


def measure_time(
    entry: Found, bench: Bench, rounds: int = 5, save: Callable[[], None] = lambda: None
) -> None:
    """Seconds a unit with LMS over seconds a unit without, at the largest batch that fits without.

    Two processes take turns, so that what else the machine does meets both.
    """
    if "without" not in entry:
        raise CaseError(f"{bench.model}: no largest batch is known; run with --what memory first")
    base = entry["without"]["units"]
    if not base:
        raise CaseError(f"{bench.model}: no time to compare with: not even one unit fits without LMS")
    double, most = entry.get("double", {}), entry.get("with", {})
    wanted = {f"{policy} at 2x": (policy, 2 * base) for policy in POLICIES if double.get(policy)}
    wanted |= {f"{policy} at most": (policy, found["units"]) for policy, found in most.items()}
    entry["time"] = {}
    without = Without(bench, base)
    try:
        for name, (policy, units) in wanted.items():
            entry["time"][name] = in_turns(without, bench, policy, units, rounds)
            save()
            say(f"{bench.model} {name}: {ratio_text(entry['time'][name])}")
    finally:
        without.kill()


class NoBaselineError(Exception):
    """Training without LMS failed, so that there is nothing to compare with; the text says how."""


class Without:
    """Training without LMS, step by step. When it runs out of memory in the end it goes on a tenth smaller.

    What ran for some steps at the limit need not run for more: where memory is not planned its order changes
    from step to step.
    """

    def __init__(self, bench: Bench, units: int) -> None:
        self.units = units
        self._bench = bench
        self._paced: Paced | None = None
        self._restarts = 0

    def step(self) -> float:
        """Take a step; returns its seconds a unit.

        Raises:
            NoBaselineError: If it runs out of memory again and again, or fails for another reason.
        """
        while True:
            try:
                if self._paced is None:
                    self._paced = Paced(self._bench.runner, self._bench.case("off", self.units))
                return self._paced.step() / self.units
            except OutOfMemoryError as error:
                self.kill()
                if self._restarts == MOST_RESTARTS:
                    raise NoBaselineError(f"without LMS, {MOST_RESTARTS} times smaller: {error}") from error
                self._restarts += 1
                self.units = max(1, int(0.9 * self.units))
            except CaseError as error:
                raise NoBaselineError(f"without LMS: {error}") from error

    def kill(self) -> None:
        """End it, until the next step."""
        if self._paced is not None:
            self._paced.kill()
            self._paced = None


def in_turns(without: Without, bench: Bench, policy: str, units: int, rounds: int) -> Found:
    """Median over the rounds of (seconds a unit with ``policy``) / (seconds a unit without LMS).

    The one without LMS takes several steps for each one of the other, which has more units.

    Raises:
        NoBaselineError: If the one without LMS fails.
    """
    turns = max(1, min(MOST_STEPS_A_TURN, units // without.units))
    pairs = []
    try:
        with_lms = Paced(bench.runner, bench.case(policy, units))
    except CaseError as error:
        return {"policy": policy, "units": units, "error": str(error)}
    try:
        for _ in range(rounds):
            off_s = [without.step() for _ in range(turns)]
            pairs.append((sum(off_s) / turns, with_lms.step() / units))
        found = with_lms.close()
    except CaseError as error:
        return {"policy": policy, "units": units, "error": str(error)}
    finally:
        with_lms.kill()
    ratios = sorted(lms_s / off_s for off_s, lms_s in pairs)
    kept = ("planned_peak_bytes", "measured_peak_bytes", "counted_bytes_out", "counted_bytes_in", "copy_s")
    return {
        "policy": policy,
        "units": units,
        "units_without": without.units,
        "ratio": median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "rounds": pairs,
        **{key: found[key] for key in kept},
    }


if __name__ == "__main__":
    sys.exit(main())
