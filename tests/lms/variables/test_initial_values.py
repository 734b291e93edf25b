"""Variables of a session that share memory with the constants which they were made from."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
MIB = 1 << 20


@pytest.mark.parametrize("limit_mib", [60, 200])
def test_an_optimizer_s_state_is_counted_before_its_first_update(limit_mib: int) -> None:
    """Twelve momenta of 1 MiB are counted as one constant of 1 MiB else, and no limit below 65 MiB trains."""
    made = run_job("initial_values_job.py", str(limit_mib))
    assert made["losses"][-1] < made["losses"][0]
    assert made["base"] >= 18 * MIB
    assert made["peak"] <= 1.12 * made["planned"]
    assert bool(made["tensors"]) == (limit_mib == 60)


@pytest.fixture
def session() -> Any:
    """Return a session of a graph with variables, what assigns to them, and groups of that."""
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default():
        v1 = tf.compat.v1
        zeros = v1.get_variable("zeros", (64, 64), initializer=v1.zeros_initializer(), use_resource=True)
        drawn = v1.get_variable("drawn", (64, 64), use_resource=True)
        large = v1.get_variable("large", (2048, 2048), initializer=v1.zeros_initializer(), use_resource=True)
        tf.group(zeros.initializer, tf.group(drawn.initializer, large.initializer), name="init")
        v1.assign(zeros, tf.random.normal((64, 64)), name="restore")
        tf.group(v1.assign_add(zeros, drawn).op, name="train")
        return v1.Session()


def test_only_constants_are_shared_and_only_those_that_tensorflow_folds(session: Any) -> None:
    from lms.variables.initial_values import SharedValues

    values = SharedValues()
    values.ran(session, ())
    assert values.of(session) == {}
    values.ran(session, ("init",))
    assert values.of(session) == {"zeros": 64 * 64 * 4}, "16 MiB are computed by the run itself"


@pytest.mark.parametrize("later", ["train", "restore"])
def test_a_variable_that_was_written_to_shares_no_more(session: Any, later: str) -> None:
    from lms.variables.initial_values import SharedValues

    values = SharedValues()
    values.ran(session, ("init",))
    values.ran(session, (later,))
    assert values.of(session) == {}
    values.ran(session, ("init",))
    assert values.of(session), "and after another run of the initializer it does"
