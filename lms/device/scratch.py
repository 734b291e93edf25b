"""Compute the scratch of kernels that transpose or unfold their inputs, from shapes alone.

Each formula is that of the kernel's source, and was traced (see :mod:`lms.device.kernels`).
"""

import math
from collections import Counter
from collections.abc import Sequence

Shape = Sequence[int | None] | None
"""Sizes of the dimensions, ``None`` or negative where one is open; ``None`` for an unknown rank."""

BROADCAST, BATCH, FREE, CONTRACT, REDUCE = range(5)
"""The kinds of an einsum's dimensions, in the order in which the kernel wants them."""

MOST_GROUPS = 3
"""The most groups of dimensions that a reduction works on at once."""

VECTOR_BYTES, SINGLE_BYTES = 32, 4
"""The bytes that AVX, which TensorFlow's wheels for x86_64 need, adds at once: eight numbers of single
precision, four of double, and eight of half precision, which take half of it."""

WORKING_SET_BYTES, LEAST_THREAD_BYTES = 30 << 20, 256 << 10
"""``l3_cache_size`` and ``l2_cache_size`` of ``conv_grad_input_ops.h``."""


def elements(shape: Shape) -> int | None:
    """Return the number of elements of a tensor of ``shape``; ``None`` where that is open."""
    dims = known_dims(shape)
    return None if dims is None else math.prod(dims)


def known_dims(shape: Shape) -> tuple[int, ...] | None:
    """Return the sizes of a shape; ``None`` where one is open."""
    dims = tuple(size for size in shape or () if size is not None and size >= 0)
    return dims if shape is not None and len(dims) == len(shape) else None


def einsum_bytes(equation: str, shapes: Sequence[Shape], inputs: Sequence[int], output: int) -> int:
    """Return the bytes of the copies that an einsum makes to transpose its inputs and its output.

    It multiplies matrices: an input whose dimensions are not in that order (batch, free, contracted; or with
    the last two the other way round) is transposed, and so is the product where the output's are not
    (``einsum_op_impl.h``, ``ReduceOperand``, ``ContractOperands``). All copies live until the end.

    Args:
        equation: Such as ``"abc,cd->abd"``.
        shapes: Those of the inputs, for the dimensions that ``...`` stands for.
        inputs: Their bytes.
        output: The bytes of the output.
    """
    left, _, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != len(shapes) or any(shape is None for shape in shapes):
        return 0
    labels = [_labels(text, len(shape or ())) for text, shape in zip(operands, shapes, strict=True)]
    dotted = sorted({label for operand in labels for label in operand if label.startswith(".")})
    before, dots, after = right.partition("...")
    wanted = [*before, *(dotted if dots else ()), *after]
    number = {
        label: place for place, label in enumerate(dict.fromkeys(one for some in labels for one in some))
    }
    counts = Counter(label for operand in labels for label in set(operand))
    kinds = {label: _kind(label, label in wanted, counts[label] == 1) for label in number}

    def order(label: str) -> tuple[int, int]:
        return kinds[label], number[label]

    def swapped_order(label: str) -> tuple[int, int]:
        return {FREE: CONTRACT, CONTRACT: FREE}.get(kinds[label], kinds[label]), number[label]

    total, result = 0, sorted((label for label in number if kinds[label] <= BATCH), key=order)
    for operand, nbytes in zip(labels, inputs, strict=True):
        in_order = sorted(operand, key=order)
        if list(operand) not in (in_order, sorted(operand, key=swapped_order)):
            total += nbytes
        result += [label for label in dict.fromkeys(in_order) if kinds[label] == FREE]
    return total + (output if len(operands) > 1 and result != wanted else 0)


def _labels(text: str, rank: int) -> tuple[str, ...]:
    """Return a label for each dimension; those of an ellipsis are numbered."""
    before, dots, after = text.partition("...")
    spread = rank - len(before) - len(after) if dots else 0
    return (*before, *(f".{place}" for place in range(spread)), *after)


def _kind(label: str, kept: bool, single: bool) -> int:
    if label.startswith("."):
        return BROADCAST
    if kept:
        return FREE if single else BATCH
    return REDUCE if single else CONTRACT


def reduction_bytes(shape: Shape, result: Shape, nbytes: int) -> int:
    """Return the copy that a reduction makes of its input where it has more than three groups of dimensions.

    Neighbours that are both kept, or both reduced, are one group (``reduction_ops_common.h``,
    ``ReductionOp::Compute``). Which are reduced is told by the result's shape; where that allows several
    answers, the one with the copy is taken.
    """
    dims, left = known_dims(shape), known_dims(result)
    if dims is None or left is None:
        return 0
    if len(left) == len(dims):
        kept = [one == other for one, other in zip(dims, left, strict=True)]
        groups = _groups([(size, is_kept) for size, is_kept in zip(dims, kept, strict=True)])
    else:
        groups = _most_groups(tuple(dims), tuple(left))
    return nbytes if groups > MOST_GROUPS else 0


def _groups(dims: Sequence[tuple[int, bool]]) -> int:
    kinds = [is_kept for size, is_kept in dims if size != 1]
    return sum(1 for place, kind in enumerate(kinds) if not place or kind != kinds[place - 1])


def _most_groups(dims: tuple[int, ...], left: tuple[int, ...]) -> int:
    """Return the most groups with which ``left`` can be what is kept of ``dims``."""
    most: dict[tuple[int, bool | None], int] = {(0, None): 0}
    # By how many are kept so far, and whether the last one is: the groups so far.
    for size in dims:
        after: dict[tuple[int, bool | None], int] = {}
        for (kept, last), groups in most.items():
            choices = [False] + ([True] if kept < len(left) and left[kept] == size else [])
            for is_kept in choices:
                key = (kept + is_kept, last if size == 1 else is_kept)
                count = groups + (size != 1 and last is not is_kept)
                after[key] = max(after.get(key, 0), count)
        most = after
    return max((groups for (kept, _), groups in most.items() if kept == len(left)), default=0)


def filter_gradient_bytes(image: Shape, window: Shape, item: int) -> int:
    """Return the buffer in which TensorFlow's own gradient of a filter unfolds images: about 28 MiB.

    ``conv_grad_filter_ops.cc``: as many images as fill a working set.

    Args:
        image: The shape of the gradient that comes in, with channels last.
        window: The shape of the filter.
        item: Bytes of a number.
    """
    unit, unfolded = _unfolded(image, window)
    return -(-(WORKING_SET_BYTES // item) // unit) * unfolded * item if unit else 0


def image_gradient_bytes(image: Shape, window: Shape, item: int, threads: int) -> int:
    """Return the buffer in which TensorFlow's own gradient of the images unfolds them.

    It unfolds one image where that is work for all threads, else as many as for a filter's gradient
    (``conv_grad_input_ops.h``, ``Conv2DCustomBackpropInputOp``).

    Args:
        image: The shape of the gradient that comes in, with channels last.
        window: The shape of the filter.
        item: Bytes of a number.
        threads: How many work on one op.
    """
    unit, unfolded = _unfolded(image, window)
    count = (known_dims(image) or (1,))[0]
    if unit and (count == 1 or unit // threads >= LEAST_THREAD_BYTES // item):
        return unfolded * item
    return filter_gradient_bytes(image, window, item)


MOST_SCRATCH = 25
"""``kMaxTempAllocationOverhead`` of ``conv_grad_ops_3d.cc``."""


def volume_gradient_bytes(
    image: Shape, window: Shape, other: Shape, item: int, cache_bytes: int, *, whole: bool
) -> int:
    """Return the buffer in which TensorFlow's own gradients of 3D convolutions unfold volumes.

    They unfold as many as fill the processor's largest cache. Where that takes more than 25 times the
    elements of all operands another kernel runs, which unfolds none (``conv_grad_ops_3d.cc``).

    Args:
        image: The shape of the gradient that comes in.
        window: The shape of the filter.
        other: The shape of the images, or of their gradient.
        item: Bytes of a number.
        cache_bytes: Bytes of the largest cache, as Eigen finds them.
        whole: Whether a single volume is unfolded alone, by all threads.

    Returns:
        Bytes; 0 where a shape is open, for then it is not known which kernel runs.
    """
    unit, unfolded = _unfolded(image, window)
    operands = [elements(shape) for shape in (image, window, other)]
    if not unit or not all(operands):
        return 0
    volumes = 1 if whole and (known_dims(image) or (0,))[0] == 1 else -(-(cache_bytes // item) // unit)
    scratch = volumes * unfolded
    return 0 if scratch // sum(filter(None, operands)) > MOST_SCRATCH else scratch * item


def depthwise_filter_gradient_bytes(image: Shape, window: Shape, item: int, threads: int) -> int:
    """Return the bytes of a depthwise filter's partial gradients, one for each image and each thread at work.

    Their channels are padded to what a processor with AVX adds at once (``depthwise_conv_grad_op.cc``).

    Args:
        image: The shape of the gradient that comes in, with channels last.
        window: The shape of the filter.
        item: Bytes of a number.
        threads: How many work on one op.
    """
    dims, sizes = known_dims(image), known_dims(window)
    if not dims or not sizes:
        return 0
    vector = VECTOR_BYTES if item >= SINGLE_BYTES else VECTOR_BYTES // 2
    padded = -(-dims[-1] * item // vector) * vector
    return (dims[0] + min(threads, dims[0])) * math.prod(sizes[:2]) * padded


def _unfolded(image: Shape, window: Shape) -> tuple[int, int]:
    """Return the numbers that a kernel works on for one image, and those of its unfolded windows."""
    dims, sizes = known_dims(image), known_dims(window)
    if dims is None or sizes is None or len(dims) != len(sizes):
        return 0, 0
    places, inner = math.prod(dims[1:-1]), math.prod(sizes[:-1])
    return places * dims[-1] + inner * dims[-1] + places * inner, places * inner
