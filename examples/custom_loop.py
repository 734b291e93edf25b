"""A training loop of one's own, with a gradient tape and an optimizer, on scikit-learn's digits.

    python examples/custom_loop.py --policy all
    lmsrun -np 2 --lms examples/custom_loop.py

The scans are enlarged to ``--image-size``, so that their activations fill memory. Tape and update stand in
one ``tf.function``, where LMS sees the whole step; the forward pass may be a function of its own inside it.
"""

import argparse
import importlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import lms


def main(argv: list[str] | None = None) -> int:
    """Train, report and check; 1 if the last losses are not below the first."""
    options = parse_options(argv)
    if options.policy is not None:
        lms.enable(policy=options.policy)
    rank, size = start_horovod()
    keras.utils.set_random_seed(options.seed)
    model = build_model(options.image_size, options.filters, options.blocks)
    step = build_step(model, options.learning_rate, distributed=size > 1)
    images, labels = (part[rank::size] for part in digits(options.image_size))
    losses = train(step, images, labels, options.batch_size, options.steps)
    if size > 1:
        importlib.import_module("lms.hvd").check_in_sync(model)
    if rank == 0:
        print(f"loss {losses[0]:.4f} in the first step, {np.mean(losses[-5:]):.4f} in the last five")
        print(lms.report())
    if np.mean(losses[-5:]) < losses[0]:
        return 0
    if rank == 0:
        print("the loss has not fallen; take more --steps", file=sys.stderr)
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
    parser.add_argument("--policy", choices=("auto", "threshold", "all"), help="switch LMS on so")
    parser.add_argument("--image-size", type=at_least_one, default=32)
    parser.add_argument("--filters", type=at_least_one, default=16)
    parser.add_argument(
        "--blocks", type=at_least_one, default=4, help="residual blocks: the depth of the model"
    )
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="images a step and rank")
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
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
    """Load the 1,797 scans, enlarged, and their labels, in a fixed shuffled order."""
    scans = load_digits()
    order = np.random.default_rng(1).permutation(len(scans.target))
    images = tf.image.resize(scans.images[order, :, :, None] / 16, (image_size, image_size))
    return tf.cast(images, tf.float32).numpy(), scans.target[order].astype("int32")


def build_model(image_size: int, filters: int, blocks: int) -> keras.Model:
    """Build a small residual network."""
    inputs = keras.Input((image_size, image_size, 1))
    x = keras.layers.Conv2D(filters, 3, padding="same")(inputs)
    for _ in range(blocks):
        y = keras.layers.BatchNormalization()(x)
        y = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(y)
        y = keras.layers.Conv2D(filters, 3, padding="same")(y)
        x = keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def build_step(model: keras.Model, learning_rate: float, distributed: bool) -> tf.types.experimental.Callable:
    """One step as one graph; with several ranks the optimizer averages the gradients."""
    optimizer = keras.optimizers.Adam(learning_rate)
    if distributed:
        hvd = importlib.import_module("lms.hvd")
        optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_variables(model.weights)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def forward(images: tf.Tensor) -> tf.Tensor:
        return model(images, training=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, forward(images))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def train(
    step: tf.types.experimental.Callable, images: np.ndarray, labels: np.ndarray, batch_size: int, steps: int
) -> list[float]:
    """Go through the data in order, again and again; the loss of each step."""
    losses = []
    for number in range(steps):
        chosen = np.arange(number * batch_size, (number + 1) * batch_size) % len(labels)
        losses.append(float(step(tf.constant(images[chosen]), tf.constant(labels[chosen]))))
    return losses


if __name__ == "__main__":
    sys.exit(main())
