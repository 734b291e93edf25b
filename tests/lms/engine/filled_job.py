"""Trains a small 3D U-Net whose plans get fillers wherever they can; prints as JSON what came of it.

Buffers of 1, 2 and 3 times one size meet in its concatenation: the allocator gives the larger ones too much.
"""

import hashlib
import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

import lms
from lms.engine import installation  # noqa: E402
from lms.errors import BuildError
from lms.planner import room
from lms.process import resources  # noqa: E402

LIMIT = int(sys.argv[1]) << 20
_peak = room.peak_in


def peak_with_fillers(case: Any, made: Any, *sizes: int) -> int | None:
    """Let no plan fit within the limit that has swaps and no fillers; none with swaps if told so."""
    is_plain = bool(made.swaps) and ("nothing fits" in sys.argv or (not made.fillers and case.fills))
    return None if is_plain and sizes[0] <= LIMIT else _peak(case, made, *sizes)


def refuse(environ: Any) -> None:
    """Stand in for a machine without a compiler."""
    raise BuildError("no C++ compiler found")


def model() -> Any:
    layers, keras = tf.keras.layers, tf.keras
    keras.utils.set_random_seed(1)
    inputs = x = layers.Input((16, 16, 32, 1))
    x = skip = layers.ReLU()(layers.BatchNormalization()(layers.Conv3D(8, 3, padding="same")(x)))
    x = layers.ReLU()(layers.Conv3D(16, 3, padding="same")(layers.MaxPooling3D(2)(x)))
    x = layers.Concatenate()([layers.UpSampling3D(2)(x), skip])
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv3D(8, 3, padding="same")(x)))
    x = layers.GlobalAveragePooling3D()(layers.Conv3D(8, 3, padding="same")(x))
    made = keras.Model(inputs, layers.Dense(4)(x))
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return made


def train(limit_bytes: int | None) -> dict[str, Any]:
    """Train six steps, on a device of ``limit_bytes`` or without a plan."""
    if limit_bytes is not None:
        lms.enable(policy="auto", recompute="off")
        installation.engine().resources.assume_limit(limit_bytes)
    made = model()
    with tf.device("CPU:0"):
        images = tf.random.stateless_uniform((4, 16, 16, 32, 1), (1, 2))
    made.fit(images, tf.range(4) % 4, batch_size=4, epochs=6, verbose=0)
    digest = hashlib.sha256(b"".join(value.tobytes() for value in made.get_weights())).hexdigest()
    found: dict[str, Any] = {"digest": digest}
    if limit_bytes is not None:
        report, planned = lms.report(), installation.engine().books.collector.planned.values()
        found["fillers"] = sum(len(one.plan.fillers) for one in planned)
        found["swaps"] = sum(graph.tensors for graph in report.graphs)
        found["peaks"] = [(graph.peak_before_bytes, graph.planned_peak_bytes) for graph in report.graphs]
        found["warnings"] = report.warnings
        found["notes"] = [note for graph in report.graphs for note in graph.notes]
        lms.disable()
    return found


if "doubtful" in sys.argv:
    room.Room.doubt_of = lambda *_: room.BY_BATCHES
if "without" in sys.argv:
    resources.load_filler = refuse
room.peak_in = peak_with_fillers
print(json.dumps(train(LIMIT or None)))
