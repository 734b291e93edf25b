"""The pool of pinned host memory, in which swapped tensors lie."""

import pytest

from lms.ir.swap_plan import Sent, Swap, SwapPlan
from lms.simulate.host_pool import fits_in_pool

MIB = 1 << 20


def plan_of(*sizes: int) -> SwapPlan:
    """A plan that swaps tensors of so many MiB, one behind the other."""
    swaps = tuple(Swap(number, size * MIB, number, ()) for number, size in enumerate(sizes))
    return SwapPlan("all", tuple(range(len(sizes))), swaps, (), (), 0, 0, 0, None)


@pytest.mark.parametrize(("mib", "most"), [(49, 10), (130, 2), (240, 2), (301, 1), (600, 1), (601, 0)])
def test_regions_hold_less_than_their_bytes(mib: int, most: int) -> None:
    """By hand for 130: one in a region of 256, one in the next, and 88 are left for a third."""
    assert fits_in_pool(plan_of(*[mib] * most), 600 * MIB)
    assert not fits_in_pool(plan_of(*[mib] * (most + 1)), 600 * MIB)


def test_what_lies_there_as_well_counts() -> None:
    assert fits_in_pool(plan_of(*[49] * 8), 600 * MIB, [60 * MIB, 0])
    assert not fits_in_pool(plan_of(*[49] * 10), 600 * MIB, [60 * MIB])


def test_a_copy_for_an_op_and_for_a_swap_is_one() -> None:
    made = plan_of(300)
    sent = SwapPlan(**{**vars(made), "sent": (Sent(0, 0, 300 * MIB),)})
    assert sent.bytes_out == made.bytes_out and fits_in_pool(sent, 600 * MIB)
