"""Hand-computed steps. Sizes are in units of 256 bytes, the granule of the allocator."""

import pytest

from lms.ir.graph import GraphBuilder, Use
from lms.ir.liveness import Buffers, round_up, timeline
from lms.ir.swap_plan import Swap, SwapIn

U = 256


class Steps(GraphBuilder):
    """A builder in units."""

    def op(self, name, *inputs, size=0, op_type="Op", **more):
        outputs = [size * U] if size else []
        made = self.add(name, op_type, inputs=inputs, outputs=outputs, **more)
        return made[0] if made else -1

    def units(self, swaps=(), kept=(), order=None):
        graph = self.build(kept)
        line = timeline(Buffers.of(graph), order or range(len(graph.ops)), swaps)
        return [nbytes // U for nbytes in line.allocated], line


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_buffers_are_rounded_to_the_granule(nbytes, taken):
    assert round_up(nbytes) == taken


def test_a_buffer_lives_from_its_producer_to_its_last_reader():
    steps = Steps()
    a = steps.op("a", size=4)
    b = steps.op("b", a, size=2)
    steps.op("c", b, size=1)
    steps.op("d", a)
    units, line = steps.units()
    #               a  .  b  .  c  .  d  .
    assert units == [4, 4, 6, 6, 7, 4, 4, 0]
    assert (line.peak_bytes, line.peak_position) == (7 * U, 2)
    assert [(stay.tensor, stay.nbytes // U) for stay in line.live_at(2)] == [(0, 4), (1, 2), (2, 1)]


def test_aliases_share_one_buffer_whose_life_is_that_of_all():
    steps = Steps()
    a = steps.op("a", size=4)
    view = steps.op("view", a, size=4, op_type="Reshape")
    steps.op("b", a)
    steps.op("c", view)
    assert steps.units()[0] == [4, 4, 4, 4, 4, 4, 4, 0]


def test_a_kernel_writes_over_an_input_that_nobody_else_reads():
    steps = Steps()
    a = steps.op("a", size=4)
    b = steps.op("b", a, size=4, op_type="Relu")
    steps.op("c", b, size=4, op_type="Relu")
    steps.op("d", b)
    # b takes over a; c cannot take over b, which d reads later
    assert steps.units()[0] == [4, 4, 4, 4, 8, 4, 4, 0]


@pytest.mark.parametrize("case", ["twice", "size", "kept"])
def test_in_place_needs_one_reference_and_the_same_size(case):
    steps = Steps()
    a = steps.op("a", size=4)
    inputs = [a, a] if case == "twice" else [a]
    steps.op("b", *inputs, size=3 if case == "size" else 4, op_type="Add")
    units, _ = steps.units(kept=[a] if case == "kept" else [])
    assert units[2] == (7 if case == "size" else 8)


def test_kept_outside_unknown_and_scratch():
    steps = Steps()
    weights = steps.op("weights", size=100, op_type="ReadVariableOp")
    (unknown,) = steps.add("unknown", "Op", inputs=[weights], outputs=[None])
    out = steps.op("out", unknown, size=2, workspace_bytes=10 * U)
    steps.op("end")
    assert steps.units(kept=[out])[0] == [0, 0, 0, 0, 12, 2, 2, 2]


def test_a_swapped_buffer_leaves_before_the_op_that_waits_and_comes_back_behind_the_trigger():
    steps = Steps()
    a = steps.op("a", size=4)
    b = steps.op("b", a, size=1)
    c = steps.op("c", b, size=1)
    d = steps.op("d", c, size=1)
    steps.op("e", d, a)
    swap = Swap(a, 4 * U, after=0, swap_ins=(SwapIn(trigger=3, uses=(Use(4, 1),)),), blocks=(2,))
    #                               a  .  b  .  c  .  d  .  e  .
    assert steps.units()[0] == [4, 4, 5, 5, 6, 5, 6, 5, 5, 0]
    assert steps.units([swap])[0] == [4, 4, 5, 5, 2, 1, 2, 5, 5, 0]


def test_several_trips_share_one_copy_on_the_host():
    steps = Steps()
    a = steps.op("a", size=4)
    for name in "bcdef":
        steps.op(name, *([a] if name in "df" else []), size=1)
    swap_ins = (SwapIn(2, (Use(3, 0),)), SwapIn(4, (Use(5, 0),)))
    units, _ = steps.units([Swap(a, 4 * U, 0, swap_ins, blocks=(1,))])
    #               a  .  b  .  c  .  d  .  e  .  f  .
    assert units == [4, 4, 1, 0, 1, 4, 5, 0, 1, 4, 5, 0]


def test_without_a_waiting_op_the_copy_is_taken_to_keep_up():
    steps = Steps()
    a = steps.op("a", size=4)
    steps.op("b", size=1)
    steps.op("c", a)
    units, _ = steps.units([Swap(a, 4 * U, 0, (SwapIn(1, (Use(2, 0),)),))])
    assert units == [4, 0, 1, 4, 4, 0]


def test_an_empty_graph_has_no_peak():
    _, line = Steps().units()
    assert (line.peak_bytes, line.peak_position) == (0, None)


def test_a_loss_writes_its_slope_over_the_logits():
    """TensorFlow's kernel hands the buffer to its second output (``xent_op.cc``)."""
    steps = Steps()
    logits = steps.op("logits", size=8)
    kind = "SparseSoftmaxCrossEntropyWithLogits"
    loss, slope = steps.add("loss", kind, inputs=[logits], outputs=[1 * U, 8 * U])
    steps.op("use", loss, slope, size=1)
    units, _ = steps.units()
    assert units == [8, 8, 9, 9, 10, 0]
