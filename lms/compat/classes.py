"""IBM's classes of the two graph rewriting generations, on top of the engine.

``LMS`` takes the parameters of either generation and can be used in three ways, as theirs could:
``run(graph)`` on a graph of compat.v1, as a hook of a MonitoredSession or Estimator, and as a Keras callback.
"""

import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

import lms
from lms.callbacks import EitherKeras
from lms.compat.parameters import names_of, parse_call
from lms.enable import rest
from lms.engine.engine import Engine
from lms.engine.installation import current, resume
from lms.engine.lifecycle import Lifecycle
from lms.errors import LMSArgumentError, LMSError
from lms.intercept.edit_guards import is_inside_of
from lms.intercept.oom_retry import Rescue
from lms.intercept.sessions import Charge, has_open_batch, has_training_step
from lms.ir.eligibility import UNKNOWN_SIZE
from lms.ir.name_filters import SECOND_GENERATION, Unmatched, unmatched
from lms.report.stats import GraphStats

GIB = 1 << 30
PLOT_NAME = "lms_autotune.png"
ASSUMED_BATCH = 32
"""Batch size where a graph leaves it open and no setting gives it. Only rules that count levels are given it:
what fits a device is not to be guessed."""

KERAS = frozenset({"keras", "tf_keras"})
"""Packages whose method of a model is the training; a user's own method may make callbacks and return."""

DISABLED = "LMS is disabled and will not modify the model."

_logger = logging.getLogger("lms.compat")


class LMS(EitherKeras, tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Large Model Support as scripts of the first (0.1) and the second (2.0) generation ask for it.

    The generations are told apart by their keywords: ``optimizer_scopes``, ``n_tensors``, ``lb``, ... are of
    the first; ``swapout_threshold``, ``swapin_groupby``, ... are of the second, and so is a bare ``LMS()``.

    Raises:
        LMSArgumentError: If the first generation's optimizer scopes are missing.
        ConfigError: If a number is outside what its parameter allows.
        TypeError: For a parameter that the generation did not have.
    """

    _scopes_required = True
    """Whether one of the optimizer's scopes has to be in the graph."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        request = parse_call(args, keywords, os.environ)
        self.generation, self._config = request.generation, request.config
        self._graph = None if request.graph is None else weakref.ref(request.graph)
        """Weak, for the graph knows of this object while its steps are planned for it."""
        self._shown = request.shown
        self._own = set(request.given)
        """The parameters and filters that the script gave; the others are the job's."""
        self._gpu_memory_gib: float | None = None
        self._fits_in: int | None = None
        """The thread in which Keras trains; None where a loop of the script's own calls this."""
        self.is_training = True
        self.autotune_plot: bool | str = False

    @property
    def config(self) -> lms.LMSConfig:
        """The configuration that the engine is given."""
        return self._config

    @property
    def batch_size(self) -> int | None:
        """The batch size to assume where the graph leaves it open."""
        return self._config.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self._config = replace(self._config, batch_size=value)

    @property
    def autotune_gpu_mem(self) -> float | None:
        """GiB of device memory to plan for; None: what the device has."""
        return self._gpu_memory_gib

    @autotune_gpu_mem.setter
    def autotune_gpu_mem(self, value: float | None) -> None:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise LMSArgumentError(f"autotune_gpu_mem is {value!r}; needed GiB of device memory, above 0")
        self._gpu_memory_gib = value

    def run(self, graph: Any = None, keras: bool = False) -> set[Any]:
        """Have a graph of compat.v1 planned, whenever a session runs a training step of it.

        The graph itself is not changed: TensorFlow gets the edited one when it has optimized it.

        Args:
            graph: The graph; None: the constructor's, in the second generation else the default graph.
            keras: Whether it is Keras's own graph, which Keras has a session for.

        Returns:
            What was added to ``graph``: nothing. The log says what a step got when it is first run.

        Raises:
            LMSArgumentError: Without a graph or a training step in it (``is_training``), or if a scope, type
                or starting op matches nothing in it.
        """
        chosen = self._chosen_graph(graph)
        if self._is_off():
            return self._off(chosen)
        if not has_training_step(chosen):
            return self._without_training()
        engine = self._engine()
        if engine is None:
            self._log(DISABLED)
            return set()
        self._take_leave(engine)
        sessions = engine.steps.sessions.watch
        if sessions.charge_of(chosen) is not None:
            self._log(
                "This model has already been updated with LMS swap operations. LMS will not re-process it."
            )
            return set()
        self._log_start()
        self.unmatched(unmatched(((op.name, op.type) for op in chosen.get_operations()), self._config))
        rescue = Rescue(self._config, engine.resources.host)
        charge = Charge(_Host(self), rescue, self._assumed_batch(chosen), self._limit())
        sessions.put_in_charge(chosen, charge)
        return set()

    # --- as a hook of a MonitoredSession or Estimator --------------------------------------------------

    def begin(self) -> None:
        """Have the default graph planned, before its session is made."""
        self.run(tf.compat.v1.get_default_graph())

    # --- as a Keras callback ---------------------------------------------------------------------------

    def set_model(self, model: Any) -> None:
        """Switch LMS on with these parameters before Keras traces the step, or keep it off this training."""
        super().set_model(model)
        fits = model is not None and is_inside_of(model, KERAS)
        self._fits_in = threading.get_ident() if fits else None
        engine = self._engine_at_work() if self._is_off() else self._engine()
        if engine is not None:
            engine.guest = self
        if self._is_off() or engine is None:
            self._log(DISABLED)
        elif not _trains_in_session(model):
            self._log_start()

    def on_train_begin(self, logs: Any = None) -> None:
        """Have the graph of a Keras without eager execution planned: its batch size is known now."""
        if self._is_off() or self._engine_at_work() is None or not _trains_in_session(self.model):
            return
        if self.model.train_function is None:  # fit_generator makes it with the first batch
            self.model._make_train_function()
        self.run(tf.compat.v1.get_default_graph(), keras=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the engine: models trained later have parameters of their own, or train without LMS."""
        engine = self._engine_at_work()
        if engine is not None and engine.guest is self:
            self.leave()

    # --- as a guest of the engine ----------------------------------------------------------------------

    @property
    def refusal(self) -> str:
        """The reason why no graph is edited, ``n_tensors=0``; empty where graphs are edited."""
        return "n_tensors is 0" if self._is_off() else ""

    def is_over(self) -> bool:
        """Tell whether ``fit`` has ended; when it raises, Keras calls no ``on_train_end``."""
        return self._fits_in == threading.get_ident() and not is_inside_of(self.model)

    def leave(self) -> None:
        """Leave the engine, and pause LMS if it is on for this training alone and no session needs it."""
        engine = current()
        if engine is None:
            return
        self._take_leave(engine)
        if engine.state is Lifecycle.BORROWED and not _trains_in_session(self.model):
            rest()

    def unmatched(self, names: Sequence[Unmatched]) -> None:
        """Raise an error if the graph lacks a name that the script gave; warn if the job gave it.

        Of the optimizer's scopes one has to be there. What the job's variables name has to be in some model
        of the job, perhaps not in this one.
        """
        scopes = [missed for missed in names if missed.filter == "optimizer_scopes"]
        for missed in scopes:
            self._log(f"No operations were found with optimizer scope {missed.item}.")
        none_found = len(scopes) == len(self._config.optimizer_scopes)
        for missed in names:
            if missed in scopes:
                if none_found and self._scopes_required:
                    raise LMSArgumentError(missed.text)
            elif missed.filter in self._own:
                raise LMSArgumentError(missed.text)
            elif (engine := current()) is not None:
                engine.books.warn(missed.text)

    def planned(self, stats: GraphStats) -> None:
        """Log what was planned, in IBM's words, and plot it if the script asks for that."""
        for note in stats.notes:
            self._log(note)
        if not stats.edited:
            if self.generation == 2 and stats.budget_bytes is not None:
                self._log(_is_it_necessary(stats))
            return
        if self.generation == 1:
            self._log(f"Added {stats.added_ops} ops into the model")
            self._log(f"{stats.tensors} tensors will be swapped out(in) to(from) the host")
        else:
            self._log_operations(stats)
        self._log(f"Editing model for LMS, took: {stats.edit_s * 1000:.1f} ms")
        if self.autotune_plot:
            self._plot(PLOT_NAME if self.autotune_plot is True else self.autotune_plot)

    def _plot(self, path: str) -> None:
        """Draw the plan; a plot that cannot be drawn must not stop the training."""
        try:
            lms.plot(path)
        except (LMSError, OSError) as error:
            self._log(f"autotune_plot: {error}")

    def _log_operations(self, stats: GraphStats) -> None:
        """Log IBM's line with the number of swaps, and then the ops added besides."""
        swaps = stats.tensors + stats.swap_ins
        if swaps:
            self._log(
                f"Added {swaps} operations to the model ({stats.tensors} swap-out operations "
                f"({stats.bytes_out / GIB:.2f} GiB) and {stats.swap_ins} swap-in operations "
                f"({stats.bytes_in / GIB:.2f} GiB))"
            )
        else:
            self._log(f"No tensor is swapped; {stats.control_edges} control dependencies order the model")
        if stats.added_ops > swaps:
            self._log(
                f"Added {stats.added_ops - swaps} more operations: views of what came back, and what "
                "orders the model"
            )

    # --- inside ----------------------------------------------------------------------------------------

    def _is_off(self) -> bool:
        return self.generation == 1 and self._config.n_tensors == 0

    def _off(self, graph: Any) -> set[Any]:
        """Have the engine, if one is at work, leave ``graph`` as it is when a session runs it."""
        self._log(DISABLED)
        engine = self._engine_at_work()
        if engine is not None:
            engine.steps.sessions.watch.leave_alone(graph)
        return set()

    def _chosen_graph(self, graph: Any) -> Any:
        given = None if self._graph is None else self._graph()
        chosen = given if graph is None else graph
        if chosen is None and self.generation == 2:
            chosen = tf.compat.v1.get_default_graph()
        if chosen is None or not chosen.get_operations():
            raise LMSArgumentError(
                "no graph to edit; needed a tf.Graph with ops, as in LMS(...).run(tf.compat.v1"
                ".get_default_graph()). In TensorFlow 2 pass LMS(...) to fit() as a callback, or call "
                "lms.enable()"
            )
        return chosen

    def _without_training(self) -> set[Any]:
        if self.is_training:
            raise LMSArgumentError(
                "the graph has no gradients; build the training step before LMS edits it, or set "
                "is_training = False"
            )
        self._log("LMS is not necessary: without a backward pass tensors are freed as the graph runs")
        return set()

    def _engine(self) -> Engine | None:
        """Return the engine, at work with these parameters; None where the job forbids LMS.

        A script's own parameters replace those of the job: whoever wrote them knew the model.
        """
        wanted, state = self._config, lms.state()
        if state is not None and not state.active and state.mode != "graph":
            return None
        at_work = self._engine_at_work()
        borrowed = state is None or (at_work is not None and at_work.state is not Lifecycle.ON)
        if state is not None and state.config != wanted:
            lms.disable()
        if not lms.enable(wanted).active:
            return None
        engine = current()
        if engine is not None:
            resume(Lifecycle.BORROWED if borrowed else Lifecycle.ON)
            engine.guest = self
            engine.resources.assume_limit(self._limit())
        return engine

    def _limit(self) -> int | None:
        assumed = self._gpu_memory_gib
        return None if assumed is None else int(assumed * GIB)

    def _take_leave(self, engine: Engine) -> None:
        """Stop being the engine's guest, and drop the device size that was assumed."""
        engine.guest = None
        engine.resources.assume_limit(None)

    def _engine_at_work(self) -> Engine | None:
        state = lms.state()
        return current() if state is not None and state.mode == "graph" else None

    def _log_start(self) -> None:
        self._log("Editing model for LMS")
        for name, value in self._shown.items():
            self._log(f"{name}: {value}")

    def _assumed_batch(self, graph: Any) -> int | None:
        """Return the batch size to assume for an iterator's batches where none is given."""
        told = self._config.batch_size or (self.params or {}).get("batch_size")
        if told or self._config.policy != "threshold" or not has_open_batch(graph):
            return None
        self._log(f"the graph leaves the batch size open; sizes are for {ASSUMED_BATCH} (LMS_BATCH_SIZE)")
        return ASSUMED_BATCH

    def _log(self, text: str) -> None:
        """Log a line as IBM wrote it, on stderr unless the program has set up logging itself."""
        if not _logger.hasHandlers():
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(message)s"))
            # For all of LMS: debug=True sends its decisions there as well.
            logging.getLogger("lms").addHandler(handler)
        if _logger.level == logging.NOTSET:
            _logger.setLevel(logging.INFO)
        _logger.info("[LMS][0] %s", text)


def _is_it_necessary(stats: GraphStats) -> str:
    """Write the line for a graph that was left as it is."""
    unknown = dict(stats.rejected).get(UNKNOWN_SIZE, 0)
    if not unknown:
        return "LMS is not necessary. Turned LMS off."
    return (
        f"whether LMS is necessary is not known: the sizes of {unknown} tensors are open; set batch_size "
        "(LMS_BATCH_SIZE)"
    )


def _trains_in_session(model: Any) -> bool:
    """Tell whether Keras trains ``model`` as in TensorFlow 1: one graph, run by its session."""
    return hasattr(model, "_make_train_function")


class _Host:
    """The guest for a session's graph; it logs the plans. ``LMS.run`` has already checked the names."""

    refusal = ""

    def __init__(self, owner: LMS) -> None:
        self._owner = owner

    def is_over(self) -> bool:
        """Return False: the guest stays as long as the graph."""
        return False

    def leave(self) -> None:
        """Do nothing: the guest stays as long as the graph."""

    def unmatched(self, names: Sequence[Unmatched]) -> None:
        """Do nothing: ``LMS.run`` has already checked the names."""

    def planned(self, stats: GraphStats) -> None:
        """Have the owner log the plan."""
        self._owner.planned(stats)


def _filter_property(name: str) -> property:
    def get(self: LMS) -> frozenset[str]:
        return frozenset(getattr(self._config, name))

    def set_to(self: LMS, value: Any) -> None:
        changed: dict[str, Any] = {name: names_of(value)}
        self._config = replace(self._config, **changed)
        self._own.add(name)

    return property(get, set_to, doc=f"The filter {name}; see :mod:`lms.ir.name_filters`.")


for _name in SECOND_GENERATION:
    setattr(LMS, _name, _filter_property(_name))


class LMSSessionRunHook(LMS):
    """The first generation's hook: has the default graph planned before its MonitoredSession is made."""

    def __init__(self, optimizer_scopes: Any = (), **keywords: Any) -> None:
        super().__init__(optimizer_scopes, **keywords)


LMSHook = LMSSessionRunHook
"""The older name."""


class LMSKerasCallback(LMS):
    """The first generation's Keras callback: Keras knows its own optimizer's scope.

    Args:
        optimizer_scopes_override: Scopes of the backward pass. What Keras calls them differs from one
            TensorFlow to the next, and the engine finds gradients by itself: where none of these is in the
            graph a line says so. None: as the job has them (``LMS_OPTIMIZER_SCOPES``), by default none.
        **keywords: The first generation's parameters.
    """

    _scopes_required = False

    def __init__(self, optimizer_scopes_override: Any = None, **keywords: Any) -> None:
        scopes = names_of(optimizer_scopes_override) or lms.LMSConfig.from_env(os.environ).optimizer_scopes
        super().__init__(scopes or {"gradient_tape"}, **keywords)
        self._config = replace(self._config, optimizer_scopes=scopes)
