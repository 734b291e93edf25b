"""``lms.estimate`` and ``lmsrun fit``: a forecast, and no step."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import warm_python
from child_job import ROOT, run_job
from jobs import wait_until

from lms import estimate
from lms.errors import LMSArgumentError
from lms.simulate.devices import known_as
from lmsrun.commands.fit import find_isolating

AC922 = ROOT / "examples/ac922.json"
LIMIT_MB = 256
SCRIPT = """
import numpy as np, tensorflow as tf
layers = [tf.keras.layers.Dense(64, activation="relu") for _ in range(6)]
model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
model.compile("adam", "mse")
model.fit(np.ones((96, 64), "f"), np.ones((96, 64), "f"), batch_size=32, verbose=0)
print("trained")
"""


@pytest.mark.tensorflow
def test_the_table_says_where_little_memory_is_left() -> None:
    pytest.importorskip("tensorflow")
    from lms.estimates.estimating import IS_LARGEST, IS_TIGHT, render_estimate

    def rows(*peaks: float, batch: int | None = 8) -> tuple[list[str], str]:
        mode = {"mode": "swap", "largest_batch": batch, "is_more": False, "bound": "", "note": ""}
        times = {"step_s": 0.1, "largest_step_s": 0.2}
        modes = [mode | times | {"peak_bytes": peak, "fits": peak <= 100} for peak in peaks]
        found = {"step": "step", "ops": 9, "batch": 4, "weights_bytes": 0, "state_bytes": 0, "unknown": []}
        gpu = {"gpu": "A100-40", "memory_bytes": 100, "modes": modes}
        text = render_estimate(found | {"gpus": [gpu]})
        return [line.split()[4] for line in text.splitlines() if "A100" in line], text

    fits, text = rows(90, 91, 100, 101)
    assert fits == ["yes", "tight", "tight", "no"]
    assert IS_TIGHT in text and IS_LARGEST in text
    head, first, *_ = text.splitlines()[1:]
    for title, number in (("largest batch", " 8"), ("step ms at 4", "100.0")):
        end = head.index(title) + len(title)
        assert first[:end].endswith(number), "numbers stand below each other"
    fits, text = rows(90, 101, batch=None)
    assert fits == ["yes", "no"]
    assert IS_TIGHT not in text and IS_LARGEST not in text


@pytest.mark.tensorflow
def test_an_estimate_runs_no_step_and_leaves_the_model_as_it_was() -> None:
    pytest.importorskip("tensorflow")
    found = run_job(
        "estimate_job.py", TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPU_BFC_MEM_LIMIT_IN_MB=str(LIMIT_MB)
    )
    assert found["unchanged"] and found["steps"] == [0, 0] and found["later"] == [1, 12]
    if found["keras 3"]:
        assert found["traces"] == 1, "the optimizer's variables have the step traced again"
    weights = 6 * (64 * 64 + 64) * 4
    for kind in ("fit", "loop"):
        one = found[kind]
        assert one["batch"] == 32 and one["weights_bytes"] >= weights
        assert 2 * weights <= one["state_bytes"] <= 2.1 * weights
        for gpu in one["gpus"]:
            modes = {mode["mode"]: mode for mode in gpu["modes"]}
            assert modes["hybrid"]["largest_batch"] >= modes["off"]["largest_batch"] > 32
    assert [gpu["gpu"] for gpu in found["fit"]["gpus"]] == ["V100-16", "H100"]
    here = found["here"]
    assert here["memory_bytes"] == LIMIT_MB * 2**20
    assert here["modes"][0]["peak_bytes"] == pytest.approx(found["measured"], rel=0.15)
    assert found["built"] == 1, "a forecaster for no device"
    assert found["left"] < 96 * 64 * 4, "the batches of the stopped step lie on the device"
    assert "the memory of the device here is not known" in found["unknown"]
    assert "not known: " in found["text"]
    assert "H1000" in found["refused"][0] and "did you mean H100" in found["refused"][0]
    assert "no training step" in found["refused"][1]
    assert "cannot be forecast: ZeroDivisionError: no such size" in found["refused"][2] and not found["ran"]
    kept, moved = found["kept"]
    assert kept == moved | {"note": ""} and moved["note"], "variables that a run would not move either"
    assert 0 < found["pickled"] < 10**6, "an estimate holds the graph that it was read from"
    assert not found["handed_on"], "a process that this one starts would write over its report"


ORDERED = """
import tensorflow as tf, lms
weights = [tf.Variable(tf.random.stateless_normal((128, 128), (1, n)) / 12) for n in range(3)]
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        for one in weights:
            x = tf.tanh(x @ one)
        loss = tf.reduce_sum(x * x)
    for one, slope in zip(weights, tape.gradient(loss, weights)):
        one.assign_sub(0.01 * slope)
    return loss
graph = lms.estimate(step, tf.ones((8, 128)), gpus=("H100",)).step.graph
updates = [op.id for op in graph.ops if op.type == "AssignSubVariableOp"]
print(sum("MatMul" == graph.ops[one].type for op in updates for one in graph.predecessors[op]))
"""


@pytest.mark.tensorflow
def test_an_estimate_has_updates_wait_as_a_run_has() -> None:
    pytest.importorskip("tensorflow")
    done = warm_python.run(["-c", ORDERED], {**os.environ, "PYTHONPATH": str(ROOT)}, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) == 2, "the gradients with respect to two layers' inputs"


def fit(tmp_path: Path, *argv: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lmsrun", "fit", *argv],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.tensorflow
def test_fit_prints_a_forecast_and_trains_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = fit(tmp_path, "--json", "--svg", "memory.svg", "--topology", str(AC922), "train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert [gpu["gpu"] for gpu in found["gpus"]] == ["unknown GPU, 16,128 MiB"] and found["batch"] == 32
    limit = found["gpus"][0]["memory_bytes"]
    assert limit == int(16128 * 2**20 * 0.94)
    for one in found["gpus"][0]["modes"]:
        assert 0.8 * limit < max(nbytes for _, nbytes in one["curve"]) <= limit or one["is_more"]
    drawn = ElementTree.fromstring((tmp_path / "memory.svg").read_text())  # noqa: S314 - our own
    lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
    assert len(lines) == len(found["gpus"][0]["modes"])
    assert "trained" not in done.stdout + done.stderr


NEAR = """
import numpy as np, keras, tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(2)
net = [keras.layers.Conv2D(24, 3, activation="relu", padding="same") for _ in range(4)]
model = keras.Sequential([keras.Input((32, 32, 3)), *net, keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile("adam", "mse", jit_compile=False)
model.fit(np.zeros((96, 32, 32, 3), "f"), np.zeros((96, 10), "f"), batch_size=96, verbose=0)
"""


@pytest.mark.tensorflow
def test_a_batch_that_fits_is_not_above_the_largest_nor_swaps_better_than_hybrids(tmp_path: Path) -> None:
    """Find a plan that fits whichever ops meet: a hybrid that was faster by 2% did in one of ten runs."""
    pytest.importorskip("tensorflow")
    (tmp_path / "train.py").write_text(NEAR)
    limits = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"}
    done = fit(tmp_path, "--json", "--target", "here", "train.py", TF_ENABLE_ONEDNN_OPTS="0", **limits)
    assert done.returncode == 0, done.stderr[-2000:]
    modes = {one["mode"]: one for one in json.loads(done.stdout)["gpus"][0]["modes"]}
    assert modes["hybrid"]["fits"] and modes["auto"]["fits"], modes
    assert not modes["off"]["fits"]
    assert all(one["largest_batch"] >= 96 for one in modes.values() if one["fits"]), modes


@pytest.mark.tensorflow
def test_nothing_goes_on_once_the_step_is_caught(tmp_path: Path) -> None:
    """A wrapper would take the end of the program for one of the training."""
    pytest.importorskip("tensorflow")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "wrapper.sh").write_text(f"#!/bin/sh\n{sys.executable} train.py; touch published\n")
    (tmp_path / "wrapper.sh").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    done = fit(tmp_path, "./wrapper.sh", TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0 and "A100-80" in done.stdout, done.stderr[-2000:]
    assert not (tmp_path / "published").exists() and "trained" not in done.stderr
    assert [*(tmp_path / "tmp").iterdir()] == []


@pytest.mark.tensorflow
def test_what_cannot_be_caught_does_not_train(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    (tmp_path / "eager.py").write_text(SCRIPT.replace('"mse"', '"mse", run_eagerly=True'))
    (tmp_path / "clash").mkdir()
    (tmp_path / "clash" / "lms.py").touch()
    (tmp_path / "clash" / "train.py").write_text(SCRIPT)
    for argv, said in (
        (["eager.py"], "a training step runs in eager execution"),
        (["clash/train.py"], "the program has its own module named lms"),
        ([sys.executable, "-E", "eager.py"], "with -E Python ignores PYTHONPATH"),
        ([sys.executable, "-uI", "eager.py"], "with -uI Python ignores PYTHONPATH"),
    ):
        done = fit(tmp_path, *argv)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr[-2000:]
        assert "trained" not in done.stdout + done.stderr


def test_python_s_own_options_are_read_as_python_does() -> None:
    for argv, found in (
        ("-E a.py", "-E"),
        ("-uI a.py", "-uI"),
        ("-X dev -E a.py", "-E"),
        ("-W error -S a.py", "-S"),
        ("--check-hash-based-pycs always -I a.py", "-I"),
        ("a.py -E", None),
        ("-mStep", None),
        ("-um Step -E", None),
        ("-c import -E", None),
        ("-WError a.py", None),
        ("-Xdev a.py -I", None),
        ("-u - -E", None),
    ):
        assert find_isolating(argv.split()) == found, argv


def test_a_signal_ends_what_fit_has_started(tmp_path: Path) -> None:
    (tmp_path / "wrapper.sh").write_text("#!/bin/sh\ntouch began; sleep 30; touch published\n")
    (tmp_path / "wrapper.sh").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    job = subprocess.Popen(
        [sys.executable, "-m", "lmsrun", "fit", "./wrapper.sh"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
    )
    wait_until((tmp_path / "began").exists, "the wrapper runs", 60)
    job.terminate()
    assert job.wait(timeout=300) == 128 + signal.SIGTERM
    assert [*(tmp_path / "tmp").iterdir()] == [] and not (tmp_path / "published").exists()


def test_bad_input_to_fit_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("print('nothing to train')\n")
    for argv, said in (
        (["--target", "H1000", "none.py"], "no GPU 'H1000' is known; did you mean H100?"),
        (["--target", "V100", "none.py"], "no GPU 'V100' is known; did you mean V100-16 or V100-32?"),
        (["--target", ",", "none.py"], "--target names no GPU (',')"),
        (["--target", "H100,,L4", "none.py"], "--target 'H100,,L4' has a comma too many; try H100,L4"),
        (["--target", "", "none.py"], "--target"),
        (["--target", "L4", "--topology", str(AC922), "none.py"], "both name GPUs"),
        (["--topology", "gone.json", "none.py"], "gone.json"),
        (["gone.py"], "gone.py is not here"),
        (["-m", "none"], "none ended with exit code 0 and no training step"),
        (["-m"], "-m needs the name of a module"),
        ([], "needs a program"),
        (["none.py"], "ended with exit code 0 and no training step"),
    ):
        done = fit(tmp_path, *argv)
        assert done.returncode == 2 and done.stdout == ""
        assert said in done.stderr.splitlines()[-1], done.stderr


def test_settings_of_lms_are_looked_at_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("print('ran')\n")
    for setting, value in (("LMS_STORE", "/gone/x"), ("LMS_POLICY", "al")):
        done = fit(tmp_path, "none.py", **{setting: value})
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and setting in line and value in line


def test_settings_of_the_folder_s_file_reach_the_script(tmp_path: Path) -> None:
    names = "LMS_ENABLED", "LMS_MODE", "LMS_MARGIN", "LMS_POLICY"
    (tmp_path / "none.py").write_text(f"import os\nprint(*map(os.environ.get, {names}))\n")
    (tmp_path / "lmsrun.toml").write_text(
        "forward = ['LMS_POLICY=all']\n[lms]\nmargin = 0.25\nmode = 'off'\nenabled = false\n"
    )
    assert fit(tmp_path, "none.py").stderr.startswith("1 auto 0.25 all\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": "H100"}, "gpus is 'H100'; needed several names, such as gpus=('H100',)"),
        ({"gpus": 4}, "gpus is 4; needed several names"),
        ({"gpus": []}, "gpus is empty; needed some of here, all, V100-16"),
        ({"gpus": ["H1000"]}, "no GPU 'H1000'; did you mean H100?; known: here, all, V100-16"),
        ({"gpus": [7]}, "no GPU 7; known: here, all, V100-16"),
        ({"gpus": [["H100"]]}, "no GPU ['H100']; known: here"),
        ({"batch_size": 0}, "batch_size is 0; needed a whole number from 1 to 1,048,576"),
        ({"batch_size": -4}, "batch_size is -4"),
        ({"batch_size": 10**9}, "batch_size is 1000000000"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
    ],
)
def test_bad_arguments_are_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(LMSArgumentError) as raised:
        estimate(print, **given)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_no_step_is_told() -> None:
    with pytest.raises(LMSArgumentError, match="step is 3; needed a compiled Keras model, or a function"):
        estimate(3)


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("NVIDIA A100-SXM4-80GB", "A100-40"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("Tesla P100-SXM2-16GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_driver_s_name_finds_the_model(told: str, known: str | None) -> None:
    found = known_as(told)
    assert (found and found.name) == known


def test_options_of_fit_behind_the_program_are_named(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("print('nothing to train')\n")
    told = "--target L4 stands behind none.py and goes to it; for lmsrun put it in front"
    assert told in fit(tmp_path, "none.py", "--target", "L4").stderr
    assert "stands behind" not in fit(tmp_path, "--", "none.py", "--target", "L4").stderr
