"""Trains as scripts of TensorFlow 1 do: gradients are made behind the updates of averages; prints JSON.

python updates_first_job.py off|all|budget v1|v2 [norms|sums|fetched|refused]
"""

import json
import os
import sys
from hashlib import sha256

os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = "300"
import numpy as np
import tensorflow as tf

import lms
from lms.passes.work import Work
from lms.passes.writing import Writing
from lms.rewriter.writer import RewriteError

tf1 = tf.compat.v1
CHANNELS, LAYERS = 16, 6


def network(images: tf.Tensor) -> tf.Tensor:
    """Return convolutions with a normalisation that is no fused kernel."""
    for number in range(LAYERS):
        normal = tf1.truncated_normal_initializer(stddev=0.1, seed=1)
        filters = tf1.get_variable(f"filters{number}", (3, 3, images.shape[-1], CHANNELS), initializer=normal)
        images = tf.nn.conv2d(images, filters, 1, "SAME")
        mean, variance = tf1.nn.moments(images, [0, 1, 2])
        for name, value in (("mean", mean), ("variance", variance)):
            zeros = tf1.zeros_initializer()
            average = tf1.get_variable(f"{name}{number}", (CHANNELS,), initializer=zeros, trainable=False)
            tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * value))
        scale = tf1.get_variable(f"scale{number}", (CHANNELS,), initializer=tf1.ones_initializer())
        offset = tf1.get_variable(f"offset{number}", (CHANNELS,), initializer=tf1.zeros_initializer())
        images = tf.nn.relu(tf1.nn.batch_normalization(images, mean, variance, offset, scale, 1e-3))
    return tf.reduce_mean(images, [1, 2, 3])


def convolution(images: tf.Tensor, name: str) -> tf.Tensor:
    """Return one with filters of its own."""
    normal = tf1.truncated_normal_initializer(stddev=0.3, seed=sum(name.encode()))
    filters = tf1.get_variable(name, (3, 3, images.shape[-1], CHANNELS), initializer=normal)
    return tf.nn.conv2d(images, filters, 1, "SAME")


def summing_network(images: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return sums of three convolutions, of which losses read the first two: their shapes are told late.

    The last terms come, too.
    """
    losses, last = [], []
    for number in range(4):
        terms = [convolution(images, f"{term}{number}") for term in "abc"]
        losses += [tf.reduce_mean(term) for term in terms[:2]]
        with tf.control_dependencies(losses[-2:]):
            images = tf.add_n(terms)
        last.append(terms[-1])
        mean = tf.reduce_mean(images, [0, 1, 2])
        zeros = tf1.zeros_initializer()
        average = tf1.get_variable(f"mean{number}", (CHANNELS,), initializer=zeros, trainable=False)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign(0.9 * average + 0.1 * mean))
        images = tf.tanh(images)
    return tf.reduce_mean(images, [1, 2, 3]) + 0.1 * tf.add_n(losses), last


def refuse_once() -> None:
    """Have the first plan with repeated ops refused once it is written."""
    apply, refused = Writing.apply, list[bool]()

    def refusing(self: Writing, work: Work) -> Work:
        made = apply(self, work)
        if not refused:
            assert work.decision is not None and work.decision.recomputation is not None
            refused.append(True)
            raise RewriteError("refused for this test")
        return made

    Writing.apply = refusing  # type: ignore[method-assign]


def main(policy: str, control_flow: str, kind: str = "norms") -> None:
    """Train for some steps in a session."""
    tf1.disable_eager_execution()
    if control_flow == "v1":
        tf1.disable_control_flow_v2()
    if policy != "off":
        budget = {"budget_bytes": 20 << 20, "bandwidth_gb_s": 0.01} if policy == "budget" else {}
        lms.enable(policy=policy, min_tensor_bytes=1 << 16, **budget)
    images = tf1.placeholder(tf.float32, (None, 32, 32, 3))
    terms: list[tf.Tensor] = []
    if kind == "norms":
        made = network(images)
    else:
        made, terms = summing_network(images)
    if kind == "refused" and policy != "off":
        refuse_once()
    loss = tf.reduce_mean(made**2)
    with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
        train = tf1.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
    fetched = [train, loss, *(terms if kind == "fetched" else ())]
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        batch = np.random.default_rng(0).standard_normal((32, 32, 32, 3), dtype="f")
        for _ in range(4):
            session.run(fetched, {images: batch})
        values = [session.run(variable) for variable in tf1.global_variables()]
    found = {"bits": sha256(b"".join(value.tobytes() for value in values)).hexdigest()}
    found["measured"] = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    if policy != "off":
        graph = max(lms.report().graphs, key=lambda one: one.ops)
        found |= {"tensors": graph.tensors, "planned": graph.planned_peak_bytes}
        found["warnings"] = list(lms.report().warnings)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
