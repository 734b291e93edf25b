"""What Python's cyclic collector does round an edit."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lms.intercept.edit_guards import collector_paused


class Held:
    """Stands for what holds a tensor."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Begin with nothing young, and with no values that other tests have frozen."""
    gc.collect()
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()


def test_what_an_edit_makes_is_not_walked_behind_it() -> None:
    with collector_paused():
        assert not gc.isenabled()
        made = [[number] for number in range(5000)]
    assert gc.isenabled()
    assert gc.get_count()[0] < 100
    assert any(one is made for one in gc.get_objects(generation=2))


def test_garbage_that_holds_tensors_goes_before_the_edit() -> None:
    held = Held()
    held.itself = held  # type: ignore[attr-defined]
    gone = weakref.ref(held)
    del held
    with collector_paused():
        assert gone() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_paused():
        pass
    assert gc.get_freeze_count() == frozen


def test_a_program_without_the_collector_stays_without() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
