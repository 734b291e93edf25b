"""Train one of Keras's well-known image models on made-up images of any size: how large can they get?

    python examples/many_model.py --image_size 1000
    python examples/many_model.py --image_size 2000 --lms --lms_stats --lms_stats_average
    lmsrun -np 2 --lms examples/many_model.py --image_size 2000

The flags are those of IBM's ManyModel. The images are random: what is measured is memory and speed. Without
``--lms`` or ``--no-lms`` it is the job that decides; the ``LMS_*`` variables say how.
"""

import argparse
import ctypes
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import lms
from lms.callbacks import EitherKeras, LMSStatsAverage, LMSStatsLogger

MODELS = {
    "resnet50": "ResNet50",
    "resnet101": "ResNet101",
    "resnet152": "ResNet152",
    "resnet50v2": "ResNet50V2",
    "resnet101v2": "ResNet101V2",
    "resnet152v2": "ResNet152V2",
    "densenet121": "DenseNet121",
    "densenet169": "DenseNet169",
    "densenet201": "DenseNet201",
    "inception": "InceptionV3",
    "inceptionresnet": "InceptionResNetV2",
    "mobilenet": "MobileNet",
    "mobilenetv2": "MobileNetV2",
    "nasnetlarge": "NASNetLarge",
    "nasnetmobile": "NASNetMobile",
    "xception": "Xception",
}
CLASSES = 15


def main(argv: list[str] | None = None) -> int:
    """Train, then say what LMS did."""
    options = parse_options(argv)
    switch = {True: lms.enable, False: lms.disable}.get(options.lms)
    if switch is not None:
        switch()
    rank, local_rank, size = start_horovod()
    use_layout(options.channels_last)
    model = build_model(options.model, options.image_size, distributed=size > 1)
    model.fit(
        random_batches(options.batch_size, model.input_shape[1:]),
        steps_per_epoch=max(1, options.steps // size),
        epochs=options.epochs,
        callbacks=callbacks(options, local_rank, size),
        shuffle=False,
        verbose=2 if rank == 0 else 0,
    )
    if rank == 0:
        print(lms.report())
    return 0


def at_least_one(text: str) -> int:
    """Parse a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} given; needed at least 1")
    return number


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--model", type=str.lower, choices=MODELS, default="resnet50")
    parser.add_argument("--epochs", type=at_least_one, default=1)
    parser.add_argument(
        "--steps", type=at_least_one, default=10, help="steps an epoch, of all ranks together"
    )
    parser.add_argument("--image_size", type=at_least_one, default=500, help="pixels along one side")
    parser.add_argument("--batch_size", type=at_least_one, default=1, help="images a step and rank")
    parser.add_argument("--lms", action=switch, default=None, help="Large Model Support; default: as the job")
    parser.add_argument("--lms_stats", action=switch, default=False, help="a CSV line for each step")
    parser.add_argument(
        "--lms_stats_average", action=switch, default=False, help="a CSV line for each training"
    )
    parser.add_argument("--lms_stats_warmup_steps", type=int, default=5, help="steps that do not count")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("model_outputs"), help="where the CSV files go"
    )
    parser.add_argument("--nvprof", action=switch, default=False, help="switch a CUDA profiler on and off")
    parser.add_argument("--nvprof_epoch", type=int, default=1, help="the epoch to profile, from 1")
    parser.add_argument("--nvprof_start", type=int, default=4, help="the first step to profile, from 0")
    parser.add_argument("--nvprof_stop", type=int, default=9, help="the step before which profiling ends")
    parser.add_argument("--channels_last", action=switch, default=False, help="the layout of images")
    return parser.parse_args(argv)


def start_horovod() -> tuple[int, int, int]:
    """Start Horovod; return the rank, its number on its host and the number of ranks: alone 0, 0 and 1."""
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1) < 2:
        return 0, 0, 1
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) > 1:  # started by a plain mpirun: under lmsrun a rank sees its own GPU alone
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    return hvd.rank(), hvd.local_rank(), hvd.size()


def use_layout(channels_last: bool) -> None:
    """IBM's default is channels first, for which TensorFlow has kernels on GPUs alone."""
    first = not channels_last and bool(tf.config.list_physical_devices("GPU"))
    tf.keras.backend.set_image_data_format("channels_first" if first else "channels_last")


def build_model(name: str, image_size: int, distributed: bool) -> tf.keras.Model:
    """Build the model with fresh weights; with several ranks its optimizer averages the gradients."""
    first = tf.keras.backend.image_data_format() == "channels_first"
    shape = (3, image_size, image_size) if first else (image_size, image_size, 3)
    make = getattr(tf.keras.applications, MODELS[name])
    model = make(weights=None, include_top=True, input_shape=shape, classes=CLASSES)
    optimizer = tf.keras.optimizers.RMSprop()
    if distributed:
        from lms.hvd import DistributedOptimizer

        optimizer = DistributedOptimizer(optimizer)
    model.compile(optimizer, "categorical_crossentropy")
    return model


def random_batches(batch_size: int, shape: tuple[int, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One random image a class, over and over, each time with another number added to it."""
    rng = np.random.default_rng(1)
    images = rng.random((CLASSES, *shape), dtype=np.float32)
    while True:
        labels = rng.integers(0, CLASSES, batch_size)
        offsets = rng.random((batch_size, 1, 1, 1), dtype=np.float32)
        yield images[labels] + offsets, np.eye(CLASSES, dtype=np.float32)[labels]


def callbacks(options: argparse.Namespace, local_rank: int, size: int) -> list[object]:
    """Make the callbacks that the flags ask for; each rank has its own files, named as in IBM's ManyModel."""
    found: list[object] = []
    if size > 1:
        from lms.hvd import BroadcastVariables, MetricAverage

        found += [BroadcastVariables(), MetricAverage()]
    if options.nvprof:
        found.append(CudaProfile(options.nvprof_epoch, options.nvprof_start, options.nvprof_stop))
    suffix = f"_{platform.node()}_gpu{local_rank}" if size > 1 else ""
    if options.lms_stats:
        found.append(LMSStatsLogger(options.output_dir / f"{options.model}_lms_stats{suffix}.csv"))
    if options.lms_stats_average:
        found.append(
            LMSStatsAverage(
                options.output_dir / f"{options.model}_lms_stats_average{suffix}.csv",
                options.image_size,
                batch_size=options.batch_size,
                start_batch=options.lms_stats_warmup_steps,
            )
        )
    return found


class CudaProfile(EitherKeras):
    """Lets a CUDA profiler that was told to wait (``nsys profile -c cudaProfilerApi``) record some steps."""

    def __init__(self, epoch: int, start: int, stop: int) -> None:
        try:
            self._runtime = ctypes.CDLL("libcudart.so")
        except OSError as error:
            sys.exit(f"many_model: --nvprof needs CUDA's libcudart.so, which cannot be loaded: {error}")
        self._epoch, self._start, self._stop = epoch - 1, start, stop
        self._current = 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Note the epoch."""
        self._current = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Start or stop."""
        if self._current == self._epoch and batch == self._start:
            self._runtime.cudaProfilerStart()
        if self._current == self._epoch and batch == self._stop:
            self._runtime.cudaProfilerStop()


if __name__ == "__main__":
    sys.exit(main())
