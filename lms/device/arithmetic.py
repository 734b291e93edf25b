"""Count the arithmetic of convolutions and matrix products, which take most of a step's time, from shapes."""

import math
import re

from lms.device.kernels import OpFacts
from lms.device.scratch import Shape, known_dims

MULTIPLY_AND_ADD = 2
_PRODUCT = re.compile(r"MatMul$|MatMulV")
_CONVOLUTION = re.compile(r"Conv2D|Conv3D|DepthwiseConv2d")


def flops_of(op: OpFacts) -> float | None:
    """Return the floating-point operations of a kernel.

    Returns:
        ``None`` for other ops, and where a shape is open.
    """
    if _PRODUCT.search(op.type):
        return _of_product(op)
    return _of_convolution(op) if _CONVOLUTION.search(op.type) else None


def is_counted(op_type: str) -> bool:
    """Tell whether :func:`flops_of` knows ops of this type: most need no facts gathered for it."""
    return bool(_PRODUCT.search(op_type) or _CONVOLUTION.search(op_type))


def _of_product(op: OpFacts) -> float | None:
    """Return two operations for each element of the result and of the dimension that is summed over."""
    left, made = _dims(op.input_shapes, 0), _dims(op.output_shapes, 0)
    if left is None or made is None or len(left) < 2:
        return None
    turned = op.attrs.get("transpose_a") or op.attrs.get("adj_x")
    return float(MULTIPLY_AND_ADD * math.prod(made) * left[-2 if turned else -1])


def _of_convolution(op: OpFacts) -> float | None:
    """Return two operations for each pixel of the result and weight that it takes part in.

    The gradients need as many as the convolution itself, whose result has the shape of ``out_backprop``.
    """
    if "Backprop" in op.type:
        made = _dims(op.input_shapes, 2)
        filters = _dims(op.output_shapes, 0) if "Filter" in op.type else _dims(op.input_shapes, 1)
    else:
        made, filters = _dims(op.output_shapes, 0), _dims(op.input_shapes, 1)
    if made is None or filters is None or len(filters) < 3:
        return None
    each = math.prod(filters[:-2]) if "Depthwise" in op.type else math.prod(filters[:-1])
    return float(MULTIPLY_AND_ADD * math.prod(made) * each)


def _dims(shapes: tuple[Shape, ...], slot: int) -> tuple[int, ...] | None:
    return known_dims(shapes[slot]) if slot < len(shapes) else None
