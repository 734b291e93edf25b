"""The table of Large Model Support on a CUDA machine: models of full size under a memory limit.

    python bench/gpu_lms.py                          # all models, 8 GiB of the first GPU
    python bench/gpu_lms.py --limit-gib 14 --out gpu.json
    python bench/gpu_lms.py --quick                  # two models, 2 GiB
    python bench/gpu_lms.py --tf-keras               # tf_keras, whose normalisation is one op
    python bench/gpu_lms.py --device cpu --quick     # without a GPU: checks this script, measures nothing

For each model: the largest batch (or picture) without LMS and with each policy, seconds an image (or pixel,
or voxel) relative to no LMS at the largest that fits without it, the peak against the plan, the bytes that a
step moves, as planned and as TensorFlow's profiler saw them, and how much of the copying was hidden behind
compute. XLA is off throughout, because no swap survives it.
Each case is a child process, 20 to 40 of them a model; at half a minute each (an estimate) that is a quarter
of an hour. The JSON is written after each model. Nobody else may use the GPU meanwhile: what they leave no
room for counts as not fitting. ``docs/measurements.md`` says where this has been run.
"""

import argparse
import json
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from lms_case import CPU, GPU, MIB, Case  # noqa: E402
from lms_children import CaseError, Found, Runner, largest, line_meets, say, table  # noqa: E402
from models import FULL_LIMIT_MB, ZOOS, Model  # noqa: E402

POLICIES = ("all", "auto", "threshold")
PROBES = (2, 4)
"""Two small sizes; the line through their planned peaks says where the search begins."""
SMALLER = 0.95
"""Of a size that fitted for two steps and not for all that are timed."""
MOST_UNITS = 1 << 30
"""More than any search tries."""
QUICK_MODELS = ("resnet50", "unet3d-size")
QUICK_LIMIT_MB, TINY_LIMIT_MB = 2048, 32
CHECK = "CPU: a check of the script, no measurement"
GPU_NAMES = """
import json, tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
names = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
print(json.dumps({"tensorflow": tf.__version__, "cuda": tf.test.is_built_with_cuda(), "gpus": names}))
"""


@dataclass(frozen=True)
class Setting:
    """What all models have in common."""

    device: str
    limit_mb: int
    zoo: str
    models: tuple[str, ...]
    policies: tuple[str, ...]
    timed_steps: int
    copy_mb: int
    tolerance: float
    """Of the search for the largest, in units."""


def main() -> int:
    """Find the device, measure its copies and every model, print the table."""
    options = _parse(sys.argv[1:])
    if options.device == "cpu" and not options.quick:
        return _refuse("found --device cpu; models of full size need a GPU; try --device cpu --quick")
    try:
        machine = read_machine(sys.executable)
    except CaseError as error:
        return _refuse(str(error))
    if options.device == "gpu" and not machine["gpus"]:
        built = "with" if machine["cuda"] else "without"
        version = machine["tensorflow"]
        return _refuse(
            f"found no GPU (TensorFlow {version}, built {built} CUDA); needed one CUDA GPU that it sees; "
            "try nvidia-smi, pip install 'tensorflow[and-cuda]', or --device cpu --quick"
        )
    out = Path(options.out) if options.out else None
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)

    def save(document: Found) -> None:
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    try:
        runner = Runner(legacy_keras=options.tf_keras, timeout_s=options.case_seconds)
        document = measure(_setting(options), runner, machine, save)
    except CaseError as error:
        return _refuse(str(error))
    print(render(document))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=ZOOS["full"], help="default: all")
    parser.add_argument("--limit-gib", type=float, help=f"default: {FULL_LIMIT_MB / 1024:g}")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tf-keras", action="store_true", help="tf_keras in place of Keras 3")
    parser.add_argument("--quick", action="store_true", help="two models, less memory, fewer steps")
    parser.add_argument("--case-seconds", type=float, default=1800.0, help="most that a case may take")
    parser.add_argument("--out", help="file for the JSON document")
    return parser.parse_args(argv)


def _refuse(why: str) -> int:
    print(f"gpu_lms: {why}", file=sys.stderr)
    return 2


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
    if options.device == "cpu":
        return Setting(CPU, TINY_LIMIT_MB, "tiny", tuple(ZOOS["tiny"]), ("all",), 3, 4, tolerance=2.0)
    if options.quick:
        setting = Setting(GPU, QUICK_LIMIT_MB, "full", QUICK_MODELS, POLICIES, 4, 256, tolerance=0.1)
    else:
        setting = Setting(GPU, FULL_LIMIT_MB, "full", tuple(ZOOS["full"]), POLICIES, 8, 256, tolerance=0.03)
    if options.limit_gib:
        setting = replace(setting, limit_mb=int(options.limit_gib * 1024))
    return replace(setting, models=tuple(options.models)) if options.models else setting


def measure(setting: Setting, runner: Runner, machine: Found, save: Callable[[Found], None]) -> Found:
    """Everything, saved after each model; what goes wrong with one is recorded, and the next comes."""
    copies = runner.run(_case(setting, setting.models[0], copy_mb=setting.copy_mb))
    results: list[Found] = []
    document = {
        "schema": "lmsrun.bench-gpu/1",
        "what": CHECK if setting.device == CPU else ", ".join(machine["gpus"][:1]),
        "machine": machine,
        "device": setting.device,
        "limit_mb": setting.limit_mb,
        "copies": copies,
        "results": results,
    }
    for name in setting.models:
        try:
            results.append(Bench(setting, runner, name).measure(copies))
        except CaseError as error:
            say(str(error))
            results.append({"model": name, "error": str(error)})
        save(document)
    return document


def _case(setting: Setting, model: str, **more: Any) -> Case:
    return Case(setting.zoo, model, limit_mb=setting.limit_mb, device=setting.device, **more)


@dataclass(frozen=True)
class Bench:
    """One model under the limit."""

    setting: Setting
    runner: Runner
    name: str

    @property
    def model(self) -> Model:
        """Its description."""
        return ZOOS[self.setting.zoo][self.name]

    def run(self, policy: str, units: int) -> Found | None:
        """Two steps, to see whether so much fits."""
        return self.runner.run(_case(self.setting, self.name, units=units, policy=policy, steps=2))

    def timed(self, policy: str, units: int) -> Found | None:
        """More steps, the last ones under the profiler, with the seconds an image."""
        case = _case(self.setting, self.name, units=units, policy=policy)
        found = self.runner.run(replace(case, steps=self.setting.timed_steps, trace_steps=2))
        if found is not None:
            found["amount"] = self.model.amount(units)
            found["step_s"] = median(found["steps_s"][1:])
        return found

    def _lasting(self, policy: str, units: int) -> tuple[int, Found]:
        """Find the largest size to time: what fits for two steps at the limit need not fit for more.

        Raises:
            CaseError: If no size fits that long.
        """
        while units:
            if (found := self.timed(policy, units)) is not None:
                return units, found
            units = int(units * SMALLER)
        raise CaseError(f"{self.name}: nothing that fitted for two steps fits for more")

    def measure(self, copies: Found | None) -> Found:
        """Measure the largest sizes first, then times and traces.

        Raises:
            CaseError: If the smallest size does not fit, or a case fails for another reason than memory.
        """
        small, more = (self.run("all", units) for units in PROBES)
        if small is None or more is None:
            raise CaseError(f"{self.name}: {PROBES[1]} units do not fit even with LMS; raise --limit-gib")
        most = {"off": self._largest("off", self._guess(small, more, "peak_before_bytes"))}
        guess = max(most["off"], int(0.95 * self._guess(small, more, "planned_peak_bytes")))
        for policy in self.setting.policies:
            most[policy] = guess = self._largest(policy, guess)
        most["off"], base = self._lasting("off", most["off"])
        twice = self._units(2 * self.model.amount(most["off"]))
        runs: dict[str, Found | None] = {}
        for policy in self.setting.policies:
            runs[f"{policy} at 2x"] = self.timed(policy, twice)
            most[policy], runs[f"{policy} at most"] = self._lasting(policy, most[policy])
        for found in filter(None, runs.values()):
            found["time_ratio"] = (found["step_s"] / found["amount"]) / (base["step_s"] / base["amount"])
            found["hidden_by_time"] = hidden_by_time(found, base, copies)
        amounts = {policy: self.model.amount(units) for policy, units in most.items()}
        return {
            "model": self.name,
            "unit": self.model.unit,
            "target": self.model.target,
            "most": most,
            "multiple": max(amounts.values()) / amounts["off"],
            "without": base,
            "runs": runs,
        }

    def _largest(self, policy: str, guess: int) -> int:
        found = largest(lambda units: self.run(policy, units), guess, self.setting.tolerance)
        return int(found["units"])

    def _guess(self, one: Found, other: Found, peak: str) -> int:
        points = ((self.model.amount(found["units"]), found[peak]) for found in (one, other))
        return self._units(line_meets(self.setting.limit_mb * MIB, *points))

    def _units(self, amount: float) -> int:
        """Find the most units that are no more than the amount; at least one."""
        return max(1, bisect_right(range(1, MOST_UNITS), amount, key=self.model.amount))


def hidden_by_time(found: Found, base: Found, copies: Found | None) -> float | None:
    """Compute the share of the copies' time that a step does not take longer for them.

    ``(compute alone + copies alone - step) / copies alone``: compute alone is the step without LMS, scaled to
    the size; copies alone are the bytes of the plan at the rates that were measured for each way. It needs no
    trace, but it counts what swapping else costs (order, smaller overlap of kernels) as copies that wait.
    """
    if copies is None or not copies["in_bytes_per_s"]:
        return None
    compute_s = base["step_s"] / base["amount"] * found["amount"]
    copies_s = found["bytes_out"] / copies["out_bytes_per_s"] + found["bytes_in"] / copies["in_bytes_per_s"]
    return (compute_s + copies_s - found["step_s"]) / copies_s if copies_s else None


HEADINGS = (
    "model",
    "policy",
    "units",
    "multiple",
    "goal",
    "time",
    "peak error",
    "GiB planned out/in",
    "GiB traced out/in",
    "hidden, trace",
    "hidden, times",
)

FOOTNOTE = (
    "time: a unit, against no LMS at its largest; peaks: from the second step on; traced bytes hold the "
    "training data, too ('-': the profiler saw no GPU, for which it may lack the rights)"
)


def render(document: Found) -> str:
    """Render the document as text."""
    device = document["what"]
    lines = [f"{device}; limit {document['limit_mb']} MiB, TensorFlow {document['machine']['tensorflow']}"]
    copies = document["copies"]
    if copies is not None:
        rates = (copies[f"{way}_bytes_per_s"] for way in ("out", "in", "both"))
        out, back, both = ("-" if rate is None else f"{rate / 1e9:.1f}" for rate in rates)
        lines.append(f"copies ({copies['transport']}): {out} GB/s out, {back} in, {both} both at once")
    rows = [row for result in document["results"] for row in _rows(result)]
    return "\n".join(
        [
            *lines,
            table([HEADINGS, *rows]),
            FOOTNOTE,
        ]
    )


def _rows(result: Found) -> list[tuple[str, ...]]:
    if "error" in result:
        return [(result["model"], result["error"].splitlines()[0], *[""] * (len(HEADINGS) - 2))]
    base = result["without"]
    first = (result["model"], "none", str(base["units"]), "1.0x", *["-"] * (len(HEADINGS) - 4))
    return [first, *(_row(result, name, found) for name, found in result["runs"].items())]


def _row(result: Found, name: str, found: Found | None) -> tuple[str, ...]:
    target = "-" if result["target"] is None else f"{result['target']:g}x"
    if found is None:
        return ("", name, "does not fit", "", target, *[""] * (len(HEADINGS) - 5))
    trace = found["trace"]
    seen = [trace[f"bytes_{way}"] / trace["steps"] for way in ("out", "in")] if trace else [0.0, 0.0]
    return (
        "",
        name,
        str(found["units"]),
        f"{found['amount'] / result['without']['amount']:.1f}x",
        target,
        f"{found['time_ratio']:.2f}",
        f"{found['measured_peak_bytes'] / found['planned_peak_bytes'] - 1:+.1%}",
        _gib(found["bytes_out"], found["bytes_in"]),
        _gib(*seen),
        _share(trace["share"] if trace else None),
        _share(found["hidden_by_time"]),
    )


def _gib(out: float, back: float) -> str:
    return f"{out / 2**30:.2f} / {back / 2**30:.2f}" if out or back else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    sys.exit(main())
