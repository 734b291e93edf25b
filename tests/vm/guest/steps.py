"""Runs in the guest: the commands of ``steps.json`` in order; prints what came of each as JSON."""

import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    print("numa-guest: up", file=sys.stderr, flush=True)
    results = {}
    for name, argv in json.loads(Path(sys.argv[1]).read_text()).items():
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603
        results[name] = {
            "code": done.returncode,
            "out": done.stdout,
            "err": done.stderr,
            "seconds": round(time.monotonic() - began, 1),
        }
    print(json.dumps(results))


main()
