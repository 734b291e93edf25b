"""Keep the batches that a step takes from iterators, so that it can be tried again with the same ones.

Keras's step, and many a loop's, takes its batch itself: ``next(iterator)`` is an op of the traced graph. What
the iterator gave is gone when the step runs out of memory, and its next batch is another one. So a first step
is given a stand-in of the same kind. It asks the real iterator, outside of the step, for as many batches as
are asked of it; keeps each as an array, outside of TensorFlow's allocators, until the step has worked; and
gives the same again after a failure. Then the real iterator goes on where it stands.

A batch can be looked at before the step is traced, too: it has the sizes that a specification leaves open.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.eager import context

Batch = tuple[np.ndarray[Any, Any], ...]
"""The components of one element, in the order of ``tf.nest.flatten`` with composite tensors expanded."""

Shapes = tuple[tuple[int, ...], ...]

KEPT_TYPES = frozenset(
    "bfloat16 bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 string uint16 uint32 "
    "uint64 uint8".split()
)
"""The data types that NumPy holds and TensorFlow takes back from Python code."""

ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)

KEPT_BYTES = 4 << 30
"""A step that takes more than this, such as a whole epoch in one call, is let go of and not tried again."""

SOURCE = "_lms_source"
"""Where an iterator remembers its :class:`Source`: two of them would share its batches out between them."""


class Source:
    """An iterator, and the batches that it has given to a step that has not worked yet."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._kept: list[Batch] = []
        self._given = 0
        """The number of kept batches that the step has been given."""
        self._nbytes = 0
        self._lock = threading.Lock()
        self._stand_in: Any = None
        self.failure: Exception | None = None
        """What the real iterator raised instead of a batch: that batch is lost."""

    @classmethod
    def of(cls, real: Any) -> "Source":
        """Return the one source of an iterator; make it where there is none."""
        if not hasattr(real, SOURCE):
            setattr(real, SOURCE, cls(real))
        source: Source = getattr(real, SOURCE)
        return source

    @property
    def too_large(self) -> bool:
        """Whether the step has taken more than is kept for it."""
        return self._nbytes > KEPT_BYTES

    @property
    def given(self) -> int:
        """The number of batches that the step has been given."""
        return self._given

    @property
    def is_ahead(self) -> bool:
        """Whether it holds a batch that no step has been given: the real iterator would leave it out."""
        return len(self._kept) > self._given

    def stand_in(self) -> Any:
        """Return an iterator like the real one, which goes on where the step stands."""
        if self._stand_in is None:
            self._stand_in = iter(_dataset(self._real.element_spec, weakref.ref(self)))
        return self._real._type_spec._from_components([self._stand_in._iterator_resource])

    @property
    def handle(self) -> Any:
        """The resource of the stand-in; ``None`` before there is one."""
        return None if self._stand_in is None else self._stand_in._iterator_resource

    def first_shapes(self, batch_size: int | None) -> Shapes:
        """Return the shapes of the tensors of the next batch, without ragged and sparse ones.

        At the end there are none.

        Args:
            batch_size: What an open first dimension counts as, whatever the batch has.
        """
        with self._lock:
            self._draw()
            batch = self._kept[self._given] if self.is_ahead else ()
        specs = tf.nest.flatten(self._real.element_spec)
        shapes: list[tuple[int, ...]] = []
        for spec in specs if batch else ():
            width = len(tf.nest.flatten(spec, expand_composites=True))
            if isinstance(spec, tf.TensorSpec):
                shape = batch[0].shape
                if batch_size is not None and spec.shape.rank and spec.shape[0] is None:
                    shape = (batch_size, *shape[1:])
                shapes.append(shape)
            batch = batch[width:]
        return tuple(shapes)

    def rewind(self) -> None:
        """Begin again with the batches that the failed step was given."""
        self._given, self._stand_in = 0, None

    def forget(self, *, goes_on: bool) -> None:
        """Drop the batches that the step was given, and also the stand-in unless the step ``goes_on``."""
        with self._lock:
            del self._kept[: self._given]
            self._given = self._nbytes = 0
            if self.failure is not None:
                self.failure = self._stand_in = None
            elif not self._kept and not goes_on:
                vars(self._real).pop(SOURCE, None)

    def next(self) -> Batch | None:
        """Return the next batch; ``None`` at the end."""
        with self._lock:
            self._draw()
            if not self.is_ahead:
                if self.failure is not None:
                    raise self.failure
                return None
            batch = self._kept[self._given]
            self._given += 1
            if self.too_large:
                del self._kept[: self._given]
                self._given = 0
            return batch

    def _draw(self) -> None:
        """Take a batch from the real iterator, unless one is kept for the step or the iterator has failed."""
        if self.is_ahead or self.failure is not None:
            return
        try:
            with context.eager_mode():
                element = next(self._real)
        except StopIteration:
            return
        except Exception as error:  # the pipeline's own, raised again once the step has ended with it
            self.failure = error
            return
        tensors = tf.nest.flatten(element, expand_composites=True)
        batch = tuple(_array(tensor) for tensor in tensors if tensor is not None)
        self._kept.append(batch)
        self._nbytes += sum(array.nbytes for array in batch)


def _nothing(spec: Any) -> np.ndarray[Any, Any]:
    """Return an array that ``spec`` describes."""
    sizes = spec.shape.as_list() if spec.shape.rank is not None else ()
    empty = b"" if spec.dtype == tf.string else 0
    return np.full([size or 0 for size in sizes], empty, spec.dtype.as_numpy_dtype)


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's value as an array; of a single string TensorFlow gives the bytes alone."""
    value = tensor.numpy()
    return np.array(value, object) if isinstance(value, bytes) else np.asarray(value)


def _dataset(element_spec: Any, source: Callable[[], Source | None]) -> Any:
    """Make a dataset of a source's batches, in the structure of ``element_spec``.

    Nothing fetches ahead, for what is fetched is taken. The copies lie where a pipeline's batches do, in the
    allocator of the CPU device, and not in NumPy's memory. The source is referred to weakly, for TensorFlow
    may keep a dataset's Python code.

    ``Dataset.from_generator`` would do with less. But with it TensorFlow 2.21 has ``malloc`` map and unmap
    each block from 128 KiB on (``mallopt``) for the rest of the process. A CPU's kernels pack their operands
    into such blocks; one step took a fifth longer for that.
    """
    specs = tf.nest.flatten(element_spec, expand_composites=True)
    types = [spec.dtype for spec in specs]

    def give(_: Any) -> list[Any]:
        batch = None if (found := source()) is None else found.next()
        return [True, *batch] if batch is not None else [False, *map(_nothing, specs)]

    def draw(number: Any) -> tuple[Any, ...]:
        is_there, *components = tf.numpy_function(give, [number], [tf.bool, *types])
        is_there.set_shape(())
        for component, spec in zip(components, specs, strict=True):
            component.set_shape(spec.shape)
        return is_there, *components

    def pack(_: Any, *components: Any) -> Any:
        copies = [tf.raw_ops.DeepCopy(x=component) for component in components]
        return tf.nest.pack_sequence_as(element_spec, copies, expand_composites=True)

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    drawn = tf.data.Dataset.range(sys.maxsize).map(draw).take_while(lambda is_there, *_: is_there)
    return drawn.map(pack).with_options(options)


@dataclass(frozen=True)
class Feed:
    """The arguments of a call, whose iterators may be stood in for."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    sources: dict[int, Source] = field(default_factory=dict)
    """By the id of the iterator; empty where the step gets the real ones."""

    sizes_open: bool = False
    """Whether the batches have sizes that are known from nothing else."""

    @property
    def failure(self) -> Exception | None:
        """The error that an iterator raised instead of a batch."""
        return next((source.failure for source in self.sources.values() if source.failure), None)

    @property
    def refusal(self) -> str:
        """Why what was taken cannot be given again; empty where it can."""
        if self.failure is not None:
            return "its input pipeline itself failed, and the batch that it was making is lost"
        if any(source.too_large for source in self.sources.values()):
            return f"it has taken more than {KEPT_BYTES >> 30} GiB of batches, which are not kept"
        return ""

    @property
    def handles(self) -> list[Any]:
        """The stand-ins as the functions of the runtime get them."""
        return [source.handle for source in self.sources.values()]

    @property
    def takes_several(self) -> bool:
        """Tell whether the call has taken more than one batch of an iterator."""
        return any(source.given > 1 for source in self.sources.values())

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the step gets them, with stand-ins for the iterators."""
        if not self.sources:
            return self.args, self.kwargs
        args = tuple(self._stood_in(value) for value in self.args)
        return args, {name: self._stood_in(value) for name, value in self.kwargs.items()}

    def first_shapes(self, batch_size: int | None) -> Shapes:
        """Return the shapes of the next batches of all iterators (:meth:`Source.first_shapes`)."""
        return tuple(shape for source in self.sources.values() for shape in source.first_shapes(batch_size))

    def rewind(self) -> None:
        """Begin again with the same batches."""
        for source in self.sources.values():
            source.rewind()

    def forget(self) -> None:
        """Drop the batches that the finished call was given."""
        for source in self.sources.values():
            source.forget(goes_on=self.sizes_open)

    def _stood_in(self, value: Any) -> Any:
        if not any(id(leaf) in self.sources for leaf in tf.nest.flatten(value)):
            return value
        return tf.nest.map_structure(
            lambda leaf: self.sources[id(leaf)].stand_in() if id(leaf) in self.sources else leaf, value
        )


class Feeder:
    """Decides which calls are fed by stand-ins: as few as can be, for each costs a copy of its batches."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
        """By function the specifications of iterators with which it has run."""

    def feed(
        self,
        function: Any,
        arguments: Any,
        *,
        may_retry: bool,
        settles: bool,
        watched: bool,
        told: Callable[[], int | None],
    ) -> Feed:
        """Return the arguments of a call of ``function``, with stand-ins where they are needed.

        Args:
            function: What is called.
            arguments: What it is called with, ``(args, kwargs)``.
            may_retry: Whether a step that is planned in this call may be tried again.
            settles: Whether this call may be, although it was planned before.
            watched: Whether the shapes of every batch of this function are to be seen.
            told: Gives the size of the batches, where it is known.
        """
        iterators = [leaf for leaf in tf.nest.flatten(arguments) if _can_be_kept(leaf)]
        if not iterators:
            return Feed(*arguments)
        sizes_open = _sizes_open(iterators, told() is not None)
        wanted = may_retry or sizes_open if self._is_new(function, iterators) else sizes_open and watched
        wanted = wanted or settles
        if not wanted and not any(hasattr(one, SOURCE) and Source.of(one).is_ahead for one in iterators):
            return Feed(*arguments)
        sources = {id(iterator): Source.of(iterator) for iterator in iterators}
        args, kwargs = arguments
        return Feed(args, kwargs, sources, sizes_open)

    def _is_new(self, function: Any, iterators: Sequence[Any]) -> bool:
        """Tell whether ``function`` is going to be traced for iterators of this kind.

        From then on it counts as having seen them.
        """
        kinds = tuple(iterator._type_spec for iterator in iterators)
        seen = self._seen.setdefault(function, set())
        if not function.experimental_get_tracing_count():
            seen.clear()
        is_new = kinds not in seen
        seen.add(kinds)
        return is_new


def _can_be_kept(iterator: Any) -> bool:
    """Tell whether this is an iterator whose batches lie in host memory and fit into arrays."""
    if type(iterator) is not OwnedIterator or "CPU" not in (iterator._iterator_resource.device or ""):
        return False
    if any(map(_is_plain_row, _inner(iterator.element_spec))):
        return False
    specs = tf.nest.flatten(iterator.element_spec, expand_composites=True)
    return all(isinstance(spec, tf.TensorSpec) and spec.dtype.name in KEPT_TYPES for spec in specs)


def _is_plain_row(spec: Any) -> bool:
    """Tell whether rows of a ragged tensor are meant.

    These are plain tensors, which a pipeline hands on as ragged ones.
    """
    return isinstance(spec, tf.RaggedTensorSpec) and not spec.ragged_rank


def _inner(element_spec: Any) -> Iterator[Any]:
    """Yield the specifications in a structure, and those that they are made of."""
    for spec in tf.nest.flatten(element_spec):
        yield spec
        if not isinstance(spec, tf.TensorSpec):
            yield from _inner(getattr(spec, "_component_specs", ()))


def _sizes_open(iterators: Iterable[Any], size_known: bool) -> bool:
    """Tell whether sizes of batches are open, beyond the one that is already known."""
    leaves = (spec for iterator in iterators for spec in tf.nest.flatten(iterator.element_spec))
    shapes = (leaf.shape for leaf in leaves if isinstance(leaf, tf.TensorSpec))
    return any(None in shape.as_list()[int(size_known) :] for shape in shapes if shape.rank is not None)
