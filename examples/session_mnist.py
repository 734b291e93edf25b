"""A TensorFlow 1 script as it was: a graph, a MonitoredTrainingSession, and IBM's hook for the tensors.

    python examples/session_mnist.py
    lmsrun -np 2 examples/session_mnist.py

The digits are the scans that scikit-learn brings, enlarged to ``--image-size`` (28 is MNIST's). The hook's
parameters are those of Large Model Support 0.1; ``--n_tensors 0`` switches it off.
"""

import argparse
import importlib
import os
import sys
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits
from tensorflow_large_model_support import LMSSessionRunHook

SCOPE = "adam_optimizer"
TEST_IMAGES = 360


def main(argv: list[str] | None = None) -> int:
    """Train and test; 1 if the accuracy is too low."""
    options = parse_options(argv)
    rank, size = start_horovod()
    tf.disable_eager_execution()
    tf.set_random_seed(options.seed)
    images, labels = digits(options.image_size)
    test, mine = slice(TEST_IMAGES), slice(TEST_IMAGES + rank, None, size)
    net = build_network(options.image_size, options.learning_rate, distributed=size > 1)
    hooks = [LMSSessionRunHook({SCOPE}, n_tensors=options.n_tensors, lb=options.lb)]
    if size > 1:
        hooks.append(EqualStart())
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        for number in range(options.steps):
            chosen = np.arange(number * options.batch_size, (number + 1) * options.batch_size)
            chosen %= len(labels[mine])
            session.run(net.train, {net.images: images[mine][chosen], net.labels: labels[mine][chosen]})
        accuracy = session.run(net.accuracy, {net.images: images[test], net.labels: labels[test]})
    if rank == 0:
        print(f"test accuracy {accuracy:.4f}")
    if accuracy >= options.min_accuracy:
        return 0
    if rank == 0:
        print(f"accuracy {accuracy:.4f} is below --min-accuracy {options.min_accuracy}", file=sys.stderr)
    return 1


def at_least_one(text: str) -> int:
    """Parse a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} given; needed at least 1")
    return number


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_tensors", type=int, default=-1, help="tensors to swap; -1: all, 0: none")
    parser.add_argument(
        "--lb", type=at_least_one, default=1, help="levels ahead of its use that a tensor comes back"
    )
    parser.add_argument("--image-size", type=at_least_one, default=28)
    parser.add_argument("--batch-size", type=at_least_one, default=64, help="images a step and rank")
    parser.add_argument("--steps", type=at_least_one, default=150)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.9, help="exit 1 below this test accuracy")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args(argv)


def start_horovod() -> tuple[int, int]:
    """Start Horovod; return this process's rank and the number of ranks, without a launcher 0 of 1."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return 0, 1
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    return hvd.rank(), hvd.size()


def digits(image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Load the 1,797 scans in a fixed shuffled order, each pixel repeated until they are large enough."""
    scans = load_digits()
    order = np.random.default_rng(1).permutation(len(scans.target))
    nearest = np.arange(image_size) * 8 // image_size
    images = scans.images[order][:, nearest][:, :, nearest, None] / 16
    return images.astype("float32"), scans.target[order].astype("int32")


class EqualStart(tf.train.SessionRunHook):
    """Gives every rank the variables of rank 0 (Horovod's own hook needs an older TensorFlow)."""

    def begin(self) -> None:
        """Add the exchange to the graph."""
        self._exchange = importlib.import_module("horovod.tensorflow").broadcast_global_variables(0)

    def after_create_session(self, session: tf.Session, coord: object) -> None:
        """Run it, before the first step."""
        session.run(self._exchange)


class Network(NamedTuple):
    """What the session feeds and fetches."""

    images: tf.Tensor
    labels: tf.Tensor
    train: tf.Operation
    accuracy: tf.Tensor


def build_network(image_size: int, learning_rate: float, distributed: bool) -> Network:
    """Three convolutions and a classifier; the optimizer stands in a scope that the hook is told."""
    images = tf.placeholder(tf.float32, [None, image_size, image_size, 1], "images")
    labels = tf.placeholder(tf.int32, [None], "labels")
    features = images
    for index, filters in enumerate((16, 32, 32)):
        with tf.variable_scope(f"conv{index}"):
            shape = [3, 3, features.shape[-1], filters]
            kernel = tf.get_variable("kernel", shape, initializer=tf.glorot_uniform_initializer())
            features = tf.nn.relu(tf.nn.conv2d(features, kernel, strides=1 + index % 2, padding="SAME"))
    flat = tf.reshape(features, [-1, int(np.prod(features.shape[1:]))])
    weights = tf.get_variable("weights", [flat.shape[1], 10], initializer=tf.glorot_uniform_initializer())
    logits = tf.matmul(flat, weights)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    right = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels)
    with tf.name_scope(SCOPE):
        optimizer = tf.train.AdamOptimizer(learning_rate)
        if distributed:
            optimizer = importlib.import_module("lms.hvd").DistributedOptimizer(optimizer)
        train = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
    return Network(images, labels, train, tf.reduce_mean(tf.cast(right, tf.float32)))


if __name__ == "__main__":
    sys.exit(main())
