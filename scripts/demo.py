"""``make demo``: a batch that does not fit into the memory of its device, and does with Large Model Support.

Two bound Horovod ranks learn handwritten digits, first without Large Model Support and then with it. Their
devices are TensorFlow's CPU device under a hard limit, so that all machines show the same. Its words
go to log files. The exit code is 0 only if the first run ran out of memory and the second one learned.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lmsrun.wheels.build_horovod import progress  # noqa: E402 - behind the path

OUTPUT = ROOT / "out" / "demo"
LIMIT_MIB = 20
"""Without Large Model Support the step needs 24, with it 13 to 17."""
EPOCHS = 16
PROGRAM = (
    "examples/train_digits.py",
    *("--convolutions", "6", "--batch-size", "360", "--epochs", str(EPOCHS), "--learning-rate", "0.004"),
)
# Two ranks are the point here, also where there is only one GPU or core.
JOB = ("run", "-np", "2", "--oversubscribe", "--gpus", "none")
ENVIRON = {
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MIB),
    "TF_ENABLE_ONEDNN_OPTS": "1",  # other kernels, on CPUs without VNNI, take 26 MiB of scratch
    "HOROVOD_FUSION_THRESHOLD": str(1 << 20),  # Horovod's buffer lies on the device, 64 MiB of it by default
    "TF_CPP_MIN_LOG_LEVEL": "0",  # the allocator says in the log what it could not give
}
WANTED = re.compile(r"ran out of memory trying to allocate ([\d.]+) *(\w+).*?requested by op (\S+)")
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: OOM|ResourceExhaustedError")
EPOCH = re.compile(r"Epoch (\d+)/\d+")


class DemoError(Exception):
    """One line for a person: what was found, what was needed, where to look."""


def run(name: str, *options: str) -> tuple[int, Path, float]:
    """Run the job with its output in a log; returns its exit code, its folder and its seconds."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    log = OUTPUT / f"{name}.log"
    folder = OUTPUT / name
    kept = ("--output-dir", str(folder), "--report", str(report_of(name)))
    argv = [sys.executable, "-m", "lmsrun", *JOB, *options, *kept, *PROGRAM]
    started = time.monotonic()
    with (
        log.open("w", encoding="utf-8") as out,
        progress("  epochs", sys.stdout.isatty()) as advance,
        subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **ENVIRON},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child,
    ):
        for line in child.stdout or ():
            out.write(line)
            # In a log the time that was said before is enough.
            if sys.stdout.isatty() and (found := EPOCH.search(line)):
                advance(100 * int(found[1]) // EPOCHS)
    return child.returncode, folder / "latest", time.monotonic() - started


def report_of(name: str) -> Path:
    """Name the page of a run."""
    return OUTPUT / f"{name}.html"


def what_was_lacking(folder: Path) -> str:
    """Find what the allocator of a rank could not give, by the ranks' own words.

    Raises:
        DemoError: If no rank says that memory ran out.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("rank-*.stderr")]
    for text in texts:
        if found := WANTED.search(text):
            return f"{found[1]} {found[2]} more were wanted by {found[3].rpartition('/')[2]}"
    if any(OUT_OF_MEMORY.search(text) for text in texts):
        return "an allocation failed"
    raise DemoError(f"the first run failed, but not for lack of memory; read {shown(folder)}")


def shown(path: Path) -> str:
    """Write a path as a person in the checkout writes it."""
    return str(path.relative_to(ROOT))


def fail_without() -> None:
    """Run without Large Model Support.

    Raises:
        DemoError: If it does not fail for lack of memory.
    """
    say("1 of 2: without Large Model Support (about half a minute; output: out/demo/without-lms.log)")
    code, folder, seconds = run("without-lms", "--no-lms")
    if code == 0:
        raise DemoError(
            f"the run without Large Model Support did not run out of {LIMIT_MIB} MiB, as it should; "
            "so this demo shows nothing here"
        )
    print(f"  out of memory: {what_was_lacking(folder)} (exit code {code}, {seconds:.0f} s)")


def succeed_with() -> None:
    """Run with Large Model Support, and show what came of it.

    Raises:
        DemoError: If that fails.
    """
    say("2 of 2: the same with Large Model Support (about half a minute; output: out/demo/with-lms.log)")
    code, folder, seconds = run("with-lms", "--lms")
    if code:
        raise DemoError(
            f"the run with Large Model Support failed with code {code}; read out/demo/with-lms.log"
        )
    lines = (folder / "rank-0.stdout").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line.startswith(("test accuracy", "Large Model Support")):
            print(f"  {line}")
    print(f"  learned in {seconds:.0f} s\n")
    from launch.receipts.judge import from_json
    from lmsrun.render.receipts import render_receipts

    receipts = folder / "receipts.json"
    print(render_receipts(from_json(json.loads(receipts.read_text(encoding="utf-8")))))
    print(f"\nreceipts: {shown(receipts)}")
    print(f"reports, for a browser: {shown(report_of('with-lms'))}, {shown(report_of('without-lms'))}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"demo: {text}", flush=True)


def main() -> int:
    """Show both runs; 1 with one line when one of them does not end as it should."""
    say(f"two Horovod ranks learn 1,797 scans of handwritten digits, each on a device of {LIMIT_MIB} MiB")
    try:
        fail_without()
        succeed_with()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
