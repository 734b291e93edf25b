"""Install, pause and remove the one engine of a process."""

import atexit
import logging
import os

import tensorflow as tf

from lms.config import REPORT_VARIABLE, LMSConfig
from lms.engine.engine import Engine
from lms.engine.lifecycle import Lifecycle
from lms.errors import LMSError
from lms.optimizer import plugin
from lms.report.html import write_document
from lms.report.render import plot_memory
from lms.report.stats import Report

logger = logging.getLogger("lms")

_engine: Engine | None = None
_report_dir = ""
"""Where this process leaves its report."""


def install(config: LMSConfig) -> None:
    """Plan every step that runs from now on.

    Args:
        config: What to do; ``enabled`` and ``mode`` have been looked at already.

    Raises:
        LMSError: If LMS is on already, or TensorFlow cannot be given a graph optimizer here.
    """
    global _engine, _report_dir
    if _engine is not None:
        raise LMSError("LMS is installed already; call lms.disable() first")
    # Of the type whose memory is planned; plug-ins of others for other types are no concern of ours.
    plugin.load(["GPU" if tf.config.get_visible_devices("GPU") else "CPU"], os.environ)
    _engine = Engine(config, os.environ)
    # Taken out: a process that this one starts must not write over its report.
    _report_dir = os.environ.pop(REPORT_VARIABLE, "") or _report_dir
    if _report_dir:
        atexit.register(_write_report, _engine, _report_dir, os.getpid())
    try:
        resume()
    except BaseException:
        uninstall()
        raise


def _write_report(reported: Engine, folder: str, pid: int) -> None:
    """Write the report of an engine that has looked at a graph; a job must not fail for want of it."""
    if os.getpid() != pid or not (reported.books.collector.graphs and os.path.isdir(folder)):
        return
    try:
        write_document(reported.report().to_json(), folder)
    except Exception as error:
        logger.warning("no report in %s: %s", folder, error)


def resume(state: Lifecycle = Lifecycle.ON) -> None:
    """Plan steps, also after :func:`pause`."""
    if _engine is None:
        return
    was, _engine.state = _engine.state, state
    if not was.edits and state.edits:
        if _engine.config.debug:
            _log_everything()
        _engine.tell_of_options()
        _engine.steps.install()
        _engine.resources.pool.install()
        plugin.arm(_engine.edit, _engine.fault)


def _log_everything() -> None:
    """Log decisions through Python's logging, or to standard error if it has no handlers."""
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def uninstall() -> None:
    """Plan no more steps; functions and sessions run as before, except callables that Keras has made."""
    global _engine
    pause()
    if _engine is not None:
        _engine.state = Lifecycle.OFF
        _engine.steps.batch_sizes.uninstall()
    _engine = None


def pause() -> None:
    """Plan nothing for a time; what was done stays in the report.

    The sizes of Keras's batches are noted further on: ``fit`` tells them before a callback resumes LMS.
    """
    if _engine is not None and _engine.state.edits:
        _engine.state = Lifecycle.PAUSED
        _engine.resources.pool.uninstall()
        plugin.disarm()
        _engine.steps.uninstall()


def engine() -> Engine:
    """Return the installed engine.

    Raises:
        LMSError: If there is none.
    """
    if _engine is None:
        raise LMSError("LMS is not enabled; call lms.enable() first")
    return _engine


def current() -> Engine | None:
    """Return the engine of this process, or None."""
    return _engine


def has_worked() -> bool:
    """Tell whether the report holds any graph."""
    return bool(engine().books.collector.graphs)


def report() -> Report:
    """Report what LMS did so far; the report prints as a table."""
    return engine().report()


def plot(path: str | os.PathLike[str]) -> None:
    """Draw the memory of the largest step, as last planned, before and after, into a PNG or SVG file.

    Raises:
        LMSError: If nothing has been planned yet, or the file cannot be drawn.
    """
    planned = engine().books.collector.largest
    if planned is None:
        raise LMSError("nothing has been planned yet; run a training step first, then call lms.plot()")
    plot_memory(planned, path)
