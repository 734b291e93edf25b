"""Trains a Keras model that XLA compiles, whose variables the device does not hold; prints JSON."""

import json
import os
import sys
import warnings

order, limit_mib, way = sys.argv[1:4]
os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": limit_mib,
}

import keras  # noqa: E402
import numpy as np  # noqa: E402

import lms  # noqa: E402

WIDTH, LAYERS, ROWS = 1024, 4, 16


def main() -> None:
    """Evaluate and train in the order that is asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {"xla": way} if way != "default" else {}
        if not order.startswith("estimate"):
            lms.enable(**given)
        keras.utils.set_random_seed(3)
        dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile("adam", "mse", jit_compile=True)
        rows = np.random.default_rng(5).normal(0, 1, (ROWS, WIDTH)).astype("f")
        losses = []
        for what in order.split(","):
            if what == "estimate":
                lms.estimate(model, rows, rows, batch_size=ROWS, gpus=("V100-16",))
                lms.enable(**given)
            elif what == "disable":
                lms.disable()
            elif what == "enable":
                lms.enable(**given)
            elif what == "evaluate":
                losses.append(model.evaluate(rows, rows, batch_size=ROWS, verbose=0))
            else:
                found = model.fit(rows, rows, batch_size=ROWS, epochs=2, verbose=0, shuffle=False)
                losses += found.history["loss"]
    report = lms.report()
    step = max(report.graphs, key=lambda one: one.ops, default=None)
    print(
        json.dumps(
            {
                "losses": losses,
                "whole": bool(step and step.whole),
                "streamed": step.streamed.state + step.streamed.weights if step else 0,
                "measured": report.measured_peak_bytes,
                "warnings": [str(one.message) for one in caught if "LMS" in one.category.__name__],
            }
        )
    )


main()
