"""Horovod Elastic under lmsrun: the job outlives a rank."""

import json
import os
import re
from pathlib import Path

import pytest
from cluster_run import HERE, lmsrun, processes_with, run

pytestmark = [pytest.mark.ranks, pytest.mark.cluster, pytest.mark.tensorflow, pytest.mark.extras]

EXAMPLE = HERE.parents[1] / "examples" / "elastic_digits.py"


def test_the_job_goes_on_without_the_rank_that_died(tmp_path: Path) -> None:
    pytest.importorskip("horovod")
    pytest.importorskip("sklearn")
    hosts = tmp_path / "hosts.sh"
    # Horovod shuns a host on which a rank died, so this machine stands there twice.
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    elastic = ("-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts))
    done = run(
        lmsrun("run", *elastic, "--no-lms", "--", str(EXAMPLE), "--die-at", "5"), tmp_path, timeout_s=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launcher: horovodrun (the job is elastic)" in done.stderr
    found = re.search(r"rank 0 of 1: 20 epochs, accuracy (0\.\d+)", done.stdout)
    assert found is not None and float(found[1]) > 0.85, done.stdout
    assert processes_with(str(EXAMPLE)) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_survivors_are_bound_anew_when_ranks_come_and_go(tmp_path: Path) -> None:
    """A third rank joins two on this machine and leaves again; then the one on its other name is killed."""
    pytest.importorskip("horovod")
    hosts = tmp_path / "hosts.sh"
    (tmp_path / "hosts").write_text("localhost:2\n127.0.0.1:1\n")
    hosts.write_text(f"#!/bin/sh\ncat '{tmp_path}/hosts'\n")
    hosts.chmod(0o755)
    elastic = ("-np", "3", "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(hosts))
    words = ("run", *elastic, "--oversubscribe", "--no-lms", "--output-dir", str(tmp_path / "job"))
    patient = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}  # A rank that joins imports TensorFlow first.
    program = HERE / "elastic_moves.py"
    done = run(lmsrun(*words, "--", str(program), str(tmp_path)), tmp_path, patient, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 2 is done") == 2, done.stdout
    looks = [json.loads(path.read_text()) for path in tmp_path.glob("look-*.json")]
    for each in looks:
        assert each["horovod"] == each["environ"], "RANK and its like follow Horovod"
        assert len(each["cpus"]) == 1, f"every one of {each['threads']} threads is on the rank's CPUs"
    # Local rank, ranks of the host, stage -> process, CPUs; the lone rank of the other name is left out.
    seen = {
        (*each["horovod"][2:], each["stage"]): (each["pid"], set(each["cpus"][0]))
        for each in looks
        if each["horovod"][3] > 1
    }
    pids = {place: pid for place, (pid, _) in seen.items()}
    cpus = {place: mask for place, (_, mask) in seen.items()}
    assert pids[0, 2, 0] == pids[0, 3, 1] == pids[0, 2, 2] == pids[0, 2, 3]
    assert pids[1, 2, 0] == pids[1, 3, 1] == pids[1, 2, 2] == pids[1, 2, 3] != pids[2, 3, 1]
    for stage in (0, 2, 3):
        assert not cpus[0, 2, stage] & cpus[1, 2, stage]
    assert cpus[1, 3, 1] != cpus[1, 2, 0] == cpus[1, 2, 2], "three share what two had, and two have it again"
    assert len(re.findall(r"is bound anew .*: CPUs [\d,-]+, memory .*, verified", done.stderr)) >= 4
    assert re.search(r"rank \d on \S+ joined: CPUs [\d,-]+, .*, verified", done.stderr), done.stderr
    moves = json.loads((tmp_path / "job" / "latest" / "receipts.json").read_text())["moves"]
    grew = {move["pid"] for move in moves if (move["was_local"], move["local"]) == ([1, 2], [1, 3])}
    assert grew == {pids[1, 2, 0]}
    assert processes_with(str(program)) == []
