"""Learns from Keras, whichever one is used, how large the batches are that it is about to feed.

``fit`` on arrays traces its step with an open batch dimension; only Keras's data adapters know the size.
They are watched, not changed: a hook notes the batch size whenever one is made.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import wrapt

from lms.shapes import dataset_batch_size

ITERATORS = (
    ("keras.src.trainers.epoch_iterator", "EpochIterator", "data_adapter"),
    ("tf_keras.src.engine.data_adapter", "DataHandler", "_adapter"),
    ("keras.src.engine.data_adapter", "DataHandler", "_adapter"),
)
"""Module, class and attribute with the adapter: Keras 3, tf_keras, and the Keras 2 that TensorFlow 2.15
brings."""


class BatchSizes:
    """Remembers the batch size of the latest Keras call."""

    def __init__(self) -> None:
        self.latest: int | None = None
        self._active = False
        self._registered = False

    def install(self) -> None:
        """Start watching, now or as soon as a Keras is imported."""
        self._active = True
        if not self._registered:
            self._registered = True
            for module, name, attribute in ITERATORS:
                wrapt.register_post_import_hook(self._watcher(name, attribute), module)

    def uninstall(self) -> None:
        """Stop watching."""
        self._active, self.latest = False, None

    def _watcher(self, name: str, attribute: str) -> Callable[[Any], None]:
        def watch(module: Any) -> None:
            if hasattr(module, name):
                wrapt.wrap_function_wrapper(module, f"{name}.__init__", self._note(attribute))

        return watch

    def _note(self, attribute: str) -> Callable[..., Any]:
        def note(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            if self._active:
                self.latest = adapter_batch_size(getattr(instance, attribute, None))
            return result

        return note


def adapter_batch_size(adapter: Any) -> int | None:
    """The batch size that a Keras data adapter knows, else that of the ``tf.data`` pipeline it wraps."""
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
