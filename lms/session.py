"""Train in sessions of compat.v1."""

from typing import Any

import tensorflow as tf

import lms
from lms.config import LMSConfig
from lms.errors import LMSError
from lms.intercept.sessions import has_training_step


class LMSSessionRunHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Switches LMS on for a monitored session: each step is planned when it is first run.

    Args:
        config: What to do; ``None``: what ``lms.enable`` was called with, else the defaults with policy
        ``all``.
    """

    def __init__(self, config: LMSConfig | None = None) -> None:
        self._config = config

    def begin(self) -> None:
        """Have the default graph planned.

        Raises:
            LMSError: If the graph has no training step yet.
        """
        edit_graph(tf.compat.v1.get_default_graph(), self._config)


def edit_graph(graph: Any, config: LMSConfig | None = None) -> None:
    """Have a graph of compat.v1 planned whenever a session runs a training step of it.

    The graph itself is not changed.

    Args:
        graph: A complete training graph.
        config: What to do; ``None``: what ``lms.enable`` was called with, else the defaults with policy
        ``all``.

    Raises:
        LMSError: If the graph has no training step.
    """
    if not has_training_step(graph):
        raise LMSError("the graph has no gradients; build the training step before LMS plans it")
    state = lms.state()
    if config is not None or state is None:
        lms.enable(config or LMSConfig(enabled=True, policy="all"))
    elif not state.active:
        lms.enable(state.config)
