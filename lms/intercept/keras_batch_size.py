"""Learn from Keras, whichever one is used, how large the batches are that it is about to feed.

``fit`` on arrays traces its step with an open batch dimension; only Keras's data adapters know the size.
They are watched, not changed: a hook notes the batch size whenever one is made. Without eager execution there
are none, and Keras tells its callbacks instead.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import wrapt

from lms.intercept.dataset_sizes import dataset_batch_size

ITERATORS = (
    ("keras.src.trainers.epoch_iterator", "EpochIterator", "data_adapter"),
    ("tf_keras.src.engine.data_adapter", "DataHandler", "_adapter"),
    ("keras.src.engine.data_adapter", "DataHandler", "_adapter"),
)
"""Module, class and attribute with the adapter: Keras 3, tf_keras, and the Keras 2 that TensorFlow 2.15
brings."""

CALLBACKS = ("tf_keras.src.callbacks", "keras.src.callbacks")
"""Where ``configure_callbacks`` is, which only loops without eager execution call."""


_active: "BatchSizes | None" = None
"""The installed watch, which the hooks report to."""


class BatchSizes:
    """Remembers the batch size of the latest Keras call."""

    def __init__(self) -> None:
        self.latest: int | None = None
        self._untaken = False
        self._by_graph: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Start watching, now or as soon as a Keras is imported."""
        global _active
        _active = self
        _watch_keras()

    def take(self) -> int | None:
        """Return the latest size to the first function that runs with it; None to all after it.

        So a validation within ``fit`` leaves the training step with the size that it began with.
        """
        untaken, self._untaken = self._untaken, False
        return self.latest if untaken else None

    def of_graph(self, graph: Any) -> int | None:
        """Return the batch size that Keras is about to run ``graph`` with in a session; None if unknown."""
        return self._by_graph.get(graph)

    def uninstall(self) -> None:
        """Stop watching."""
        global _active
        if _active is self:
            _active = None
        self.latest = None
        self._by_graph.clear()

    def _note(self, size: int | None) -> None:
        self.latest, self._untaken = size, True

    def _note_graph(self, size: int | None) -> None:
        self._by_graph[tf.compat.v1.get_default_graph()] = size


@functools.cache
def _watch_keras() -> None:
    """Watch whichever Keras is imported, for good; a hook does nothing while no watch is installed."""
    for module, name, attribute in ITERATORS:
        _watch(module, f"{name}.__init__", _noting(attribute))
    for module in CALLBACKS:
        _watch(module, "configure_callbacks", _noting_graph)


def _watch(module: str, name: str, note: Callable[..., Any]) -> None:
    def watch(imported: Any) -> None:
        if hasattr(imported, name.partition(".")[0]):
            wrapt.wrap_function_wrapper(imported, name, note)

    wrapt.register_post_import_hook(watch, module)


def _noting(attribute: str) -> Callable[..., Any]:
    def note(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if _active is not None:
            _active._note(adapter_batch_size(getattr(instance, attribute, None)))
        return result

    return note


def _noting_graph(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if _active is not None:
        _active._note_graph(kwargs.get("batch_size"))
    return wrapped(*args, **kwargs)


def adapter_batch_size(adapter: Any) -> int | None:
    """Return the batch size that a Keras data adapter knows, else that of the pipeline it wraps."""
    for name in ("batch_size", "_batch_size", "_first_batch_size"):
        size = getattr(adapter, name, None)
        size = size() if callable(size) else size
        if isinstance(size, int):
            return size
    peeked = getattr(adapter, "_first_batches", None)
    if peeked:  # of a generator, by Keras 3
        sizes = [getattr(array, "shape", ())[:1] for array in tf.nest.flatten(peeked[0])]
        return next((int(size[0]) for size in sizes if size), None)
    dataset = getattr(adapter, "_dataset", None)
    return None if dataset is None else dataset_batch_size(dataset)
