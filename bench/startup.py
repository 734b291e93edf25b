"""Start-up: time from the command to the first line of rank code, lmsrun against horovodrun and mpirun.

    python bench/startup.py [--repeat 10] [--ranks 2] [--json FILE]

The same script is started by each launcher in turn (so that the machine's mood hits all alike), and alone by
Python; a launcher's overhead is its median time less that. The script notes the clock on its first line and
imports nothing that Python has not loaded, so what is measured is the launcher.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """\
import os, time
first_line = time.clock_gettime(time.CLOCK_MONOTONIC)
with open(os.path.join(os.environ["STARTUP_FOLDER"], str(os.getpid())), "w") as note:
    note.write(repr(first_line))
"""
GOAL_OF_HOROVODRUN = 0.2
GOAL_BEYOND_MPIRUN_S = 0.15
_LIMIT_S = 120


def launchers(ranks: int, script: str) -> dict[str, list[str]]:
    """Build the command of each launcher that is here; ``python`` is the script alone."""
    tools = Path(sys.executable).parent
    found = {
        "python": [sys.executable, script],
        "lmsrun": [
            sys.executable,
            str(ROOT / "lmsrun" / "__main__.py"),
            "-np",
            str(ranks),
            "--oversubscribe",
            script,
        ],
    }
    horovodrun = tools / "horovodrun"
    if horovodrun.exists():
        found["horovodrun"] = [str(horovodrun), "--gloo", "-np", str(ranks), sys.executable, script]
    mpirun = shutil.which("mpirun")
    if mpirun:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        found["mpirun"] = [mpirun, *root, "--oversubscribe", "-np", str(ranks), sys.executable, script]
    return found


def measure(argv: list[str], ranks: int) -> float:
    """Seconds from the command to the last rank's first line.

    Raises:
        RuntimeError: If the command fails or a rank did not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "STARTUP_FOLDER": folder}
        # What is installed has its bytecode; compiling ours at every start would measure the compiler.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        begin = time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False
        )
        lines = [float(note.read_text()) for note in Path(folder).iterdir()]
    if done.returncode != 0 or len(lines) != ranks:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
        raise RuntimeError(
            f"{argv[0]} exits with {done.returncode}, {len(lines)} of {ranks} ranks ran: {said}"
        )
    return max(lines) - begin


def run(ranks: int, repeat: int) -> dict[str, list[float]]:
    """Time every launcher, interleaved; one round before is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_line.py"
        script.write_text(SCRIPT)
        commands = launchers(ranks, str(script))
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(repeat + 1):
            for name, argv in commands.items():
                took = measure(argv, 1 if name == "python" else ranks)
                if turn:
                    times[name].append(took)
    return times


def summarise(times: Mapping[str, list[float]]) -> dict[str, object]:
    """Medians, overheads beyond Python alone, and how lmsrun stands to its goals."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    overheads = {name: medians[name] - medians["python"] for name in medians if name != "python"}
    result: dict[str, object] = {"median_s": medians, "overhead_s": overheads, "times_s": dict(times)}
    ours = overheads["lmsrun"]
    if "horovodrun" in overheads:
        result["of_horovodrun"] = ours / overheads["horovodrun"]
        result["goal_of_horovodrun"] = GOAL_OF_HOROVODRUN
    if "mpirun" in overheads:
        result["beyond_mpirun_s"] = ours - overheads["mpirun"]
        result["goal_beyond_mpirun_s"] = GOAL_BEYOND_MPIRUN_S
    return result


def render(times: Mapping[str, list[float]], result: Mapping[str, object]) -> str:
    """Render the result as a table."""
    medians, overheads = result["median_s"], result["overhead_s"]
    assert isinstance(medians, dict) and isinstance(overheads, dict)
    lines = [f"{'':12}{'median s':>10}{'min s':>10}{'max s':>10}{'overhead s':>12}{'lmsrun = 1':>12}"]
    for name, values in times.items():
        over = overheads.get(name)
        columns = f"{medians[name]:10.3f}{min(values):10.3f}{max(values):10.3f}"
        if over is not None:
            columns += f"{over:12.3f}{over / overheads['lmsrun']:12.2f}"
        lines.append(f"{name:12}{columns}")
    if "of_horovodrun" in result:
        lines.append(
            f"lmsrun's overhead is {result['of_horovodrun']:.2f} of horovodrun's (goal: {GOAL_OF_HOROVODRUN})"
        )
    if "beyond_mpirun_s" in result:
        lines.append(
            f"and {result['beyond_mpirun_s']:+.3f} s against mpirun's (goal: +{GOAL_BEYOND_MPIRUN_S} s)"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = run(options.ranks, options.repeat)
    result = summarise(times)
    print(render(times, result))
    if options.json:
        options.json.write_text(
            json.dumps({"schema": "lmsrun.startup/1", "ranks": options.ranks, **result}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
