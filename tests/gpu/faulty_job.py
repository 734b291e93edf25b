"""Trains on the stand-in GPU whose copies or kernels fail as ``faulty_device.cc`` says; prints JSON.

    python faulty_job.py LIBRARY [MIB]

A training that has raised an error is begun once more. With MIB TensorFlow's pool of pinned memory holds only
so much, of which LMS is not told: as if others had the rest.
"""

import json
import os
import sys
from typing import Any

_exists = os.path.exists
os.path.exists = lambda path: not str(path).endswith("tensorflow-plugins") and _exists(path)
import tensorflow as tf  # noqa: E402 - else it would load the plug-in that is replaced

os.path.exists = _exists
from tensorflow.python.framework import load_library  # noqa: E402

load_library.load_pluggable_device_library(sys.argv[1])

import stand_in_job  # noqa: E402

import lms  # noqa: E402

for mib in sys.argv[2:]:
    os.environ["TF_GPU_HOST_MEM_LIMIT_IN_MB"] = mib
    tf.zeros((4,)).numpy()  # which makes the pool
    del os.environ["TF_GPU_HOST_MEM_LIMIT_IN_MB"]
# The speed of the link is given: else the copies that measure it fail.
lms.enable(policy="all", min_tensor_bytes=4096, bandwidth_gb_s=4)


def train() -> dict[str, Any]:
    """Train for an epoch."""
    return stand_in_job.trained(stand_in_job.network(), stand_in_job.data())


found: dict[str, Any] = {}
try:
    found = train()
except tf.errors.OpError as error:
    found = {"error": f"{type(error).__name__}: {error.message}"}
    if len(sys.argv) == 2:
        found |= train()
print(json.dumps(found | stand_in_job.planned()))
