"""A rank for tests: does what its arguments say, ``[RANK:]ACTION[=VALUE]``, except those of other ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]
FOLDER = Path(os.environ["STUB_FOLDER"])


def ready() -> None:
    (FOLDER / f"ready-{RANK}").touch()


def ignore(name: str) -> None:
    signal.signal(signal.Signals[name], signal.SIG_IGN)


def exit_on(text: str) -> None:
    """``SIGTERM/9``: exit with 9 on SIGTERM."""
    name, _, code = text.partition("/")
    signal.signal(signal.Signals[name], lambda *_: os._exit(int(code)))


def die(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


def daemon() -> None:
    """Children of three kinds: in this group, in their own session, and a daemon that ignores SIGTERM."""
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "601"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (FOLDER / f"daemon-{RANK}").touch()
            time.sleep(600)
        os._exit(0)
    while not (FOLDER / f"daemon-{RANK}").exists():
        time.sleep(0.01)


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def say(text: str) -> None:
    sys.stdout.buffer.write(text.encode().decode("unicode_escape").encode("latin-1"))
    sys.stdout.buffer.flush()


def complain(text: str) -> None:
    os.write(2, text.encode() + b"\n")


def lose_binding() -> None:
    """What a rank leaves after hvd.init() when a library has reset its CPU mask."""
    content = {"rank": int(RANK), "cpus": "0-4095", "mem_policy": "none", "mem_nodes": ""}
    target = Path(os.environ["LMSRUN_RECEIPT_DIR"], f"rank-{RANK}.init.json")
    draft = target.with_name(f".draft-{RANK}")
    draft.write_text(json.dumps(content))
    draft.rename(target)


def flood(text: str) -> None:
    """``COUNT/LENGTH`` lines, each of one letter."""
    count, length = map(int, text.split("/"))
    letter = "ab"[int(RANK) % 2]
    for number in range(count):
        sys.stdout.write(f"{number} {letter * length}\n")
    sys.stdout.flush()


def show() -> None:
    """The variables of a rank, and what its standard input is."""
    wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "HOROVOD_CONTROLLER")
    print(" ".join(f"{name}={os.environ[name]}" for name in wanted))
    print("stdin", os.readlink("/proc/self/fd/0"), "port", os.environ["MASTER_PORT"].isdigit())
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("signals", default, signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)


ACTIONS = {
    "ready": ready,
    "ignore": ignore,
    "exit_on": exit_on,
    "die": die,
    "daemon": daemon,
    "wait_for": wait_for,
    "say": say,
    "complain": complain,
    "flood": flood,
    "lose_binding": lose_binding,
    "show": show,
    "sleep": lambda text: time.sleep(float(text)),
    "exit": lambda text: sys.exit(int(text)),
}

for argument in sys.argv[1:]:
    who, colon, action = argument.partition(":")
    if not (colon and who.isdigit()):
        who, action = RANK, argument
    name, equals, value = action.partition("=")
    if who == RANK:
        ACTIONS[name](*([value] if equals else []))
