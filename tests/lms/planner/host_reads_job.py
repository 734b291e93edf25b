"""Trains a small U-Net with and without LMS; prints digests and what was decided as JSON.

    python host_reads_job.py POLICY [direct|host|nested]

With ``host`` concatenations run on the host, as they do beside a GPU, and their results are fetched; with
``nested`` some of them read others.
"""

import hashlib
import json
import os
import sys
import warnings
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.engine import installation  # noqa: E402
from lms.passes import planning  # noqa: E402


def train(where: str) -> str:
    """Three steps from the same start."""
    keras, layers = tf.keras, tf.keras.layers
    keras.utils.set_random_seed(1)
    x = inputs = layers.Input((16, 16, 16, 1))
    skips = []
    for filters in (8, 16):
        x = layers.Conv3D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling3D(2)(x)
    x = layers.Conv3D(32, 3, padding="same", activation="relu")(x)
    for filters, skip in zip((16, 8), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.UpSampling3D(2)(x), skip])
        if where == "nested":
            x = layers.Concatenate()([skip, x])
        x = layers.Conv3D(filters, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv3D(2, 1)(x))
    model.compile("sgd", keras.losses.MeanSquaredError())
    random = np.random.default_rng(0)
    images = random.normal(size=(6, 16, 16, 16, 1)).astype("float32")
    model.fit(images, np.concatenate([images, -images], -1), batch_size=2, epochs=1, verbose=0, shuffle=False)
    return hashlib.sha256(b"".join(weights.tobytes() for weights in model.get_weights())).hexdigest()


def main(policy: str, where: str) -> dict[str, Any]:
    """The digests, the plan's figures and the devices of the concatenations."""
    warnings.simplefilter("ignore")
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    off = train(where)
    lms.enable(policy=policy, min_tensor_bytes=1024)
    if where != "direct":
        decide = planning.decide

        def decide_for_gpu(graph: Any, config: Any, device_type: str, limit: Any, costs: Any) -> Any:
            return decide(graph, config, "GPU", limit, costs)

        planning.decide = decide_for_gpu
    on = train(where)
    planned = installation.engine().books.collector.latest
    graph = lms.report().edited[-1]
    return {
        "off": off,
        "on": on,
        "sent": len(planned.plan.sent),
        "copied": len(planned.plan.copied),
        "bytes_out": graph.bytes_out,
        "counted_bytes_out": lms.report().store.bytes_out,
        "fetched_bytes": planned.plan.fetched_bytes,
        "notes": graph.notes,
    }


print(json.dumps(main(sys.argv[1], sys.argv[2])))
