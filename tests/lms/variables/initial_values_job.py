"""Trains a network with Adam in a session of compat.v1, under a limit; prints what was planned as JSON."""

import json
import os
import sys

os.environ |= {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": sys.argv[1],
}

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

WIDTH, LAYERS, ROWS, STEPS = 512, 6, 2048, 4
v1 = tf.compat.v1
v1.disable_eager_execution()
v1.enable_resource_variables()
lms.enable(policy="auto")
rows = v1.placeholder(tf.float32, (ROWS, WIDTH))
made = rows
for layer in range(LAYERS):
    made = tf.nn.tanh(tf.matmul(made, v1.get_variable(f"w{layer}", (WIDTH, WIDTH))))
loss = tf.reduce_mean(tf.square(made - rows))
train = v1.train.AdamOptimizer(1e-3).minimize(loss)
# Ops that meet by chance take memory by chance: one op after the other, as planned.
one_by_one = v1.ConfigProto(inter_op_parallelism_threads=1)
with v1.Session(config=one_by_one) as session:
    session.run(v1.global_variables_initializer())
    batch = np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32)
    losses = [float(session.run([loss, train], {rows: batch})[0]) for _ in range(STEPS)]
report = lms.report()
step = report.graphs[-1]
print(
    json.dumps(
        {
            "losses": losses,
            "planned": step.planned_peak_bytes,
            "base": step.base_bytes,
            "peak": report.measured_peak_bytes,
            "tensors": step.tensors,
        }
    )
)
