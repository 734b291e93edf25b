"""What of a step lies on the host although the step runs on a GPU: nothing of it is to be swapped.

TensorFlow puts an op that has no kernel for GPUs on the host, without a word in the graph. And kernels for
GPUs keep most integers of 32 bits in host memory, from where the copy to the host refuses to read
("must reside on the device": ``gpu_swapping_kernels.cc``).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import tensorflow as tf
from tensorflow.python.framework import kernels

from lms.graph import Tensor
from lms.tf_graph import GraphView

HOST_INTEGERS = "kernels for GPUs keep integers of 32 bits on the host"
"""Why such a tensor stays, whatever made it."""

ON_GPU = ("DEFAULT", "GPU")
"""Under which devices a kernel is registered that runs on a GPU."""


@cache
def runs_on_host(op_type: str) -> bool:
    """Whether ops of a type run on the host: TensorFlow has a kernel for them, but none for GPUs.

    A TensorFlow that is built without GPUs has hardly any, and says nothing.
    """
    return _has_gpu_kernel("MatMul") and not _has_gpu_kernel(op_type)


def _has_gpu_kernel(op_type: str) -> bool:
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return not registered or any(kernel.device_type in ON_GPU for kernel in registered)


def with_host_side(view: GraphView, on_host: Callable[[str], bool] = runs_on_host) -> GraphView:
    """``view`` of a step for a GPU with what lies on the host marked.

    Args:
        view: The step.
        on_host: Whether ops of a type run on the host.
    """
    there = {op.id for op in view.graph.ops if on_host(op.type)}

    def marked(tensor: Tensor) -> Tensor:
        if tensor.op in there:
            return replace(tensor, outside=True)
        made = view.tensors[tensor.id]
        is_integer = made is not None and made.dtype == tf.int32
        return replace(tensor, forbidden=tensor.forbidden or HOST_INTEGERS) if is_integer else tensor

    return replace(view, graph=replace(view.graph, tensors=tuple(map(marked, view.graph.tensors))))
