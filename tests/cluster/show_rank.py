"""A rank that writes down what reached it: ``show_rank.py OUT EXIT... ARGS``; then ends as it is told.

``OUT`` is a folder; ``how`` is ``ok``, or ``exit:RANK:CODE`` or ``kill:RANK:SIGNAL`` (the others wait).
"""

import json
import os
import sys
import time

rank = os.environ["RANK"]
out, how, *args = sys.argv[1:]
record = {
    "argv": args,
    "env": {name: value for name, value in os.environ.items() if name.startswith(("T_", "LMS_", "MASTER_"))},
    "secrets": sorted(name for name in os.environ if "SECRET" in name or "VISIBLE" in name),
    "cpus": sorted(os.sched_getaffinity(0)),
    "cwd": os.getcwd(),
    "pid": os.getpid(),
    "sizes": [os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
}
draft = os.path.join(out, f".rank-{rank}")
with open(draft, "w") as file:
    json.dump(record, file)
os.rename(draft, os.path.join(out, f"rank-{rank}.json"))
print("rank", rank, "is here", flush=True)

kind, _, rest = how.partition(":")
if kind != "ok":
    who, _, what = rest.partition(":")
    if rank == who:
        # What this rank does ends the others, which shall have told first.
        everyone = [os.path.join(out, f"rank-{each}.json") for each in range(int(os.environ["WORLD_SIZE"]))]
        for _ in range(600):
            if all(map(os.path.exists, everyone)):
                break
            time.sleep(0.05)
        if kind == "kill":
            os.kill(os.getpid(), int(what))
        sys.exit(int(what))
    time.sleep(60)
