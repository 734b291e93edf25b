"""Watch calls of ``tf.function``s, for what the graph that TensorFlow optimizes cannot tell.

The outermost call is kept while it runs: its arguments know the batches, and it can be run again. Below it,
TensorFlow calls functions of its runtime with plain tensors: their shapes are those of the graph's arguments,
and the options of that call decide which optimized graph of the function runs. Where XLA would compile a
step whole, no graph is optimized: there XLA is switched off, or a copy of the function runs in its place.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import polymorphic_function as pf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.util import tf_decorator

from lms.intercept.batch_replay import Feed
from lms.intercept.dataset_sizes import dataset_batch_size, gone_through_batch_size, pipelines_of
from lms.intercept.optimizer_options import OptimizerOptions
from lms.optimizer import plugin

COMPILED_LAYERS = (
    "keras.src.backend.tensorflow.nn",
    "keras.src.layers.convolutional.base_conv",
    "tf_keras.src.layers.convolutional.base_conv",
    "lms.rewriter.segments",
)
"""Where LMS tries whether XLA works, and where Keras has XLA compile one convolution: in groups, or in three
dimensions with channels first. Not every CPU has other kernels for these, and theirs give other last digits;
each stays the one op that it is."""


@dataclass
class Call:
    """The outermost call of a ``tf.function`` that is under way in a thread."""

    function: Any = None
    arguments: tuple[Any, ...] = ()
    feed: Feed = field(default_factory=Feed)
    """The arguments as they are passed on."""
    batches_fed: tuple[tuple[int, ...], ...] = ()
    """The shapes of what iterators among the arguments give, where they had to be asked."""
    size_fed: int | None = None
    """The size of its batches, where Keras or a dataset has told it for a planned step."""
    batches: tuple[tuple[int, ...], ...] = ()
    """The shapes to plan for, of those that were fed."""
    begun: Any = None
    """The state kept before the call began: of a function that goes through a dataset itself, of one of the
    steps behind a first one, of a session's step; ``None`` for others."""
    attempt: Any = None
    """What is kept to run it again (:mod:`lms.intercept.oom_retry`); ``None`` while nothing was planned."""
    apart: Any = None
    """Holds how it runs apart from other ranks first; ``None`` where it does not."""
    tried: bool = False
    """Tells whether its plan has just run apart."""
    again: bool = False
    """Tells whether it has been undone, and is tried again with the same batches."""
    ran: list["RuntimeCall"] = field(default_factory=list)
    """Holds each function of the runtime that it has run, or runs."""
    beside: set[int] = field(default_factory=set)
    """The resources of calls of other threads that have ended since it began."""
    thread: int = field(default_factory=threading.get_ident)

    @property
    def resources(self) -> set[int]:
        """The variables, tables and other resources that it uses, each as the identity of its handle."""
        return {id(one) for runtime in self.ran for one in runtime.inputs if one.dtype == tf.resource}

    @property
    def functions(self) -> set[str]:
        """The names of the functions of the runtime that it has run, or runs."""
        return {runtime.copy or runtime.name for runtime in self.ran}

    def share_of(self, size: int | None) -> int | None:
        """Return what a device gets of a batch that a distribution strategy divides."""
        flat = tf.nest.flatten(self.arguments)
        iterators = (one for one in flat if isinstance(one, tf.distribute.DistributedIterator))
        devices = max((one._strategy.num_replicas_in_sync for one in iterators), default=1)
        return None if size is None else -(-size // devices)

    def batch_size(self) -> int | None:
        """Return the size of the batches of the datasets among the arguments, where these say it."""
        flat = tf.nest.flatten(self.arguments)
        iterators = [
            one for one in flat if isinstance(one, tf.data.Iterator | tf.distribute.DistributedIterator)
        ]
        sizes = (dataset_batch_size(dataset) for one in iterators for dataset in pipelines_of(one))
        size = next((size for size in sizes if size), None)
        if size is None:
            datasets = [
                one for one in flat if isinstance(one, tf.data.Dataset | tf.distribute.DistributedDataset)
            ]
            size = gone_through_batch_size([dataset for one in datasets for dataset in pipelines_of(one)])
        return size

    def specified_size(self) -> int | None:
        """Return the size of all batches, where the specifications of the iterators fix it.

        TensorFlow leaves it open in the trace nevertheless where it traces again for another size.
        """
        iterators = [one for one in tf.nest.flatten(self.arguments) if isinstance(one, tf.data.Iterator)]
        specs = (spec for iterator in iterators for spec in tf.nest.flatten(iterator.element_spec))
        shapes = (spec.shape for spec in specs if isinstance(spec, tf.TensorSpec))
        sizes: set[int | None] = {shape[0] if shape.rank else None for shape in shapes}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True)
class RuntimeCall:
    """A function of TensorFlow's runtime that is about to run."""

    name: str
    inputs: Sequence[Any]
    """The tensors that it is called with, those that it captures among them."""
    taped: bool = False
    """Whether a gradient tape around it is recording: its gradient is a function of its own."""
    copy: str = ""
    """The name of the copy without XLA that runs in its place, where there is one."""
    whole: bool = False
    """Whether it runs as it is because XLA may compile it whole, as was found out in this call."""


class Compiler(Protocol):
    """The interface of the object that decides about functions that XLA compiles."""

    def drops_xla(self, function: Any) -> bool:
        """Tell whether a function that is about to be traced is one that XLA shall not compile."""

    def without_xla(self, call: Call, runtime: RuntimeCall) -> str:
        """Return the name of the copy that is to run in place of a function that XLA compiles, if any."""

    def is_left_to_xla(
        self, call: Call, runtime: RuntimeCall, generation: int, error: tf.errors.InvalidArgumentError
    ) -> bool:
        """Tell whether a copy ended with ``error`` because its plan leaves the step to XLA, and note that."""

    def ran_whole(self, call: Call, runtime: RuntimeCall) -> None:
        """Note that a step that was left to XLA has run for the first time."""


class Observer(Protocol):
    """The interface of the object that the watch reports to."""

    def run(self, call: Call, step: Callable[..., Any]) -> Any:
        """Run the outermost call, ``step`` with the call's arguments; may run it again."""

    def generation(self, call: Call, runtime: RuntimeCall) -> int:
        """Return the number of the wanted plan; for another number TensorFlow optimizes again."""

    def number(self, call: Call, runtime: RuntimeCall, generation: int) -> int:
        """Return the number of the options for a call that runs this plan."""

    def ran(self, runtime: RuntimeCall) -> None:
        """Take note that a function of the runtime has run, or has failed."""


class _UnderWay(threading.local):
    call: Call | None = None
    runtime: RuntimeCall | None = None


class Watch:
    """The installed watch; :meth:`uninstall` puts everything back."""

    def __init__(self, observer: Observer, compiler: Compiler, options: OptimizerOptions) -> None:
        self._observer, self._compiler, self._options = observer, compiler, options
        self._local = _UnderWay()
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        """The calls that are under way in all threads."""
        self._latest: tuple[Call, RuntimeCall] | None = None
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._methods = {name: getattr(pf.Function, name) for name in ("__call__", "get_concrete_function")}
        self._call_function = context.Context.call_function

    @property
    def is_here(self) -> bool:
        """Whether this thread is about to run a function of the runtime.

        A body that a dataset runs is optimized in a thread of its own, while the call under way waits.
        """
        return self._local.runtime is not None

    @property
    def call(self) -> Call:
        """The call under way, in this thread if there is one; an empty one when there is none."""
        if self._local.call is not None:
            return self._local.call
        latest = self._latest  # read once: another thread may be about to end that call
        return latest[0] if latest is not None and not self.is_here else Call()

    @property
    def runtime(self) -> RuntimeCall | None:
        """The function of the runtime that is about to run, in this thread if there is one."""
        latest = self._latest
        return self._local.runtime or (latest[1] if latest is not None else None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep what is called in the ``with`` block out of the call under way."""
        call, self._local.call = self._local.call, None
        try:
            yield
        finally:
            self._local.call = call

    @contextmanager
    def _under_way(self, call: Call) -> Iterator[None]:
        """Have a call known in the ``with`` block to those that run beside it in other threads."""
        with self._lock:
            self._calls[id(call)] = call
        try:
            yield
        finally:
            with self._lock:
                del self._calls[id(call)]
                for other in self._others(call):
                    other.beside |= call.resources

    def _others(self, call: Call) -> list[Call]:
        return [one for one in self._calls.values() if one.thread != call.thread]

    def is_only(self, call: Call) -> bool:
        """Tell whether no other thread is calling anything now."""
        with self._lock:
            return not self._others(call)

    def beside(self, call: Call) -> list[Any]:
        """Return the functions that other threads are calling now."""
        with self._lock:
            return [one.function for one in self._others(call) if one.function is not None]

    def is_alone(self, call: Call) -> bool:
        """Tell whether nothing in another thread has used since it began what a call uses, or uses it now."""
        with self._lock:
            used = call.beside.union(*(other.resources for other in self._others(call)))
        return used.isdisjoint(call.resources)

    def install(self) -> None:
        """Begin to watch."""
        call, concrete = self._methods["__call__"], self._methods["get_concrete_function"]

        def watched_call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._drop_xla(function)
            inside = tf_ops.inside_function() or not tf.executing_eagerly()
            if inside or self._local.call is not None:  # also eager code that runs while a function is traced
                return call(function, *args, **kwargs)
            self._local.call = made = Call(function, (args, kwargs))
            try:
                with self._under_way(made):
                    return self._observer.run(made, partial(call, function))
            finally:
                self._local.call = None

        def watched_concrete(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._drop_xla(function)
            return concrete(function, *args, **kwargs)

        def watched_runtime(ctx: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
            return self._run(ctx, name, tensor_inputs, num_outputs)

        pf.Function.__call__ = watched_call
        pf.Function.get_concrete_function = watched_concrete
        context.Context.call_function = watched_runtime

    def uninstall(self, without_xla: Callable[[str], str] | None = None) -> None:
        """Put TensorFlow's own methods back; functions not yet traced may use XLA again.

        Args:
            without_xla: Returns the name of the function that runs in place of one that XLA compiles, where
                variables lie on the host: XLA would find none there.
        """
        for name, method in self._methods.items():
            setattr(pf.Function, name, method)
        call_function = self._call_function
        context.Context.call_function = call_function
        if without_xla is not None:

            def by_copies(ctx: Any, name: Any, tensor_inputs: Any, num_outputs: Any) -> Any:
                return call_function(
                    ctx, without_xla(name.decode()).encode() or name, tensor_inputs, num_outputs
                )

            context.Context.call_function = by_copies
        for function in self._compiled:
            function._jit_compile = True
        self._compiled.clear()

    def _run(self, ctx: Any, name: Any, inputs: Any, outputs: int) -> Any:
        runtime = RuntimeCall(name.decode(), inputs, bool(record.could_possibly_record()))
        call = self._local.call
        if call is None:
            call = Call()  # not that of another thread
            with self._under_way(call):
                return self._run_for(call, ctx, runtime, outputs)
        return self._run_for(call, ctx, runtime, outputs)

    def _run_for(self, call: Call, ctx: Any, runtime: RuntimeCall, outputs: int) -> Any:
        name, inputs = runtime.name.encode(), runtime.inputs
        call.ran.append(runtime)
        generation = self._observer.generation(call, runtime)
        copy = self._compiler.without_xla(call, runtime)
        call.ran[-1] = runtime = replace(runtime, copy=copy)
        outer, before = self._local.runtime, ctx.function_call_options
        number = self._observer.number(call, runtime, generation)
        planned = self._options.planned(before, number, is_copy=bool(copy))
        ctx.function_call_options, iterations = planned
        plugin.expect_iterations(iterations)
        latest = self._latest
        self._local.runtime, self._latest = runtime, (call, runtime)
        try:
            try:
                return self._call_function(ctx, copy.encode() or name, inputs, outputs)
            except tf.errors.InvalidArgumentError as error:
                if not (copy and self._compiler.is_left_to_xla(call, runtime, generation, error)):
                    raise
            self._local.runtime = replace(runtime, copy="", whole=True)
            done = self._call_function(ctx, name, inputs, outputs)
            self._compiler.ran_whole(call, runtime)
            return done
        finally:
            ctx.function_call_options = before
            self._local.runtime, self._latest = outer, latest if outer is not None else None
            self._observer.ran(runtime)

    def _drop_xla(self, function: Any) -> None:
        if not function._jit_compile or function.experimental_get_tracing_count():
            return
        if not is_compiled_layer(function) and self._compiler.drops_xla(function):
            function._jit_compile = None
            self._compiled.add(function)


def is_compiled_layer(function: Any) -> bool:
    """Tell whether ``function`` is one layer of Keras's that only XLA can run everywhere."""
    return bool(function._jit_compile) and module_of(function) in COMPILED_LAYERS


def module_of(function: Any) -> str:
    """Return the module of the Python code of a ``tf.function``."""
    python_function = tf_decorator.unwrap(function._python_function)[1]
    return getattr(python_function, "__module__", None) or ""
