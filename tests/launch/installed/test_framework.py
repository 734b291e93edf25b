"""How ranks find each other: what was asked for, what the script names, what is installed."""

import os
import sys
import venv
from pathlib import Path

import pytest

from launch.installed import framework
from launch.installed.framework import choose_framework, find_other_python, read_script

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
    for words in ("-u", "-X dev", "-Xdev", "-W ignore -B", "-uX dev", "--"):
        assert read_script(["/opt/bin/python3.11", *words.split(), "train.py", "x"]) == b"one", words
    assert read_script(["python", "-u", "-m", "pkg.mod", "train.py"]) == b"two"
    assert read_script(["python", "-um", "pkg.sub"]) == b"three"
    assert read_script(["env", "A=1", "B=x=y", "python", "-u", "train.py"]) == b"one"
    assert read_script(["/usr/bin/env", "A=1", "./train.py"]) == b"one"
    assert read_script(["python", "-c", "print()", "train.py"]) == b""
    assert read_script(["python", "-", "train.py"]) == b""
    for program in ([], ["bash", "train.py"], ["-m"], ["gone.py"], ["pkg"], ["python"], ["env"]):
        assert read_script(program) == b""


@pytest.mark.parametrize("installed", [True], indirect=True)
@pytest.mark.parametrize(
    ("lacks", "script", "name", "said"),
    [
        ("horovod tensorflow", HOROVOD, "horovod", "no horovod nor tensorflow"),
        ("tensorflow", HOROVOD, "horovod", "no tensorflow"),
        ("horovod", "import tensorflow\n", "tensorflow", ""),
        ("horovod", "import lms.hvd as hvd\n", "horovod", "no horovod"),
        ("", HOROVOD, "horovod", ""),
        ("horovod tensorflow", "print()", "horovod", ""),
    ],
)
def test_another_python_is_asked_what_it_lacks(
    installed: None, lacks: str, script: str, name: str, said: str, tmp_path: Path
) -> None:
    train, python = tmp_path / "train.py", tmp_path / "python"
    train.write_text(script)
    python.write_text(f"#!/bin/sh\necho a greeting\necho lmsrun-lacks: {lacks}\n")
    python.chmod(0o755)
    for words in (["python", "-u", str(train)], ["env", "A=1", "python", str(train)]):
        chosen = choose_framework("auto", words, {"PATH": str(tmp_path)})
        assert chosen.name == name
        assert not chosen.misses_horovod
        told = f"python is {python}, which has {said}, and not lmsrun's own {sys.executable}; "
        assert [warning.startswith(told) for warning in chosen.warnings] == [True] * bool(said)


def test_lmsruns_own_python_and_one_that_does_not_answer_are_not_doubted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HOROVOD)
    (tmp_path / "python").symlink_to("/bin/false")
    words = ["python", str(tmp_path / "train.py")]
    assert find_other_python(words, {"PATH": str(tmp_path)}) is None
    assert find_other_python(words, {"PATH": "/nowhere"}) is None
    assert find_other_python(["python3", "x.py"], {"PATH": os.path.dirname(sys.executable)}) is None


def test_a_real_python_without_packages_answers(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    found = find_other_python(["python3", "x.py"], {"PATH": str(tmp_path / "bare" / "bin")})
    assert found is not None and found.lacks == {"horovod", "tensorflow"}
