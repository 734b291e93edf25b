"""The dynamic programme over blocks against all plans of small chains."""

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from lms.planner.block_chain import Link, Option, Path, fastest, priced

MODEST = settings(max_examples=150, deadline=None, derandomize=True)
BUDGET = 24


@st.composite
def chains(draw: st.DrawFn) -> list[list[Option]]:
    """Options for the runs of up to five blocks: small whole numbers, so that slots hold them exactly."""
    blocks = draw(st.integers(1, 5))
    small = st.integers(0, 12)
    return [
        [
            Option(
                draw(st.integers(begin + 1, blocks)),
                float(draw(small)),
                resident := draw(small),
                resident + draw(small),
                draw(small),
            )
            for _ in range(draw(st.integers(1, 4)))
        ]
        for begin in range(blocks)
    ]


def all_paths(options: Sequence[Sequence[Option]], begin: int = 0, used: int = 0) -> Iterator[Path]:
    """Yield every plan within the budget, by trying all of them."""
    if begin == len(options):
        yield ()
        return
    for option in options[begin]:
        if used + option.needed <= BUDGET:
            for rest in all_paths(options, option.end, used + option.resident):
                yield (option, *rest)


def cost_s(path: Path, prices_s: Sequence[float]) -> float:
    begins = (0, *(option.end for option in path))
    return sum(
        option.seconds + prices_s[begin] * option.moved for begin, option in zip(begins, path, strict=False)
    )


@MODEST
@given(chains(), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_no_plan_within_the_budget_takes_less_time(options, prices):
    prices_s = [float(price) for price in prices]
    found = fastest(options, BUDGET, prices_s, slots=BUDGET)
    possible = list(all_paths(options))
    assert (found is None) == (not possible)
    if found is not None:
        assert found in possible
        assert cost_s(found, prices_s) == min(cost_s(path, prices_s) for path in possible)


@MODEST
@given(chains(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 40), st.integers(0, 40))
def test_plans_for_several_prices_fit_and_come_in_the_order_of_their_estimates(
    options, out, back, forward, backward
):
    link = Link(out / 4, back / 4, forward, backward)
    found = priced(options, BUDGET, link)
    possible = set(all_paths(options))
    assert bool(found) == bool(possible)
    assert possible.issuperset(found) and len(set(found)) == len(found)
    assert [link.extra_s(path) for path in found] == sorted(link.extra_s(path) for path in found)
    assert found == priced(options, BUDGET, link), "the same input gives other plans"


def block(index: int) -> list[Option]:
    """A block that is kept, moved, or made again for half a second."""
    end = index + 1
    return [Option(end, 0.0, 8, 8), Option(end, 0.0, 0, 8, 8), Option(end, 0.5, 1, 8, level=1)]


def test_what_the_link_has_time_for_moves_and_the_rest_is_made_again():
    options = [block(index) for index in range(8)]
    link = Link(out_bytes_per_s=8.0, in_bytes_per_s=8.0, forward_s=3.0, backward_s=8.0)
    best = priced(options, 16, link)[0]
    assert link.exposed_s(best) == 0.0
    assert [option.moved > 0 for option in best] == [True] * 3 + [False] * 5, "early blocks have more time"
    assert sum(option.level for option in best) == 4, "one of the others fits as it is"


def test_a_chain_that_fits_keeps_everything():
    options = [block(index) for index in range(8)]
    link = Link(out_bytes_per_s=1.0, in_bytes_per_s=1.0, forward_s=8.0, backward_s=16.0)
    assert all(option.resident == 8 for option in priced(options, 64, link)[0])


def test_nothing_is_planned_where_one_block_alone_does_not_fit():
    assert fastest([[Option(1, 0.0, 8, 8)]], 7, [0.0]) is None
    assert priced([[Option(1, 0.0, 8, 8)]], 7, Link(1.0, 1.0, 1.0, 1.0)) == []
