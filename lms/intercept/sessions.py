"""Watch sessions of compat.v1: note the shapes that each run feeds, and what it takes to run it again.

A session keeps what TensorFlow has made of its graph by what is fed, fetched and run. What a step runs is
named once more for each further plan, which makes another key and changes nothing.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from tensorflow.python.client import pywrap_tf_session as c_session
from tensorflow.python.client import session as tf_session

from lms.device.device import adopt_gpus
from lms.intercept.function_calls import Call
from lms.intercept.oom_retry import Rescue
from lms.intercept.optimizer_options import OptimizerOptions, iterations_of
from lms.ir.op_traits import is_backward
from lms.optimizer import plugin
from lms.specialiser.known_predicates import fed_predicates
from lms.variables.initial_values import SharedValues, ops_reached
from lms.variables.session_values import SessionValues

WATCHED = ("__init__", "_call_tf_sessionrun", "_Callable", "partial_run_setup")
"""What is replaced in TensorFlow's sessions: how they are made, all ways to run them, what Keras calls."""

CALLABLE = tf_session.BaseSession._Callable
"""TensorFlow's own class."""

_numbers = itertools.count(1)
_current: "SessionWatch | None" = None
"""The watch that is installed."""


MOST_BRANCHES = 2
"""So many ways through its conditions get a step of their own. Each holds the constants of the graph once
more, and what decides more ways changes from step to step (stochastic depth)."""


class Runs:
    """Counts the runs of a session, of all its threads."""

    def __init__(self) -> None:
        self._lock, self._begun, self._under_way = threading.Lock(), 0, 0

    @contextmanager
    def one(self) -> Iterator[Callable[[], bool]]:
        """Count a run; yield what tells whether there was no other one since it began."""
        with self._lock:
            self._begun += 1
            self._under_way += 1
            number, is_first = self._begun, self._under_way == 1
        try:
            yield lambda: is_first and self._begun == number
        finally:
            with self._lock:
                self._under_way -= 1


class SessionStep:
    """Stands for what a session runs again and again, with the same things fed, fetched and run.

    Args:
        session: The session.
        ops: The names of the ops that are run or fetched.
        predicates: What is fed that decides conditions, by the name of its node.
        number: How often what it runs is named for its first plan.
        count: Counts the steps that train.
    """

    def __init__(
        self,
        session: Any,
        ops: tuple[str, ...],
        predicates: Mapping[str, bool],
        number: int,
        count: Iterator[int],
    ) -> None:
        self.predicates = predicates
        self.keeps_conditions = False
        """Set where its latest graph fits with all branches."""
        self._count = count
        self._session: Callable[[], Any] = weakref.ref(session)
        self._ops = ops
        self._numbers = [number]
        self.ran: set[int] = set()
        """The numbers of the plans that ran to their end."""

    @cached_property
    def _name(self) -> str:
        """What it is called, like a function."""
        count = next(self._count) if self.trains else 1
        name = "session graph" if count == 1 else f"session graph {count}"
        values = ", ".join(f"{fed}={value}" for fed, value in self.predicates.items())
        return f"{name} ({values})" if values else name

    def as_read(self, name: str, value: Any) -> Any:
        """Return what is fed to a node; of a predicate the value that was read, whatever becomes of it."""
        return np.array(self.predicates[name]) if name in self.predicates else value

    @property
    def trains(self) -> bool:
        """Whether there are gradients among its ops."""
        return bool(self._reached)

    @property
    def is_optimized(self) -> bool:
        """Whether TensorFlow optimizes the graph of its session, so that it can be planned."""
        config = self._session()._config
        return config is None or not config.graph_options.place_pruned_graph

    def number(self, generation: int) -> int:
        """Return how often what it runs is named for a plan: in no session as often for two."""
        while len(self._numbers) <= generation:
            self._numbers.append(next(_numbers))
        return self._numbers[generation]

    @cached_property
    def _reached(self) -> tuple[Any, ...]:
        """The ops that it runs, if there are gradients among them; else none."""
        ops = tuple(ops_reached(self._session().graph, self._ops))
        return ops if any(is_backward(op.name, op.type) for op in ops) else ()

    def values(self) -> SessionValues | None:
        """Read the variables that it reaches; ``None`` where it is no training step, or runs elsewhere."""
        session = self._session()
        is_here = not session.sess_str  # a server plans in threads of its own
        return SessionValues.of(session, self._reached) if is_here and self.trains else None


class Branches:
    """The steps of a session that feed, fetch and run the same, by the branches that they take.

    Args:
        session: The session.
        ops: The names of the ops that are run or fetched.
        watch: Makes the steps.
    """

    def __init__(self, session: Any, ops: tuple[str, ...], watch: "SessionWatch") -> None:
        self._session: Callable[[], Any] = weakref.ref(session)
        self._ops, self._watch, self._lock = ops, watch, threading.Lock()
        self._steps: dict[Any, SessionStep] = {}

    def step(self, predicates: Mapping[str, bool]) -> SessionStep:
        """Return the step with these predicates; one for all where there are too many, or one fits anyway."""
        with self._lock:
            key = tuple(sorted(predicates.items()))
            is_full = sum(map(bool, self._steps)) >= MOST_BRANCHES
            if key not in self._steps and (
                is_full or any(one.keeps_conditions for one in self._steps.values())
            ):
                key = ()
            if key not in self._steps:
                make, is_first = self._watch.step_of, not self._steps
                self._steps[key] = make(self._session(), self._ops, dict(key), is_first=is_first)
            return self._steps[key]


@dataclass(frozen=True)
class SessionRun:
    """A run of a session that is under way."""

    graph: Any
    call: Call
    """The same as a call: its function is the :class:`SessionStep`."""
    feeds: Mapping[str, tuple[int, ...]]
    """Shapes of what is fed, by its name as a node reads it: ``x`` for output 0 of a node, ``x:1``."""
    shared: Mapping[str, int]
    """Bytes of each variable that shares memory with another or a constant, by the name of its handle."""
    is_alone: Callable[[], bool]
    """Tells whether the session has run nothing else since it began."""

    def whole_batches(self, size: int | None) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what is fed, by name; of an open number of rows at least ``size``."""
        found = []
        for name, shape in sorted(self.feeds.items()):
            tensor = name if ":" in name else f"{name}:0"
            known = self.graph.get_tensor_by_name(tensor).shape if size and shape else None
            has_rows = known is not None and (known.rank is None or known.as_list()[0] is None)
            found.append((max(shape[0], size or 0), *shape[1:]) if has_rows else shape)
        return tuple(found)


@dataclass(frozen=True)
class Charge:
    """The guest that has asked for the plans of a graph, and how it is to be planned."""

    guest: Any
    rescue: Rescue
    """The configuration to plan with, and what is kept to run steps again."""
    assumed_batch: int | None = None
    """The batch size where nothing tells it."""
    limit_bytes: int | None = None
    """The size of the device to plan for; ``None``: that of the real one."""


class Observer(Protocol):
    """The interface of the object that the watch reports to."""

    def run_session(self, run: SessionRun, step: Callable[[int], Any]) -> Any:
        """Run ``step``, the run of a session, with the plan of a number."""


class _UnderWay(threading.local):
    run: SessionRun | None = None
    is_aside: bool = False
    """Whether a session runs something for us."""


class SessionWatch:
    """Sets the optimizer options that a plan needs, and notes the shapes that each run feeds.

    A session that ran before gets plans nevertheless, for each watch that has been installed.
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
        self._steps: weakref.WeakKeyDictionary[Any, dict[Any, Branches]] = weakref.WeakKeyDictionary()
        """The steps of each session, by what they feed, fetch and run, in any order, as for TensorFlow."""
        self._trained = itertools.count(1)
        self._runs: weakref.WeakKeyDictionary[Any, Runs] = weakref.WeakKeyDictionary()

    @property
    def run(self) -> SessionRun | None:
        """The run under way in this thread."""
        return self._local.run

    @property
    def is_aside(self) -> bool:
        """Whether a session of this thread runs something for us."""
        return self._local.is_aside

    def install(self) -> None:
        """Begin to watch."""
        global _current
        _current = self
        make = self._originals["__init__"]

        def watched_init(session: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
            make(session, target, graph, self._options.as_planned(config))
            adopt_gpus(config)

        def watched_run(session: Any, *arguments: Any) -> Any:
            return self._run(session, *arguments)

        def unplanned_setup(session: Any, *args: Any, **kwargs: Any) -> Any:
            """Leave a step alone that is fed a part at a time: no op of one part may wait for another's."""
            with self.aside():
                return self._originals["partial_run_setup"](session, *args, **kwargs)

        changes: tuple[Any, ...] = watched_init, watched_run, WatchedCallable, unplanned_setup
        for name, changed in zip(WATCHED, changes, strict=True):
            setattr(tf_session.BaseSession, name, changed)

    def uninstall(self) -> None:
        """Put TensorFlow's own methods back."""
        global _current
        _current = None
        for name, original in self._originals.items():
            setattr(tf_session.BaseSession, name, original)

    def _run(self, session: Any, options: Any, feeds: Any, fetches: Any, targets: Any, metadata: Any) -> Any:
        run = self._originals["_call_tf_sessionrun"]
        if self._local.is_aside:
            return run(session, options, feeds, fetches, targets, metadata)
        named = {_name_of(fed): value for fed, value in feeds.items()}
        shapes = {name: np.shape(value) for name, value in named.items()}
        names = [c_session.TF_OperationName(fetched.oper) for fetched in fetches]
        ran = {c_session.TF_OperationName(target): target for target in targets}
        alone = sorted({*ran}.difference(names))
        first = ran[alone[0]] if alone else fetches[names.index(min(names))].oper if names else None
        fetched = sorted((name, one.index) for name, one in zip(names, fetches, strict=True))
        ops = (*alone, *names)
        branches = self._steps.setdefault(session, {}).setdefault(
            (tuple(sorted(shapes)), tuple(fetched), tuple(alone)), Branches(session, ops, self)
        )
        step = branches.step(fed_predicates(session.graph, named))
        feeds = {fed: step.as_read(_name_of(fed), value) for fed, value in feeds.items()}
        buffers = [metadata]  # TensorFlow takes an empty one: what a second try does is told nowhere

        def once(generation: int) -> Any:
            again = [] if first is None else [first] * step.number(generation)
            told = buffers.pop() if buffers else None
            return run(session, options, feeds, fetches, [*(ran[name] for name in alone), *again], told)

        return self.observe(session, step, ops, shapes, once)

    def observe(
        self,
        session: Any,
        step: SessionStep,
        ops: tuple[str, ...],
        feeds: Mapping[str, tuple[int, ...]],
        once: Callable[[int], Any],
    ) -> Any:
        """Run a step of a session with the plan whose number ``once`` gets."""
        plugin.expect_iterations(iterations_of(session._config) if session._config else 2)
        shared, outer = self._values.of(session), self._local.run
        with self._runs.setdefault(session, Runs()).one() as is_alone:
            call = Call(function=step)
            self._local.run = SessionRun(session.graph, call, feeds, shared, is_alone)
            try:
                found = self._observer.run_session(self._local.run, once)
            finally:
                self._local.run = outer
        self._values.ran(session, ops)
        return found

    def step_of(
        self, session: Any, ops: tuple[str, ...], predicates: Mapping[str, bool], *, is_first: bool
    ) -> SessionStep:
        """Return a new step; all but the first have numbers of their own: TensorFlow's key has no values."""
        number = self._number if is_first else next(_numbers)
        return SessionStep(session, ops, predicates, number, self._trained)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let sessions run without a plan in this thread, for us."""
        outer = self._local.run, self._local.is_aside
        self._local.run, self._local.is_aside = None, True
        try:
            yield
        finally:
            self._local.run, self._local.is_aside = outer

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


class WatchedCallable:
    """A callable of a session, made for each plan when it is called: shapes are known then."""

    def __init__(self, session: Any, options: Any) -> None:
        self._session, self._options, self._lock = session, options, threading.Lock()
        self._ops = tuple(name.partition(":")[0] for name in (*options.target, *options.fetch))
        self._watch: SessionWatch | None = None
        self._branches: Branches | None = None
        self._made: dict[Any, Any] = {}
        """TensorFlow's own callables, by the step and the number of its plan."""
        self._made_for: SessionWatch | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, watched by the watch that is installed now."""
        watch = _current
        if watch is None:
            return self._callable(None, 0)(*args, **kwargs)
        names = [name.removesuffix(":0") for name in self._options.feed]
        feeds = dict(zip(names, args, strict=False))
        shapes = {name: np.shape(value) for name, value in feeds.items()}
        with self._lock:
            if self._watch is not watch or self._branches is None:
                self._watch, self._branches = watch, Branches(self._session, self._ops, watch)
            branches = self._branches
        step = branches.step(fed_predicates(self._session.graph, feeds))

        known = (step.as_read(name, value) for name, value in zip(names, args, strict=False))
        args = (*known, *args[len(names) :])

        def once(generation: int) -> Any:
            return self._callable(watch, (step, generation))(*args, **kwargs)

        return watch.observe(self._session, step, self._ops, shapes, once)

    def _callable(self, watch: SessionWatch | None, generation: Any) -> Any:
        """Return TensorFlow's own callable, made for a plan."""
        with self._lock:
            if self._made_for is not watch:
                self._made, self._made_for = {}, watch
            if generation not in self._made:
                self._made[generation] = CALLABLE(self._session, self._options)
            return self._made[generation]


def _name_of(fed: Any) -> str:
    """Return the name of what is fed, as a node reads it."""
    name = c_session.TF_OperationName(fed.oper)
    return f"{name}:{fed.index}" if fed.index else name


def has_training_step(graph: Any) -> bool:
    """Tell whether a graph of compat.v1 holds gradients."""
    return any(is_backward(op.name, op.type) for op in reversed(graph.get_operations()))


def has_open_batch(graph: Any) -> bool:
    """Tell whether an iterator in a graph of compat.v1 leaves the size of the batch open."""
    sources = (op for op in graph.get_operations() if op.type == "IteratorGetNext")
    made = (output for op in sources for output in op.outputs)
    return any(output.shape.rank and output.shape.as_list()[0] is None for output in made)
