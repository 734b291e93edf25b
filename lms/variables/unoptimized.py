"""Call functions that TensorFlow does not optimize, also while it optimizes another one."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context, execute


def unoptimized(build: Callable[..., Any], *specs: tf.TensorSpec) -> Callable[..., Any]:
    """Return a function that runs as it is built.

    Args:
        build: Builds the graph from tensors of the ``specs``, and returns one tensor.
        specs: Shapes and types of the arguments.
    """
    made = tf.function(build, autograph=False).get_concrete_function(*specs)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    attrs = ("executor_type", "", "config_proto", config.SerializeToString())

    def call(*arguments: Any) -> Any:
        return execute.execute(made.name, 1, [*arguments], attrs, context.context())

    return call
