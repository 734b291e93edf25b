"""Batches that grow beyond what a step was planned for."""

import pytest
from child_job import run_job
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.intercept.batch_growth import SPREAD, Growth

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy_keras", ["0", "1"])
def test_a_step_is_planned_again_for_larger_batches(legacy_keras: str) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("growth_job.py", TF_USE_LEGACY_KERAS=legacy_keras)
    four, eight, large = seen["peaks"]
    assert eight > 1.8 * four and large > 3.5 * eight, "each planned for its own size"
    said = [text.partition("batches of ")[2] for text in seen["said"]]
    assert said == ["8, and is again for 32"], "the batches of 8 have a trace of their own"
    assert seen["traces"] == seen["plain traces"] > 0
    assert not seen["left"], "a model is kept after its training"


@pytest.mark.parametrize(("kind", "legacy_keras"), [("keras", "0"), ("keras", "1"), ("loop", "0")])
def test_open_lengths_are_planned_for_the_first_batch_and_again_for_a_longer_one(
    kind: str, legacy_keras: str
) -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("lengths_job.py", kind, TF_USE_LEGACY_KERAS=legacy_keras)
    assert seen["same"], "other losses, traces or weights than without LMS"
    assert min(seen["tensors"]) > 2, "what has an open length is swapped"
    first, *_, longest = seen["needed"]
    assert longest > 1.6 * first > 0, "and in the planned peaks"
    (said,) = seen["said"]
    assert "and 32x20, and is again for 32x41" in said


@pytest.mark.parametrize(("way", "legacy_keras"), [("iterators", "0"), ("train_on_batch", "1")])
def test_a_batch_whose_size_its_iterator_specifies_is_planned_for(way: str, legacy_keras: str) -> None:
    """Keras has told another size before, or nobody any."""
    pytest.importorskip("tensorflow")
    seen = run_job("specified_job.py", way, TF_USE_LEGACY_KERAS=legacy_keras)
    *_, sixteen, large = seen["peaks"]
    assert large > 3 * sixteen > 0
    if way == "iterators":
        assert len(seen["peaks"]) == 3
        (said,) = seen["said"]
        assert said.endswith("step was planned for batches of 16, and is again for 64")


def test_each_call_of_a_function_is_compared_while_another_one_is_traced() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("specified_job.py", "called_while_traced")
    first, second, third = seen["peaks"]
    assert third > 3 * second > 9 * first > 0


class Step:
    """Something that owns plans."""


def run(growth: Growth, step: Step, *shapes: tuple[int, ...]) -> tuple[int, str, tuple[tuple[int, ...], ...]]:
    """A call with batches of these shapes: the number of its plan, what is said, and what is planned for."""
    batches = growth.at_least(step, shapes)
    said = growth.outgrown(step, batches)
    before = growth.generation(step)
    if said or growth.generation(step) not in growth.made:
        growth.made.add(before)
        growth.planned(step, batches)
    return before, said, batches


@pytest.fixture
def growth() -> Growth:
    found = Growth()
    found.made = set()
    return found


def test_batches_that_grow_in_one_dimension_get_one_plan_after_the_other(growth: Growth) -> None:
    step = Step()
    seen = [run(growth, step, (rows, 20))[::2] for rows in (8, 4, 16, 8, 17)]
    assert seen == [(0, ((8, 20),)), (0, ((8, 20),)), (1, ((16, 20),)), (1, ((16, 20),)), (2, ((17, 20),))]


def test_long_batches_of_few_rows_get_a_plan_of_their_own(growth: Growth) -> None:
    """Else there would be one for 64 rows of 500, of which none is fed."""
    step = Step()
    shapes = ((64, 100), (1, 500), (64, 100), (1, 400), (32, 90), (2, 500), (1, 500), (64, 110))
    seen = [run(growth, step, shape)[::2] for shape in shapes]
    assert [number for number, _ in seen] == [0, 1, 0, 1, 0, 2, 2, 3]
    assert seen[3][1] == ((1, 500),) and seen[5][1] == ((2, 500),) and seen[7][1] == ((64, 110),)


def test_one_plan_serves_all_where_the_sizes_of_a_call_are_not_all_known(growth: Growth) -> None:
    step = Step()
    run(growth, step, (64, 100))
    growth.plan_together(step)
    seen = [run(growth, step, shape)[::2] for shape in ((1, 500), (64, 100), (2, 400))]
    assert seen == [(1, ((64, 500),))] * 3


def test_each_trace_counts_its_own_plans(growth: Growth) -> None:
    step = Step()
    growth.planned(step, (), "exact", open_arguments={})
    growth.planned(step, (), "open", open_arguments={0: (64, 100)})
    for shape, number in (((1, 500), 1), ((64, 90), 0)):
        growth.outgrown_arguments(step, "open", [_Tensor(shape)])
        growth.planned(
            step, (), "open", open_arguments=growth.argument_shapes(step, "open", [_Tensor(shape)])
        )
        assert (growth.generation(step, "exact"), growth.generation(step, "open")) == (0, number)


def test_a_plan_that_failed_is_not_run_again(growth: Growth) -> None:
    step = Step()
    run(growth, step, (64, 100))
    run(growth, step, (1, 500))
    growth.renew(step)
    assert run(growth, step, (1, 500))[0] == 2
    growth.renew_all()
    assert [run(growth, step, shape)[0] for shape in ((64, 100), (1, 500))] == [4, 5]


def test_arguments_get_plans_of_their_own_too(growth: Growth) -> None:
    step, seen = Step(), []
    for shape in ((64, 100), (1, 500), (64, 90), (1, 500)):
        growth.outgrown_arguments(step, "f", [_Tensor(shape)])
        number = growth.generation(step, "f")
        if number not in growth.made:
            growth.made.add(number)
            planned = growth.argument_shapes(step, "f", [_Tensor(shape)])
            growth.planned(step, (), "f", open_arguments=planned or {0: shape})
        seen.append(number)
    assert seen == [0, 1, 0, 1]


class _Tensor:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


SHAPE = st.tuples(st.integers(1, 40), st.integers(1, 40))


@settings(max_examples=200, deadline=None)
@given(st.lists(SHAPE, min_size=1, max_size=30))
def test_each_call_runs_a_plan_that_serves_it_and_none_is_much_larger(shapes: list[tuple[int, int]]) -> None:
    growth, step, planned_for, fed = Growth(), Step(), {}, 0
    growth.made = set()
    for shape in shapes:
        fed = max(fed, shape[0] * shape[1])
        number, _, ((rows, words),) = run(growth, step, shape)
        assert planned_for.setdefault(number, (rows, words)) == (rows, words), "a plan keeps its shapes"
        assert rows >= shape[0] and words >= shape[1] and rows * words <= SPREAD * fed
