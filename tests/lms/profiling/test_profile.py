"""``lms.profile()``: times that were measured, kept, checked and used."""

import json
import math
import os
from collections.abc import Mapping, Sequence
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
    for path in (None, tmp_path / "file", Path("/proc/1/nowhere")):
        with pytest.raises(ProfileError, match="LMS_CACHE"):
            profiles(path)[0].keep(small(), {"relu": 1.0})
        with pytest.raises(ProfileError, match="LMS_CACHE"):
            profiles(path)[0].prepare()


def test_where_profiles_lie() -> None:
    assert profile_folder({"LMS_CACHE": "/c"}) == Path("/c/profiles")
    assert profile_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/lmsrun/profiles")
    assert profile_folder({"HOME": "/h"}) == Path("/h/.cache/lmsrun/profiles")


HOST_PLANE, GPU_PLANE, MAIN_THREAD, COMPUTE, COPIES, BY_OP = 5, 7, 1, 14, 15, 0xFFFF_FFF0
NS = 1000
"""Picoseconds."""


def trace_of(
    calls: Mapping[str, Sequence[int]], kernels: Mapping[str, Sequence[tuple[int, int, int]]]
) -> bytes:
    """Build a trace: for each op when it is called, and line, begin and length of its kernels."""
    made: Any = pytest.importorskip("tensorflow.tsl.profiler.protobuf.trace_events_pb2").Trace()
    made.devices[HOST_PLANE].name = "/host:CPU"
    made.devices[HOST_PLANE].resources[MAIN_THREAD].name = "tf_main"
    made.devices[GPU_PLANE].name = "/device:GPU:0"
    for line, name in ((COMPUTE, "Stream #14(Compute)"), (COPIES, "Stream #15"), (BY_OP, "TensorFlow Ops")):
        made.devices[GPU_PLANE].resources[line].name = name
    for name, begins in calls.items():
        for begin in begins:
            event = made.trace_events.add(
                device_id=HOST_PLANE, resource_id=MAIN_THREAD, timestamp_ps=begin * NS
            )
            event.duration_ps = 3 * NS
            event.args["long_name"] = f"{name}:Op"
    for name, launched in kernels.items():
        for line, begin, length in launched:
            event = made.trace_events.add(device_id=GPU_PLANE, resource_id=line, timestamp_ps=begin * NS)
            event.name, event.duration_ps = "void kernel<float>(int)", length * NS
            event.args["tf_op"] = f"{name}:Op"
    return bytes(made.SerializeToString())


@pytest.mark.tensorflow
def test_a_gpu_s_times_are_those_of_its_kernels() -> None:
    op_trace = pytest.importorskip("lms.profiling.op_trace")
    steps = (0, 10_000, 20_000)
    data = trace_of(
        {"conv": steps, "reshape": steps, "late": steps[1:]},
        {
            # the first run tries algorithms, the second and the third launch two kernels and a copy
            "conv": [
                *((COMPUTE, 50 + 1600 * number, 1500) for number in range(5)),
                *((COMPUTE, step + 50, 100) for step in steps[1:]),
                *((COMPUTE, step + 160, 20) for step in steps[1:]),
                *((COPIES, step + 170, 5) for step in steps[1:]),
                *((BY_OP, step + 50, 130) for step in steps),
            ],
            **{name: [(COMPUTE, step + 300, 8) for step in steps] for name in ("relu", "bias")},
            "late": [(COMPUTE, 20_900, 7)],
            "elsewhere": [(COMPUTE, 30_000, 9)],
        },
    )
    kernels, calls = op_trace.kernels_of(data), op_trace.calls_of(data)
    names = ("conv", "relu", "bias", "reshape", "late")
    wanted = {"conv": 125e-9, "relu": 8e-9, "bias": 8e-9, "reshape": 0.0, "late": 0.0}
    assert op_trace.gpu_seconds(kernels, names) == wanted
    assert op_trace.cpu_seconds(calls, names) == {"conv": 3e-9, "reshape": 3e-9, "late": 3e-9}
    other_step = ("relu", *(f"op_{number}" for number in range(9)))
    assert (
        op_trace.gpu_seconds(kernels, other_step) == op_trace.cpu_seconds(calls, ("conv", *other_step)) == {}
    )
    assert op_trace.gpu_seconds(kernels, ("another",)) == op_trace.cpu_seconds(calls, ("another",)) == {}


@pytest.mark.tensorflow
def test_a_trace_without_a_gpu_s_kernels_is_refused() -> None:
    op_trace = pytest.importorskip("lms.profiling.op_trace")
    for kernels in ({}, {"conv": [(BY_OP, 50, 130)]}):
        with pytest.raises(ProfileError, match="no kernel of the GPU"):
            op_trace.kernels_of(trace_of({"conv": (0,)}, kernels))


@pytest.mark.tensorflow
def test_a_step_that_another_function_calls_is_found() -> None:
    """Keras has ``fit`` call the step, and TensorFlow puts it into its caller: its ops' names get longer."""
    op_trace = pytest.importorskip("lms.profiling.op_trace")
    calls = op_trace.calls_of(
        trace_of({"call/a/relu": (0, 9), "call/relu": (1, 8), "call_1/relu": (2,), "relu/x": (3,)}, {})
    )
    assert [*op_trace.cpu_seconds(calls, ("a/relu", "relu"))] == ["a/relu", "relu"]
    assert [*op_trace.cpu_seconds(calls, ("relu",))] == ["relu"]


CONV, RELU = "functional_1/conv2d_1/convolution", "functional_1/re_lu_1_2/Relu"
MEAN = "functional_1/batch_normalization_1/moments/mean"


@pytest.mark.tensorflow
def test_a_trace_of_an_h100_is_read() -> None:
    """It has some ops of two steps of ``tiny`` (``bench/models.py``) with 256 images, TensorFlow 2.21."""
    op_trace = pytest.importorskip("lms.profiling.op_trace")
    data = (Path(__file__).parent / "h100_trace.pb").read_bytes()
    kernels = op_trace.kernels_of(data)
    assert f"StatefulPartitionedCall/{CONV}/lms/0/swap_in_0" in kernels
    assert len(kernels[f"StatefulPartitionedCall/{CONV}"]) == 10
    found = op_trace.gpu_seconds(kernels, (CONV, RELU, MEAN, "functional_1/reshape"))
    assert found == {
        CONV: pytest.approx(65.9e-6, rel=1e-2),
        RELU: pytest.approx(4.16e-6, rel=1e-2),
        MEAN: pytest.approx(139e-6, rel=1e-2),
        "functional_1/reshape": 0.0,
    }


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
def test_steps_of_fit_are_profiled(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    found = run_job("profile_job.py", "keras", LMS_CACHE=str(tmp_path))
    assert "ops measured" in found["text"] and len(found["files"]) == 1


@pytest.mark.tensorflow
def test_only_what_ran_in_the_block_is_profiled(tmp_path: Path) -> None:
    """Two functions of one name have ops of the same names."""
    pytest.importorskip("tensorflow")
    found = run_job("profile_job.py", "cross", LMS_CACHE=str(tmp_path))
    assert all("ops measured" in text for text in found["texts"])


@pytest.mark.tensorflow
def test_what_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    found = run_job("profile_job.py", "refused", LMS_CACHE=str(tmp_path))
    assert "lms.enable()" in found["off"]
    assert "no training step ran" in found["nothing"]
    assert "set LMS_CACHE" in found["unwritable"] and found["began"] == ["nothing"]
