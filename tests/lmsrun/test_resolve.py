"""One value holds what is decided of a job; what its hosts answer replaces a part of it."""

import errno
import os
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from machines import SPECS, build_root, machine

from launch.backends.choice import LauncherChoice
from launch.cluster.hosts import Host, HostShare
from launch.model.errors import PlanError, UsageError
from launch.model.plan import LaunchPlan
from launch.plan_host.planner import HostRequest
from lmsrun.cluster_run import plan_cluster
from lmsrun.commands import run
from lmsrun.options import LaunchOptions
from lmsrun.place import Place
from lmsrun.report.recording import recorded
from lmsrun.resolve import ResolvedJob, resolve_job
from lmsrun.sources.request import Request
from lmsrun.sources.variables import leave_outer_job

PLACE = Place(LauncherChoice("mpirun", "as asked"), (Host("a"), Host("b")), False, None, {})
JOB = ResolvedJob(LaunchOptions(), {}, PLACE, machine(SPECS["dgx"]), HostRequest(("x",), 1, 1))


def request(*program: str, **options: object) -> Request:
    return Request(LaunchOptions(**options), program, {}, {})  # type: ignore[arg-type]


def test_what_hosts_answer_replaces_what_was_assumed() -> None:
    assert [share.ranks for share in JOB.deal(PLACE, oversubscribe=False)] == [8, 8]
    known = JOB.answered({"b": machine(SPECS["ac922"])}, ("hosts differ",))
    assert known.deal(PLACE, oversubscribe=False) == (HostShare("a", 0, 8), HostShare("b", 8, 4))
    assert (known.warnings, JOB.warnings, JOB.machines) == (("hosts differ",), (), {})
    with pytest.raises(FrozenInstanceError):
        known.is_plan = True  # type: ignore[misc]


def test_ranks_beyond_the_slots_are_dealt_only_when_asked() -> None:
    job = replace(JOB, options=LaunchOptions(num_proc=18))
    with pytest.raises(PlanError, match="18 ranks do not fit on 2 hosts with 16 slots"):
        job.deal(PLACE, oversubscribe=False)
    assert [share.ranks for share in job.deal(PLACE, oversubscribe=True)] == [9, 9]


def test_what_is_hidden_here_says_nothing_about_another_machine(tmp_path: Path) -> None:
    environ = {"PATH": "/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/root"}
    live = resolve_job(request("true"), environ, is_plan=False)
    assert live.place is None and live.request.environ == environ
    saved = build_root(SPECS["dgx"], tmp_path)
    other = resolve_job(request("true", topology=str(saved)), environ, is_plan=True)
    assert "CUDA_VISIBLE_DEVICES" not in other.request.environ and other.environ == environ
    handed_on = request("true", topology=str(saved), forward=("CUDA_VISIBLE_DEVICES",))
    assert resolve_job(handed_on, environ, is_plan=True).request.environ == environ


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_is_hidden_here_counts_for_a_job_that_runs_here(tmp_path: Path, dry_run: bool) -> None:
    """A saved topology then describes this machine; only a plan may be of another one."""
    environ = {"PATH": "/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "2,3"}
    asked = request("true", topology=str(build_root(SPECS["dgx"], tmp_path)), dry_run=dry_run)
    job = resolve_job(asked, environ, is_plan=False)
    assert (job.request.environ, job.slots_of("localhost")) == (environ, 2)


def test_what_is_given_counts_as_exported_wherever_the_job_runs(tmp_path: Path) -> None:
    environ = {"PATH": "/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "0"}
    saved = str(build_root(SPECS["dgx"], tmp_path))
    given = request("true", topology=saved, forward=("CUDA_VISIBLE_DEVICES=2,3", "TF_CONFIG={}"))
    job = resolve_job(given, environ, is_plan=True)
    assert job.slots_of("anywhere") == 2
    assert job.framework.why == "TF_CONFIG is set here, and stays as it is"


def test_a_named_host_that_is_this_one_is_no_cluster() -> None:
    job = resolve_job(request("true", hosts="localhost:3"), {"PATH": "/bin:/usr/bin"}, is_plan=True)
    assert (job.place, job.options.num_proc) == (None, 3)
    with pytest.raises(UsageError, match="is not there"):
        resolve_job(request("no-such-program"), {"PATH": "/bin"}, is_plan=False)


def test_another_launchers_ranks_know_where_reports_go_without_kept_output(tmp_path: Path) -> None:
    options = LaunchOptions(report=str(tmp_path / "page.html"), allow_run_as_root=True)
    asked = replace(JOB, options=options, environ={"TMPDIR": str(tmp_path)})
    job = run._with_run_folder(asked)
    _, command = plan_cluster(job, PLACE)
    assert command.env["LMS_REPORT_DIR"] == job.record_dir and "LMS_REPORT_DIR" in " ".join(command.argv)
    assert Path(job.record_dir).parent == tmp_path and not Path(job.record_dir).exists()
    with recorded(LaunchPlan(0, "mpirun", (), ()), job):
        assert Path(job.record_dir).stat().st_mode & 0o777 == 0o700
    assert not Path(job.record_dir).exists(), "no output is kept"
    elsewhere = replace(job, request=replace(job.request, given={"LMS_REPORT_DIR": "/mine"}))
    assert plan_cluster(elsewhere, PLACE)[1].env["LMS_REPORT_DIR"] == "/mine"


@pytest.mark.parametrize(("reader", "told"), [(None, "none"), (0, "0")])
def test_another_launchers_ranks_know_who_reads_the_input(reader: int | None, told: str) -> None:
    job = replace(JOB, options=LaunchOptions(stdin=reader, allow_run_as_root=True))
    assert plan_cluster(job, PLACE)[1].env["LMSRUN_STDIN"] == told


@pytest.mark.parametrize("keeps_output", [True, False])
def test_a_plan_that_cannot_be_written_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_output: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = str(tmp_path / "out") if keeps_output else None
    options = LaunchOptions(output_dir=out, report=str(tmp_path / "page.html"))
    job = run._with_run_folder(replace(JOB, options=options, environ={"TMPDIR": str(tmp_path)}))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="job.json: No space left on device"):
        with recorded(LaunchPlan(0, "mpirun", (), ()), job):
            raise AssertionError("the job is not started")
    assert not list(tmp_path.glob("lmsrun-report-*")) and not list(tmp_path.glob("out/*"))


def test_a_job_that_a_rank_starts_leaves_what_is_the_outer_jobs_alone() -> None:
    outer = {"LMSRUN_JOB_ID": "1", "LMS_REPORT_DIR": "/out", "HOROVOD_THREAD_AFFINITY": "1,3"}
    assert leave_outer_job(outer) == {"LMSRUN_JOB_ID": "1"}
    assert leave_outer_job({"LMS_REPORT_DIR": "/out"}) == {"LMS_REPORT_DIR": "/out"}
