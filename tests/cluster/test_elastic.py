"""Horovod Elastic under lmsrun: the job outlives a rank."""

import json
import os
import re
from pathlib import Path

import pytest
from cluster_run import HERE, lmsrun, processes_with, run

pytestmark = [pytest.mark.ranks, pytest.mark.cluster, pytest.mark.tensorflow]

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
    """Two ranks here and one on the same machine's other name: that one dies, then a third joins the two."""
    pytest.importorskip("horovod")
    hosts = tmp_path / "hosts.sh"
    grown = tmp_path / "grown"
    hosts.write_text(
        f"#!/bin/sh\nif [ -e '{grown}' ]; then echo localhost:3; "
        "else echo localhost:2; echo 127.0.0.1:1; fi\n"
    )
    hosts.chmod(0o755)
    elastic = ("-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(hosts))
    words = ("run", *elastic, "--oversubscribe", "--no-lms", "--output-dir", str(tmp_path / "job"))
    patient = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}  # A rank that joins imports TensorFlow first.
    program = HERE / "elastic_moves.py"
    done = run(lmsrun(*words, "--", str(program), str(tmp_path)), tmp_path, patient, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of 3 is done") == 3, done.stdout
    looks = [json.loads(path.read_text()) for path in tmp_path.glob("look-*.json")]
    for each in looks:
        assert each["horovod"] == each["environ"], "RANK and its like follow Horovod"
        assert len(each["cpus"]) == 1, f"every one of {each['threads']} threads is on the rank's CPUs"
    where = {tuple(each["horovod"][2:]): tuple(each["cpus"][0]) for each in looks if each["horovod"][3] > 1}
    pairs, triples = ([where[rank, size] for rank in range(size)] for size in (2, 3))
    assert not set(pairs[0]) & set(pairs[1])
    assert len(set(triples)) == 2 and pairs != triples[:2], "three share what two had"
    survivors = {each["pid"] for each in looks if each["horovod"][3] == 2}
    joined = {each["pid"] for each in looks if each["horovod"][2:] == [2, 3]}
    assert len(survivors) == 2 and len(joined) == 1 and not survivors & joined
    assert len(re.findall(r"is bound anew .*: CPUs [\d,-]+, memory .*, verified", done.stderr)) >= 2
    assert re.search(r"rank 2 on \S+ joined: CPUs [\d,-]+, .*, verified", done.stderr), done.stderr
    moves = json.loads((tmp_path / "job" / "receipts.json").read_text())["moves"]
    assert {
        move["pid"] for move in moves if move["was_local"] == [1, 2] and move["local"] == [1, 3]
    } < survivors
    assert processes_with(str(program)) == []
