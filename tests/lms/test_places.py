"""Files and folders that a configuration names: refused in one line, before anything trains."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import warm_python

from lms.errors import PlaceError
from lms.user_files import require_file, require_folder

ROOT = Path(__file__).resolve().parents[2]


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("of before")
    require_file(tmp_path / "old.csv", "a test")
    require_file(tmp_path / "new.csv", "a test")
    require_folder(tmp_path, "a test")
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]
    assert (tmp_path / "old.csv").read_text() == "of before"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlaceError, match="file' is no folder; needed in store_dir"):
        require_folder(tmp_path / "file", "store_dir")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "steps.csv")
    with pytest.raises(PlaceError, match="it is a pipe, which waits for somebody to read it; needed in"):
        require_file(tmp_path / "steps.csv", "stats_file")


def test_what_may_not_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "old.csv").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may do anything
    with pytest.raises(PlaceError, match="it cannot be changed; needed in stats_file"):
        require_file(tmp_path / "old.csv", "stats_file")
    with pytest.raises(PlaceError, match=f"{tmp_path}' cannot be written to; needed in stats_file"):
        require_file(tmp_path / "new.csv", "stats_file")


REFUSED = """
import json, lms
answer = []
for fields in (
    {"store_dir": "/no/such/folder"},
    {"stats_file": "/no/such/steps.csv"},
    {"transport": "file"},
    {"transport": "device"},
):
    try:
        lms.enable(policy="all", **fields)
    except lms.LMSError as error:
        answer.append(str(error))
assert lms.state() is None
print(json.dumps(answer))
"""


@pytest.mark.tensorflow
def test_enable_refuses_what_is_not_there() -> None:
    pytest.importorskip("tensorflow")
    done = _python(REFUSED, ROOT, {"CUDA_VISIBLE_DEVICES": ""})
    folder, file, no_folder, no_gpu = json.loads(done.stdout.splitlines()[-1])
    assert "there is no folder '/no/such/folder'; needed in store_dir (LMS_STORE)" in folder
    assert "there is no folder '/no/such'; needed in stats_file (LMS_STATS_FILE)" in file
    assert "set LMS_STORE to a folder" in no_folder
    assert "no GPU is visible; needed 'host'" in no_gpu


@pytest.mark.tensorflow
def test_a_rank_ends_before_it_trains_without_the_folder_it_was_given() -> None:
    pytest.importorskip("tensorflow")
    variables = {"LMS_ENABLED": "1", "LMS_STORE": "/no/such/folder"}
    done = _python("import tensorflow; print('it trains')", ROOT / "lms" / "bootstrap", variables)
    assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "lmsrun: Large Model Support cannot be switched on: cannot make files in '/no/such"
    )


def _python(source: str, path: Path, environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    wanted = {**os.environ, "PYTHONPATH": str(path), "TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    return warm_python.run(["-c", source], wanted, timeout_s=300)
