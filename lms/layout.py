"""In which layout a GPU computes a step's images, and what memory that takes beside the plan.

TensorFlow's layout optimizer turns images on a GPU from "channels last" to "channels first", and puts a
``Transpose`` wherever an op stands between that it does not know. A copy to the host is such an op: each
image that is swapped would be turned back before it leaves, and again, once for each reader, when it has
come. So the optimizer is switched off where the kernels take the images as they are. Where they do not, it
stays on, and the plan keeps room for the largest image that is turned.

Sources: ``generic_layout_optimizer.cc`` (``GetSrcAndDstDataFormats``), ``conv_ops_gpu.cc``
(``ComputeInNhwcEnabled``) and ``fused_batch_norm_op.cc`` (``fast_nhwc_batch_norm``) of TensorFlow. What the
optimizer does was seen with virtual GPUs; nothing of this has been run on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from lms.device import Device
from lms.graph import Graph
from lms.grappler import OptimizerSettings
from lms.tf_graph import GraphView

CHANNELS_LAST = (b"NHWC", b"NDHWC")
CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})
CONVOLUTION_GRADIENTS = frozenset(
    {"Conv2DBackpropFilter", "Conv2DBackpropInput", "Conv3DBackpropFilterV2", "Conv3DBackpropInputV2"}
)
NORMALISATIONS = {
    "FusedBatchNormV2": 2,
    "FusedBatchNormV3": 2,
    "FusedBatchNormGradV2": 3,
    "FusedBatchNormGradV3": 3,
}
"""With channels last, cuDNN's normalisation turns what it reads and makes: so many copies of its input."""

OTHERS = frozenset(
    {"AvgPool", "AvgPool3D", "BiasAdd", "DepthwiseConv2dNative", "MaxPool", "MaxPool3D", "MaxPoolV2"}
)
"""What else of a forward pass the optimizer turns."""

PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
"""With it cuDNN normalises images of ``float16`` as they are."""

IMAGE_RANKS = (4, 5)
VOLTA, AMPERE = (7, 0), (8, 0)


@dataclass(frozen=True)
class Layout:
    """What becomes of the images of a step."""

    on_gpu: bool = False
    turned: bool = False
    """Whether TensorFlow turns them, and with them each one that is swapped."""
    switched_off: bool = False
    """Whether they stay as they are only while the layout optimizer is off."""
    persistent: bool = False
    """See :data:`PERSISTENT`."""

    def with_scratch(self, view: GraphView) -> Graph:
        """The graph of ``view`` with what normalisations allocate that turn their images themselves."""
        if self.turned or not self.on_gpu:
            return view.graph
        tensors = view.graph.tensors
        ops = [
            replace(op, workspace_bytes=copies * (tensors[op.inputs[0]].nbytes or 0))
            if (copies := self._copies(made, op.type))
            else op
            for op, made in zip(view.graph.ops, view.ops, strict=True)
        ]
        return replace(view.graph, ops=tuple(ops))

    def settle(self, optimizer: OptimizerSettings) -> None:
        """Have the layout optimizer do what the plan takes for granted."""
        if self.turned or self.switched_off:
            optimizer.set_layout(on=self.turned)

    def _copies(self, op: Any, op_type: str) -> int:
        copies = NORMALISATIONS.get(op_type, 0)
        return copies if copies and _turns_itself(op, self.persistent) else 0

    def reserve_bytes(self, view: GraphView) -> int:
        """Room for one image that is turned on its way out or back: the largest that can be swapped.

        With the step's other needs this was at least the peak of the optimized graphs of ResNet-50 and a
        3D U-Net; two that are turned at once, behind a swap-in with several readers, came to no more.
        """
        if not self.turned:
            return 0
        return max(
            (
                tensor.nbytes or 0
                for tensor, made in zip(view.graph.tensors, view.tensors, strict=True)
                if not (tensor.outside or tensor.forbidden)
                and made is not None
                and made.shape.rank in IMAGE_RANKS
            ),
            default=0,
        )


def choose_layout(
    tf_graph: Any, ops: Sequence[Any], device: Device, asked: bool | None, environ: Mapping[str, str]
) -> Layout:
    """What becomes of the images of a step.

    Args:
        tf_graph: The step's graph. A session brings its own options, so there the optimizer stays on.
        ops: The step's ops.
        device: Where it runs.
        asked: Whether the layout optimizer has to be on, or off; ``None``: as is best.
        environ: The process's variables.
    """
    if device.type != "GPU":
        return Layout()
    stays = Layout(on_gpu=True, persistent=environ.get(PERSISTENT, "").lower() in ("1", "true"))
    if asked is False or not any(_is_image_op(op) for op in ops) or _optimizer_leaves(ops, device):
        return stays
    takes_all = all(_takes(_dtype(op), device) for op in ops if op.type in CONVOLUTIONS)
    turning = any(op.type in NORMALISATIONS and _turns_itself(op, stays.persistent) for op in ops)
    if asked or turning or not takes_all or not isinstance(tf_graph, FuncGraph):
        return replace(stays, turned=True)
    return replace(stays, switched_off=True)


def _optimizer_leaves(ops: Sequence[Any], device: Device) -> bool:
    """Whether the optimizer itself finds that channels last is best: half of the convolutions decide."""
    types = [_dtype(op) for op in ops if op.type in CONVOLUTIONS]
    if any(op.type in CONVOLUTION_GRADIENTS and _dtype(op) == tf.float32 for op in ops):
        preferring = [kind for kind in types if kind != tf.float32 and _takes(kind, device)]
    else:
        preferring = [kind for kind in types if _takes(kind, device)]
    return bool(types) and 2 * len(preferring) >= len(types)


def _takes(dtype: Any, device: Device) -> bool:
    """Whether cuDNN's convolutions of a type take channels last as they are."""
    if device.capability is None:
        return False
    if dtype == tf.float16:
        return device.capability >= VOLTA
    exact = dtype == tf.float32 and not tf.config.experimental.tensor_float_32_execution_enabled()
    return dtype in (tf.bfloat16, tf.float32) and not exact and device.capability >= AMPERE


def _turns_itself(op: Any, persistent: bool) -> bool:
    """Whether a normalisation turns its images, which it gets with channels last."""
    fast = persistent and _dtype(op) == tf.float16
    return not fast and bool(op.get_attr("is_training")) and op.get_attr("data_format") in CHANNELS_LAST


def _is_image_op(op: Any) -> bool:
    if op.type in CONVOLUTIONS or op.type in NORMALISATIONS or op.type in OTHERS:
        rank = op.outputs[0].shape.rank
        return op.get_attr("data_format") in CHANNELS_LAST and (rank is None or rank in IMAGE_RANKS)
    return False


def _dtype(op: Any) -> Any:
    return tf.as_dtype(op.get_attr("T"))
