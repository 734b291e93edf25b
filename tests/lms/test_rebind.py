"""A rank that Horovod Elastic gives another place, with lmsrun's real planner and the real kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lms.bootstrap import lmsrun_rebind as rebind

ROOT = Path(__file__).resolve().parents[2]
SHIM = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "worker"]
CPUS = sorted(os.sched_getaffinity(0))
PROGRAM = """
import json, os, sys, threading
import horovod.tensorflow as hvd
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(3)]
for thread in threads:
    thread.start()
def look():
    masks = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_THREAD_AFFINITY")
    sees = {name: os.environ.get(name) for name in names}
    print(json.dumps({"cpus": sorted({tuple(sorted(mask)) for mask in masks}), "sees": sees}))
hvd.init()
look()
for place in map(str.split, sys.argv[1:]):
    names = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    os.environ.update(zip(names, place))
    hvd.init()
    look()
stop.set()
"""
SHOW_ENVIRON = """
import json, os
print(json.dumps({name: os.environ.get(name) for name in ("PYTHONPATH", "LD_PRELOAD", "HOROVOD_RANK")}))
"""


def start(folder: Path, *places: str) -> "list[dict[str, Any]]":
    """Run the program as rank 1 of 2 on this host, then in other places; what it saw in each."""
    (folder / "train.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LMS", "HOROVOD"))}
    own = {
        "PYTHONPATH": str(ROOT / "tests" / "fakes" / "ibm"),
        "LMSRUN_JOB_ID": "job",
        "LMSRUN_RECEIPT_DIR": str(folder),
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
    }
    argv = [*SHIM, "--", str(folder / "train.py"), *places]
    done = subprocess.run(
        argv, env={**inherited, **own}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def receipts(folder: Path) -> "list[dict[str, Any]]":
    paths = sorted(folder.glob("rank-*.moved.*.json"), key=lambda path: int(path.name.split(".")[3]))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_every_thread_goes_where_the_planner_says(tmp_path: Path) -> None:
    second, alone, first = start(tmp_path, "0 1 0 1", "0 2 0 2")
    assert len(second["cpus"]) == len(alone["cpus"]) == len(first["cpus"]) == 1
    assert set(alone["cpus"][0]) == set(CPUS), "the host's CPUs, not only those that this rank had"
    assert not set(first["cpus"][0]) & set(second["cpus"][0])
    assert list(alone["sees"].values()) == ["0", "0", "1", None], "a list of CPUs for two would be wrong now"
    started, left_alone, joined = receipts(tmp_path)
    assert started["rank"] == 1 and "was" not in started
    assert left_alone["was"] == {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2}
    assert left_alone["verified"] is joined["verified"] is True
    assert (left_alone["rank"], left_alone["pid"]) == (0, started["pid"])


def test_the_same_place_is_no_move(tmp_path: Path) -> None:
    before, after = start(tmp_path, "1 2 1 2")
    assert before == after
    assert len(receipts(tmp_path)) == 1


def test_a_planner_without_an_answer_leaves_the_binding_and_says_so(tmp_path: Path) -> None:
    before, after = start(tmp_path, "0 0 0 0")
    assert before["cpus"] == after["cpus"]
    moved = receipts(tmp_path)[1]
    assert moved["verified"] is False
    assert "the planner gave no answer, the binding stays (" in moved["reasons"][0]
    assert "needed a rank below the size" in moved["reasons"][0]


class Recorder(rebind.Kernel):
    """Notes what it is told, for this machine may have one node only."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def bind_threads(self, cpus: set[int]) -> None:
        self.calls.append(("cpus", cpus))

    def set_policy(self, policy: str, nodes: set[int]) -> None:
        self.calls.append((policy, nodes))

    def migrate(self, old: set[int], new: set[int]) -> str:
        self.calls.append((old, new))
        return "moved"


def test_pages_and_policy_follow_to_another_node() -> None:
    """Policy first, then the pages."""
    kernel = Recorder()
    notes: list[str] = []
    before = {"mem_policy": "bind", "mem_nodes": "0"}
    after = {"cpus": "", "mem_policy": "preferred", "mem_nodes": "8"}
    told = {"LMSRUN_REPLAN": json.dumps({"ask": [], "cpus": "0-3"})}
    assert rebind.apply(before, after, told, notes, kernel) == []
    assert kernel.calls == [("cpus", {0, 1, 2, 3}), ("preferred", {8}), ({0}, {8})]
    assert notes == ["threads that ran before keep their memory policy", "moved"]


def test_the_planner_is_no_rank() -> None:
    """Nothing that is put before the user's interpreter is put before lmsrun's."""
    told = json.dumps({"ask": [sys.executable, "-c", SHOW_ENVIRON], "cpus": "0"})
    environ = {
        "PATH": os.environ["PATH"],
        "LMSRUN_REPLAN": told,
        "LMSRUN_EXPECT": json.dumps({"PYTHONPATH": "", "LD_PRELOAD": "", "HOROVOD_RANK": ""}),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "lms" / "bootstrap"), "/users/own"]),
        "LD_PRELOAD": "libprofile-of-the-user.so",
    }
    place = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2}
    seen = rebind.ask_planner(place, environ)
    assert seen == {"PYTHONPATH": "/users/own", "LD_PRELOAD": None, "HOROVOD_RANK": "3"}


@pytest.mark.parametrize(("gloo", "limit_s"), [(None, 15), ("8", 4), ("soon", 15), ("9" * 50, 15)])
def test_a_planner_is_waited_for_half_as_long_as_peers_wait(gloo: "str | None", limit_s: float) -> None:
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": gloo} if gloo else {}
    assert rebind.ask_timeout_s(environ) == limit_s
