"""A file of scalars and texts that TensorBoard reads; writing it needs no TensorBoard installed."""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf


class EventFile:
    """A TFRecord of Event messages.

    Args:
        folder: Where TensorBoard looks; it is made.

    Raises:
        OSError: If it cannot be written, here and in each method.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.lms"
        with _os_errors():
            self._file = tf.io.TFRecordWriter(os.fspath(place / name))
        self._put(file_version="brain.Event:2")

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write values of one step by their tags; ``None``, which nothing counts, is left out."""
        messages = tf.compat.v1.Summary
        found = [
            messages.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None
        ]
        self._put(step=step, summary=messages(value=found))

    def text(self, step: int, tag: str, text: str) -> None:
        """Write a text in Markdown, for TensorBoard's page of texts."""
        messages = tf.compat.v1
        about = messages.SummaryMetadata(plugin_data=messages.SummaryMetadata.PluginData(plugin_name="text"))
        value = messages.Summary.Value(tag=tag, tensor=tf.make_tensor_proto([text]), metadata=about)
        self._put(step=step, summary=messages.Summary(value=[value]))

    def flush(self) -> None:
        """Write out what is buffered."""
        with _os_errors():
            self._file.flush()

    def _put(self, **content: Any) -> None:
        event = tf.compat.v1.Event(wall_time=time.time(), **content)
        with _os_errors():
            self._file.write(event.SerializeToString())


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what TensorFlow says of a file, a full disk for example, as an ``OSError``."""
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(error.message) from error
