"""The same with real Horovod ranks over Gloo: they meet, are verified again after hvd.init(), and end."""

import importlib.util
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JobStarter, wait_until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.tensorflow,
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
]
RANK = Path(__file__).with_name("hvd_rank.py")
LIMIT_S = 180


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def test_ranks_meet_and_are_verified_after_init(start: JobStarter, tmp_path: Path) -> None:
    job = start(RANK, options=("--output-dir", tmp_path / "out"))
    folder = tmp_path / "out" / "latest"
    assert job.finish(LIMIT_S) == 0, job.stderr.decode()
    for rank in range(2):
        said = (folder / f"rank-{rank}.stdout").read_text()
        assert said == f"sum 3 rank {rank} of 2 local {rank} of 2\n"
    receipts = json.loads((folder / "receipts.json").read_text())["ranks"]
    assert [receipt["stages"] for receipt in receipts] == [["start", "framework", "init"]] * 2
    assert [receipt["verified"] for receipt in receipts] == [True, True], receipts
    table = job.stderr.decode()
    assert table.count("yes, also after hvd.init()") == 2
    job.assert_nothing_left()


def test_a_rank_that_dies_ends_the_one_that_waits_for_it(start: JobStarter) -> None:
    job = start(RANK, "segv")
    assert job.finish(LIMIT_S) == 128 + signal.SIGSEGV
    assert job.last_line.startswith("lmsrun: rank 1 on localhost (no GPU) was killed by SIGSEGV (signal 11)")
    job.assert_nothing_left()


def test_the_rank_that_left_first_is_named_although_its_peer_is_gone_before(start: JobStarter) -> None:
    job = start(RANK, "leave")
    assert job.finish(LIMIT_S) == 7, job.stderr.decode()
    assert job.last_line == "lmsrun: rank 1 on localhost (no GPU) exited with code 7"
    job.assert_nothing_left()


@pytest.mark.parametrize("way", ["leave early", "leave without a word"])
def test_a_rank_that_left_early_with_0_is_named(start: JobStarter, way: str) -> None:
    """Its peer fails in a collective that nobody else joins, and would look like the culprit."""
    job = start(RANK, way)
    assert job.finish(LIMIT_S) == 1, job.stderr.decode()
    assert job.last_line == (
        "lmsrun: rank 0 on localhost (no GPU) exited with code 1, after rank 1 had left with code 0"
    )
    job.assert_nothing_left()


def test_a_rank_that_never_came_is_named(start: JobStarter) -> None:
    job = start(RANK, "never comes", environ={"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"})
    assert job.finish(LIMIT_S) != 0, job.stderr.decode()
    assert job.last_line.startswith("lmsrun: rank 0 on localhost (no GPU) "), job.last_line
    assert job.last_line.endswith("; rank 1 has not come to hvd.init(), where rank 0 waits"), job.last_line
    job.assert_nothing_left()


def test_sigkill_to_the_launcher_ends_a_training(start: JobStarter) -> None:
    job = start(RANK, "wait")
    wait_until(lambda: len(list(job.folder.glob("ready-*"))) == 2, "both ranks train", LIMIT_S)
    job.signal(signal.SIGKILL)
    assert job.finish() == 137
    job.assert_nothing_left()
