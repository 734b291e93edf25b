"""Forecast a training step on GPUs without running it: the largest batch and the step time of each mode."""

import gc
import importlib
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lms.config import LMSConfig, nearest
from lms.errors import LMSArgumentError, LMSError

if TYPE_CHECKING:
    from lms.estimates.estimating import Estimate


MOST = 1 << 20
"""The largest batch that is looked at."""


def estimate(step: Any, *arguments: Any, gpus: Iterable[str] = ("A100-80",), **given: Any) -> "Estimate":
    """Trace a step, and forecast what it needs on GPUs; the step does not run and changes no variable.

    What LMS takes for no training step runs as ever: very small graphs, graphs without gradients, eager steps
    and a function under a tape of its caller's.

    Args:
        step: A compiled Keras model, whose ``fit`` gets the arguments; or a function that makes one step.
        *arguments: What one step gets: ``estimate(model, x, y, batch_size=32)``.
        gpus: Names of GPUs: V100-16, V100-32, A100-40, A100-80, H100, H200, GH200, RTX4090, L4; ``all`` of
            these; ``here`` is the device at hand, as its own kernels would run the step.
        **given: Further arguments.

    Returns:
        The forecasts; they print as a table, and ``to_json()`` gives plain values.

    Raises:
        LMSArgumentError: If ``step`` is no step, a GPU not in the table, or ``batch_size`` no size.
        LMSError: If LMS is on already, or the call makes no training step, or one that cannot be forecast.
    """
    devices = importlib.import_module("lms.simulate.devices")
    wanted = devices.each_of(_wanted(gpus, devices.NAMES))
    _check_batch(given.get("batch_size"))
    found = _traced(_caller(step), arguments, given)
    estimating = importlib.import_module("lms.estimates.estimating")
    name, traced, here = found
    if isinstance(traced, Exception):
        raise LMSError(f"the step cannot be forecast: {estimating.reason_of(traced)}") from traced
    with importlib.import_module("lms.intercept.edit_guards").collector_paused():
        made: Estimate = estimating.estimate_step(name, traced, wanted, here)
    return made


def _wanted(gpus: Any, known: Collection[str]) -> tuple[str, ...]:
    """Check the names of GPUs.

    Raises:
        LMSArgumentError: If they are no names of GPUs, or none.
    """
    if isinstance(gpus, str) or not isinstance(gpus, Iterable):
        try_this = f"gpus=({gpus!r},)" if isinstance(gpus, str) else "gpus=('A100-80',)"
        raise LMSArgumentError(f"gpus is {gpus!r}; needed several names, such as {try_this}")
    wanted = tuple(gpus)
    if not wanted:
        raise LMSArgumentError(f"gpus is empty; needed some of {', '.join(known)}")
    for name in wanted:
        if name not in known:
            like = nearest(name, known) if isinstance(name, str) else ""
            raise LMSArgumentError(f"no GPU {name!r}{like}; known: {', '.join(known)}")
    return wanted


def _check_batch(size: Any) -> None:
    """Check a batch size that was given by its name.

    Raises:
        LMSArgumentError: If no batch has such a size.
    """
    is_whole = isinstance(size, Integral) and not isinstance(size, bool)
    if size is not None and not (is_whole and 0 < size <= MOST):
        raise LMSArgumentError(f"batch_size is {size!r}; needed a whole number from 1 to {MOST:,}")


def _caller(step: Any) -> Callable[..., Any]:
    if not callable(step) and not hasattr(step, "fit"):
        raise LMSArgumentError(
            f"step is {step!r}; needed a compiled Keras model, or a function that makes one step"
        )
    if not hasattr(step, "fit"):
        caller: Callable[..., Any] = step
        return caller

    def fit(*arguments: Any, **given: Any) -> Any:
        importlib.import_module("lms.estimates.early_build").build_optimizer(step)
        return step.fit(*arguments, **{"epochs": 1, "verbose": 0, "shuffle": False, **given})

    return fit


def _traced(
    call: Callable[..., Any], arguments: tuple[Any, ...], given: dict[str, Any]
) -> tuple[str, Any, Any]:
    """Call a step with an editor that keeps it from running, and return its name and the traced step."""
    import tensorflow as tf

    installation = importlib.import_module("lms.engine.installation")
    stopped = importlib.import_module("lms.engine.tracing").STOPPED
    found: list[tuple[str, Any, Any]] = []
    if installation.current() is not None:
        raise LMSError("LMS is on: call lms.estimate() before lms.enable(), or after lms.disable()")
    installation.install(LMSConfig(enabled=True))
    try:
        installation.engine().traced = lambda name, step, here=None: found.append((name, step, here))
        call(*arguments, **given)
    except tf.errors.InvalidArgumentError as error:
        if stopped not in str(error):
            raise
    finally:
        installation.uninstall()
    gc.collect()  # the iterator of a stopped step is in cycles, and its batches lie on the device
    if not found:
        raise LMSError(
            "the call made no training step to forecast; needed a compiled Keras model or a tf.function with "
            "its gradient tape and update inside, called for the first time"
        )
    return next((one for one in found if not isinstance(one[1], Exception)), found[0])
