"""Switches LMS on and off; prints what became of the options of TensorFlow's graph optimizer, as JSON."""

import json
import os
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

import lms  # noqa: E402

CALLS: list[list[str]] = []
"""What the passes of each call of a function are set to."""


def options() -> list[Any]:
    """What the program reads, and the whole configuration with which functions run."""
    made = context.context().function_call_options.config_proto_serialized
    return [tf.config.optimizer.get_experimental_options(), str(config_pb2.ConfigProto.FromString(made))]


def note(ctx: Any, *args: Any) -> Any:
    """Call a function of the runtime as TensorFlow does, and note its options."""
    made = config_pb2.ConfigProto.FromString(ctx.function_call_options.config_proto_serialized)
    rewrite, kinds = made.graph_options.rewrite_options, rewriter_config_pb2.RewriterConfig
    memory = kinds.MemOptType.Name(rewrite.memory_optimization)
    CALLS.append([memory, kinds.Toggle.Name(rewrite.arithmetic_optimization)])
    return CALL(ctx, *args)


CALL = context.Context.call_function
context.Context.call_function = note


def around(asked: bool | None) -> dict[str, Any]:
    """Before, while and after LMS is on."""
    CALLS.clear()
    function, read = tf.function(lambda x: x + 1.0), []
    for on in (False, True, False):
        if on:
            lms.enable(policy="all", arithmetic_optimization=asked)
        function(1.0)
        read.append(options())
        lms.disable()
    return {"options": read, "calls": list(CALLS)}


print(json.dumps({str(asked): around(asked) for asked in (None, False, True)}))
