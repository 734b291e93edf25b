"""Training on the stand-in GPU, with and without Large Model Support.

What the stand-in says nothing of: cuDNN, cuBLAS and their scratch memory, XLA, the real pool of pinned memory
(it is plain memory here, under another allocator's name), and bits of a real GPU's kernels. One kernel runs
at a time.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import stand_in

pytestmark = pytest.mark.tensorflow

ROOT = Path(__file__).resolve().parents[2]
JOB = str(Path(__file__).with_name("stand_in_job.py"))
MIB = 1 << 20


@cache
def found(*arguments: str, **environ: str) -> Any:
    return stand_in.run([JOB, *arguments], environ).found


@pytest.mark.parametrize("optimizer", ["turned", "as it is"])
@pytest.mark.parametrize("layout", ["last", "first"])
def test_swaps_change_no_bit_in_either_layout(layout: str, optimizer: str) -> None:
    """Turned: TensorFlow's layout optimizer puts transposes round what takes channels first on a GPU."""
    without, swapped = found("bits")[f"{layout}, {optimizer}"]
    assert swapped["warnings"] == [] and swapped["tensors"] > 5
    assert swapped["bits"] == without["bits"]
    assert swapped["peak"] < 0.85 * without["peak"]


def test_every_transport_swaps_from_a_gpu(tmp_path: Path) -> None:
    ways = found("ways", str(tmp_path))
    assert {way: one.get("transport") for way, one in ways.items()} == {
        "off": None,
        "auto": "device",
        "host": "host",
        "numpy": "numpy",
        "store": "file",
    }
    assert {one["bits"] for one in ways.values()} == {ways["off"]["bits"]}
    assert all(one["warnings"] == [] for way, one in ways.items() if way != "off")


def test_a_step_trains_within_a_limit_as_planned() -> None:
    """A concatenation needs a chunk of twice the size: free memory must lie as it was planned to lie."""
    narrow = found("narrow", "22")
    assert narrow["retries"] == 0 and narrow["warnings"] == []
    assert narrow["peak_before"] > 25 * MIB and narrow["peak"] <= 22 * MIB
    assert abs(narrow["peak"] - narrow["planned"]) < 0.03 * narrow["planned"]


def test_a_gpu_that_the_profiler_does_not_see_is_said() -> None:
    """A real GPU whose driver lets nobody trace looks the same."""
    assert "saw no kernel of the GPU" in found("profiled")


def test_repeated_ops_change_no_bit_where_tensorflow_has_turned_the_layout() -> None:
    """TensorFlow shares transposes between a convolution and its gradient, under the name of the gradient."""
    repeated = found("narrow", "22", "only")
    assert repeated["recomputed"] > 5 and repeated["tensors"] == 0
    assert repeated["bits"] == found("plain")["bits"]
    assert repeated["peak"] <= 22 * MIB < found("plain")["peak"]


def test_each_gpu_of_a_process_has_its_own_plan_and_limit() -> None:
    """The stand-in has no NCCL: the mirrored strategy reduces on the host."""
    seen = found("devices", SIMGPU_DEVICES="2")
    assert seen["on"]["bits"] == seen["off"]["bits"]
    assert seen["on"]["places"] == ["GPU:0", "GPU:1"]
    assert all(on < 0.8 * off for on, off in zip(seen["on"]["peaks"], seen["off"]["peaks"], strict=True))
    first, second = map(float, seen["budgets"])
    assert first < 30 * 0.9 < second < 60 * 0.9, "of 30 MiB and of 60, less what lies there and the margin"
    assert seen["mirrored"]["places"] == ["GPU:0", "GPU:1"] and seen["mirrored"]["warnings"] == []


def test_a_session_swaps_beside_a_gpu_that_it_does_not_use() -> None:
    seen = found("session", SIMGPU_DEVICES="2")
    assert seen["on"]["bits"] == seen["off"]["bits"] and seen["on"]["tensors"] > 5
    assert seen["on"]["places"] == ["GPU:0"] and seen["on"]["warnings"] == []


def test_momenta_stay_where_they_are() -> None:
    """TensorFlow gives each another buffer in each step: free memory would fall into more and more pieces."""
    off, on = found("momenta")["off"], found("momenta")["on"]
    moved, kept = ([len({*each}) for each in zip(*one["addresses"], strict=True)] for one in (off, on))
    assert max(moved) > 1 and set(kept) == {1}
    assert None not in on["addresses"][0]
    assert on["bits"] == off["bits"] and on["tensors"] > 5


def test_mixed_precision_and_memory_that_grows() -> None:
    """The stand-in computes half precision as the CPU does."""
    seen = found("half")
    assert seen["on"]["bits"] == seen["off"]["bits"] and seen["on"]["tensors"] > 5
    assert seen["on"]["peak"] < seen["off"]["peak"] and seen["on"]["warnings"] == []


def test_a_first_step_that_runs_out_of_memory_is_taken_again() -> None:
    """Scratch memory of convolutions, as cuDNN's, that no plan knows of; the stand-in knows no algorithms."""
    again = found("retried", SIMGPU_SCRATCH_MB="4")
    assert again["retries"] > 0 and any("planned again" in text for text in again["warnings"])
    assert again["bits"] == found("plain")["bits"]


def test_a_plan_leaves_room_in_the_pool_of_pinned_memory() -> None:
    """On an H200 a plan that swaps 596 MiB ran out in a pool of 600: batches lie there, too, in regions."""
    seen = found("pinned", TF_GPU_HOST_MEM_LIMIT_IN_MB="30")
    swapped = seen["on"]
    assert swapped["warnings"] == [] and swapped["retries"] == 0 and 0 < swapped["tensors"]
    assert swapped["bits"] == seen["off"]["bits"] and swapped["peak"] < 0.6 * seen["off"]["peak"]


def test_copies_run_beside_compute_both_ways() -> None:
    """Kernels take a modelled time here, and compute nothing."""
    settings = {"SIMGPU_COMPUTE": "model", "SIMGPU_TFLOPS": "0.05", "SIMGPU_MEM_GBPS": "4"}
    links = {"SIMGPU_D2H_GBPS": "0.5", "SIMGPU_H2D_GBPS": "1"}
    ran = stand_in.run([JOB, "narrow", "22"], settings | links, traced=True)
    copies = stand_in.copies_of(tuple(row for row in ran.rows if float(row["began"]) >= ran.found["began"]))
    assert ran.found["tensors"] > 0 and copies.nbytes > 20 * MIB
    assert copies.hidden > 0.3, "the images on their way to the first step, too"


def test_ranks_of_one_host_have_a_device_each() -> None:
    """NVML knows no such device: the ranks are told what the launcher tells them where it does."""
    told = {"PYTHONPATH": f"{ROOT / 'lms/bootstrap'}:{ROOT}", "SIMGPU_DEVICES": "2"}
    told |= {"LMSRUN_JOB_ID": "stand-in", "LMSRUN_GPUS": "0,1"}
    seen = [
        stand_in.run([JOB, "rank"], {**told, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}).found
        for rank in ("0", "1")
    ]
    assert [one["device"] for one in seen] == [[f"/physical_device:GPU:{rank}"] for rank in (0, 1)]
    assert seen[0]["bits"] == seen[1]["bits"]


def test_a_device_of_no_known_generation_is_measured() -> None:
    speeds = {"SIMGPU_COMPUTE": "both", "SIMGPU_TFLOPS": "0.01", "SIMGPU_MEM_GBPS": "0.5"}
    links = {"SIMGPU_D2H_GBPS": "0.2", "SIMGPU_H2D_GBPS": "0.4"}
    seen = found("speeds", **speeds, **links)
    for measured, made in zip(seen, (0.01e12, 0.5e9, 0.2e9, 0.4e9), strict=True):
        assert 0.8 * made < measured < 1.15 * made
