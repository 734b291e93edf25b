"""Switches LMS on and off; prints what became of the options of TensorFlow's graph optimizer, as JSON."""

import json
import os
from collections.abc import Mapping
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf  # noqa: E402
from tensorflow.core.protobuf import config_pb2  # noqa: E402
from tensorflow.python.eager import context  # noqa: E402

import lms  # noqa: E402

ARITHMETIC = "arithmetic_optimization"


def options() -> dict[str, Any]:
    """What the program reads, and the whole configuration with which functions run."""
    functions = config_pb2.ConfigProto.FromString(
        context.context().function_call_options.config_proto_serialized
    )
    return {"read": tf.config.optimizer.get_experimental_options(), "functions": str(functions)}


def around(asked: bool | None, meanwhile: Mapping[str, bool] | None = None) -> list[dict[str, Any]]:
    """Before, while and after LMS is on; the program sets ``meanwhile`` in that time."""
    seen = [options()]
    lms.enable(policy="all", arithmetic_optimization=asked)
    seen.append(options())
    tf.config.optimizer.set_experimental_options(meanwhile or {})
    lms.disable()
    return [*seen, options()]


def main() -> dict[str, Any]:
    """By what was asked of LMS; at last where the program has a word of its own."""
    seen: dict[str, Any] = {str(asked): around(asked) for asked in (None, False, True)}
    seen["meanwhile"] = around(False, {ARITHMETIC: True, "constant_folding": True})
    tf.config.optimizer.set_experimental_options({ARITHMETIC: False})
    seen["set before"] = around(True)
    return seen


print(json.dumps(main()))
