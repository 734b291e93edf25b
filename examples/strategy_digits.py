"""Train on scikit-learn's digits with TensorFlow's own strategy: one worker per rank, without Horovod.

    python examples/strategy_digits.py
    lmsrun -np 2 examples/strategy_digits.py --epochs 8

``lmsrun`` tells each rank in ``TF_CONFIG`` who the workers are. Each worker trains on its own share of the
images; the strategy adds up the gradients, so all of them hold the same weights, which is checked at the end.
"""

import argparse
import os
import sys
import zlib
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from train_digits import at_least_one, build_model, share, split_digits

Step = Callable[[np.ndarray, np.ndarray], tf.Tensor]


def main(argv: list[str] | None = None) -> int:
    """Train, check and report; 1 if the accuracy is too low or the workers' weights differ."""
    options = parse_options(argv)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # Before any other op of TensorFlow.
    resolver, size = strategy.cluster_resolver, strategy.num_replicas_in_sync
    rank = resolver.task_id or 0
    keras.utils.set_random_seed(options.seed)
    train, (images, labels) = split_digits(options.seed)
    with strategy.scope():
        model = build_model(options.learning_rate, distributed=False)
        model.optimizer.build(model.trainable_variables)
    step = make_step(strategy, model, options.batch_size * size)
    mine = share(train, rank, size)
    for epoch in range(options.epochs):
        losses = [float(step(*batch)) for batch in shuffled(mine, options.batch_size, options.seed + epoch)]
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}", flush=True)
    equal = hold_the_same_weights(strategy, model)
    accuracy = float(np.mean(np.argmax(model(images, training=False), axis=1) == labels))
    if rank == 0:
        agreement = f", {size} workers hold the same weights" if size > 1 and equal else ""
        print(f"test accuracy {accuracy:.4f}, {len(images)} images{agreement}", flush=True)
    if equal and accuracy >= options.min_accuracy:
        return 0
    if rank == 0:
        why = "the workers' weights differ" if not equal else f"below --min-accuracy {options.min_accuracy}"
        print(f"accuracy {accuracy:.4f}: {why}", file=sys.stderr)
    return 1


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=at_least_one, default=8)
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="images per step and worker")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="exit 1 below this test accuracy")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args(argv)


def shuffled(
    data: tuple[np.ndarray, np.ndarray], batch_size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield full batches in a new order: workers that take different numbers of steps wait forever."""
    order = np.random.default_rng(seed).permutation(len(data[0]))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield data[0][chosen], data[1][chosen]


def make_step(strategy: tf.distribute.Strategy, model: keras.Model, global_batch: int) -> Step:
    """Build the step of one worker; Keras 3's own ``fit`` knows no several workers, tf-keras's does."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step_of_worker(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss(labels, model(images, training=True))
            mine = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
        model.optimizer.apply(tape.gradient(mine, model.trainable_variables), model.trainable_variables)
        return mine

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(step_of_worker, args=(images, labels)), axis=None)

    return step


def hold_the_same_weights(strategy: tf.distribute.Strategy, model: keras.Model) -> bool:
    """Compare a checksum of the weights and of the optimizer's state over all workers."""
    variables = [*model.weights, *model.optimizer.variables]
    content = b"".join(np.ascontiguousarray(variable.numpy()).tobytes() for variable in variables)
    mine = tf.constant([zlib.crc32(content)], tf.int64)

    @tf.function
    def gather() -> tf.Tensor:
        every = strategy.run(lambda: tf.distribute.get_replica_context().all_gather(mine, axis=0))
        return strategy.experimental_local_results(every)[0]

    return len(set(gather().numpy().tolist())) == 1


if __name__ == "__main__":
    sys.exit(main())
