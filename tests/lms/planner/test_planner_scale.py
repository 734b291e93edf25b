"""A deep net of 30,000 ops plans in seconds, in memory stated here, and growing no faster than the net."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOST_SECONDS = 40.0
"""Processor time; it takes about 4 s on a machine with nothing else to do, tests may share theirs."""
MOST_MIB = 300

CHILD = """
import json, time
from pathlib import Path
from lms_models import chain_of_blocks
from lms.config import LMSConfig
from lms.swaps.swap_planner import plan

report = []
for blocks in (150, 1500):
    graph = chain_of_blocks(blocks)
    config = LMSConfig(policy="all")
    peak = plan(graph, config).peak_before_bytes
    began = time.process_time()
    made = plan(graph, LMSConfig(margin=0.0), limit_bytes=peak // 2)
    assert made.feasible and made.swaps
    report.append((len(graph.ops), time.process_time() - began))
status = Path("/proc/self/status").read_text()  # ru_maxrss would start at the size of the process that forked
mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"times": report, "mib": mib}))
"""


@pytest.mark.slow
def test_thirty_thousand_ops():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")])}
    done = subprocess.run(  # one child for time and memory: its peak is then only its own
        [sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True, check=True, timeout=300
    )
    report = json.loads(done.stdout)
    (small, small_s), (large, large_s) = report["times"]
    assert small > 3_000 and large > 30_000
    assert large_s < MOST_SECONDS
    assert large_s / small_s < 5 * large / small
    assert report["mib"] < MOST_MIB


def test_the_engine_never_imports_tensorflow():
    code = (
        "import sys, lms.swaps.swap_planner, lms.planner.hybrid;"
        " print([m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'numpy')])"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_bench_of_chains_finds_no_plan_that_runs_of_blocks_make_slower():
    command = [sys.executable, str(ROOT / "bench" / "lms_chains.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 9 cases" in done.stdout and "0 slower" in done.stdout


@pytest.mark.slow
def test_the_simulator_bench_meets_its_goals(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "bench" / "lms_sim.py"),
        "--quick",
        "--out",
        str(tmp_path / "sim.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "sim.json").read_text())
    assert "all goals met" in done.stdout and len(report["simulated"]["rows"]) == 8
