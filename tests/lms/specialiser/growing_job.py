"""Feed a session small batches, which fit with both branches, and then large ones; prints losses as JSON.

Run as a child process with ``v1`` or ``v2``, ``lms`` or ``plain``, and the memory of the CPU device in MiB.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = sys.argv[3]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

v1 = tf.compat.v1
v1.disable_eager_execution()
if sys.argv[1] == "v1":
    v1.disable_v2_behavior()
if sys.argv[2] == "lms":
    lms.enable(policy="auto")

WIDTH, LAYERS, FEW, MANY = 512, 8, 8, 2048

training = v1.placeholder(tf.bool, [], "training")
rows = v1.placeholder(tf.float32, [None, WIDTH], "rows")
hidden = rows
for number in range(LAYERS):
    kernel = v1.get_variable(
        f"kernel{number}", [WIDTH, WIDTH], initializer=v1.glorot_uniform_initializer(seed=number)
    )
    made = tf.matmul(hidden, kernel)
    hidden = v1.cond(training, lambda made=made: tf.tanh(made) * 1.1, lambda made=made: tf.nn.relu(made))
loss = tf.reduce_mean(tf.square(hidden - 0.3))
train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)

random, losses = np.random.default_rng(0), []
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    for count in (FEW, MANY, MANY, FEW, MANY):
        for value in (True, False):
            feeds = {rows: random.normal(size=(count, WIDTH)).astype("f"), training: value}
            losses.append(float(session.run([loss, train], feeds)[0]).hex())
edited = sum(graph.edited for graph in lms.report().graphs)
print(json.dumps({"losses": losses, "edited": edited}))
