"""Room of their own for small buffers, in the real allocator and in the simulated one."""

import pytest
from child_job import run_job

from lms.ir.liveness import SMALL_BYTES, Residency
from lms.simulate.allocation_trace import Demand
from lms.simulate.rehearsal import peak_in_pieces, small_pool_bytes

KIB, MIB = 1 << 10, 1 << 20


def demand(small: int = KIB) -> Demand:
    """A small buffer that is allocated beside a large one, and outlives it, and a larger one then."""
    return Demand((Residency(0, 30 * MIB, 0, 2), Residency(1, small, 1, 5), Residency(2, 40 * MIB, 4, 4)))


@pytest.mark.tensorflow
@pytest.mark.parametrize("where", ["eager", "session"])
@pytest.mark.parametrize("sizes, fits", [((), False), ((4 * MIB,), True), ((2 * MIB, MIB, 4 * MIB), True)])
def test_a_small_buffer_does_not_part_the_memory_where_it_has_room_of_its_own(
    sizes: tuple[int, ...], fits: bool, where: str
) -> None:
    pytest.importorskip("tensorflow")
    bfc = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"}
    seen = run_job("small_pool_job.py", where, *map(str, sizes), **bfc)
    assert seen["fits"] is fits
    assert seen["kept_bytes"] == max(sizes, default=0), "what keeps the largest one apart, and no more"


@pytest.mark.tensorflow
def test_a_batch_does_not_part_the_memory_where_it_has_room_of_its_own() -> None:
    pytest.importorskip("tensorflow")
    bfc = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"}
    seen = run_job("small_pool_job.py", "batches", *[str(3 * MIB)] * 4, **bfc)
    assert seen == {"fits": True, "kept_bytes": 3 * MIB}


def test_the_simulated_allocator_knows_of_it() -> None:
    assert peak_in_pieces(demand(), 64 * MIB) is None
    peak = peak_in_pieces(demand(), 64 * MIB, pooled=True)
    assert peak is not None and 40 * MIB < peak < 65 * MIB


def test_the_simulated_allocator_keeps_room_for_batches() -> None:
    stays = (Residency(0, 30 * MIB, 0, 2), Residency(1, 2 * MIB, 1, 5), Residency(2, 40 * MIB, 4, 4))
    assert peak_in_pieces(Demand(stays), 64 * MIB) is None
    batched = Demand(stays, room_for_batches=(2 * MIB,) * 3)
    peak = peak_in_pieces(batched, 64 * MIB)
    assert peak is not None and peak > 44 * MIB, "what keeps the room apart is counted"
    assert peak_in_pieces(batched, 46 * MIB) is None
    assert small_pool_bytes(batched, 32 * MIB) == MIB // 2
    assert small_pool_bytes(batched, 640 * MIB) == MIB, "the pipeline has small buffers, too"


def test_the_room_is_that_of_the_small_buffers_at_once_and_never_a_large_part() -> None:
    assert small_pool_bytes(demand(), 64 * MIB) == KIB * 5 // 4
    assert small_pool_bytes(demand(small=SMALL_BYTES + 1), 64 * MIB) == 0
    many = Demand(tuple(Residency(tensor, SMALL_BYTES, 0, 9) for tensor in range(200)))
    assert small_pool_bytes(many, 64 * MIB) == MIB


@pytest.mark.tensorflow
def test_small_variables_that_are_made_later_do_not_fill_it() -> None:
    """A session's are made after the edit; large ones find their place elsewhere."""
    pytest.importorskip("tensorflow")
    from lms.device.memory_pool import SMALL, Rooms

    rooms = Rooms()
    rooms.make_small(MIB, "CPU:0", [SMALL_BYTES, 100, MIB])
    assert rooms.nbytes("CPU:0", SMALL) == MIB + SMALL_BYTES + 256
    rooms.make_small(0, "CPU:0", [SMALL_BYTES])
    assert Rooms().nbytes("CPU:0", SMALL) == 0


@pytest.mark.tensorflow
def test_each_device_has_its_own() -> None:
    pytest.importorskip("tensorflow")
    from lms.device.memory_pool import SMALL, Rooms

    rooms = Rooms()
    rooms.make_small(MIB, "CPU:0")
    rooms.make_small(KIB, "cpu:0")  # the name of another one
    assert (rooms.nbytes("CPU:0", SMALL), rooms.nbytes("cpu:0", SMALL)) == (MIB, KIB)


@pytest.mark.tensorflow
def test_each_use_has_its_own() -> None:
    pytest.importorskip("tensorflow")
    from lms.device.memory_pool import BATCHES, SMALL, Rooms

    rooms = Rooms()
    rooms.make_small(KIB, "CPU:0")
    rooms.make_for_batches((MIB, MIB, MIB), "CPU:0")
    rooms.make_for_batches((), "CPU:0")
    assert (rooms.nbytes("CPU:0", SMALL), rooms.nbytes("CPU:0", BATCHES)) == (KIB, 3 * MIB)
    assert (rooms.kept_bytes("CPU:0"), rooms.kept_bytes("GPU:0")) == (KIB + MIB, 0)
