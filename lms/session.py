"""Sessions of compat.v1: the whole graph is edited once, before its first run.

TensorFlow hands a session a copy of the graph at the first run, and ignores later edits of what was in it.
So the edit comes before that, or not at all, and then a warning says so.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session as tf_session

from lms.config import LMSConfig
from lms.device import adopt_gpus
from lms.errors import LMSError
from lms.grappler import as_planned
from lms.keras import BatchSizes
from lms.rewrite import Edits, is_edited
from lms.shapes import ShapeHints
from lms.step_log import StepLog
from lms.tf_graph import has_backward_pass


class Editor(Protocol):
    """What edits a graph (:class:`lms.engine.Engine`)."""

    config: LMSConfig
    batch_sizes: BatchSizes
    steps: StepLog | None

    def edit(self, tf_graph: Any, name: str, hints: ShapeHints) -> Edits | None:
        """Plan and edit."""

    def offer(self, tf_graph: Any, name: str, hints: ShapeHints) -> Edits | None:
        """The same for a graph that nobody has asked to edit: a warning where that cannot be."""

    def leave(self, tf_graph: Any, name: str, why: str) -> None:
        """Note in a warning and in the report that it is not edited."""


class SessionWatch:
    """Edits each session's graph at its first run, and sets the optimizer options LMS needs."""

    def __init__(self, editor: Editor, arithmetic: bool | None) -> None:
        self._editor, self._arithmetic = editor, arithmetic
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        base = tf_session.BaseSession
        self._bypassed: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        """The sessions made since; what an earlier one has run is not known."""
        self._early: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """An earlier session, and of how many ops it has been told that they stay as they are."""
        self._begun_empty: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs that held nothing yet: no earlier session has run any of them."""
        self._originals: dict[str, Callable[..., Any]] = {"__init__": base.__init__, "run": base.run}

    def install(self) -> None:
        """Begin to watch."""
        make, run = self._originals["__init__"], self._originals["run"]
        if not tf.executing_eagerly() and not (graph := tf.compat.v1.get_default_graph()).get_operations():
            self._begun_empty.add(graph)

        def watched_init(session: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
            make(session, target, graph, session_config(config, self._arithmetic))
            adopt_gpus(config)
            self._made.add(session)

        def watched_run(session: Any, fetches: Any, feed_dict: Any = None, *args: Any, **more: Any) -> Any:
            if self._is_unknown(session):
                self._leave_to(session)
            else:
                self.before_run(session.graph, feed_dict or {})
                self.require_seen(session.graph, feed_dict or {})
            steps = self._editor.steps
            if steps is None:
                return run(session, fetches, feed_dict, *args, **more)
            if is_edited(session.graph):
                steps.planned(session.graph)
            again = functools.partial(run, session, fetches, feed_dict, *args, **more)
            return steps.run(session.graph, "session run", again, idle=False)

        tf_session.BaseSession.__init__ = watched_init
        tf_session.BaseSession.run = watched_run

    def uninstall(self) -> None:
        """Put TensorFlow's own methods back."""
        for name, method in self._originals.items():
            setattr(tf_session.BaseSession, name, method)

    def settle(self, graph: Any, edits: Edits | None) -> None:
        """Leave ``graph`` as it is now, with these edits."""
        self._sizes[graph] = len(graph.get_operations())
        if edits is not None:
            self._bypassed[graph] = edits.bypassed

    def require_seen(self, graph: Any, feeds: Mapping[Any, Any]) -> None:
        """Check that all readers of each fed tensor see what is fed.

        Raises:
            LMSError: If some read what was swapped in instead.
        """
        lost = self._bypassed.get(graph, frozenset()).intersection(getattr(key, "name", key) for key in feeds)
        if lost:
            raise LMSError(
                f"{min(lost)} is fed, and LMS has sent its readers to the tensor it shows; "
                "make it a tf.compat.v1.placeholder_with_default, or feed the tensor it is made from"
            )

    def _is_unknown(self, session: Any) -> bool:
        """Whether a session may have run a graph that nobody here has looked at."""
        looked_at = session.graph in self._sizes or session.graph in self._begun_empty
        return session not in self._made and not looked_at

    def _leave_to(self, session: Any) -> None:
        """Say, where there is a training step, that what this session runs stays as it is."""
        operations = session.graph.get_operations()
        known = self._early.get(session, 0)
        self._early[session] = len(operations)
        if known == len(operations) or is_edited(session.graph):
            return
        if has_backward_pass(operations[known:]):
            self._editor.leave(
                session.graph,
                "session graph",
                "the session was made before lms.enable() and stays as it is, for it may have run the graph "
                "already, and then it ignores every edit; call lms.enable() before the session is made",
            )

    def before_run(self, graph: Any, feeds: Mapping[Any, Any]) -> None:
        """Edit ``graph`` if this is its first run; warn where it has grown a training step since."""
        operations = graph.get_operations()
        known = self._sizes.get(graph)
        self._sizes[graph] = len(operations)
        if known == len(operations) or is_edited(graph) or not has_backward_pass(operations[known or 0 :]):
            return
        if known is not None:
            self._editor.leave(
                graph,
                "session graph",
                "the graph got its training step after a session had run it, too late for LMS; build the "
                "whole graph before the first session.run",
            )
        elif graph.finalized:
            self._editor.leave(
                graph,
                "session graph",
                "the graph is finalized, so LMS cannot edit it; pass lms.session.LMSSessionRunHook() to the "
                "monitored session",
            )
        else:
            size = self._editor.batch_sizes.of_graph(graph)
            hints = feed_hints(graph, feeds, self._editor.config, size)
            self.settle(graph, self._editor.offer(graph, "session graph", hints))


def feed_hints(
    graph: Any, feeds: Mapping[Any, Any], config: LMSConfig, batch_size: int | None = None
) -> ShapeHints:
    """What a configuration, else the fed values, else the batch size of Keras say about open shapes."""
    if config.batch_size is not None:
        return ShapeHints(batch_size=config.batch_size)
    return ShapeHints(batch_size=batch_size, feeds=dict(_fed_shapes(graph, feeds)))


def _fed_shapes(graph: Any, feeds: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name of the op and shape of each fed value; what a session itself will refuse is passed over."""
    for key, value in feeds.items():
        with suppress(KeyError, TypeError, ValueError):
            tensor = graph.as_graph_element(key, allow_operation=False)
            yield tensor.op.name, np.shape(value)


def session_config(config: Any, arithmetic: bool | None) -> Any:
    """A copy of a session's configuration with the optimizer options that LMS needs."""
    changed = as_planned(config)
    if arithmetic is not None:
        rewrite = changed.graph_options.rewrite_options
        rewrite.arithmetic_optimization = type(rewrite).ON if arithmetic else type(rewrite).OFF
    return changed


class LMSSessionRunHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Edits the default graph when a monitored session or an estimator is about to make its session.

    Args:
        config: What to do; ``None``: what ``lms.enable`` was called with, else the defaults with policy
        ``all``.
    """

    def __init__(self, config: LMSConfig | None = None) -> None:
        self._config = config
        self.edits: Edits | None = None
        """What was added, once the hook has begun."""

    def begin(self) -> None:
        """Edit the graph.

        Raises:
            LMSError: If the graph has no training step yet, or was edited already.
        """
        self.edits = edit_graph(tf.compat.v1.get_default_graph(), self._config)


def edit_graph(graph: Any, config: LMSConfig | None = None) -> Edits | None:
    """Edit a graph of compat.v1 before its session is made.

    Args:
        graph: A complete training graph.
        config: What to do; ``None``: what ``lms.enable`` was called with, else the defaults with policy
        ``all``.

    Returns:
        What was added; ``None`` when nothing had to be.

    Raises:
        LMSError: If the graph has no training step, or was edited already.
    """
    from lms import hook

    if is_edited(graph):
        raise LMSError("the graph was edited already; a graph is edited once")
    if not has_backward_pass(graph.get_operations()):
        raise LMSError("the graph has no gradients; build the training step before LMS edits it")
    editor = hook.editor_for(config)
    edits = editor.edit(graph, "session graph", feed_hints(graph, {}, editor.config))
    editor.sessions.settle(graph, edits)
    return edits
