"""Trains with recomputing where the check of an edited graph refuses each repeated op; prints JSON."""

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.passes import writing  # noqa: E402
from lms.rewriter.repeats import repeated_node  # noqa: E402
from lms.rewriter.writer import RewriteError  # noqa: E402

validate = writing.validate


def strict(graph_def, table, outputs, added, kernels):
    if any(repeated_node(name) for name in added):
        raise RewriteError("no repeats here")
    validate(graph_def, table, outputs, added, kernels)


writing.validate = strict
lms.enable(
    policy="budget", budget_bytes=3 << 19, recompute="auto", min_tensor_bytes=1024, bandwidth_gb_s=0.02
)
layers = [tf.keras.layers.Dense(256, activation="gelu") for _ in range(8)]
model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
model.compile("sgd", "mse")
model.fit(np.ones((256, 64), "f"), np.ones((256, 256), "f"), batch_size=256, verbose=0)
report = lms.report()
(graph,) = report.edited
print(json.dumps({"again": graph.recomputed, "swapped": graph.tensors, "warnings": report.warnings}))
