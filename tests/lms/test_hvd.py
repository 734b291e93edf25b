"""Two real Horovod ranks, under Keras 3 and under tf-keras: one job each, see ``hvd_job.py``."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks]

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "lms" / "hvd_job.py"
NO_HOROVOD = "Horovod is not installed here (scripts/setup.py builds it)"


def run_job(**environ: str) -> dict[str, Any]:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip(NO_HOROVOD)
    lmsrun = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "run", "-np", "2", "--oversubscribe"]
    done = subprocess.run(
        [*lmsrun, "--no-lms", "--no-tag-output", str(JOB)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout
    found: dict[str, Any] = json.loads(lines[0])
    return found


@pytest.fixture(scope="module")
def own_keras() -> dict[str, Any]:
    """The Keras that TensorFlow brings: Keras 3, and up to 2.15 Keras 2."""
    return run_job()


@pytest.fixture
def keras_3(own_keras: dict[str, Any]) -> dict[str, Any]:
    if not own_keras["keras 3"]:
        pytest.skip("this TensorFlow brings Keras 2")
    return own_keras


@pytest.fixture(scope="module")
def tf_keras() -> dict[str, Any]:
    return run_job(TF_USE_LEGACY_KERAS="1")


@pytest.fixture(params=["own_keras", "tf_keras"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "tf_keras" and importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed here")
    content: dict[str, Any] = request.getfixturevalue(request.param)
    assert content["keras"] == {"own_keras": "keras", "tf_keras": "tf_keras"}[request.param]
    return content


def test_horovods_own_optimizer_diverges_under_keras_3(keras_3: dict[str, Any]) -> None:
    """Why ours exists. Should a later Horovod average here, this test says that the detour can end."""
    assert keras_3["horovods"].startswith(
        "sequential/dense/kernel differs: rank 1 against rank 0 (4 of 4 variables"
    )


def test_horovods_own_optimizer_is_right_under_tf_keras(tf_keras: dict[str, Any]) -> None:
    assert tf_keras["horovods"] == "in sync"


def test_ours_agrees_with_its_peers_and_with_one_process(found: dict[str, Any]) -> None:
    assert found["ours"] == "in sync"
    assert found["as one process"]


def test_the_broadcast_makes_different_starts_equal(found: dict[str, Any]) -> None:
    assert "kernel" in found["before broadcast"]
    assert "differs: rank 1 against rank 0" in found["before broadcast"]
    assert found["after broadcast"] == "in sync"
    assert found["metrics agree"]


def test_a_saved_model_needs_no_horovod(found: dict[str, Any]) -> None:
    if (found["keras"], found["loaded as"]) == ("tf_keras", "keras"):
        pytest.skip("Keras 2.15 and tf_keras 2.15 register the same names: the wrong one loads")
    assert found["loaded optimizer"] == ["Adam", False]
    assert found["same predictions"]


def test_sparse_gradients_of_a_model_built_by_its_first_batch(found: dict[str, Any]) -> None:
    assert found["late build, sparse gradients"] == "in sync"


def test_custom_loops_eager_and_traced(found: dict[str, Any]) -> None:
    assert found["custom loop"] == "in sync"


def test_what_a_reduction_returns(found: dict[str, Any]) -> None:
    assert found["reduced"] == [None, [0.5, 4.0], [[0.0], [0.5]]]
    assert found["sparse as dense"] == [[0.0], [0.5]]


def test_mistakes_are_one_line_instead_of_a_hang(found: dict[str, Any]) -> None:
    assert found["without init"].startswith("Horovod is not initialised; call horovod.tensorflow.init()")
    assert found["twice"] == "this SGD is distributed already; wrap an optimizer once"
    assert found["no optimizer"].startswith("object has no apply_gradients; needed an optimizer")
    assert found["other variables"].startswith("the ranks hold different variables (rank 0: 1, rank 1: 2)")
    assert found["other order"].startswith("the ranks hold different variables (rank 0: 1, rank 1: 1)")


def test_optimizers_of_sessions_get_horovods_own(found: dict[str, Any]) -> None:
    assert found["session's"] == "horovod.tensorflow"


def test_loss_scaling_belongs_inside(keras_3: dict[str, Any]) -> None:
    assert "use DistributedOptimizer(LossScaleOptimizer(...)) instead" in keras_3["scaled outside"]
    assert keras_3["scaled inside"] == "in sync"
