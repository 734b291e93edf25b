"""Tables of facts about TensorFlow's kernels: how each op type uses memory.

An op type that is in none of them allocates each output anew, which is the common case and the safe
assumption.
"""

import re
from functools import cache

ALIAS_TYPES = frozenset(
    """Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient CheckNumerics EnsureShape
    Bitcast DebugIdentity""".split()
)
"""Output i is input i (output 0 is input 0 where there is only one): no allocation, one buffer, one
lifetime. ``PlaceholderWithDefault`` is none of them: what a session feeds it is not its input."""

SUM = "AddN"
"""It begins with a term that nothing else holds: its last digits depend on who holds what."""

SHAPE_READERS = frozenset({"Rank", "Shape", "ShapeN", "Size"})
"""Ops that look at a tensor's shape alone. They run as soon as it exists and never need its bytes later; once
the shape is known, and before anything is merged, they are constants."""

IN_PLACE_TYPES = frozenset(
    """Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e
    BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1
    BiasAdd BiasAddV1 Ceil Cos Cosh Dawsn Digamma Div DivNoNan Elu EluGrad Erf Erfc Erfinv Exp Expint Expm1
    Floor FloorDiv FloorMod FresnelCos FresnelSin Igamma IgammaGradA Igammac Inv InvGrad LeakyRelu
    LeakyReluGrad Lgamma Log Log1p LogSoftmax Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter OnesLike
    Polygamma Pow RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad
    Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softmax Softplus SoftplusGrad Softsign
    SoftsignGrad Spence Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv TruncateMod
    Xdivy Xlog1py Xlogy ZerosLike Zeta""".split()
)
"""Kernels that ask for ``forward_input_or_allocate_output``: output 0 takes over an input's buffer when the
sizes agree and nothing else holds the buffer. All op types of TensorFlow that take and make ``float``
of one shape were traced on 2.15.1 and 2.21.0, with oneDNN and without (see :mod:`lms.device.kernels`).
``FusedBatchNorm`` and its like are not among them, though older sources say so."""

IN_PLACE_SLOTS = {
    "ClipByValue": (0,),  # cwise_op_clip.cc
    "MatrixBandPart": (0,),  # matrix_band_part_op.cc
    "MatrixSetDiag": (0,),  # matrix_set_diag_op.cc, and below
    "MatrixSetDiagV2": (0,),
    "MatrixSetDiagV3": (0,),
    "MaxPoolGradWithArgmax": (0,),  # maxpooling_op.cc
    "Select": (1, 2),  # cwise_op_select.cc: the values, and below
    "SelectV2": (1, 2),
    "SoftmaxCrossEntropyWithLogits": (0,),  # xent_op.cc; see IN_PLACE_OUTPUTS
    "SparseSoftmaxCrossEntropyWithLogits": (0,),  # sparse_xent_op.h; see IN_PLACE_OUTPUTS
    "_FusedConv2D": (3,),  # mkl_conv_ops.cc, AllocateOutputTensor: what it adds behind the bias
    "_FusedConv3D": (3,),  # the same
    "_FusedMatMul": (3,),  # mkl_matmul_op_fused.cc: what it adds behind the bias
    "_MklFusedInstanceNorm": (0,),  # mkl_fused_instance_norm_op.cc
    "_MklLayerNorm": (0,),  # mkl_layer_norm_op.cc
    "_UnaryOpsComposition": (0,),  # unary_ops_composition.cc
}
"""Kernels that write over certain inputs alone; of the others that TensorFlow merges ops into none does
(``_FusedBatchNormEx``, ``_FusedDepthwiseConv2dNative``, ``_MklFusedBatchMatMulV2``, ``_MklFusedMish``,
``_MklSwish``). Traced like the others."""

IN_PLACE_OUTPUTS = {"SoftmaxCrossEntropyWithLogits": 1, "SparseSoftmaxCrossEntropyWithLogits": 1}
"""Which output takes the buffer over where it is not the first: that is the loss, the second its slope."""


def in_place_slots(op_type: str, inputs: int) -> tuple[int, ...]:
    """Return the inputs whose buffer an op with so many inputs may write over, in the order of trial."""
    if op_type in IN_PLACE_TYPES:
        return tuple(range(inputs))
    return tuple(slot for slot in IN_PLACE_SLOTS.get(op_type, ()) if slot < inputs)


def in_place_output(op_type: str) -> int:
    """Return which output takes over a buffer that an op writes over."""
    return IN_PLACE_OUTPUTS.get(op_type, 0)


PLACES = "places of its maxima"
KEPT_FOR_GRADIENT = {"MaxPool": PLACES, "MaxPool3D": PLACES}
"""What oneDNN's kernels keep beside the one output that the op has for TensorFlow."""

OUTSIDE_TYPES = frozenset(
    """Arg Const HostConst LmsGetHostValue Placeholder ReadVariableOp Variable VariableV2 VarHandleOp
    VarIsInitializedOp _Arg _DeviceArg _HostConst _ReadVariablesOp _VarHandlesOp""".split()
)
"""Outputs that live outside the step's own memory: variables, constants and arguments."""

STREAM_IN, STREAM_ENTER, STREAM_LAST, STREAM_OUT, STREAM_LEAVE = (
    "LmsStreamIn",
    "LmsStreamEnter",
    "LmsStreamLast",
    "LmsStreamOut",
    "LmsStreamLeave",
)
"""Types of the ops that bring a variable's value from the host, make it the variable's, read it at last, copy
it to the host and make that the variable's (:mod:`lms.rewriter.streaming`)."""
STREAM_TYPES = frozenset({STREAM_IN, STREAM_ENTER, STREAM_LAST, STREAM_OUT, STREAM_LEAVE})

FEWEST_TERMS = 3
"""The terms of a sum whose order counts: of two either may be the first."""

OF_BODIES = frozenset(
    "Exit If Loop Merge PartitionedCall StatefulPartitionedCall StatelessIf StatelessWhile While".split()
)
"""Types of ops that hand on the buffer of a branch, a turn or a function, which others may hold."""

CONSTANTS = frozenset({"Const", "HostConst", "_HostConst"})
"""Types of ops that keep their value."""
FOLDED_BYTES = 10 << 20
"""``max_constant_size_in_bytes`` of ``constant_folding.cc`` in ``core/common_runtime``: up to there what is
computed from constants alone is made a constant; more is left to the step."""
MERGES = frozenset({"Merge", "RefMerge"})
"""Types of the ops that run once one of their inputs has come, and all that they wait for."""

CHEAP = "cheaper to make than to move"

EXIT = "exit"
"""The purpose of the nodes that run whether a condition leaves others out or not."""

STACKED = "list"
"""The purpose of the nodes that make a list a tensor and a list again (:mod:`lms.rewriter.stacking`)."""

UNSWAPPABLE_TYPES = {
    **dict.fromkeys(("Fill", "OnesLike", "Range", "ZerosLike"), CHEAP),
    "IteratorGetNext": "input of the step",
    "Merge": "control flow",
    "Enter": "control flow",
    "Exit": "control flow",
    "NextIteration": "control flow",
    "RefEnter": "control flow",
    "RefSwitch": "control flow",
}
"""Producers whose outputs stay on the device, with the reason."""

COLLECTIVE_PREFIXES = ("Horovod", "Collective", "Nccl")
"""Ops that talk to other ranks. They and what depends on them are never put in a chain: the order in which
they run belongs to the communication library, and waiting for them would serialise compute with
communication."""


HOLDS_OPERANDS = "Horovod"
"""The beginning of the types of collectives that allocate their results when they are launched, and hold
their operands until all is done (``HorovodAllreduceOp::ComputeAsync`` in ``mpi_ops.cc``). On a GPU that is
long before. TensorFlow's own work in place."""


GROUPED, GATHERS = "HorovodGroupedAllreduce", "HorovodAllgather"
"""Reduces several tensors at once; joins the rows of all ranks."""

APART_TYPES = frozenset({"HorovodAllreduce", "HorovodBroadcast", GROUPED, GATHERS})
"""Collectives for which copies of this rank's own operands stand where a step runs apart from other ranks."""

ASKS_ABOUT_PEERS = frozenset(
    {"HorovodLocalRank", "HorovodLocalSize", "HorovodProcessSetIncluded", "HorovodRank", "HorovodSize"}
)
"""Ops that tell what a rank knows of the others, and send nothing."""

STATES_UNDONE = (
    *("Assert", "Case", "CudnnRNN", "DeepCopy", "Empty", "If", "Iterator", "Lms", "Multinomial"),
    *("Parameterized", "Random", "ReadVariable", "Resource", "Rng", "Stateful", "TemporaryVariable"),
    *("TensorArray", "Truncated", "Var", "While"),
)
"""Beginnings of the types of stateful ops, besides updates, of which a step that is undone leaves nothing:
their state is in variables, batches that are given again, kernels that are made anew, or the step."""


def is_collective(op_type: str) -> bool:
    """Tell whether ops of this type communicate with other ranks."""
    return op_type.startswith(COLLECTIVE_PREFIXES)


UPDATE_TYPES = (
    "Apply",
    "Assign",
    "ResourceApply",
    "ResourceScatter",
    "ResourceSparseApply",
    "ScatterAdd",
    "ScatterSub",
    "ScatterUpdate",
    "SparseApply",
)
"""Beginnings of the types of ops that change a variable."""


def is_update(op_type: str) -> bool:
    """Tell whether ops of this type change a variable."""
    return op_type.startswith(UPDATE_TYPES)


ENDING_TYPES = ("IteratorGetNext", "MultiDeviceIteratorGetNext", "QueueDequeue", "OptionalGetValue")
"""Beginnings of the types of ops that end a step with an error as a matter of course: nothing is left."""


def may_end_step(op_type: str) -> bool:
    """Tell whether ops of this type end the step when there is no batch left for it."""
    return op_type.startswith(ENDING_TYPES)


PYTHON_TYPES = frozenset({"PyFunc", "EagerPyFunc"})
"""Ops that run Python code with effects of its own. ``PyFuncStateless`` has none."""

MOVES = {
    "it moves items of a queue": (
        ("BarrierTake", "MapUnstage", "OrderedMapUnstage", "QueueDequeue", "Unstage"),
        ("BarrierInsert", "MapStage", "OrderedMapStage", "QueueEnqueue", "Stage"),
        ("BarrierClose", "MapClear", "OrderedMapClear", "QueueClose"),
    ),
    "it feeds an accumulator": (
        ("AccumulatorTake", "ResourceAccumulatorTake", "SparseAccumulatorTake"),
        ("AccumulatorApply", "ResourceAccumulatorApply", "SparseAccumulatorApply"),
        ("AccumulatorSet", "ResourceAccumulatorSet"),
    ),
    "it reads records by a reader": (
        ("ReaderRead",),
        (),
        ("ReaderReset", "ReaderRestoreState", "RecordInput"),
    ),
    "it keeps sparse tensors aside": (
        ("TakeManySparseFromTensorsMap",),
        ("AddManySparseToTensorsMap", "AddSparseToTensorsMap"),
        (),
    ),
}
"""Ops that exchange something between steps and threads, by the effect that lasts: beginnings of the types of
those that take it and wait until it is there, that put it there and may wait for room, and of others."""
LOOKS = ("MapPeek", "OrderedMapPeek", "StagePeek")
"""Beginnings of the types of the ops that wait like those that take, and leave it there."""
_TAKES = (*LOOKS, *(one for takes, _, _ in MOVES.values() for one in takes))
_PUTS = tuple(one for _, puts, _ in MOVES.values() for one in puts)
ANYTHING = "anything"
"""Stands for the types of the ops in a function that is not known."""
_MAY_EXCHANGE = PYTHON_TYPES | {ANYTHING}


def may_take(op_type: str) -> bool:
    """Tell whether ops of this type may wait for what another op puts somewhere; Python code may do so."""
    return op_type in _MAY_EXCHANGE or op_type.startswith(_TAKES)


def may_put(op_type: str) -> bool:
    """Tell whether ops of this type may put something somewhere, for which another op waits."""
    return op_type in _MAY_EXCHANGE or (op_type.startswith(_PUTS) and not op_type.startswith(LOOKS))


def lasting_effect(op_type: str) -> str:
    """Return what ops of this type do that lasts beyond the step; empty where it is not known of."""
    if op_type.startswith(LOOKS):
        return ""
    return next((what for what, kinds in MOVES.items() if any(map(op_type.startswith, kinds))), "")


REPEATABLE_TYPES = (ALIAS_TYPES | IN_PLACE_TYPES) - {SUM, "CheckNumerics", "DebugIdentity"} | frozenset(
    """All Any ApproximateEqual ArgMax ArgMin AvgPool AvgPool3D BatchMatMul BatchMatMulV2 BatchMatMulV3
    BroadcastTo Cast ClipByValue Concat ConcatV2 Conv2D Conv3D Cumprod Cumsum DepthToSpace
    DepthwiseConv2dNative Einsum Equal Fill
    FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 GatherNd GatherV2 Greater GreaterEqual L2Loss LRN
    Less LessEqual LogicalAnd LogicalNot LogicalOr MatMul MatrixBandPart Max Mean Min MirrorPad NotEqual
    OneHot Pack Prod ResizeBilinear ResizeNearestNeighbor ReverseV2 Roll Select SelectV2 Slice
    SpaceToDepth Split SplitV StridedSlice Sum Tile Transpose Unpack _FusedBatchMatMulV2 _FusedBatchNormEx
    _FusedConv2D _FusedConv3D _FusedDepthwiseConv2dNative _FusedMatMul _MklFusedBatchMatMulV2
    _MklFusedInstanceNorm _MklFusedMish _MklLayerNorm _MklSwish _UnaryOpsComposition""".split()
)
"""Ops that may run a second time: they read nothing but their inputs, draw nothing at random, have no effect,
and their kernels give the same bits each time. A type that is not named here is never repeated.

``AddN`` begins with whichever of its terms is free (see :mod:`lms.rewriter.sum_order`); ``Pad`` and
``MaxPool`` are tied to other kernels by oneDNN (:mod:`lms.device.kernels`); transposed convolutions may add
in any order on a GPU (cuDNN's backward data algorithm 0); the dropout of cuDNN, all that
begins with ``Random`` or ``Stateless``, and what reads a variable, a queue or a table are left out for what
they are.
"""

AGAIN = "again"
"""The last part of the name of an op that repeats another."""

CONTRACTIONS = ("Conv", "MatMul", "Einsum")
"""Parts of the types of ops whose arithmetic outweighs their bytes."""


BACKWARD_SCOPE = re.compile(r"(^|/)gradient(s|_tape)(_\d+)?/")
"""The scope of gradients in the name of an op; the scope of what they are gradients of follows."""
_BACKWARD_TYPE = re.compile(r"(Grad|GradV\d+|Backprop(?!Input)\w*)$")
"""Not the gradient to a convolution's input: a transposed convolution of the forward pass is one too."""


def is_backward(name: str, op_type: str) -> bool:
    """Tell whether an op belongs to the backward pass, by its type or the scope of its name.

    ``StopGradient`` does not, nor does whatever else a user calls a gradient.
    """
    return is_backward_type(op_type) or ("gradient" in name and bool(BACKWARD_SCOPE.search(name)))


@cache
def is_backward_type(op_type: str) -> bool:
    """Tell whether ops of this type compute a gradient."""
    return bool(_BACKWARD_TYPE.search(op_type))
