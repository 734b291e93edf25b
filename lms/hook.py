"""The hook: one transform of every graph that TensorFlow traces, from the moment it is installed."""

import logging
import os

from tensorflow.python.eager.polymorphic_function import transform

from lms.config import LMSConfig
from lms.engine import Engine
from lms.errors import LMSError
from lms.report import plot_memory
from lms.stats import Report

logger = logging.getLogger("lms")

_engine: Engine | None = None


def install(config: LMSConfig) -> None:
    """Edit every graph that is traced from now on.

    Args:
        config: What to do; ``enabled`` and ``mode`` have been looked at already.

    Raises:
        LMSError: If the hook is installed already.
    """
    global _engine
    if _engine is not None:
        raise LMSError("LMS is installed already; call lms.disable() first")
    _engine = Engine(config, os.environ)
    try:
        resume()
    except BaseException:
        uninstall()
        raise


def resume() -> None:
    """Edit graphs, also after :func:`pause`, and not for guests alone."""
    if _engine is None:
        return
    _engine.lent = False
    if _engine.at_rest:
        _engine.at_rest = False
        _engine.optimizer.apply()
        _start(_engine)


def _start(engine: Engine) -> None:
    if engine.config.debug:
        _log_everything()
    engine.tell_of_options()
    engine.watch.install()
    engine.unseen.install()
    engine.sessions.install()
    engine.batch_sizes.install()
    transform.FUNC_GRAPH_TRANSFORMS.append(engine)


def _log_everything() -> None:
    """Decisions go to Python's logging, and to standard error where nobody has set that up."""
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def uninstall() -> None:
    """Edit nothing any more; graphs that were edited keep their swaps."""
    global _engine
    pause()
    if _engine is not None:
        _engine.batch_sizes.uninstall()
    _engine = None


def pause() -> None:
    """Edit nothing for a time; what was done stays in the report.

    The sizes of Keras's batches are noted further on: ``fit`` tells them before a callback resumes LMS.
    """
    if _engine is None or _engine.at_rest:
        return
    _engine.at_rest = True
    if _engine in transform.FUNC_GRAPH_TRANSFORMS:
        transform.FUNC_GRAPH_TRANSFORMS.remove(_engine)
    _engine.watch.uninstall()
    _engine.unseen.uninstall()
    _engine.sessions.uninstall()
    _engine.optimizer.restore()


def engine() -> Engine:
    """The engine at work.

    Raises:
        LMSError: If there is none.
    """
    if _engine is None:
        raise LMSError("LMS is not enabled; call lms.enable() first")
    return _engine


def editor_for(config: LMSConfig | None) -> Engine:
    """The engine at work when it has this configuration; else one that only edits what it is given."""
    if _engine is not None and config in (None, _engine.config):
        return _engine
    return Engine(config or LMSConfig(enabled=True, policy="all"), os.environ)


def has_worked() -> bool:
    """Whether a training step was looked at."""
    return bool(engine().collector.graphs)


def report() -> Report:
    """What LMS did so far; prints as a table."""
    return engine().report()


def plot(path: str | os.PathLike[str]) -> None:
    """Draw the memory of the last planned step, before and after, into a PNG or SVG file.

    Raises:
        LMSError: If nothing has been planned yet, or the file cannot be drawn.
    """
    planned = engine().collector.planned
    if not planned:
        raise LMSError("nothing has been planned yet; run a training step first, then call lms.plot()")
    plot_memory(max(planned, key=lambda one: len(one.graph.ops)), path)
