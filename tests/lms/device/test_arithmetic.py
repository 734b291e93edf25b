"""The arithmetic of convolutions and products, against counts by hand."""

import pytest

pytest.importorskip("tensorflow")

from lms.device.arithmetic import flops_of  # noqa: E402
from lms.device.kernels import OpFacts  # noqa: E402

IMAGE, FILTERS, MADE = (4, 8, 8, 3), (3, 3, 3, 16), (4, 8, 8, 16)
CONVOLUTION = 2 * (4 * 8 * 8 * 16) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("op", "read", "made"),
    [
        ("Conv2D", (IMAGE, FILTERS), MADE),
        ("_FusedConv2D", (IMAGE, FILTERS, (16,)), MADE),
        ("Conv2DBackpropFilter", (IMAGE, (4,), MADE), FILTERS),
        ("Conv2DBackpropInput", ((4,), FILTERS, MADE), IMAGE),
    ],
)
def test_a_convolution_and_its_gradients_take_the_same(op: str, read: tuple, made: tuple) -> None:
    assert flops_of(OpFacts(op, input_shapes=read, output_shapes=(made,))) == CONVOLUTION


def test_each_channel_alone() -> None:
    op = OpFacts("DepthwiseConv2dNative", input_shapes=(IMAGE, (3, 3, 3, 2)), output_shapes=((4, 8, 8, 6),))
    assert flops_of(op) == 2 * (4 * 8 * 8 * 6) * (3 * 3)


def test_products_of_matrices() -> None:
    shapes = {"input_shapes": ((5, 7, 3), (5, 3, 11)), "output_shapes": ((5, 7, 11),)}
    assert flops_of(OpFacts("BatchMatMulV2", **shapes)) == 2 * 5 * 7 * 11 * 3
    turned = OpFacts(
        "MatMul", input_shapes=((3, 7), (3, 11)), output_shapes=((7, 11),), attrs={"transpose_a": True}
    )
    assert flops_of(turned) == 2 * 7 * 11 * 3


def test_what_is_open_or_no_arithmetic_has_no_count() -> None:
    assert flops_of(OpFacts("Conv2D", input_shapes=(None, FILTERS), output_shapes=(None,))) is None
    assert flops_of(OpFacts("Conv2D")) is None and flops_of(OpFacts("Relu", output_shapes=(IMAGE,))) is None
