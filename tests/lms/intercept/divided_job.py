"""Train on batches that a strategy divides between two devices, the last unevenly; with and without LMS."""

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import lms
from lms.intercept.function_calls import Call

DEVICES, ROWS, BATCH, SIDE, CHANNELS = 2, 40, 16, 16, 8
RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((ROWS, SIDE, SIDE, 3)).astype("float32")
LABELS = RNG.integers(0, 10, ROWS)


class Trainings:
    """The ways to train, each of which returns losses and weights."""

    def __init__(self) -> None:
        names = [f"CPU:{number}" for number in range(DEVICES)]
        self.strategy = tf.distribute.MirroredStrategy(names)

    def fit(self) -> list[Any]:
        """Fit a model of Keras."""
        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(1)
        with self.strategy.scope():
            x = inputs = layers.Input((SIDE, SIDE, 3))
            for _ in range(5):
                x = layers.Conv2D(CHANNELS, 3, padding="same", activation="relu")(x)
            model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        done = model.fit(IMAGES, LABELS, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
        return [*done.history["loss"], *model.get_weights()]

    def dataset(self) -> list[Any]:
        """Go through a divided dataset."""
        return self._epochs(self.strategy.experimental_distribute_dataset(self._batches(BATCH)), whole=True)

    def iterator(self) -> list[Any]:
        """Take from the iterator of a divided dataset."""
        return self._epochs(self.strategy.experimental_distribute_dataset(self._batches(BATCH)), whole=False)

    def _batches(self, size: int) -> Any:
        return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(size)

    def _epochs(self, divided: Any, *, whole: bool) -> list[Any]:
        shapes = [(3, 3, CHANNELS if layer else 3, CHANNELS) for layer in range(5)]
        with self.strategy.scope():
            values = [tf.random.stateless_normal(shape, (layer, 1)) / 5 for layer, shape in enumerate(shapes)]
            head = tf.random.stateless_normal((CHANNELS, 10), (7, 1))
            weights = [*map(tf.Variable, [*values, head])]

        def train(batch: Any) -> Any:
            x, labels = batch
            with tf.GradientTape() as tape:
                for weight in weights[:-1]:
                    x = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME"))
                logits = tf.reduce_mean(x, [1, 2]) @ weights[-1]
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_sum(losses) / BATCH
            gradients = tape.gradient(loss, weights)
            summed = tf.distribute.get_replica_context().all_reduce("sum", gradients)
            for weight, gradient in zip(weights, summed, strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        @tf.function
        def epoch(source: Any) -> Any:
            total = 0.0
            for batch in source:
                total += self.strategy.reduce("sum", self.strategy.run(train, args=(batch,)), axis=None)
            return total

        losses = [epoch(divided if whole else iter(divided)) for _ in range(2)]
        return [*losses, *(self.strategy.experimental_local_results(weight)[0] for weight in weights)]


def size_of_own() -> int | None:
    """Return the size that is found of batches that each worker makes itself for its devices."""
    made = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).distribute_datasets_from_function(
        lambda _: tf.data.Dataset.range(20).batch(8)
    )
    return Call(arguments=(iter(made),)).batch_size()


def main() -> None:
    """Print what LMS has planned, and whether the bits are the same."""
    (device,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    train = getattr(Trainings(), sys.argv[1])
    alone = [np.asarray(one).tobytes() for one in train()]
    lms.enable(policy="all", min_tensor_bytes=4096)
    same = [np.asarray(one).tobytes() for one in train()] == alone
    plans = [(one.tensors, one.open_sizes is None) for one in lms.report().edited]
    print(json.dumps({"same": same, "plans": plans, "size": size_of_own()}))


if __name__ == "__main__":
    main()
