"""A file is written as a whole, or stays as it was."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch.system.output_file import write_whole

FULL = """
import resource, signal, sys
from launch.system.output_file import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_whole(sys.argv[1], "x" * 9000)
except OSError as error:
    print(error.strerror)
"""
"""A limit on the size of files stands in for a full disk."""


def test_what_was_there_stays_where_the_new_text_has_no_room(tmp_path: Path) -> None:
    path = tmp_path / "site.json"
    for before in (None, "before"):
        if before is not None:
            path.write_text(before)
        argv = [sys.executable, "-c", FULL, str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout == "File too large\n", done.stderr
        assert [one.read_text() for one in tmp_path.iterdir()] == ([] if before is None else [before])


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path: Path, is_link: bool) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path.name)
    write_whole(tmp_path / "link" if is_link else path, "after")
    assert path.read_text() == "after" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "link").is_symlink() and sorted(os.listdir(tmp_path)) == ["link", "page.html"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_stays_his(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text("before")
    os.chown(path, 65534, 65534)
    write_whole(path, "after")
    assert path.read_text() == "after" and path.stat().st_uid == 65534


def test_a_hard_link_stays_one_and_a_pipe_is_written(tmp_path: Path) -> None:
    path, other = tmp_path / ("\u754c" * 80), tmp_path / "other"
    path.write_text("before")
    os.link(path, other)
    write_whole(path, "after")
    assert other.read_text() == "after"
    other.unlink()
    write_whole(path, "again")
    assert path.read_text() == "again"
    script = "from launch.system.output_file import write_whole; write_whole('/dev/stdout', 'text')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, check=True)
    assert done.stdout == b"text"


def test_a_new_file_has_the_usual_mode_and_a_device_is_written(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    write_whole("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
