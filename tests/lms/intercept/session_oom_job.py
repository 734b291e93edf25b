"""Runs a step in a session of compat.v1 that no plan fits into the device; prints what is raised, as JSON."""

import json
import os
import warnings

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "40"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402

v1 = tf.compat.v1
v1.disable_eager_execution()
WIDTH, FEW, MANY = 256, 64, 16_384
warnings.simplefilter("ignore")
lms.enable()

with v1.Session() as session:
    rows = v1.placeholder(tf.float32, (None, WIDTH))
    made = rows
    for layer in range(6):
        made = tf.tanh(made @ v1.get_variable(f"w{layer}", (WIDTH, WIDTH)))
    step = v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(made * made))
    session.run(v1.global_variables_initializer())
    session.run(step, {rows: np.ones((FEW, WIDTH), "f")})
    errors = []
    try:
        session.run(step, {rows: np.ones((MANY, WIDTH), "f")})
    except tf.errors.OpError as error:
        errors.append([type(error).__name__, error.message])
    session.run(step, {rows: np.ones((FEW, WIDTH), "f")})
    print(json.dumps({"errors": errors}))
