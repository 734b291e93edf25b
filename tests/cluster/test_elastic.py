"""Horovod Elastic under lmsrun: the job outlives a rank."""

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
