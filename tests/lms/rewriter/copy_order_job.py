"""Trains in a session, and traces the order in which ops run; prints JSON.

python copy_order_job.py none|reshaped
"""

import json
import sys

import numpy as np
import tensorflow as tf

import lms

v1 = tf.compat.v1


def main(how: str) -> None:
    """Print which ops ran, in their order, and how many tensors leave the device."""
    lms.enable(policy="auto")
    with tf.Graph().as_default():
        images = v1.placeholder(tf.float32, (32, 32, 32, 16))
        filters = [v1.get_variable(f"filter_{layer}", (3, 3, 16, 16)) for layer in range(8)]
        made = images
        for one in filters:
            made = tf.tanh(tf.nn.conv2d(made, one, 1, "SAME"))
            if how == "reshaped":
                height, width = made.shape[1:3]
                made = tf.reshape(made, (32, 2 * width, height // 2, 16))
        gradients = v1.gradients(tf.reduce_sum(made), filters)
        train = [one.assign_sub(1e-4 * by) for one, by in zip(filters, gradients, strict=True)]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            batch = {images: np.ones(images.shape, np.float32)}
            session.run(train, batch)
            traced = v1.RunMetadata()
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            session.run(train, batch, options=options, run_metadata=traced)
    ran = [node for device in traced.step_stats.dev_stats for node in device.node_stats]
    ran.sort(key=lambda node: node.all_start_nanos)
    swapped = lms.report().graphs[-1].tensors
    print(json.dumps({"ran": [node.node_name for node in ran], "tensors": swapped}))


main(sys.argv[1])
