"""Watch sessions of compat.v1, and note the shapes that each run feeds.

TensorFlow optimizes a graph anew for each set of feeds.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from tensorflow.python.client import pywrap_tf_session as c_session
from tensorflow.python.client import session as tf_session

from lms.device.device import adopt_gpus
from lms.intercept.optimizer_options import OptimizerOptions, iterations_of
from lms.ir.op_traits import is_backward
from lms.optimizer import plugin
from lms.variables.initial_values import SharedValues

WATCHED = ("__init__", "_call_tf_sessionrun", "_Callable")
"""What is replaced in TensorFlow's sessions: how they are made, all ways to run them, what Keras calls."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class SessionRun:
    """A run of a session that is under way."""

    graph: Any
    feeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of what is fed, by the name of its node."""
    ops: tuple[str, ...] = ()
    """The names of the ops that are run or fetched."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each variable that shares memory with another or a constant, by the name of its handle."""


@dataclass(frozen=True)
class Charge:
    """The guest that has asked for the plans of a graph, and how it is to be planned."""

    guest: Any
    config: Any
    assumed_batch: int | None = None
    """The batch size where nothing tells it."""
    limit_bytes: int | None = None
    """The size of the device to plan for; ``None``: that of the real one."""


class Observer(Protocol):
    """The interface of the object that the watch reports to."""

    def run_session(self, run: SessionRun, step: Callable[[], Any]) -> Any:
        """Run ``step``, the run of a session."""


class _UnderWay(threading.local):
    run: SessionRun | None = None


class SessionWatch:
    """Sets the optimizer options that a plan needs, and notes the shapes that each run feeds.

    A session keeps what TensorFlow has made of its graph by what is fed, fetched and run. One that ran before
    gets plans nevertheless: what it runs is named once more for each watch that has been installed, which
    makes another key and changes nothing.
    """

    def __init__(self, observer: Observer, options: OptimizerOptions) -> None:
        self._observer, self._options = observer, options
        self._number = next(_numbers)
        base = tf_session.BaseSession
        self._originals = {name: getattr(base, name) for name in WATCHED}
        self._left_alone: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs that are not to be planned."""
        self._charges: weakref.WeakKeyDictionary[Any, Charge] = weakref.WeakKeyDictionary()
        self._local = _UnderWay()
        self._values = SharedValues()

    @property
    def run(self) -> SessionRun | None:
        """The run under way in this thread."""
        return self._local.run

    def install(self) -> None:
        """Begin to watch."""
        make, run, made = (self._originals[name] for name in WATCHED)
        watch = self

        def watched_init(session: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
            make(session, target, graph, self._options.as_planned(config))
            adopt_gpus(config)

        def watched_run(
            session: Any, options: Any, feeds: Any, fetches: Any, targets: Any, metadata: Any
        ) -> Any:
            shapes = {c_session.TF_OperationName(fed.oper): np.shape(value) for fed, value in feeds.items()}
            named = (targets or [fetched.oper for fetched in fetches])[:1]
            step = partial(run, session, options, feeds, fetches, [*targets, *named * self._number], metadata)
            asked = [*targets, *(fetched.oper for fetched in fetches)]
            names = tuple(map(c_session.TF_OperationName, asked))
            return self._observe(session, SessionRun(session.graph, shapes, names), step)

        class WatchedCallable(made):  # type: ignore[misc, valid-type]
            """Made when it is first called: TensorFlow optimizes the graph then, and shapes are known."""

            def __init__(self, session: Any, options: Any) -> None:
                self._session, self._options, self._handle = session, options, None

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                names = (name.partition(":")[0] for name in self._options.feed)
                shapes = dict(zip(names, map(np.shape, args), strict=False))
                step = partial(self._run, *args, **kwargs)
                asked = (*self._options.target, *self._options.fetch)
                ops = tuple(name.partition(":")[0] for name in asked)
                return watch._observe(self._session, SessionRun(self._session.graph, shapes, ops), step)

            def _run(self, *args: Any, **kwargs: Any) -> Any:
                if self._handle is None:
                    super().__init__(self._session, self._options)
                return super().__call__(*args, **kwargs)

        for name, changed in zip(WATCHED, (watched_init, watched_run, WatchedCallable), strict=True):
            setattr(tf_session.BaseSession, name, changed)

    def uninstall(self) -> None:
        """Put TensorFlow's own methods back."""
        for name, original in self._originals.items():
            setattr(tf_session.BaseSession, name, original)

    def _observe(self, session: Any, run: SessionRun, step: Callable[[], Any]) -> Any:
        plugin.expect_iterations(iterations_of(session._config) if session._config else 2)
        outer, self._local.run = self._local.run, replace(run, shared=self._values.of(session))
        try:
            found = self._observer.run_session(run, step)
        finally:
            self._local.run = outer
        self._values.ran(session, run.ops)
        return found

    def put_in_charge(self, graph: Any, charge: Charge) -> None:
        """Have the steps of ``graph`` planned as ``charge`` says."""
        self._charges[graph] = charge

    def charge_of(self, graph: Any) -> Charge | None:
        """Return the charge of a graph; ``None``: LMS itself plans it."""
        return self._charges.get(graph)

    def leave_alone(self, graph: Any) -> None:
        """Plan nothing of ``graph`` from now on."""
        self._left_alone.add(graph)

    def leaves(self, graph: Any) -> bool:
        """Tell whether nothing of ``graph`` is to be planned."""
        return graph in self._left_alone


def has_training_step(graph: Any) -> bool:
    """Tell whether a graph of compat.v1 holds gradients."""
    return any(is_backward(op.name, op.type) for op in reversed(graph.get_operations()))


def has_open_batch(graph: Any) -> bool:
    """Tell whether an iterator in a graph of compat.v1 leaves the size of the batch open."""
    sources = (op for op in graph.get_operations() if op.type == "IteratorGetNext")
    made = (output for op in sources for output in op.outputs)
    return any(output.shape.rank and output.shape.as_list()[0] is None for output in made)
