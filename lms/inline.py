"""Watches calls of ``tf.function``s, for what a traced graph alone cannot tell.

Three things happen here. A function called under a gradient tape while another is being traced runs as plain
Python inside it: as a nested function its tensors would be hidden from the plan. XLA is switched off,
because it fuses the step and no swap survives that. And the arguments of the outermost call are kept for the
time of the call, because they know the sizes that a graph leaves open.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function import polymorphic_function as pf
from tensorflow.python.framework import func_graph as func_graph_module
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.util import tf_decorator

from lms.batches import Feed
from lms.shapes import ShapeHints, argument_shapes, dataset_batch_size, gone_through_batch_size

KEPT_MODULES = ("horovod",)
"""Functions of these packages stay functions: Horovod caches and orders its own."""

KEEPING_ATTRIBUTES = frozenset({"api_implements", "_noinline", "forward_function_name"})
"""A function that carries one of these is recognised by name later on, so it stays one."""


COMPILED_LAYERS = (
    "keras.src.backend.tensorflow.nn",
    "keras.src.layers.convolutional.base_conv",
    "tf_keras.src.layers.convolutional.base_conv",
)
"""Where Keras has XLA compile one convolution: in groups, or in three dimensions with channels first. Not
every CPU has other kernels for these, and theirs give other last digits; each stays the one op that it is."""


@dataclass
class Call:
    """The outermost call that is under way in this thread, and the functions that are traced for it."""

    arguments: tuple[Any, ...] = ()
    functions: list[Any] = field(default_factory=list)
    feed: Feed = field(default_factory=Feed)
    """The arguments as they are passed on."""
    batches: tuple[tuple[int, ...], ...] = ()
    """The shapes to plan for of what iterators among the arguments give, where they had to be asked."""

    def hints(self) -> ShapeHints:
        """What the arguments say about open shapes."""
        flat = tf.nest.flatten(self.arguments)
        sizes = (dataset_batch_size(getattr(argument, "_dataset", None)) for argument in flat)
        size = next((size for size in sizes if size), None)
        if size is None:
            size = gone_through_batch_size([one for one in flat if isinstance(one, tf.data.Dataset)])
        return ShapeHints((*argument_shapes(flat), *self.batches), size)

    def specified_size(self) -> int | None:
        """The size of all batches, where the specifications of the iterators among the arguments fix it.

        TensorFlow leaves it open in the trace nevertheless where it traces again for another size.
        """
        iterators = [one for one in tf.nest.flatten(self.arguments) if isinstance(one, tf.data.Iterator)]
        specs = (spec for iterator in iterators for spec in tf.nest.flatten(iterator.element_spec))
        shapes = (spec.shape for spec in specs if isinstance(spec, tf.TensorSpec))
        sizes: set[int | None] = {shape[0] if shape.rank else None for shape in shapes}
        return sizes.pop() if len(sizes) == 1 else None


class Observer(Protocol):
    """Whom the watch tells what it sees."""

    def xla_dropped(self, function: Any) -> None:
        """XLA was switched off for ``function``."""

    def called(self, function: Any) -> None:
        """``function`` is called from eager code."""

    def run(self, function: Any, call: Call, step: Callable[..., Any]) -> Any:
        """Run the outermost call, ``step`` with the call's arguments; may run it again."""


class Watch:
    """The installed watch; :meth:`uninstall` puts everything back."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._local = threading.local()
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._originals = {name: getattr(pf.Function, name) for name in ("__call__", "get_concrete_function")}

    @property
    def call(self) -> Call:
        """The call under way in this thread; an empty one when there is none."""
        return getattr(self._local, "call", None) or Call()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is traced meanwhile is no part of the call under way."""
        call, self._local.call = getattr(self._local, "call", None), None
        try:
            yield
        finally:
            self._local.call = call

    def install(self) -> None:
        """Begin to watch."""
        call, concrete = self._originals["__call__"], self._originals["get_concrete_function"]

        def watched_call(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._drop_xla(function)
            if should_inline(function):
                return run_inline(function, args, kwargs)
            if tf_ops.inside_function() or not tf.executing_eagerly():
                with self._tracing(function):
                    return call(function, *args, **kwargs)
            return self._outermost(function, call, args, kwargs)

        def watched_concrete(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._drop_xla(function)
            with self._tracing(function):
                return concrete(function, *args, **kwargs)

        pf.Function.__call__ = watched_call
        pf.Function.get_concrete_function = watched_concrete

    def uninstall(self) -> None:
        """Put TensorFlow's own methods back; functions not yet traced may use XLA again."""
        for name, method in self._originals.items():
            setattr(pf.Function, name, method)
        for function in self._compiled:
            function._jit_compile = True
        self._compiled.clear()

    def _outermost(self, function: Any, call: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self._local, "call", None) is not None:  # eager code that runs while a function is traced
            return call(function, *args, **kwargs)
        self._observer.called(function)
        self._local.call = Call((args, kwargs), [function])
        try:
            return self._observer.run(function, self._local.call, partial(call, function))
        finally:
            self._local.call = None

    @contextmanager
    def _tracing(self, function: Any) -> Iterator[None]:
        functions = self.call.functions
        functions.append(function)
        yield

    def _drop_xla(self, function: Any) -> None:
        if is_compiled_layer(function):
            return
        if function._jit_compile and not function.experimental_get_tracing_count():
            function._jit_compile = None
            self._compiled.add(function)
            self._observer.xla_dropped(function)


def is_recording() -> bool:
    """Whether a gradient tape is active in this thread."""
    return bool(record.could_possibly_record())


def should_inline(function: Any) -> bool:
    """Whether a call of ``function`` is to run as part of the function that is being traced."""
    if not isinstance(tf.compat.v1.get_default_graph(), func_graph_module.FuncGraph) or not is_recording():
        return False
    if is_compiled_layer(function) or module_of(function).split(".")[0] in KEPT_MODULES:
        return False
    return not KEEPING_ATTRIBUTES.intersection(function._attributes)


def is_compiled_layer(function: Any) -> bool:
    """Whether ``function`` is one layer of Keras's that only XLA can run everywhere."""
    return bool(function._jit_compile) and module_of(function) in COMPILED_LAYERS


def module_of(function: Any) -> str:
    """The module of the Python code of a ``tf.function``."""
    python_function = tf_decorator.unwrap(function._python_function)[1]
    return getattr(python_function, "__module__", None) or ""


def run_inline(function: Any, args: Any, kwargs: Any) -> Any:
    """Run the Python code of ``function`` in the current graph, with the conversions a call would make."""
    python_function = function._python_function
    if function._autograph:
        python_function = autograph_util.py_func_from_autograph(
            python_function, function._experimental_autograph_options
        )
    args, kwargs = tf.nest.map_structure(_as_argument, (args, kwargs))
    if function.input_signature is not None and not kwargs:
        typed = tf.nest.map_structure(
            _as_specified, function.input_signature, tuple(args)[: len(function.input_signature)]
        )
        args = (*typed, *args[len(typed) :])
    return tf.nest.map_structure(_as_result, python_function(*args, **kwargs))


def _as_argument(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _as_specified(spec: Any, value: Any) -> Any:
    return tf.convert_to_tensor(value, spec.dtype) if isinstance(spec, tf.TensorSpec) else value


def _as_result(value: Any) -> Any:
    return (
        tf.convert_to_tensor(value)
        if isinstance(value, (bool, int, float, np.ndarray, np.generic))
        else value
    )
