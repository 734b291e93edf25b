"""jsrun cannot be had: its stand-in reads the options strictly and runs the resource sets for real."""

import os
from pathlib import Path

import pytest
from cluster_run import HERE, SHOW_RANK, lmsrun, read_ranks, run
from hostile import ARGUMENTS, VALUES

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

CSM = {
    "LSB_JOBID": "9",
    "LSB_MCPU_HOSTS": "batch2 1 h41n01 42 h41n02 42",
    "CSM_ALLOCATION_ID": "77",
    "PATH": f"{HERE.parent / 'fakes' / 'jsm'}:{os.environ['PATH']}",
    "ERF_PARSER": str(HERE.parent / "launch" / "backends"),
}


def test_an_lsf_allocation_under_csm(tmp_path: Path) -> None:
    given = [word for name, value in VALUES.items() for word in ("-x", f"{name}={value}")]
    argv = lmsrun("run", "-np", "4", *given, "--", str(SHOW_RANK), str(tmp_path), "ok", *ARGUMENTS)
    done = run(argv, tmp_path, CSM)
    assert done.returncode == 0, done.stderr
    assert "launcher: jsrun (LSF job 9 is under CSM)" in done.stderr
    ranks = read_ranks(tmp_path, 4)
    assert [rank["sizes"] for rank in ranks] == [[local, "4", "2"] for local in "0101"]
    for rank in ranks:
        assert rank["argv"] == list(ARGUMENTS)
        assert {name: rank["env"].get(name) for name in VALUES} == VALUES
    assert not list(tmp_path.rglob("pwned"))


def test_hosts_are_asked_over_jsrun(tmp_path: Path) -> None:
    done = run(lmsrun("run", "--dry-run", "-H", "h41n01:1,h41n02:1", "--", "true"), tmp_path, CSM)
    assert done.returncode == 0, done.stderr
    assert "assumed" not in done.stdout
    silent = {**CSM, "LSB_MCPU_HOSTS": "batch2 1 h41n01 42 h41n02 42 h41n03 42"}
    refused = run(lmsrun("run", "--dry-run", "-H", "h41n01:1,h41n02:1", "--", "true"), tmp_path, silent)
    assert refused.returncode == 2
    assert "jsrun: resource sets do not fit the allocation" in refused.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an uneven job needs two cores")
def test_an_uneven_job_travels_as_an_erf(tmp_path: Path) -> None:
    argv = lmsrun("run", "-np", "3", "--", str(SHOW_RANK), str(tmp_path), "exit:2:7")
    words = ("-H", "h41n01:2,h41n02:1")
    done = run([*argv[:3], *words, *argv[3:]], tmp_path, CSM)
    assert done.returncode == 7, done.stderr
    assert "lmsrun: rank 2 on h41n02 (no GPU) exited with code 7" in done.stderr
    assert [rank["sizes"] for rank in read_ranks(tmp_path, 3)] == [
        ["0", "3", "2"],
        ["1", "3", "2"],
        ["0", "3", "1"],
    ]


def test_the_erf_is_written_for_other_machines(topologies: Path, tmp_path: Path) -> None:
    archive = str(topologies / "ac922-6gpu-power9.tar.bz2")
    words = ("plan", "--launcher", "jsrun", "-H", "a,b", "--topology", archive, "--rankfile-out", "job.erf")
    done = run(lmsrun(*words, "--", "train.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in (tmp_path / "job.erf").read_text().splitlines() if line.startswith("rank: ")]
    assert len(lines) == 12
    assert lines[0] == "rank: 0: { hostname: a; cpu: {0-7}; gpu: *; mem: * }"
    assert lines[9].startswith("rank: 9: { hostname: b; cpu: {88-95}; ")
