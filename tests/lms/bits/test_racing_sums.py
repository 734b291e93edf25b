"""Sums whose order TensorFlow leaves to chance are found in a graph."""

from types import SimpleNamespace
from typing import Any

import pytest
from racing_sums import racing_sums


def node(name: str, *inputs: str, op: str = "Tanh") -> Any:
    return SimpleNamespace(name=name, op=op, input=inputs)


def graph(*more: Any, terms: tuple[str, ...] = ("a", "b", "c")) -> Any:
    made = [node(name, "x") for name in "abc"]
    return SimpleNamespace(node=[node("x", op="_Arg"), *made, node("sum", *terms, op="AddN"), *more])


def test_terms_that_nobody_else_reads_begin_with_the_first() -> None:
    assert racing_sums(graph()) == []


def test_a_reader_beside_the_sum_races_with_it() -> None:
    assert racing_sums(graph(node("aside", "a"))) == []  # the second comes first then, which is the same
    assert racing_sums(graph(node("aside", "a"), node("beside", "b"))) == ["sum"]
    assert racing_sums(graph(node("view", "a", op="Reshape"), node("d", "view"), node("e", "b"))) == ["sum"]


def test_terms_that_one_reader_frees_together_do_not_race() -> None:
    assert racing_sums(graph(node("aside", "a", "b", "c"))) == []
    assert racing_sums(graph(node("aside", "a", "b"), node("beside", "c"))) == ["sum"]


def test_two_terms_do_not_race() -> None:
    assert racing_sums(graph(node("aside", "a"), node("beside", "b"), terms=("a", "b"))) == []


@pytest.mark.parametrize("waiting", ["sum", "^sum"])
def test_a_reader_behind_the_sum_does_not_race(waiting: str) -> None:
    behind = [node("one", "a", waiting), node("two", "b", waiting), node("three", "c", waiting)]
    assert racing_sums(graph(*behind)) == []


def test_a_reader_before_the_sum_does_not_race() -> None:
    assert racing_sums(graph(node("one", "a"), node("two", "b"), terms=("a", "b", "c", "^one", "^two"))) == []


def test_what_lives_on_is_never_free() -> None:
    assert racing_sums(graph(node("aside", "a"), terms=("x", "x", "a"))) == ["sum"]
    assert racing_sums(graph(terms=("x", "a", "b"))) == []


def test_what_is_fetched_lives_on() -> None:
    seen = graph(node("view", "a", op="Identity"), node("aside", "c"))
    assert racing_sums(seen) == []
    assert racing_sums(seen, ["view:0", "b:0"]) == ["sum"]
    assert racing_sums(seen, ["view:0", "b:0", "c:0"]) == []


@pytest.mark.parametrize("flow", ["Switch", "Merge", "Enter", "Exit", "Split"])
def test_what_may_share_a_buffer_may_be_free(flow: str) -> None:
    held = [node("first", "a", "sum"), node("second", "b", "sum")]
    assert racing_sums(graph(*held)) == []
    assert racing_sums(graph(*held, node("turn", "c", op=flow), node("third", "turn", "sum"))) == ["sum"]
    assert racing_sums(graph(*held, node("turn", "c", op=flow), terms=("a", "b", "turn"))) == ["sum"]
