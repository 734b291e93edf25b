"""Train a 3D U-Net to find the brain in a noisy scan, on volumes as large as memory lets you.

    python examples/unet3d.py
    LMS_POLICY=all lmsrun -np 2 --lms examples/unet3d.py --size 64

The scan is real: nibabel brings an echo-planar image of a whole head (128 x 96 x 24 voxels, taken twice). The
first take, with fresh noise on it in every step, is trained on; the second one is the test. What counts as
brain is what is bright in the take without noise. ``--size`` resamples both to a cube.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import nibabel
import numpy as np
from scipy.ndimage import zoom

import lms
from lms.callbacks import LMSStatsAverage

GROUPS = 4
"""Channels are normalised in so many groups."""
SCAN = Path(nibabel.__file__).parent / "tests" / "data" / "example4d.nii.gz"


def main(argv: list[str] | None = None) -> int:
    """Train and test; 1 if too little of the brain is found."""
    options = parse_options(argv)
    rank, size = start_horovod()
    keras.utils.set_random_seed(options.seed)
    first, second = takes(options.size)
    model = build_unet(options.size, options.filters, options.depth)
    compile_model(model, options.learning_rate, distributed=size > 1)
    rng = np.random.default_rng(options.seed + rank)
    batches = noisy_batches(first, options.batch_size, options.noise, rng)
    model.fit(
        batches,
        steps_per_epoch=options.steps,
        epochs=options.epochs,
        callbacks=callbacks(options, rank, size),
        shuffle=False,
        verbose=2 if rank == 0 else 0,
    )
    test_rng = np.random.default_rng(0)
    image, brain = next(noisy_batches(second, 1, options.noise, test_rng, flip=False))
    found = dice(model.predict_on_batch(image) > 0, brain > 0)
    if rank == 0:
        print(f"dice {found:.4f} on the second take, {options.size}^3 voxels")
        print(lms.report())
    if found >= options.min_dice:
        return 0
    if rank == 0:
        print(f"dice {found:.4f} is below --min-dice {options.min_dice}", file=sys.stderr)
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
    parser.add_argument("--size", type=at_least_one, default=32, help="voxels along each side")
    parser.add_argument("--filters", type=at_least_one, default=8, help="channels of the first level")
    parser.add_argument("--depth", type=at_least_one, default=3, help="levels below the first")
    parser.add_argument("--batch-size", type=at_least_one, default=1, help="volumes a step and rank")
    parser.add_argument("--steps", type=at_least_one, default=20, help="steps an epoch")
    parser.add_argument("--epochs", type=at_least_one, default=2)
    parser.add_argument("--noise", type=float, default=0.4, help="its deviation; the brain is about 1 bright")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--min-dice", type=float, default=0.9, help="exit 1 below this overlap")
    parser.add_argument("--stats", type=Path, help="append speed and swapped bytes to this CSV file")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(argv)
    if options.size % 2**options.depth:
        parser.error(f"--size is {options.size}; needed a multiple of {2**options.depth} for --depth")
    if options.filters % GROUPS:
        parser.error(f"--filters is {options.filters}; needed a multiple of {GROUPS}")
    return options


def start_horovod() -> tuple[int, int]:
    """Start Horovod; return this process's rank and the number of ranks, without a launcher 0 of 1."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return 0, 1
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    return hvd.rank(), hvd.size()


def takes(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Both takes as cubes, scaled so that bright tissue is about 1."""
    scan = np.asarray(nibabel.load(SCAN).dataobj, dtype=np.float32)
    cubes = [zoom(scan[..., take], [size / side for side in scan.shape[:3]], order=1) for take in (0, 1)]
    return tuple(cube / np.percentile(cube, 95) for cube in cubes)


def noisy_batches(
    cube: np.ndarray, batch_size: int, noise: float, rng: np.random.Generator, flip: bool = True
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the take with noise, each volume mirrored at random, and where the brain is in it."""
    while True:
        chosen = [
            np.flip(cube, np.flatnonzero(rng.integers(0, 2, 3))) if flip else cube for _ in range(batch_size)
        ]
        clean = np.stack(chosen)[..., None]
        image = clean + rng.normal(0, noise, clean.shape)
        yield image.astype("float32"), (clean > 0.3).astype("float32")


def build_unet(size: int, filters: int, depth: int) -> keras.Model:
    """Two convolutions a level; each level's features come back beside those from below."""
    inputs = keras.Input((size, size, size, 1))
    x, skipped = inputs, []
    for level in range(depth):
        x = convolve(x, filters << level)
        skipped.append(x)
        x = keras.layers.MaxPooling3D()(x)
    x = convolve(x, filters << depth)
    for level in reversed(range(depth)):
        x = keras.layers.Conv3DTranspose(filters << level, 2, strides=2)(x)
        x = convolve(keras.layers.Concatenate()([skipped[level], x]), filters << level)
    return keras.Model(inputs, keras.layers.Conv3D(1, 1)(x))


def convolve(x: Any, filters: int) -> Any:
    """Two convolutions, each normalised."""
    for _ in range(2):
        x = keras.layers.Conv3D(filters, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.GroupNormalization(GROUPS)(x))
    return x


def compile_model(model: keras.Model, learning_rate: float, distributed: bool) -> None:
    """With several ranks the optimizer averages their gradients."""
    optimizer = keras.optimizers.Adam(learning_rate)
    if distributed:
        optimizer = importlib.import_module("lms.hvd").DistributedOptimizer(optimizer)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))


def callbacks(options: argparse.Namespace, rank: int, size: int) -> list[object]:
    """Make the callbacks that keep ranks together, and the statistics of rank 0."""
    found: list[object] = []
    if size > 1:
        hvd = importlib.import_module("lms.hvd")
        found += [hvd.BroadcastVariables(), hvd.MetricAverage()]
    if options.stats and rank == 0:
        average = LMSStatsAverage(
            options.stats, options.size, image_dimensions=3, batch_size=options.batch_size
        )
        found.append(average)
    return found


def dice(found: np.ndarray, wanted: np.ndarray) -> float:
    """Measure the overlap of two sets of voxels: 1 when they are the same, 0 without any in common."""
    return float(2 * np.sum(found & wanted) / (np.sum(found) + np.sum(wanted)))


if __name__ == "__main__":
    sys.exit(main())
