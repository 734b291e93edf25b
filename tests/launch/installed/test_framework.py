"""How ranks find each other: what was asked for, what the script names, what is installed."""

from pathlib import Path

import pytest

from launch.installed import framework
from launch.installed.framework import choose_framework, read_script

STRATEGY = "import tensorflow as tf\nstrategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
HOROVOD = "import horovod.tensorflow as hvd\nhvd.init()\n"
KERAS = "import keras\n"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(framework, "horovod_installed", lambda: request.param)


@pytest.mark.parametrize(
    ("installed", "script", "name", "stage", "misses"),
    [
        (True, STRATEGY, "tensorflow", "init", False),
        (True, HOROVOD, "horovod", "init", False),
        (True, STRATEGY + HOROVOD, "horovod", "init", False),
        (True, KERAS, "horovod", "framework", False),
        (True, "print()", "horovod", "start", False),
        (False, STRATEGY, "tensorflow", "init", False),
        (False, HOROVOD, "horovod", "init", True),
        (False, KERAS, "tensorflow", "framework", True),
        (False, "print()", "tensorflow", "start", False),
    ],
    indirect=["installed"],
)
def test_the_script_counts_before_what_is_installed(
    installed: None, script: str, name: str, stage: str, misses: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    chosen = choose_framework("auto", [str(path), "--x"], {})
    assert (chosen.name, chosen.last_stage, chosen.misses_horovod) == (name, stage, misses)
    assert bool(chosen.warnings) == ("is not installed" in "".join(chosen.warnings))
    assert choose_framework("tensorflow", [str(path)], {}).name == "tensorflow"
    assert choose_framework("horovod", [str(path)], {}).name == "horovod"


@pytest.mark.parametrize("installed", [False], indirect=True)
def test_horovod_that_is_missing_is_told_where_it_is_wanted(installed: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HOROVOD)
    (warning,) = choose_framework("auto", [str(tmp_path / "train.py")], {}).warnings
    assert "hvd.init() in a rank will not find its peers" in warning
    assert choose_framework("auto", ["hostname"], {}).warnings == ()
    assert choose_framework("auto", ["hostname"], {}, "/other/python").name == "horovod"


@pytest.mark.parametrize("installed", [True], indirect=True)
def test_the_users_own_configuration_stays(installed: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STRATEGY)
    chosen = choose_framework("auto", [str(tmp_path / "train.py")], {"TF_CONFIG": "{}"})
    assert (chosen.name, chosen.why) == ("horovod", "TF_CONFIG is set here, and stays as it is")


def test_the_script_is_found_where_python_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "train.py").write_text("one")
    (tmp_path / "pkg" / "mod.py").write_text("two")
    (tmp_path / "pkg" / "sub" / "__main__.py").write_text("three")
    monkeypatch.chdir(tmp_path)
    assert read_script(["train.py"]) == b"one"
    assert read_script(["python3", "train.py", "x"]) == b"one"
    assert read_script(["-m", "pkg.mod"]) == b"two"
    assert read_script(["python", "-m", "pkg.sub"]) == b"three"
    for program in ([], ["bash", "train.py"], ["-m"], ["gone.py"], ["pkg"], ["python"]):
        assert read_script(program) == b""
