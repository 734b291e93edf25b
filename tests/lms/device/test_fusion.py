"""When Horovod's fusion buffer is counted, without Horovod: two real ranks are in test_hvd_swaps."""

from types import SimpleNamespace

import pytest

pytest.importorskip("tensorflow")
from lms.device import horovod_fusion_buffer as fusion
from lms.device.horovod_fusion_buffer import DEFAULT_BYTES, FusionBuffer, buffer_bytes, taken_bytes

pytestmark = pytest.mark.tensorflow


Exchanges = list[tuple[str, int]]


def each(*op_types: str) -> Exchanges:
    """Ops of these types, with one input each."""
    return [(op_type, 1) for op_type in op_types]


TWO = each("Relu", "HorovodAllreduce", "HorovodAllreduce")


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(
        is_initialized=lambda: True, size=lambda: 2, cuda_built=lambda: False, rocm_built=lambda: False
    )
    monkeypatch.setitem(fusion.sys.modules, "horovod.tensorflow", module)  # type: ignore[arg-type]
    return module


def test_its_size_is_the_variables() -> None:
    assert buffer_bytes({}) == DEFAULT_BYTES == 128 << 20
    assert buffer_bytes({"HOROVOD_FUSION_THRESHOLD": "0"}) == 0
    assert buffer_bytes({"HOROVOD_FUSION_THRESHOLD": " 1048576 "}) == 1 << 20


def grows(device_type: str) -> bool:
    """The pools of devices whose memory nobody has claimed."""
    return device_type == "CPU"


@pytest.mark.parametrize(
    ("asked", "grows", "taken"),
    [(24, True, 32), (32, True, 32), (24, False, 24), (0, True, 0), (300, True, 300)],
)
def test_a_pool_that_grows_hands_out_powers_of_two(asked: int, grows: bool, taken: int) -> None:
    """300 MiB of 512 would waste more than the allocator lets pass."""
    assert taken_bytes(asked << 20, grows) == taken << 20


@pytest.mark.parametrize(
    ("exchanges", "device", "pending"),
    [
        (TWO, "CPU", DEFAULT_BYTES),
        (TWO, "GPU", 0),
        (each("HorovodAllreduce"), "CPU", 0),
        ([("HorovodGroupedAllreduce", 2)], "CPU", DEFAULT_BYTES),
        (each("HorovodBroadcast", "HorovodBroadcast"), "CPU", 0),
    ],
)
def test_where_several_tensors_are_exchanged(
    horovod: SimpleNamespace, exchanges: Exchanges, device: str, pending: int
) -> None:
    assert FusionBuffer({}, grows, late=False).pending_bytes(exchanges, device, 1 << 30) == pending


def test_not_for_one_rank_alone(horovod: SimpleNamespace) -> None:
    horovod.size = lambda: 1
    assert FusionBuffer({}, grows, late=False).pending_bytes(TWO, "CPU", 0) == 0


def test_once_it_is_there_the_allocator_counts_it(horovod: SimpleNamespace) -> None:
    buffer = FusionBuffer({}, grows, late=False)
    assert [buffer.pending_bytes(TWO, "CPU", 0), buffer.pending_bytes(TWO, "CPU", 0)] == [DEFAULT_BYTES] * 2
    buffer.step_done()
    assert buffer.pending_bytes(TWO, "CPU", DEFAULT_BYTES) == 0


def test_a_graph_that_exchanges_nothing_takes_nothing_back(horovod: SimpleNamespace) -> None:
    buffer = FusionBuffer({}, grows, late=False)
    assert [buffer.pending_bytes(one, "CPU", 0) for one in (TWO, each("Relu"))] == [DEFAULT_BYTES, 0]
    buffer.step_done()
    assert buffer.pending_bytes(TWO, "CPU", DEFAULT_BYTES) == 0


def test_what_was_done_before_lms_came_is_told_by_the_memory_in_use(horovod: SimpleNamespace) -> None:
    assert FusionBuffer({}, grows, late=True).pending_bytes(TWO, "CPU", DEFAULT_BYTES - 1) == DEFAULT_BYTES
    assert FusionBuffer({}, grows, late=True).pending_bytes(TWO, "CPU", DEFAULT_BYTES) == 0
