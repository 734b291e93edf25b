"""Faults of the device and of its link under Large Model Support: one clear error, and never a hang.

The stand-in refuses a copy, or says that a kernel has failed, as a driver does; of a real GPU it says nothing
more. TensorFlow raises an error where a copy is refused, and ends the process once a device has failed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stand_in

pytestmark = pytest.mark.tensorflow

HERE = Path(__file__).resolve().parent
JOB = str(HERE / "faulty_job.py")
LONGEST_S = 240
"""A training takes 10 s; one that is not done then hangs."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in with faults."""
    site = plugin().parent.parent
    made = tmp_path_factory.mktemp("faulty") / "libfaulty.so"
    flags = ["-std=c++17", "-fPIC", "-shared", "-w", f"-I{site}/tensorflow/include", "-o", str(made)]
    links = [f"-L{site}/tensorflow", "-l:libtensorflow_framework.so.2"]
    subprocess.run(["g++", *flags, str(HERE / "faulty_device.cc"), *links], check=True, timeout=300)
    return made


def plugin() -> Path:
    (found,) = stand_in.prepare(os.environ).parents[1].glob("lib/*/site-packages/tensorflow-plugins/*.so")
    return found


def trained(library: Path, *held: str, **faults: str) -> dict[str, Any]:
    environ = {"FAULTY_PLUGIN": str(plugin()), **faults}
    return stand_in.run([JOB, str(library), *held], environ, timeout_s=LONGEST_S).found


@pytest.mark.parametrize(
    ("fault", "way", "nodes"),
    [("FAULTY_OUT", "out", "(swap_out|host_copy)"), ("FAULTY_IN", "in", r"(swap_in_\d|fetch)")],
)
def test_a_copy_that_fails_is_one_error_that_names_it(
    library: Path, fault: str, way: str, nodes: str
) -> None:
    """The training that is begun again behind it runs.

    Which of the copies is refused depends on their order: one of a swap, or one that an op on the host needs.
    """
    seen = trained(library, **{fault: "9"})
    assert seen["error"].startswith("InternalError") and f"a refused copy {way}" in seen["error"]
    assert re.search(rf"/lms/\d+/{nodes}\b", seen["error"])
    assert seen["tensors"] > 5 and seen["retries"] == 0


def test_a_fault_on_a_thread_of_the_device_ends_the_process(library: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with -6") as error:
        trained(library, FAULTY_EVENT="9")
    assert str(error.value).count("Unexpected Event status") == 1


def test_a_rank_whose_device_fails_ends_its_job(library: Path) -> None:
    python = stand_in.prepare(os.environ)
    fails = 'if [ "$RANK" = 1 ]; then export FAULTY_EVENT=9; fi; exec "$@"'
    argv = [sys.executable, "-m", "lmsrun", "-np", "2", "--", "sh", "-c", fails, "sh", str(python), JOB]
    environ = {**os.environ, "PYTHONPATH": str(stand_in.ROOT), "FAULTY_PLUGIN": str(plugin())}
    environ |= {"SIMGPU_DEVICES": "2"}
    job = subprocess.run(
        [*argv, str(library)], env=environ, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    assert job.returncode == 128 + 6, job.stderr[-3000:]
    assert "rank 1" in job.stderr and "Unexpected Event status" in job.stderr + job.stdout


def test_a_full_pool_of_pinned_memory_is_told_as_such(library: Path) -> None:
    """The step is not planned again: more swaps would not help.

    It takes a minute, because TensorFlow waits 10 s for the memory of each copy.
    """
    seen = trained(library, "1")
    assert "Raise TF_GPU_HOST_MEM_LIMIT_IN_MB" in seen["error"] and seen["retries"] == 0
    assert seen["tensors"] > 5
