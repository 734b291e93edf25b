"""State what the kernels of a device do with memory that TensorFlow's op definitions do not tell.

One class describes the kernels of one device, and all have one shape, :class:`Kernels`. They are asked about
the graph that really runs, behind TensorFlow's own optimizer, and work on plain values (:class:`OpFacts`).

"Traced" in a comment means: run on TensorFlow 2.15.1 and 2.21.0 with ``RunOptions.FULL_TRACE``, which gives
the address of every output and the bytes that each kernel asked the allocator for. Files that are named are
TensorFlow's.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from lms.device.scratch import Shape as Shape
from lms.device.scratch import (
    depthwise_filter_gradient_bytes,
    einsum_bytes,
    elements,
    filter_gradient_bytes,
    image_gradient_bytes,
    known_dims,
    reduction_bytes,
    volume_gradient_bytes,
)
from lms.ir.op_traits import ALIAS_TYPES, in_place_slots
from lms.native.processor_cache import OTHER_L3_BYTES


class Reader(NamedTuple):
    """One reading of output 0 of an op."""

    type: str
    slot: int
    """Which input of the reader it is."""


class OpFacts(NamedTuple):
    """The facts that kernels depend on: one op as plain values."""

    type: str
    input_bytes: tuple[int | None, ...] = ()
    """Exact size of each input; ``None``: unknown. Likewise below."""
    output_bytes: tuple[int | None, ...] = ()
    input_shapes: tuple[Shape, ...] = ()
    output_shapes: tuple[Shape, ...] = ()
    attrs: Mapping[str, object] = MappingProxyType({})
    """``bool``, ``int``, ``float`` or ``str`` by name, or a list of these. A data type is its number in
    ``types.proto``, as in a NodeDef. What is not there has its default."""
    readers: tuple[Reader, ...] = ()
    """The readers of output 0, aliases not followed: TensorFlow matches kernels edge by edge."""
    makers: tuple[str, ...] = ()
    """The type of the op that makes each input, where it is known."""


class ExtraOutput(NamedTuple):
    """A buffer that an op makes, and of which TensorFlow's op definition does not tell the size."""

    nbytes: int | None
    """``None``: unknown."""
    output: int | None = None
    """Which of the op's outputs it is; ``None``: one that TensorFlow gives it behind the plug-in."""
    readers: tuple[Reader, ...] = ()
    """Those of the op's readers that read such a new output too; those of an old one are in the graph."""
    pins: str | None = None
    """Why output 0 may not be swapped; ``None`` when it may be."""


class Source(Protocol):
    """An output of a node."""

    @property
    def node(self) -> int:
        """The node's number."""

    @property
    def index(self) -> int:
        """The output's number."""


class Nodes(Protocol):
    """The part of a graph that is needed to find pairs in it; nodes are known by number."""

    @property
    def types(self) -> Sequence[str]:
        """The op type of each node."""

    @property
    def inputs(self) -> Sequence[Sequence[Source]]:
        """The outputs that each node reads, by slot."""

    @property
    def controls(self) -> Sequence[Sequence[int]]:
        """The nodes that each node waits for beside its inputs."""

    @property
    def readers(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For each node the readers of its outputs: (node, slot)."""

    def attr(self, node: int, name: str) -> object:
        """Return an attribute as a plain value (see :attr:`OpFacts.attrs`); ``None``: it is not there."""


class Pair(NamedTuple):
    """Two nodes of which TensorFlow makes one kernel behind the plug-in, so they are one op."""

    first: int
    """The node whose name the one op gets."""
    second: int
    vanishes: bool = False
    """Whether the second's output never exists: the first alone reads it."""
    bare: bool = False
    """Whether neither node may get a control edge."""


class Kernels(Protocol):
    """The memory that the kernels of one device use."""

    @property
    def types(self) -> frozenset[str]:
        """The op types to ask about; all others need nothing, and are as their type is."""

    def workspace_bytes(self, op: OpFacts) -> int:
        """Return the bytes that an op needs for itself while it runs."""

    def extra_outputs(self, op: OpFacts) -> tuple[ExtraOutput, ...]:
        """Return what an op makes beside the outputs whose sizes TensorFlow tells."""

    def in_place_slots(self, op: OpFacts) -> tuple[int, ...]:
        """Return the inputs whose buffer an output may take over, in the order in which they are tried.

        That is output 0, but for :data:`lms.ir.op_traits.IN_PLACE_OUTPUTS`.
        """

    def alias_slots(self, op: OpFacts) -> tuple[int | None, ...]:
        """Return for each output the input in whose buffer it lies, ``None`` where it has one of its own."""

    def compiled_bytes(self, body: Iterable[OpFacts]) -> int:
        """Return the scratch of a function that XLA compiles, by the ops of its body."""

    def pairs(self, nodes: Nodes) -> Sequence[Pair]:
        """Return the nodes that become one kernel; no node is in two pairs."""

    def fatal(self, nodes: Nodes) -> Iterable[int]:
        """Return the nodes at whose merging TensorFlow would end the process."""


FLOAT_BYTES = 4
FLOAT, HALF, BFLOAT16 = 1, 19, 14
"""``DT_FLOAT``, ``DT_HALF`` and ``DT_BFLOAT16``."""

RESERVING = frozenset({"FusedBatchNormV3", "_FusedBatchNormEx"})
RESERVE = 5
"""``reserve_space_3`` of a batch normalisation: the kernel's own note for its gradient, of open shape."""

CHANNELS_LAST = ("NHWC", "NDHWC")

REDUCTIONS = frozenset({"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"})

ROW_BYTES = 64
"""``EIGEN_MAX_ALIGN_BYTES``: a part of a tensor that begins at a multiple of it can be used as it is."""

PARTS = {"Slice": 0, "Split": 1, "SplitV": 0, "StridedSlice": 0, "Unpack": 0}
"""Ops that pass on parts of the buffer in this slot, where they divide its first dimension alone and its rows
are aligned (``slice_op.cc``, ``split_op.cc``, ``split_v_op.cc``, ``strided_slice_op.cc``, ``unpack_op.cc``).
Traced. They keep all of it from being freed."""

PASSING_ON = REDUCTIONS | {"BroadcastTo", "MirrorPad", "Pad", "Slice", "Tile"}
"""Ops that pass their input's buffer on where they have nothing to do, as their output's size shows
(``reduction_ops_common.h``, ``broadcast_to_op.cc``, ``mirror_pad_op.cc``, ``pad_op.cc``, ``slice_op.cc``,
``tile_ops.cc``), and ``Transpose`` (``transpose_op.cc``) where at most one dimension is not 1. Seen on
TensorFlow 2.21 by the addresses. TensorFlow takes such ops out itself where no shape is open."""

VOLUME_GRADIENTS = frozenset({"Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"})
DEPTHWISE_FILTER_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"

FILTER_GRADIENTS = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"})

DENSE_FILTERS = 2
"""How many filters over all channels XLA holds on a CPU for the gradient of a depthwise one, of which it then
picks the filter's part. Seen on TensorFlow 2.21 with 7x7 filters of 96 and of 768 channels, 3.4 and 220.8
MiB; with two and more channels a group nothing."""


def size_at(sizes: Sequence[int | None], index: int) -> int:
    """Return a size, 0 where it is unknown or not there."""
    return (sizes[index] or 0) if index < len(sizes) else 0


def shape_at(shapes: Sequence[Shape], index: int) -> Shape:
    """Return a shape, ``None`` where it is not there."""
    return shapes[index] if index < len(shapes) else None


class TensorFlowKernels:
    """The kernels that TensorFlow has written once for all devices."""

    types: ClassVar[frozenset[str]] = frozenset({"Einsum", "Transpose", *PASSING_ON, *PARTS, *RESERVING})

    def workspace_bytes(self, op: OpFacts) -> int:
        """Return the copies of what an einsum or a reduction has to transpose."""
        if op.type == "Einsum":
            sizes = [size or 0 for size in op.input_bytes]
            equation = str(op.attrs.get("equation", ""))
            return einsum_bytes(equation, op.input_shapes, sizes, size_at(op.output_bytes, 0))
        if op.type in REDUCTIONS:
            read, made = shape_at(op.input_shapes, 0), shape_at(op.output_shapes, 0)
            return reduction_bytes(read, made, size_at(op.input_bytes, 0))
        return 0

    def extra_outputs(self, op: OpFacts) -> tuple[ExtraOutput, ...]:
        """Return a normalisation's reserve space, which takes no memory here."""
        return (ExtraOutput(0, RESERVE),) if op.type in RESERVING else ()

    def in_place_slots(self, op: OpFacts) -> tuple[int, ...]:
        """Return the slots of :mod:`lms.ir.op_traits`."""
        return in_place_slots(op.type, len(op.input_bytes))

    def alias_slots(self, op: OpFacts) -> tuple[int | None, ...]:
        """Return the slots that the op type tells, or the input of which an op passes parts on."""
        count = len(op.output_bytes)
        if op.type == "IdentityN":
            return tuple(range(count))
        is_whole = op.type in ALIAS_TYPES or _passes_on(op)
        slot = 0 if is_whole and op.input_bytes else self._divided(op)
        if slot is None:
            return (None,) * count
        return (slot,) * (count if op.type in PARTS else 1)

    def _divided(self, op: OpFacts) -> int | None:
        """Return the slot of which an op's outputs are parts."""
        slot = PARTS.get(op.type)
        dims = None if slot is None else known_dims(shape_at(op.input_shapes, slot))
        if not dims or slot is None or not dims[0] or size_at(op.input_bytes, slot) // dims[0] % ROW_BYTES:
            return None
        if op.type == "Unpack":
            return None if op.attrs.get("axis", 0) else slot
        made = [known_dims(shape) for shape in op.output_shapes]
        if op.type == "StridedSlice":  # its strides are not known: only one row is sure to be in one piece
            one_row = op.attrs.get("shrink_axis_mask") == 1
            others = any(op.attrs.get(mask) for mask in ("ellipsis_mask", "new_axis_mask"))
            return slot if one_row and not others and made == [dims[1:]] else None
        rows = [shape for shape in made if shape and shape[1:] == dims[1:] and shape[0] < dims[0]]
        return slot if len(rows) == len(made) else None

    def compiled_bytes(self, body: Iterable[OpFacts]) -> int:
        """Return 0: the memory that XLA needs beside inputs and outputs is not known."""
        return 0

    def pairs(self, nodes: Nodes) -> Sequence[Pair]:
        """Return none: nothing is merged."""
        return ()

    def fatal(self, nodes: Nodes) -> Iterable[int]:
        """Return none: nothing is merged."""
        return ()


REPOOLING, POOLED, PLACE_BYTES = ("MaxPoolGrad", "MaxPoolGradV2"), 1, 8
"""TensorFlow's own gradient of pooling pools again, for the places of the maxima: that takes an ``int64`` for
each element of the result, which stands in this slot (``MaxPoolingGradOp`` in ``maxpooling_op.cc``). It also
takes a copy of the result, except where nothing else holds that any more. It writes over the pooling's input
(slot 0). Traced."""

NORMALISATION_COPIES = {
    "FusedBatchNorm": 2,
    "FusedBatchNormGrad": 3,
    "FusedBatchNormGradV2": 3,
    "FusedBatchNormGradV3": 3,
    "FusedBatchNormV2": 2,
    "FusedBatchNormV3": 2,
}
"""How many copies of its input a normalisation makes that turns its images: what it reads and makes
(``fused_batch_norm_op.cc``). On a CPU those with channels first; traced. On a GPU those with channels last
(``fast_nhwc_batch_norm``), while it trains; that has not been run."""


@dataclass(frozen=True)
class PlainCpu(TensorFlowKernels):
    """TensorFlow's own kernels on a CPU."""

    threads: int = 1
    """Threads that work on one op (``intra_op_parallelism_threads``, else the cores)."""
    cache_bytes: int = OTHER_L3_BYTES
    """Bytes of the processor's largest cache, as Eigen finds them."""
    types: ClassVar[frozenset[str]] = TensorFlowKernels.types | {
        *REPOOLING,
        *NORMALISATION_COPIES,
        *FILTER_GRADIENTS,
        *VOLUME_GRADIENTS,
        "Conv2DBackpropInput",
        DEPTHWISE_FILTER_GRADIENT,
    }

    def workspace_bytes(self, op: OpFacts) -> int:
        """Return the scratch of the gradients of convolutions and poolings, and of transposed images."""
        item = size_at(op.output_bytes, 0) // (elements(shape_at(op.output_shapes, 0)) or 1)
        if op.type == "Conv2DBackpropInput":
            shapes = shape_at(op.input_shapes, 2), shape_at(op.input_shapes, 1)
            return image_gradient_bytes(*shapes, item or FLOAT_BYTES, self.threads)
        if op.type == "Conv2DBackpropFilter":
            shapes = shape_at(op.input_shapes, 2), shape_at(op.output_shapes, 0)
            return filter_gradient_bytes(*shapes, item or FLOAT_BYTES)
        if op.type == DEPTHWISE_FILTER_GRADIENT:
            shapes = shape_at(op.input_shapes, 2), shape_at(op.output_shapes, 0)
            return depthwise_filter_gradient_bytes(*shapes, item or FLOAT_BYTES, self.threads)
        if op.type in VOLUME_GRADIENTS:
            return self._unfolded_volumes(op, item or FLOAT_BYTES)
        if op.type in REPOOLING:
            places = elements(shape_at(op.input_shapes, POOLED)) or 0
            return size_at(op.input_bytes, POOLED) + places * PLACE_BYTES
        if op.type in NORMALISATION_COPIES and str(op.attrs.get("data_format", "NHWC")).startswith("NC"):
            return NORMALISATION_COPIES[op.type] * size_at(op.input_bytes, 0)
        return super().workspace_bytes(op)

    def _unfolded_volumes(self, op: OpFacts, item: int) -> int:
        """Return the volumes that a gradient of a 3D convolution unfolds."""
        image, made = shape_at(op.input_shapes, 2), shape_at(op.output_shapes, 0)
        if op.type == "Conv3DBackpropInputV2":
            window = shape_at(op.input_shapes, 1)
            return volume_gradient_bytes(image, window, made, item, self.cache_bytes, whole=True)
        if op.attrs.get("T", FLOAT) == HALF:
            return 0  # there is another kernel for it
        other = shape_at(op.input_shapes, 0)
        return volume_gradient_bytes(image, made, other, item, self.cache_bytes, whole=False)

    def in_place_slots(self, op: OpFacts) -> tuple[int, ...]:
        """Return the slots of :mod:`lms.ir.op_traits`, and that of a pooling's gradient."""
        return (0,) if op.type in REPOOLING else super().in_place_slots(op)

    def compiled_bytes(self, body: Iterable[OpFacts]) -> int:
        """Return the most that one op of a compiled function needs beside what it reads and makes."""
        return max((_dense_filter_bytes(op) for op in body if op.type in FILTER_GRADIENTS), default=0)


def _dense_filter_bytes(op: OpFacts) -> int:
    dims = known_dims(shape_at(op.output_shapes, 0))
    if not dims or dims[-2] != 1:
        return 0
    return DENSE_FILTERS * dims[-1] * size_at(op.output_bytes, 0)


POOLS = {"MaxPool": "MaxPoolGrad", "MaxPool3D": "MaxPool3DGrad"}
"""oneDNN's graph pass takes the gradient of pooling where it reads the result from the pooling itself, in
slot 1, and lets it read the places of the maxima, which the pooling always makes (``mkl_layout_pass.cc``,
``wsinfo_``; traced). Otherwise another kernel runs, which shares the gradient out in another way. So the
result of a pooling stays where one of these reads it."""

POOLS_OF = {gradient: pool for pool, gradient in POOLS.items()}

PLACES_PIN = "oneDNN's gradient of the pooling reads it"
"""Why the result of a pooling stays."""

SMALL_WINDOW = 256
"""The place of a maximum is a byte where a window has fewer elements, else an ``int32`` (``pooling.cpp`` of
oneDNN). Traced, with windows of 4 to 343 elements."""


@dataclass(frozen=True)
class OneDnnCpu(PlainCpu):
    """oneDNN's kernels on a CPU, and TensorFlow's own for what oneDNN does not take.

    Not counted, for it is small: a convolution's 8 KiB, with 4 more for each thread but the first, and one
    operand's matrix for each thread of a product of many (``BatchMatMulV2``) that is read transposed.
    """

    types: ClassVar[frozenset[str]] = PlainCpu.types | POOLS.keys() | POOLS_OF.keys()

    def workspace_bytes(self, op: OpFacts) -> int:
        """Return the scratch of TensorFlow's own kernels; oneDNN's does not come from the allocator."""
        return TensorFlowKernels.workspace_bytes(self, op) if self._takes(op) else super().workspace_bytes(op)

    def extra_outputs(self, op: OpFacts) -> tuple[ExtraOutput, ...]:
        """Return the places that a pooling keeps, and the reserve space of a merged normalisation."""
        if op.type in POOLS and self._takes(op):
            grads = tuple(one for one in op.readers if one == (POOLS[op.type], POOLED))
            return (ExtraOutput(_places_bytes(op), None, grads, PLACES_PIN if grads else None),)
        if op.type == "_FusedBatchNormEx":
            return (ExtraOutput(reserved_bytes(op), RESERVE),)
        return super().extra_outputs(op)

    def in_place_slots(self, op: OpFacts) -> tuple[int, ...]:
        """Return the slots of the op type; none for a pooling's gradient that oneDNN computes."""
        return () if op.type in REPOOLING and self._takes(op) else super().in_place_slots(op)

    def pairs(self, nodes: Nodes) -> Sequence[Pair]:
        """Return the pairs of nodes that oneDNN's graph pass merges."""
        return tuple(_find_pairs(nodes))

    def fatal(self, nodes: Nodes) -> Iterable[int]:
        """Return the biases that have control inputs, the same ones as their convolution.

        TensorFlow merges the two and ends the process (``Check failed: pred->in_edges()``).
        """
        return (bias for bias, _ in _biased(nodes) if nodes.controls[bias])

    def _takes(self, op: OpFacts) -> bool:
        """Return whether oneDNN has the kernel of an op that is in one of the tables above."""
        if op.attrs.get("T", FLOAT) not in (FLOAT, BFLOAT16):
            return False
        if op.type in POOLS or op.type in POOLS_OF:
            made_by = op.makers[POOLED] if len(op.makers) > POOLED else POOLS_OF.get(op.type)
            return _pools_in_planes(op) and made_by == POOLS_OF.get(op.type, made_by)
        if op.type in NORMALISATION_COPIES:
            return len(shape_at(op.input_shapes, 0) or ()) == 4
        return op.type not in REPOOLING


def _passes_on(op: OpFacts) -> bool:
    """Return whether an op that could have made a new tensor passes on the one it reads."""
    if op.type == "Transpose":
        dims = known_dims(shape_at(op.input_shapes, 0))
        return dims is not None and sum(dim != 1 for dim in dims) <= 1
    read = size_at(op.input_bytes, 0)
    return op.type in PASSING_ON and bool(read) and size_at(op.output_bytes, 0) == read


def _pools_in_planes(op: OpFacts) -> bool:
    """Return whether a pooling stays within images and channels (``NonDepthBatchWisePoolRewrite``)."""
    channels = 1 if str(op.attrs.get("data_format", "NHWC")).startswith("NC") else -1
    sizes = [op.attrs.get(name) for name in ("ksize", "strides")]
    return all(isinstance(one, list | tuple) and one[0] == one[channels] == 1 for one in sizes)


def _places_bytes(op: OpFacts) -> int | None:
    """Return the bytes of the places that a pooling keeps."""
    count = elements(shape_at(op.output_shapes, 0))
    window = op.attrs["ksize"]
    wide = isinstance(window, list | tuple) and math.prod(window) >= SMALL_WINDOW
    return None if count is None else count * (4 if wide else 1)


def reserved_bytes(op: OpFacts) -> int | None:
    """Return the bytes that a normalisation merged with its activation keeps for its gradient.

    Which elements the activation let pass: with channels last a bit each where the channels are a multiple of
    eight, else a byte. TensorFlow takes a number of four bytes for each byte of that
    (``mkl_fused_batch_norm_op.cc``: the workspace's bytes become the tensor's elements). Seen with 22 numbers
    of channels from 1 to 256 in two sizes on TensorFlow 2.21, three of them on 2.15; with channels first
    traced with 16, 24 and 32. Without training it is empty; traced.
    """
    if not op.attrs.get("is_training", True):
        return 0
    shape = shape_at(op.input_shapes, 0)
    count = elements(shape)
    if count is None or not shape:
        return None
    in_bits = op.attrs.get("data_format", "NHWC") == "NHWC" and not (shape[-1] or 1) % 8
    return 4 * (count // 8 if in_bits else count)


HALVES = (HALF, BFLOAT16)
FILTER_GRADIENT, FILTER_SLOT, BIAS_GRADIENT = "Conv2DBackpropFilter", 2, "BiasAddGrad"
PADDED = frozenset({"Conv2D", "_FusedConv2D"})


def _find_pairs(nodes: Nodes) -> Iterator[Pair]:
    """Find the nodes that oneDNN's graph pass merges behind the plug-in: two with the same control inputs.

    It does not look for paths between the two: with one it makes a cycle, and where they wait for different
    nodes it leaves them apart and results differ in the last digits. It looks at nodes and not at outputs
    (``mkl_layout_pass.cc``, ``minfo_`` and ``CheckForNodeMerge``). Traced, with control edges to one, to both
    and between. It merges gradients in half precision,
    too, where the processor has instructions for it; elsewhere the two lose nothing by being ordered as one.
    Of several that fit, which it takes depends on its walk through
    the graph: the first in the graph's order is only likely.
    """
    taken: set[int] = set()
    biased = dict(_biased(nodes))
    for node, op_type in enumerate(nodes.types):
        found = None
        if op_type == FILTER_GRADIENT:
            gradient = nodes.inputs[node][FILTER_SLOT].node
            readers = [one for one, slot in nodes.readers[gradient] if slot == 0]
            biases = (one for one in readers if nodes.types[one] == BIAS_GRADIENT and one not in taken)
            found = next((Pair(node, bias) for bias in biases if _fit(nodes, node, bias, HALVES)), None)
        elif node in biased and not nodes.controls[node]:
            found = Pair(node, biased[node], vanishes=True, bare=True)
        elif op_type in PADDED and nodes.attr(node, "padding") == "VALID":
            pad = nodes.inputs[node][0].node
            if nodes.types[pad] == "Pad" and _is_only_reader(nodes, node, pad) and _fit(nodes, node, pad):
                found = Pair(node, pad, vanishes=True)
        if found is not None and taken.isdisjoint(found[:2]):
            taken.update(found[:2])
            yield found


def _biased(nodes: Nodes) -> Iterator[tuple[int, int]]:
    """Find biases with the convolutions that oneDNN merges them into."""
    for node, op_type in enumerate(nodes.types):
        if op_type == "BiasAdd":
            conv = nodes.inputs[node][0].node
            if (
                nodes.types[conv] == "Conv2D"
                and _is_only_reader(nodes, node, conv)
                and _fit(nodes, node, conv)
            ):
                yield node, conv


def _is_only_reader(nodes: Nodes, reader: int, made_by: int) -> bool:
    return [one for one, _ in nodes.readers[made_by]] == [reader]


def _fit(nodes: Nodes, node: int, other: int, more: Collection[int] = ()) -> bool:
    """Return whether two nodes have the type and format that is merged, and the same control inputs."""
    same = set(nodes.controls[node]) == set(nodes.controls[other])
    dtypes = {nodes.attr(one, "T") for one in (node, other)}
    formats = {nodes.attr(one, "data_format") or "NHWC" for one in (node, other) if nodes.types[one] != "Pad"}
    return same and dtypes in ({FLOAT}, *({one} for one in more)) and len(formats) == 1


PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
"""With it cuDNN normalises images of ``float16`` with channels last as they are."""

VOLTA, AMPERE = (7, 0), (8, 0)

CONVOLUTIONS = {
    "Conv2D": (0, 1),
    "Conv2DBackpropFilter": (0, 2),
    "Conv2DBackpropInput": (1, 2),
    "Conv3D": (0, 1),
    "Conv3DBackpropFilterV2": (0, 2),
    "Conv3DBackpropInputV2": (1, 2),
    "_FusedConv2D": (0, 1),
}
"""In which slots convolutions read images and filters."""


@dataclass(frozen=True)
class Gpu(TensorFlowKernels):
    """cuDNN's kernels and TensorFlow's own on a GPU of NVIDIA. An H200 has run them: docs/measurements.md."""

    capability: tuple[int, int] | None = None
    """Compute capability, such as (9, 0)."""
    persistent: bool = False
    """Whether cuDNN normalises with :data:`PERSISTENT`."""
    tensor_float: bool = True
    """Whether ``float32`` may be rounded (``tf.config.experimental.enable_tensor_float_32_execution``)."""

    types: ClassVar[frozenset[str]] = (
        TensorFlowKernels.types | NORMALISATION_COPIES.keys() | CONVOLUTIONS.keys()
    )

    def workspace_bytes(self, op: OpFacts) -> int:
        """Return the scratch of normalisations and convolutions that transpose their images."""
        last = op.attrs.get("data_format", "NHWC") in CHANNELS_LAST
        if op.type in NORMALISATION_COPIES:
            fast = self.persistent and op.attrs.get("T") == HALF
            turns = last and not fast and bool(op.attrs.get("is_training", True))
            return NORMALISATION_COPIES[op.type] * size_at(op.input_bytes, 0) if turns else 0
        if op.type in CONVOLUTIONS:
            # Filters are always brought into cuDNN's order, images where it does not take channels last
            # (conv_ops_impl.h, conv_grad_input_ops.cc, conv_grad_filter_ops.cc). What its algorithms need
            # beside that is not known before.
            made = size_at(op.output_bytes, 0)
            if last and not self._takes_last(op):
                return made + sum(size_at(op.input_bytes, slot) for slot in CONVOLUTIONS[op.type])
            return made if op.type in FILTER_GRADIENTS else size_at(op.input_bytes, 1)
        return super().workspace_bytes(op)

    def _takes_last(self, op: OpFacts) -> bool:
        """Return whether cuDNN's convolutions take channels last as they are (``ComputeInNhwcEnabled``)."""
        dtype = op.attrs.get("T", FLOAT)
        if self.capability is None:
            return False
        if dtype == HALF:
            return self.capability >= VOLTA
        return self.capability >= AMPERE and (dtype == BFLOAT16 or (dtype == FLOAT and self.tensor_float))
