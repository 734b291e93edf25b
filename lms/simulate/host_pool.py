"""Simulate TensorFlow's pool of pinned host memory, in which a GPU's swapped tensors lie."""

from collections.abc import Iterable

from lms.ir.liveness import round_up
from lms.ir.swap_plan import SwapPlan
from lms.simulate.bfc_arena import Arena


def fits_in_pool(plan: SwapPlan, pool_bytes: int, others: Iterable[int] = ()) -> bool:
    """Tell whether the pool has room for all that a step swaps, at the same time.

    The pool grows in regions, most of them twice as large as the one before, whose chunks are never joined:
    600 MiB hold ten tensors of 49 MiB, and two of 130.

    Args:
        plan: What is swapped.
        pool_bytes: The most that the pool may take.
        others: Bytes of what lies there as well: batches on their way to the device, variables.
    """
    pool, place = Arena(pool_bytes, grows=True), {op: number for number, op in enumerate(plan.order)}
    sent = [(place[swap.after], swap.nbytes) for swap in plan.swaps if swap.tensor not in plan.copied]
    sent += [(place[one.op], one.nbytes) for one in plan.sent]
    sizes = (*others, *(nbytes for _, nbytes in sorted(sent)))
    return all(pool.allocate(round_up(nbytes)) is not None for nbytes in sizes if nbytes)
