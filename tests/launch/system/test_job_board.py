"""Running jobs are seen while they live, whatever lies in a folder that everybody can write."""

import json
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.model.idset import parse_ids
from launch.system import job_board
from launch.system.job_board import FOLDER, MAX_BYTES, MAX_JOBS, JobBoard, board_folders

CPUS = parse_ids("0-3,8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / FOLDER


@pytest.fixture
def board(folder: Path) -> JobBoard:
    return JobBoard((folder,))


def test_a_job_is_seen_until_it_is_taken_off(board: JobBoard, folder: Path) -> None:
    note = board.write("train.py", CPUS, frozenset({"0000:04:00.0"}))
    assert note is not None
    (job,) = board.read()
    assert (job.name, job.cpus) == (f"job train.py (process {os.getpid()})", CPUS)
    assert job.gpus == {"0000:04:00.0"}
    assert board.read(note.token) == ()  # its own ranks do not take it for another job
    note.remove()
    assert board.read() == ()
    assert list(folder.iterdir()) == []


def test_all_users_share_the_folder_and_nobody_takes_away_what_others_wrote(
    board: JobBoard, folder: Path
) -> None:
    assert board.is_there
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    note = board.write("train.py", CPUS, frozenset())
    assert note is not None
    assert stat.S_IMODE((folder / f"{note.token}.json").stat().st_mode) == 0o644
    note.remove()


@pytest.mark.ranks
def test_a_killed_job_is_gone_at_once_and_its_file_too(board: JobBoard, folder: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        board.write("train.py", CPUS, frozenset())
        os.write(write, b"x")
        signal.pause()
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"x"
    assert len(board.read()) == 1
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert len(list(folder.iterdir())) == 1
    assert board.read() == ()
    assert list(folder.iterdir()) == []
    os.close(read)


def test_a_job_is_seen_among_many_files_that_are_none(board: JobBoard, folder: Path) -> None:
    note = board.write("train.py", CPUS, frozenset())
    assert note is not None
    for number in range(2 * MAX_JOBS):
        (folder / f".draft-{number}").touch()
        (folder / f"anything-{number}").touch()
        (folder / f"{number}.json").touch()
    assert len(board.read()) == 1
    note.remove()


def test_a_folder_with_more_names_than_are_read_is_known_for_it(
    board: JobBoard, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_board, "MAX_ENTRIES", 8)
    for number in range(8):
        (folder / f"anything-{number}").touch()
    assert (board.read(), board.is_crowded) == ((), False)
    (folder / "one-more").touch()
    assert (board.read(), board.is_crowded) == ((), True)


def test_the_draft_of_a_killed_job_goes_away_and_that_of_a_living_one_stays(
    board: JobBoard, folder: Path
) -> None:
    for name, age in (("killed", 3600), ("living", 0)):
        (folder / f".{name}").touch()
        os.utime(folder / f".{name}", (time.time() - age,) * 2)
    assert board.read() == ()
    assert [path.name for path in folder.iterdir()] == [".living"]


@pytest.mark.ranks
def test_a_fork_keeps_its_job_on_the_board_when_the_first_process_dies(board: JobBoard) -> None:
    read, write = os.pipe()
    to_grandchild, hold = os.pipe()
    child = os.fork()
    if child == 0:
        board.write("train.py", CPUS, frozenset())
        if os.fork() == 0:
            os.close(hold)
            os.write(write, b"x")
            os.read(to_grandchild, 1)  # until the test is over
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"x"
    assert len(board.read()) == 1
    os.close(hold)
    for fd in (read, write, to_grandchild):
        os.close(fd)


def _lock_and_write(folder: Path, content: bytes) -> int:
    """What another user's living process has put there."""
    import fcntl

    fd = os.open(folder / "foreign.json", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, content)
    return fd


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"program": "a", "pid": 1, "cpus": "0-99999999", "gpus": []}',
        b'{"program": "a", "pid": 1e999, "cpus": "0", "gpus": []}',
        b'{"program": "a", "pid": -1, "cpus": "0", "gpus": []}',
        b'{"program": "a", "pid": 1, "cpus": "0", "gpus": {"a": 1}}',
        b"x" * (MAX_BYTES + 1),
    ],
)
def test_damaged_and_hostile_files_are_no_jobs(board: JobBoard, folder: Path, content: bytes) -> None:
    fd = _lock_and_write(folder, content)
    assert board.read() == ()
    os.close(fd)


def test_what_a_terminal_would_obey_is_not_shown(board: JobBoard, folder: Path) -> None:
    content = {"program": "\x1b[2J" + "a" * 900, "pid": 7, "cpus": "0", "gpus": ["\x1b]0;x\x07"]}
    fd = _lock_and_write(folder, json.dumps(content).encode())
    (job,) = board.read()
    assert job.name.isprintable() and len(job.name) < 100
    assert all(gpu.isprintable() for gpu in job.gpus)
    os.close(fd)


def _link(folder: Path, target: Path) -> None:
    folder.symlink_to(target)


def _file(folder: Path, target: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("plant", [_link, _file])
def test_a_planted_folder_is_not_used_and_another_one_serves(
    tmp_path: Path, folder: Path, plant: Callable[[Path, Path], None]
) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    plant(folder, target)
    assert not JobBoard((folder,)).is_there
    assert JobBoard((folder, tmp_path / "own")).is_there
    assert list(target.iterdir()) == []


def test_planted_links_and_pipes_are_neither_read_nor_waited_for(
    tmp_path: Path, board: JobBoard, folder: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"program": "a", "pid": 1, "cpus": "0", "gpus": []}))
    (folder / "link.json").symlink_to(secret)
    os.mkfifo(folder / "pipe.json")
    assert board.read() == ()
    assert secret.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_from_which_others_could_take_files_is_not_used(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, 12345, 12345)
    assert not JobBoard((folder,)).is_there
    folder.chmod(0o1777)
    assert JobBoard((folder,)).is_there


def test_who_holds_the_turn_for_long_does_not_keep_others(board: JobBoard, folder: Path) -> None:
    with board.turn(), JobBoard((folder,)).turn():
        assert board.read() == ()


def test_without_any_folder_nothing_is_read_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    board = JobBoard((tmp_path / "file" / FOLDER,))
    assert (board.is_there, board.read(), board.write("a", CPUS, frozenset())) == (False, (), None)
    with board.turn():
        pass


def test_a_relative_folder_is_none() -> None:
    assert board_folders("/tmp", {"XDG_RUNTIME_DIR": "run"}) == (Path("/tmp") / FOLDER,)
