"""Callbacks that write down what each step swapped, for whichever Keras drives them."""

import csv
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lms.enable import state as lms_state
from lms.user_files import require_file

GIB = 1 << 30


class EitherKeras:
    """A callback of no Keras in particular: it has every method that Keras 3 or tf_keras calls."""

    model: Any = None
    params: Any = None
    _supports_tf_logs = True

    def set_model(self, model: Any) -> None:
        """Keep the model that is trained."""
        self.model = model

    def set_params(self, params: Any) -> None:
        """Keep Keras's parameters of this training."""
        self.params = params

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return True

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing, for every event that a callback does not handle."""

    on_train_begin = on_train_end = on_test_begin = on_test_end = on_predict_begin = on_predict_end = _nothing
    on_epoch_begin = on_epoch_end = on_batch_begin = on_batch_end = _nothing
    on_train_batch_begin = on_train_batch_end = on_test_batch_begin = on_test_batch_end = _nothing
    on_predict_batch_begin = on_predict_batch_end = _nothing


@dataclass(frozen=True)
class StepStats:
    """Time and transfers of one step, or the average of several; None where nothing counts it."""

    time: float
    """Seconds."""
    allocs: float | None
    reclaim_ones: float | None
    """Tensors swapped out."""
    reclaim_alls: float | None
    gib_reclaimed: float | None
    """GiB swapped out."""

    def __sub__(self, earlier: "StepStats") -> "StepStats":
        return self._combine(earlier, -1)

    def __add__(self, other: "StepStats") -> "StepStats":
        return self._combine(other, 1)

    def over(self, steps: int) -> "StepStats":
        """Return the average of ``steps`` steps whose sum this is."""
        shares: dict[str, Any] = {
            name: None if value is None else value / steps for name, value in vars(self).items()
        }
        return StepStats(**shares)

    def _combine(self, other: "StepStats", sign: int) -> "StepStats":
        theirs = vars(other)
        both: dict[str, Any] = {
            name: None if value is None or theirs[name] is None else value + sign * theirs[name]
            for name, value in vars(self).items()
        }
        return StepStats(**both)


class _Meter:
    """Reads the counters before and after a step."""

    def __init__(self, gpu_id: int) -> None:
        self._gpu_id = gpu_id
        self._before: StepStats | None = None
        self._restarts = 0
        self.steps: list[StepStats] = []

    def begin(self) -> None:
        self._restarts, self._before = _restarts(), self._read()

    def end(self) -> StepStats | None:
        """Return the step since ``begin``; None where ``begin`` has not been called."""
        if self._before is None:
            return None
        step = _with_plan(self._read() - self._before)
        if _restarts() != self._restarts:
            step = replace(step, allocs=None)
        self._before = None
        self.steps.append(step)
        return step

    def _read(self) -> StepStats:
        read = {name: _counter(name, self._gpu_id) for name in ("num_allocs", "num_single_reclaims")}
        alls, nbytes = _counter("num_full_reclaims", self._gpu_id), _counter("bytes_reclaimed", self._gpu_id)
        return StepStats(
            time.perf_counter(),
            read["num_allocs"],
            read["num_single_reclaims"],
            alls,
            None if nbytes is None else nbytes / GIB,
        )


def _restarts() -> int:
    """Return how often the engine has restarted the allocator's counters, which planning a graph does."""
    state = lms_state()
    if state is None or state.mode != "graph":
        return 0
    from lms.engine.installation import engine

    return engine().books.collector.plans


def _counter(name: str, gpu_id: int) -> int | None:
    """Read a statistic by IBM's name, from IBM's TensorFlow or else from ours; None if nothing counts it."""
    import tensorflow as tf

    from lms.device.ibm_counters import GETTERS, NoStatisticError

    getter = getattr(tf.experimental, f"get_{name}", None) or GETTERS[f"get_{name}"]
    try:
        return int(getter(gpu_id))
    except NoStatisticError:
        return None


def _with_plan(step: StepStats) -> StepStats:
    """Fill in the plan's swaps and bytes where nothing counts the copies.

    On a GPU TensorFlow makes the copies and counts none; every step makes those of the plan.
    """
    if step.gib_reclaimed is not None:
        return step
    from lms.engine.installation import engine

    edited = engine().report().edited
    if not edited:
        return step
    swaps, nbytes = edited[-1].tensors, edited[-1].bytes_out
    return StepStats(step.time, step.allocs, swaps, step.reclaim_alls, nbytes / GIB)


class LMSStatsLogger(EitherKeras):
    """Writes one CSV line a step: ``t`` for training, ``v`` for validation.

    The columns are IBM's. A field is empty where nothing counts it: ``allocs`` without a compiler for the op
    that asks the allocator, and in a step that LMS plans, for that starts the allocator's counters anew. On a
    GPU the swapped tensors and bytes are the plan's.

    Args:
        logfile: The file; it is written anew. Its folder is made.
        gpu_id: Whose allocator is asked.
        log_dir: Where the same series go for TensorBoard; None: nowhere.

    Raises:
        PlaceError: If the file cannot be written.
    """

    COLUMNS = (
        "step type",
        "epoch",
        "step",
        "duration",
        "allocs",
        "reclaimOnes",
        "reclaimAlls",
        "GiB reclaimed",
    )

    def __init__(
        self, logfile: str | os.PathLike[str], gpu_id: int = 0, log_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._logfile, self._meter = _place(logfile), _Meter(gpu_id)
        self._board = None if log_dir is None else _Board(log_dir)
        self._epoch = 0
        self._started = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Write the header."""
        self._start()

    def on_test_begin(self, logs: Any = None) -> None:
        """Write the header, if this is an evaluation of its own."""
        self._start()

    def on_train_end(self, logs: Any = None) -> None:
        """Flush the file for TensorBoard."""
        self._started = False
        if self._board:
            self._board.flush()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Read the counters."""
        self._meter.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write the line of the step."""
        self._write("t", batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Read the counters."""
        self._meter.begin()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write the line of the step."""
        self._write("v", batch)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            with self._logfile.open("w", newline="") as file:
                csv.writer(file).writerow(self.COLUMNS)

    def _write(self, kind: str, batch: int) -> None:
        step = self._meter.end()
        if step is None:
            return
        values = (step.time, step.allocs, step.reclaim_ones, step.reclaim_alls, step.gib_reclaimed)
        with self._logfile.open("a", newline="") as file:
            csv.writer(file).writerow([kind, self._epoch, batch, *map(_field, values)])
        if self._board:
            self._board.write(kind, dict(zip(self.COLUMNS[3:], values, strict=True)))


def _place(logfile: str | os.PathLike[str]) -> Path:
    """Make the folder of a statistics file, check that the file can be written, and return its path."""
    path = Path(logfile)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    require_file(path, "a callback's logfile")
    return path


def _field(value: float | None) -> float | str:
    return "" if value is None else value


class _Board:
    """Scalars for TensorBoard, each kind numbered by its own steps."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        from lms.report.event_file import EventFile

        self._file = EventFile(log_dir)
        self._steps = {"t": 0, "v": 0}

    def write(self, kind: str, values: Mapping[str, float | None]) -> None:
        """Write one step; values that nothing counts are left out."""
        name = {"t": "train", "v": "validation"}[kind]
        tags = {f"lms/{name}/{column}": value for column, value in values.items()}
        self._file.scalars(self._steps[kind], tags)
        self._steps[kind] += 1

    def flush(self) -> None:
        """Write out what is buffered."""
        self._file.flush()


class LMSStatsAverage(EitherKeras):
    """Appends one CSV line a training: throughput and averages over its steps, in IBM's columns.

    The first step of a training traces and plans, which takes seconds and starts the allocator's counters
    anew. ``start_batch=0`` counts it as any other, as IBM's did: the averages have its time, the median
    hardly, and ``allocs`` is empty.

    Args:
        logfile: The file; lines are added, so that runs with growing images make one table. Its folder is
            made.
        image_size: Pixels (voxels) along one side.
        image_dimensions: 2 or 3.
        gpu_id: Whose allocator is asked.
        batch_size: Images a step.
        start_epoch: First epoch that counts, from 0.
        start_batch: First step of each epoch that counts, from 0; those before warm up.

    Raises:
        PlaceError: If the file cannot be written.
    """

    def __init__(
        self,
        logfile: str | os.PathLike[str],
        image_size: int,
        image_dimensions: int = 2,
        gpu_id: int = 0,
        batch_size: int = 1,
        start_epoch: int = 0,
        start_batch: int = 2,
    ) -> None:
        self._logfile, self._meter = _place(logfile), _Meter(gpu_id)
        self._image_size, self._dimensions, self._batch_size = image_size, image_dimensions, batch_size
        self._start_epoch, self._start_batch = start_epoch, start_batch
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Read the counters, once warm."""
        if batch >= self._start_batch and self._epoch >= self._start_epoch:
            self._meter.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep the step."""
        self._meter.end()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the line; a training that ended while warming up writes none and says so."""
        if not self._meter.steps:
            first = f"step {self._start_batch} of epoch {self._start_epoch}"
            print(f"LMSStatsAverage: no step counted; training ended before {first}, both from 0")
            return
        row = self._row(self._meter.steps)
        is_new = not self._logfile.exists()
        with self._logfile.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def _row(self, steps: list[StepStats]) -> dict[str, float | str]:
        average = sum(steps[1:], start=steps[0]).over(len(steps))
        median_s = statistics.median(step.time for step in steps)
        millions = self._batch_size * self._image_size**self._dimensions / 1e6
        rate = "megavoxels/sec" if self._dimensions == 3 else "megapixels/sec"
        return {
            "image_size": self._image_size,
            rate: millions / average.time,
            f"median {rate}": millions / median_s,
            "gib_reclaimed": _field(average.gib_reclaimed),
            "allocs": _field(average.allocs),
            "num_steps": len(steps),
            "reclaim_alls": _field(average.reclaim_alls),
            "reclaim_ones": _field(average.reclaim_ones),
            "time": average.time,
        }
