"""``lms.profile()``: times that were measured, kept, checked and used."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from child_job import run_job

from lms.ir.graph import Graph, GraphBuilder
from lms.ir.liveness import Buffers
from lms.planner.recomputation import Repeats, recompute
from lms.profiling.store import MOST_SECONDS, ProfileError, Profiles, profile_folder, read_profile
from lms.simulate.cost_model import Costs

MACHINE = ("CPU:0", "a processor")


def small(nbytes: int = 1024, name: str = "relu") -> Graph:
    build = GraphBuilder()
    (x,) = build.add("x", "MatMul", outputs=[nbytes])
    (y,) = build.add(name, "Relu", inputs=[x], outputs=[nbytes])
    (z,) = build.add("gradient_tape/first", "Op", inputs=[y], outputs=[nbytes])
    (w,) = build.add("gradient_tape/second", "Op", inputs=[z, y], outputs=[nbytes])
    return build.build([w])


def profiles(folder: Path | None, *machine: str) -> tuple[Profiles, list[str]]:
    told: list[str] = []
    return Profiles(folder, machine or MACHINE, told.append), told


def test_what_was_kept_is_found_for_the_same_graph_and_machine_only(tmp_path: Path) -> None:
    mine, told = profiles(tmp_path / "new")
    assert mine.find(small()) == {}
    path = mine.keep(small(), {"x": 0.25, "relu": 1e-6})
    assert path.parent == tmp_path / "new" and path.stat().st_mode & 0o077 == 0
    assert mine.find(small()) == {"x": 0.25, "relu": 1e-6}
    assert mine.find(small(2048)) == {} and mine.find(small(name="relu_1")) == {}
    assert profiles(tmp_path / "new", "CPU:0", "another")[0].find(small()) == {}
    assert not told


def test_measured_times_go_before_estimates_and_hold_for_repeated_ops() -> None:
    graph = small()
    repeats = Repeats(Buffers.of(graph), 1)
    made = recompute(repeats, [graph.ops[1].outputs[0]]).graph
    costs = Costs(profile_s={"x": 0.25, "relu": 0.5})
    seconds = dict(zip([op.name for op in made.ops], costs.op_seconds(made), strict=True))
    assert seconds["x"] == 0.25 and seconds["relu"] == seconds["relu/again"] == 0.5
    assert seconds["gradient_tape/first"] == Costs().op_seconds(graph)[2]


GOOD = {"version": 1, "seconds": {"relu": 0.5}}
BAD: dict[str, Any] = {
    "no json": b"{",
    "deep": b"[" * 100_000,
    "not text": b"\xff\xfe",
    "a list": [],
    "another version": {**GOOD, "version": 2},
    "no times": {"version": 1, "seconds": {}},
    "a list of times": {"version": 1, "seconds": [1.0]},
    "text": {"version": 1, "seconds": {"relu": "1.0"}},
    "a truth": {"version": 1, "seconds": {"relu": True}},
    "negative": {"version": 1, "seconds": {"relu": -1.0}},
    "infinite": {"version": 1, "seconds": {"relu": math.inf}},
    "no number": {"version": 1, "seconds": {"relu": math.nan}},
    "huge whole number": b'{"version": 1, "seconds": {"relu": 1' + b"0" * 400 + b"}}",
    "for ever": {"version": 1, "seconds": {"relu": 2 * MOST_SECONDS}},
    "a long name": {"version": 1, "seconds": {"r" * 10_000: 1.0}},
    "many ops": {"version": 1, "seconds": {str(number): 1.0 for number in range(200_001)}},
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_file_is_not_used_and_said(bad: str, tmp_path: Path) -> None:
    mine, told = profiles(tmp_path)
    path = mine.keep(small(), {"relu": 1.0})
    path.write_bytes(BAD[bad] if isinstance(BAD[bad], bytes) else json.dumps(BAD[bad]).encode())
    assert mine.find(small()) == {}
    assert len(told) == 1 and str(path) in told[0] and "\n" not in told[0]


def test_what_others_could_have_written_is_not_read(tmp_path: Path) -> None:
    mine, _ = profiles(tmp_path)
    path = mine.keep(small(), {"relu": 1.0})
    path.chmod(0o620)
    with pytest.raises(ProfileError, match="other users"):
        read_profile(path)
    path.chmod(0o600)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        read_profile(link)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="no file"):
        read_profile(tmp_path / "pipe")


def test_a_profile_that_cannot_be_kept_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="LMS_CACHE"):
        profiles(tmp_path / "file")[0].keep(small(), {"relu": 1.0})
    with pytest.raises(ProfileError, match="LMS_CACHE"):
        profiles(None)[0].keep(small(), {"relu": 1.0})


def test_where_profiles_lie() -> None:
    assert profile_folder({"LMS_CACHE": "/c"}) == Path("/c/profiles")
    assert profile_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/lmsrun/profiles")
    assert profile_folder({"HOME": "/h"}) == Path("/h/.cache/lmsrun/profiles")


@pytest.mark.tensorflow
def test_a_profile_serves_later_processes_and_changes_no_bit(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    cache = {"LMS_CACHE": str(tmp_path)}
    plain = run_job("profile_job.py", "plain", **cache)
    first = run_job("profile_job.py", "profile", "all", **cache)
    later = run_job("profile_job.py", "run", "all", **cache)
    assert plain["losses"] == first["losses"] == later["losses"]
    assert first["measured_ops"] == [0] and "times           estimated" in first["report"]
    assert later["measured_ops"][0] > 50 and "times           measured, of " in later["report"]
    assert len(first["files"]) == 1 and first["files"][0] in first["text"]
    assert first["warnings"] == later["warnings"] == []
    Path(first["files"][0]).write_text("{}")
    spoilt = run_job("profile_job.py", "run", "all", **cache)
    assert spoilt["losses"] == plain["losses"] and spoilt["measured_ops"] == [0]
    assert len(spoilt["warnings"]) == 1 and "is not used" in spoilt["warnings"][0]


@pytest.mark.tensorflow
def test_what_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    found = run_job("profile_job.py", "refused", LMS_CACHE=str(tmp_path))
    assert "lms.enable()" in found["off"]
    assert "no training step ran" in found["nothing"]
