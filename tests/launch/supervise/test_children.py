"""What the supervisor may ask of its children: of own ranks, and of a launcher that starts them."""

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from launch.channel.client import find_supervisor, open_stream
from launch.cluster.job import Command
from launch.model.plan import LaunchPlan, RankPlan
from launch.receipts.file import write_receipt
from launch.supervise.children import Children, ForeignLauncher, OwnRanks, choose_children
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.rendezvous import Rendezvous

COMMAND = Command(("mpirun", "x"), {"TOKEN": "t"}, unset=("SECRET",), gloo=True)


def rank(number: int) -> RankPlan:
    env = {"RANK": str(number), "LMSRUN_EXPECT": "{}"}
    argv = ("shim", str(number))
    return RankPlan(number, number, "here", None, None, frozenset({1}), "none", frozenset(), None, env, argv)


PLAN = LaunchPlan(2, "mpirun", (rank(0), rank(1)), ())


def children(command: Command | None = None) -> Children:
    return choose_children(
        PLAN,
        JobOptions(environ={"SECRET": "s", "HOME": "/h", "LMSRUN_CONTROL": "another job's"}, command=command),
    )


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    return JobFiles("job", tmp_path, {}, None, (0, 0))


def test_own_ranks_are_started_one_by_one(files: JobFiles) -> None:
    ours = children()
    rendezvous = Rendezvous(PLAN, print, lambda: None)
    try:
        first, second = ours.prepare(files, rendezvous)
    finally:
        rendezvous.stop()
    assert isinstance(ours, OwnRanks)
    assert (first.number, first.argv, first.is_shim) == (0, ("shim", "0"), True)
    assert (second.environ["RANK"], second.environ["HOROVOD_SIZE"], second.environ["HOME"]) == (
        "1",
        "2",
        "/h",
    )
    assert (ours.names, ours.mixed, ours.elastic) == ({0: "rank-0", 1: "rank-1"}, True, False)
    assert ours.open_sieve(files) is None


def test_a_launcher_is_one_child_whatever_it_starts(files: JobFiles) -> None:
    theirs = children(COMMAND)
    rendezvous = Rendezvous(PLAN, print, lambda: None)
    try:
        (only,) = theirs.prepare(files, rendezvous)
    finally:
        rendezvous.stop()
    assert isinstance(theirs, ForeignLauncher)
    assert (only.number, only.argv, only.is_shim) == (0, ("mpirun", "x"), False)
    assert only.environ["TOKEN"] == "t" and "SECRET" not in only.environ
    assert only.environ["LMSRUN_RENDEZVOUS_PORT"] == str(rendezvous.port)
    assert (theirs.names, theirs.mixed, theirs.elastic) == ({0: "launcher"}, True, False)
    assert theirs.open_sieve(files) is not None
    assert theirs.describe(None) == "mpirun"
    assert theirs.channel is not None
    assert only.environ["LMSRUN_CONTROL"] == str(files.receipt_dir / "control")
    theirs.channel.close()


@pytest.mark.parametrize(
    ("files_at_once", "elastic", "carries"), [(38, False, True), (37, False, False), (38, True, False)]
)
def test_output_comes_to_us_where_files_suffice_and_ranks_stay(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch, files_at_once: int, elastic: bool, carries: bool
) -> None:
    """Two ranks with three connections each, and 32 files beside them."""
    theirs = children(replace(COMMAND, elastic=elastic))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files_at_once, resource.RLIM_INFINITY))
    rendezvous = Rendezvous(PLAN, print, lambda: None)
    try:
        (only,) = theirs.prepare(files, rendezvous)
    finally:
        rendezvous.stop()
    assert theirs.channel is not None
    environ = {**only.environ, "LMSRUN_JOB_ID": "job"}
    rank = find_supervisor(environ, 1)
    assert rank is not None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(open_stream, environ, 1, "stdout")
        while not asked.done():
            theirs.channel.serve(theirs.channel.filenos())
    assert (asked.result() is not None) is carries
    theirs.channel.close()


@pytest.mark.parametrize("shows_environ", [True, False])
def test_no_channel_is_open_where_all_could_read_its_password(files: JobFiles, shows_environ: bool) -> None:
    theirs = children(replace(COMMAND, only_here=False, shows_environ=shows_environ))
    rendezvous = Rendezvous(PLAN, print, lambda: None)
    try:
        (only,) = theirs.prepare(files, rendezvous)
    finally:
        rendezvous.stop()
    assert theirs.channel is not None
    assert ("LMSRUN_CONTROL" in only.environ, bool(theirs.channel.filenos())) == (not shows_environ,) * 2
    theirs.channel.close()


def test_only_an_own_rank_says_nothing_before_its_program(files: JobFiles) -> None:
    ours, theirs = children(), children(COMMAND)
    assert "had not started" in ours.explain(1, 256, files)
    assert theirs.explain(1, 256, files) == ""
    assert theirs.describe(1) == "rank 1 on here (no GPU)"


def test_receipts_speak_for_ranks_that_a_launcher_started(files: JobFiles) -> None:
    start = {"verified": True, "cpus": "7", "mem_policy": "none", "mem_nodes": ""}
    assert children().take_in(rank(0), {"start": start}) == rank(0), "its plan was carried out here"
    assert children(COMMAND).take_in(rank(0), {"start": start}).cpus == {7}
    for number, code in ((1, 7), (9, 5)):
        write_receipt(files.receipt_dir, number, "end", {"rank": number, "code": code, "how": "failed"})
        found = children(COMMAND).find_first_failure(files)
        assert found is not None and (found.rank, found.exit_code) == (1, 7)
        assert children().find_first_failure(files) is None


def test_a_rank_that_its_launcher_ended_is_not_to_blame(files: JobFiles) -> None:
    ended = {"rank": 0, "code": 128 + signal.SIGTERM, "how": "was killed"}
    (files.receipt_dir / "rank-0.end.json").write_text(json.dumps(ended))
    assert children(COMMAND).find_first_failure(files) is None
