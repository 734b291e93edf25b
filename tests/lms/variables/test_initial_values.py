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


SMALL = 64 * 64 * 4
LARGE = 2048 * 2048 * 4


@pytest.fixture
def session() -> Any:
    """Return a session of a graph with variables, what assigns to them, and groups of that."""
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default():
        v1 = tf.compat.v1
        zeros = v1.zeros_initializer()

        def made(name: str, size: int, initializer: Any = zeros) -> Any:
            return v1.get_variable(name, (size, size), initializer=initializer, use_resource=True)

        small, other, drawn = made("small", 64), made("other", 64), made("drawn", 64, None)
        given = made("given", 2048, lambda shape, **_: tf.constant(1.0, shape=shape))
        large = made("large", 2048, None)
        optimizer = v1.train.AdamOptimizer()
        optimizer.minimize(tf.reduce_sum(large * large), name="step")
        momenta = [optimizer.get_slot(large, name) for name in ("m", "v")]
        first = tf.group(small.initializer, other.initializer, drawn.initializer, name="first")
        tf.group(first, given.initializer, *(one.initializer for one in (large, *momenta)), name="init")
        v1.assign(small, tf.random.normal((64, 64)), name="restore")
        updated = tf.raw_ops.AssignAddVariableOp(resource=small.handle, value=drawn)
        tf.group(updated, name="train")
        with tf.control_dependencies([updated]):
            tf.identity(1.0, name="loss")
        tf.identity(tf.reduce_sum(small), name="asked")
        tf.raw_ops.MakeIterator(
            dataset=tf.data.Dataset.range(3)._variant_tensor,
            iterator=tf.raw_ops.Iterator(
                shared_name="", container="", output_types=[tf.int64], output_shapes=[()]
            ),
            name="fresh_data",
        )
        return v1.Session()


def shared_after(session: Any, *runs: str) -> dict[str, int]:
    from lms.variables.initial_values import SharedValues

    values = SharedValues()
    for run in runs:
        values.ran(session, (run,))
    return dict(values.of(session))


def test_a_constant_is_kept_and_what_is_computed_as_one_is_the_last_one_s(session: Any) -> None:
    assert shared_after(session) == {}
    found = shared_after(session, "init")
    assert {found.pop("small"), found.pop("other")} == {SMALL}
    assert found.pop("given") == LARGE, "the op of a constant keeps its value, of whatever size"
    assert list(found.values()) == [LARGE], "of two momenta one updates in place"
    assert all(name.startswith("large/Adam") for name in found)
    later = shared_after(session, "init", "step")
    assert sorted(later) == ["given", "other", "small"]


@pytest.mark.parametrize("later", ["train", "loss", "restore"])
def test_a_variable_that_was_written_to_shares_no_more(session: Any, later: str) -> None:
    assert shared_after(session, "first", later) == {"other": SMALL}
    assert len(shared_after(session, "first", later, "first")) == 2, "but where it is initialized again"


@pytest.mark.parametrize("later", ["asked", "fresh_data"])
def test_what_writes_to_no_variable_changes_nothing(session: Any, later: str) -> None:
    assert len(shared_after(session, "first", later)) == 2
