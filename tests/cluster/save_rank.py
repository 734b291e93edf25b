"""A rank that saves for some seconds when it is told to end: ``save_rank.py FOLDER SECONDS wait|fail``.

With ``fail`` rank 1 exits with 7 as soon as rank 0 is ready.
"""

import os
import signal
import sys
import time
from pathlib import Path

FOLDER, SECONDS, HOW = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "RANK", "SLURM_PROCID")
RANK = next(int(os.environ[name]) for name in NAMES if name in os.environ)


def save(number: int, _: object) -> None:
    print("saving", flush=True)
    time.sleep(SECONDS)
    (FOLDER / f"saved-{RANK}").write_text(str(number))
    sys.exit(0)


def note(number: int, _: object) -> None:
    (FOLDER / f"told-{RANK}-{number}").touch()


for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, signal.SIG_DFL if HOW == "die" else save)
for each in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, note)
(FOLDER / f"ready-{RANK}").touch()
while True:
    time.sleep(0.02)
    if HOW == "fail" and RANK == 1 and (FOLDER / "ready-0").exists():
        sys.exit(7)
