"""Whether what trains with Large Model Support ends in the same bits: all cases, policies and Kerases.

Each case of ``tests/lms/bits`` is a process of its own: without LMS twice, and under the policies ``all`` and
``budget`` (half of what the plain step takes); then one under ``auto`` and a hard limit of the device. What
the file holds already is not run again.

    python bench/bits.py --out bits.json                        # everything; hours
    python bench/bits.py --out bits.json --cases encoder vae    # a part of it
    python bench/bits.py --out bits.json --what table           # only the table
    python bench/bits.py --python .venv-tf215/bin/python        # another TensorFlow
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench")]

from lms_children import say  # noqa: E402
from lms_document import read_document, write_part  # noqa: E402

JOBS = ROOT / "tests" / "lms" / "bits"
RANKS = (
    str(ROOT / "lmsrun" / "__main__.py"),
    "run",
    "-np",
    "2",
    "--oversubscribe",
    "--no-lms",
    "--no-tag-output",
)
APPLICATIONS = "applications/"
PART = "bits"
MIB = 1 << 20
LEAST_PEAK_MB = 12
"""A smaller case gets no hard limit: what TensorFlow needs for itself would be much of it."""
LIMIT_SHARE = 0.6
"""Of what the plain step takes beside what stays: less than it needs, more than ``all`` does."""
CHUNK = 100
"""Random graphs in one process."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)

Found = dict[str, Any]


class JobError(Exception):
    """A job failed; the text says how it ended."""


@dataclass(frozen=True)
class Jobs:
    """How the jobs are run."""

    python: str
    keras: str
    timeout_s: float

    def run(self, script: str, *arguments: str, ranks: int = 1, **environ: str) -> list[Found]:
        """Run a job and parse the lines of JSON that it prints, one per rank.

        Raises:
            JobError: If it failed, or took too long.
        """
        program = [*RANKS, str(JOBS / script)] if ranks > 1 else [str(JOBS / script)]
        own = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        own["TF_USE_LEGACY_KERAS"] = "1" if self.keras == "2" else "0"
        try:
            done = subprocess.run(
                [self.python, *program, *arguments],
                env={**os.environ, **own, **environ},
                capture_output=True,
                text=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise JobError(f"no end after {self.timeout_s:.0f} s") from error
        if -done.returncode in CRASHES:
            raise JobError(f"crashed with signal {-done.returncode}")
        if done.returncode:
            raise JobError(f"ended with {done.returncode}: {done.stderr[-600:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def case(self, name: str, needs: Found) -> Found:
        """Train one case in every way."""
        seen: Found = {"steps": needs["steps"]}
        try:
            ranks = self.run("bits_job.py", name, ranks=needs["ranks"])
        except JobError as error:
            return seen | {"failed": str(error)}
        seen["modes"] = ranks[0][name]
        for other in ranks[1:]:
            for mode, one in other[name].items():
                if one["digest"] != seen["modes"][mode]["digest"]:
                    seen["modes"][mode]["error"] = "the ranks differ"
        if needs["ranks"] == 1 and seen["modes"]["plain"]["peak_bytes"] >= LEAST_PEAK_MB * MIB:
            seen["modes"]["auto"] = self._under_a_limit(name, seen["modes"]["plain"])
        return seen

    def _under_a_limit(self, name: str, plain: Found) -> Found:
        held = plain["held_bytes"]
        limit = int((held + LIMIT_SHARE * (plain["peak_bytes"] - held)) / MIB) + 1
        environ = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit)}
        try:
            found = self.run("bits_job.py", "--modes", "auto", name, **environ)
        except JobError as error:
            return {"limit_mb": limit, "no_room": str(error)}
        return {"limit_mb": limit, **found[0][name]["auto"]}


def main() -> int:
    """Run what is asked for and not there yet, and print the table; 1 where something differs."""
    options = _parse(sys.argv[1:])
    path = Path(options.out) if options.out else None
    entries: list[Found] = read_document(path).get(PART, []) if path else []
    if options.what == "run":
        version = _tensorflow(options.python)
        for keras in options.keras or _kerases(version):
            jobs = Jobs(options.python, keras, options.case_seconds)
            for entry in _measure(jobs, version, entries, options):
                entries.append(entry)
                if path:
                    write_part(path, PART, entries)
    print(render(entries))
    wrong = [line for entry in entries for line in faults(entry)]
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="file of the JSON document; what it holds is not run again")
    parser.add_argument("--what", choices=("run", "table"), default="run")
    parser.add_argument("--keras", nargs="+", choices=("3", "2"), help="default: all that there are")
    parser.add_argument("--cases", nargs="*", help="default: all")
    parser.add_argument("--random", type=int, default=1000, help="random graphs under each policy")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the jobs")
    parser.add_argument("--case-seconds", type=float, default=3600.0, help="most that a process may take")
    return parser.parse_args(argv)


def _tensorflow(python: str) -> str:
    code = "import importlib.metadata; print(importlib.metadata.version('tensorflow'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _kerases(version: str) -> tuple[str, ...]:
    """``2`` is tf_keras, and the only one of TensorFlow 2.15."""
    return ("2",) if version.startswith("2.15") else ("3", "2")


def _measure(jobs: Jobs, version: str, entries: list[Found], options: argparse.Namespace) -> Iterator[Found]:
    """Give an entry for each case and each part of the random graphs that is not there yet."""
    who = {"tensorflow": version, "keras": jobs.keras}
    there = {(one["tensorflow"], one["keras"], one["case"]) for one in entries}
    cases = jobs.run("bits_job.py", "--list")[0]
    for name, needs in cases.items():
        if (version, jobs.keras, name) not in there and (not options.cases or name in options.cases):
            say(f"{name}, Keras {jobs.keras}")
            yield {**who, "case": name, **jobs.case(name, needs)}
    if options.cases or jobs.keras != "3" and "3" in (options.keras or _kerases(version)):
        return  # random graphs use no Keras
    for policy in ("all", "budget"):
        for first in range(0, options.random, CHUNK):
            count = min(CHUNK, options.random - first)
            name = f"random {policy} {first} to {first + count - 1}"
            if (version, jobs.keras, name) not in there:
                say(name)
                yield {**who, "case": name, **_random(jobs, first, count, policy)}


def _random(jobs: Jobs, first: int, count: int, policy: str) -> Found:
    try:
        return {"random": jobs.run("random_graphs_job.py", str(first), str(count), policy)[0]}
    except JobError as error:
        return {"failed": str(error)}


def faults(entry: Found) -> Iterator[str]:
    """One line for each thing that is wrong."""
    who = f"{entry['case']}, TensorFlow {entry['tensorflow']}, Keras {entry['keras']}"
    if "failed" in entry:
        yield f"{who}: {entry['failed']}"
    elif "random" in entry:
        yield from (f"{who}: seed {seed} differs by {far}" for seed, far in entry["random"]["differ"].items())
        yield from (f"{who}: seed {seed}: {text}" for seed, text in entry["random"]["failed"].items())
    else:
        yield from (
            f"{who}, {mode}: {_verdict(entry, mode)}" for mode in entry["modes"] if _is_wrong(entry, mode)
        )


def _is_wrong(entry: Found, mode: str) -> bool:
    return _verdict(entry, mode) not in ("same", "no room", "")


def _verdict(entry: Found, mode: str) -> str:
    one = entry["modes"].get(mode)
    if one is None:
        return ""
    if "no_room" in one:
        return "no room"
    if "error" in one:
        is_full = mode == "auto" and str(one["error"]).startswith("ResourceExhaustedError")
        return "no room" if is_full else str(one["error"])
    return "same" if one["digest"] == entry["modes"]["plain"]["digest"] else "other bits"


def render(entries: Sequence[Found]) -> str:
    """Render the table, in Markdown; the ``keras.applications`` and the random graphs are a line each."""
    head = (
        "| TensorFlow, Keras | case | steps | `all` | tensors | peak, MiB: without, planned, measured | "
        "`budget` | tensors | `auto` under a limit | tensors |"
    )
    lines = [head, "| --- " * head.count(" | ") + "| --- |"]
    single = [one for one in entries if "modes" in one and not one["case"].startswith(APPLICATIONS)]
    lines += [_row(one) for one in single]
    return "\n".join([*lines, "", *_applications(entries), *_random_lines(entries)])


def _beside(mode: Found, name: str) -> int | None:
    """Return a peak without what lay there before: Keras keeps models of earlier runs in the process."""
    peak = mode.get(name)
    return None if peak is None else int(peak) - int(mode.get("before_bytes", 0))


def _row(entry: Found) -> str:
    modes = entry["modes"]
    most, some, auto = (modes.get(mode, {}) for mode in ("all", "budget", "auto"))
    plain = modes["plain"]
    peaks = [
        _beside(plain, "peak_bytes"),
        *(_beside(most, name) for name in ("planned_peak_bytes", "measured_peak_bytes")),
    ]
    cells = [
        *(f"{entry['tensorflow']}, {entry['keras']}", entry["case"], entry["steps"]),
        *(_verdict(entry, "all"), most.get("tensors", "")),
        ", ".join("-" if peak is None else f"{peak / MIB:.1f}" for peak in peaks),
        *(_verdict(entry, "budget"), some.get("tensors", "")),
        f"{_verdict(entry, 'auto')} ({auto['limit_mb']} MiB)" if auto else "",
        auto.get("tensors", ""),
    ]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _applications(entries: Sequence[Found]) -> Iterator[str]:
    """Yield a line per Keras: how many are the same, and which are not."""
    ours = [one for one in entries if one["case"].startswith(APPLICATIONS)]
    for who in sorted({(one["tensorflow"], one["keras"]) for one in ours}):
        some = [one for one in ours if (one["tensorflow"], one["keras"]) == who]
        wrong = [one["case"].removeprefix(APPLICATIONS) for one in some if any(faults(one))]
        told = f"; not {', '.join(wrong)}" if wrong else ""
        yield (
            f"`keras.applications`, TensorFlow {who[0]}, Keras {who[1]}: "
            f"{len(some) - len(wrong)} of {len(some)} the same{told}"
        )


def _random_lines(entries: Sequence[Found]) -> Iterator[str]:
    """Yield a line per policy."""
    ours = [one for one in entries if "random" in one]
    for version, policy in sorted({(one["tensorflow"], one["random"]["policy"]) for one in ours}):
        some = [
            one["random"] for one in ours if (one["tensorflow"], one["random"]["policy"]) == (version, policy)
        ]
        differ, failed, chance = (
            sum(len(one[key]) for one in some) for key in ("differ", "failed", "left to chance")
        )
        trained, tensors = (sum(one[key] for one in some) for key in ("count", "tensors"))
        yield (
            f"random graphs, TensorFlow {version}, `{policy}`: {trained:,} trained, "
            f"{tensors:,} tensors swapped, {differ} differ, {failed} failed, "
            f"{chance} differ where TensorFlow leaves the order of a sum open"
        )


if __name__ == "__main__":
    sys.exit(main())
