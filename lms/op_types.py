"""What TensorFlow's op types mean for memory: facts about kernels, as tables.

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

SHAPE_READERS = frozenset({"Rank", "Shape", "ShapeN", "Size"})
"""Ops that look at a tensor's shape alone. They run as soon as it exists and never need its bytes later; once
the shape is known, and before anything is merged, they are constants."""

IN_PLACE_TYPES = frozenset(
    """Abs Acos Add AddN AddV2 Asin Atan BiasAdd BiasAddV1 Ceil ClipByValue Cos Cosh Digamma Div DivNoNan
    Elu EluGrad Erf Erfc Exp Expm1 Floor FloorDiv FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Inv InvGrad
    LeakyRelu LeakyReluGrad Lgamma Log Log1p LogSoftmax Maximum Minimum Mod Mul MulNoNan Neg Pow RealDiv
    Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select Selu SeluGrad
    Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softmax Softplus SoftplusGrad Softsign SoftsignGrad Sqrt
    SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad TruncateDiv Xdivy Xlogy""".split()
)
"""Kernels that ask for ``forward_input_or_allocate_output``: output 0 takes over an input's buffer when the
sizes agree and nobody else holds the buffer any more."""

PLACES, PASSED = "places of its maxima", "what it let pass"
KEPT_FOR_GRADIENT = {
    "LeakyRelu": PASSED,
    "MaxPool": PLACES,
    "MaxPool3D": PLACES,
    "Relu": PASSED,
    "Relu6": PASSED,
}
"""What oneDNN's kernels keep beside the one output that the op has for TensorFlow."""

OUTSIDE_TYPES = frozenset(
    """Arg Const HostConst Placeholder ReadVariableOp Variable VariableV2 VarHandleOp VarIsInitializedOp
    _Arg""".split()
)
"""Outputs that live outside the step's own memory: variables, constants and arguments."""

UNSWAPPABLE_TYPES = {
    "Fill": "cheaper to make than to move",
    "OnesLike": "cheaper to make than to move",
    "Range": "cheaper to make than to move",
    "ZerosLike": "cheaper to make than to move",
    "IteratorGetNext": "input of the step",
    "Switch": "control flow",
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


def is_collective(op_type: str) -> bool:
    """Whether ops of this type talk to other ranks."""
    return op_type.startswith(COLLECTIVE_PREFIXES)


_BACKWARD_SCOPE = re.compile(r"(^|/)gradient(s|_tape)(_\d+)?/")
_BACKWARD_TYPE = re.compile(r"(Grad|GradV\d+|Backprop(?!Input)\w*)$")
"""Not the gradient to a convolution's input: a transposed convolution of the forward pass is one too."""


def is_backward(name: str, op_type: str) -> bool:
    """Whether an op belongs to the backward pass, by its type or the scope of its name.

    ``StopGradient`` does not, nor does whatever else a user calls a gradient.
    """
    return _is_backward_type(op_type) or ("gradient" in name and bool(_BACKWARD_SCOPE.search(name)))


@cache
def _is_backward_type(op_type: str) -> bool:
    return bool(_BACKWARD_TYPE.search(op_type))
