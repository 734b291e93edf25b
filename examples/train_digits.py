"""Train a small convolutional network on scikit-learn's digits, alone or with one rank per GPU.

    python examples/train_digits.py
    lmsrun -np 2 examples/train_digits.py --epochs 8

The 1,797 images are real scans of handwritten digits (8 x 8 pixels) that the package brings along. Each rank
trains on its own share of them; rank 0 prints the accuracy on the images that nobody has trained on.
"""

import argparse
import importlib.util
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits


def main(argv: list[str] | None = None) -> int:
    """Train, check and report; 1 if the accuracy is too low."""
    options = parse_options(argv)
    rank, size = start_horovod()
    keras.utils.set_random_seed(options.seed)
    (images, labels), test = split_digits(options.seed)
    model = build_model(options.learning_rate, options.convolutions, distributed=size > 1)
    model.fit(
        *share((images, labels), rank, size),
        batch_size=options.batch_size,
        epochs=options.epochs,
        callbacks=callbacks(size > 1),
        verbose=2 if rank == 0 else 0,
    )
    if size > 1:
        from lms.hvd import check_in_sync

        check_in_sync(model)
    loss, accuracy = model.evaluate(*test, verbose=0)
    if rank == 0:
        agreement = f", {size} ranks hold the same weights" if size > 1 else ""
        say_what_was_swapped()
        print(f"test accuracy {accuracy:.4f}, loss {loss:.4f}, {len(test[0])} images{agreement}", flush=True)
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
    parser.add_argument("--epochs", type=at_least_one, default=8)
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="images a step and rank")
    parser.add_argument("--convolutions", type=at_least_one, default=2, help="how deep the network is")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="exit 1 below this test accuracy")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args(argv)


def start_horovod() -> tuple[int, int]:
    """Start Horovod; return this process's rank and the number of ranks, 0 of 1 where it is not installed."""
    if importlib.util.find_spec("horovod") is None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            sys.exit(
                "train_digits: several ranks need Horovod, which is not installed here; try -np 1, or "
                "examples/strategy_digits.py, or build it with 'lmsrun build-horovod'"
            )
        return 0, 1
    import horovod.tensorflow as hvd

    hvd.init()
    return hvd.rank(), hvd.size()


def split_digits(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Load the digits in a fixed shuffled order: four fifths to train on, the rest to test."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype("float32")
    labels = digits.target[order]
    held_out = len(order) // 5
    return (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])


def share(data: tuple[np.ndarray, np.ndarray], rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every size-th image, as many for each rank: ranks that take different numbers of steps wait forever."""
    length = len(data[0]) // size * size
    return data[0][rank:length:size], data[1][rank:length:size]


def build_model(learning_rate: float, convolutions: int = 2, *, distributed: bool) -> keras.Model:
    """Convolutions and a classifier; with several ranks the optimizer averages their gradients."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *(keras.layers.Conv2D(32, 3, activation="relu", padding="same") for _ in range(convolutions)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(learning_rate)
    if distributed:
        from lms.hvd import DistributedOptimizer

        optimizer = DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def say_what_was_swapped() -> None:
    """Say what Large Model Support has made of the training step, if it has made something."""
    import lms

    if edited := lms.report().edited:
        step = edited[-1]
        before, now = (step.peak_before_bytes or 0) / 2**20, (step.planned_peak_bytes or 0) / 2**20
        print(
            f"Large Model Support: {step.why}; the step's peak is {now:.1f} MiB instead of {before:.1f}",
            flush=True,
        )


def callbacks(distributed: bool) -> list[keras.callbacks.Callback]:
    """Make the callbacks that keep ranks together: equal weights at the start, one mean of each metric."""
    if not distributed:
        return []
    from lms.hvd import BroadcastVariables, MetricAverage

    return [BroadcastVariables(), MetricAverage()]


if __name__ == "__main__":
    sys.exit(main())
