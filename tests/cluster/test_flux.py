"""Flux cannot be had: its stand-in reads the options strictly and runs the tasks for real."""

import os
from pathlib import Path

import pytest
from cluster_run import HERE, SHOW_RANK, lmsrun, read_ranks, run
from hostile import ARGUMENTS, VALUES

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

INSTANCE = {
    "FLUX_ENCLOSING_ID": "fM7Zq9AKHno",
    "FLUX_URI": "local:///run/flux/local",
    "FAKE_FLUX_HOSTS": "elcap1,elcap2",
    "PATH": f"{HERE.parent / 'fakes' / 'flux'}:{os.environ['PATH']}",
}


def test_a_job_in_a_flux_instance(tmp_path: Path) -> None:
    given = [word for name, value in VALUES.items() for word in ("-x", f"{name}={value}")]
    argv = lmsrun("run", "-np", "4", *given, "--", str(SHOW_RANK), str(tmp_path), "ok", *ARGUMENTS)
    done = run(argv, tmp_path, {**INSTANCE, "WANDB_API_KEY": "secret"})
    assert done.returncode == 0, done.stderr
    assert "launcher: flux (this is Flux job fM7Zq9AKHno on 2 hosts)" in done.stderr
    ranks = read_ranks(tmp_path, 4)
    assert [rank["sizes"] for rank in ranks] == [[local, "4", "2"] for local in "0101"]
    for rank in ranks:
        assert rank["argv"] == list(ARGUMENTS)
        assert {name: rank["env"].get(name) for name in VALUES} == VALUES
        assert "WANDB_API_KEY" not in rank["env"]
    assert not list(tmp_path.rglob("pwned"))


def test_the_rank_that_fails_is_named_and_its_code_is_the_jobs(tmp_path: Path) -> None:
    done = run(lmsrun("run", "-np", "4", "--", str(SHOW_RANK), str(tmp_path), "exit:2:7"), tmp_path, INSTANCE)
    assert done.returncode == 7, done.stderr
    assert "lmsrun: rank 2 on elcap2 (no GPU) exited with code 7" in done.stderr


def test_hosts_that_the_instance_does_not_have_are_refused(tmp_path: Path) -> None:
    done = run(lmsrun("run", "-H", "elcap1:1,other:1", "--", "true"), tmp_path, INSTANCE)
    assert done.returncode == 2 and "other" in done.stderr
    uneven = run(
        lmsrun("run", "--no-host-probe", "-H", "elcap1:2,elcap2:1", "--", "true"), tmp_path, INSTANCE
    )
    assert uneven.returncode == 2
    assert "flux run gives every host as many ranks, but found elcap1:2, elcap2:1" in uneven.stderr


def test_an_instance_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    done = run(lmsrun("run", "--", "true"), tmp_path, {**INSTANCE, "FLUX_URI": ""})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needed the names of hosts" in done.stderr


def test_a_task_of_flux_run_is_no_place_for_another_job(tmp_path: Path) -> None:
    inside = {**INSTANCE, "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}
    done = run(lmsrun("run", "--", "true"), tmp_path, inside)
    assert done.returncode == 2
    assert "this is task 1 of 2 that flux run started; try 'flux run lmsrun worker -- PROGRAM'" in done.stderr


def test_ranks_under_a_script_of_the_users_own(tmp_path: Path) -> None:
    words = ("flux", "run", "--nodes=2", "--tasks-per-node=2", "--label-io")
    done = run([*words, *lmsrun("worker", "--", "sh", "-c", "echo $RANK $LOCAL_RANK")], tmp_path, INSTANCE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: 0 0", "1: 1 1", "2: 2 0", "3: 3 1"]
