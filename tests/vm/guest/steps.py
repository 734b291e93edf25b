"""Runs in the guest: the commands of ``steps.json`` in order; prints what came of each as JSON.

On standard error it says every few seconds that the guest is alive, and which command runs.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

BEAT_S = 2.0
STEP_S = 240
"""A step takes 1 to 10 s, on a busy machine a few times that."""
TIMED_OUT = 124
"""The exit code of a step that was stopped, as of ``timeout``."""


def main() -> None:
    running = "up"

    def beat() -> None:
        while True:
            print(f"numa-guest: {running}", file=sys.stderr, flush=True)
            time.sleep(BEAT_S)

    threading.Thread(target=beat, daemon=True).start()
    results = {}
    for name, argv in json.loads(Path(sys.argv[1]).read_text()).items():
        running = name
        began = time.monotonic()
        results[name] = {**outcome(argv), "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(results))


def outcome(argv: list[str]) -> dict[str, object]:
    """Run a step, which has its time; return its exit code and what it said."""
    try:
        done = subprocess.run(  # noqa: S603 - the test's own commands
            argv, capture_output=True, text=True, check=False, errors="replace", timeout=STEP_S
        )
    except subprocess.TimeoutExpired as late:
        said = [(text or b"").decode(errors="replace") for text in (late.stdout, late.stderr)]
        return {"code": TIMED_OUT, "out": said[0], "err": f"{said[1]}\nstopped after {STEP_S} s"}
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


main()
