"""Measure the ops of the steps that run, by TensorFlow's own tracer.

The tracer notes the begin and the end of each kernel call on the CPU, under the name that its node has in the
graph that really runs. It changes nothing in a step. What it hands over is a serialized ``Trace`` of
TensorFlow's ``trace_events.proto``, of which :func:`op_seconds` reads what it needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.profiler.internal import _pywrap_profiler

from lms.profiling.store import ProfileError

OPTIONS = {"host_tracer_level": 2, "device_tracer_level": 0, "python_tracer_level": 0}
"""TensorFlow 2.15 notes no kernels below the second level, and there not those that it takes for cheap."""
EVENTS, DURATION_PS, ARGS, KEY, VALUE = 4, 10, 11, 1, 2
"""Numbers of fields: ``Trace.trace_events``, ``TraceEvent.duration_ps``, ``.args``, and of a map's entry."""
LONG_NAME = b"long_name"
"""The argument of an event that holds the node's name and its kernel's type."""
MORE_BITS, PAYLOAD = 0x80, 0x7F
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""Kinds of fields."""
PS_PER_S = 1e12


class Trace:
    """What the tracer has noted; empty until it is stopped."""

    def __init__(self) -> None:
        self.data = b""


@contextmanager
def tracing() -> Iterator[Trace]:
    """Have TensorFlow's tracer note what runs in the ``with`` block.

    Raises:
        ProfileError: If another profiler is at work.
    """
    session, trace = _pywrap_profiler.ProfilerSession(), Trace()
    try:
        session.start("", OPTIONS)
    except tf.errors.OpError as error:
        raise ProfileError(f"TensorFlow's profiler cannot start: {error.message}") from error
    try:
        yield trace
    finally:
        trace.data = session.stop()


def op_seconds(data: bytes) -> dict[str, float]:
    """Return the seconds of each op by the name of its node: of several runs the lower median.

    The first run of an op, in which kernels prepare themselves, so hardly counts.
    """
    runs: dict[str, list[int]] = {}
    for field, event in _fields(data):
        if field == EVENTS and isinstance(event, bytes) and LONG_NAME in event:
            name, duration_ps = _named(event)
            if name:
                runs.setdefault(name, []).append(duration_ps)
    return {name: sorted(found)[(len(found) - 1) // 2] / PS_PER_S for name, found in runs.items()}


def _named(event: bytes) -> tuple[str, int]:
    name, duration_ps = "", 0
    for field, value in _fields(event):
        if field == DURATION_PS and isinstance(value, int):
            duration_ps = value
        elif field == ARGS and isinstance(value, bytes):
            entry = dict(_fields(value))
            if entry.get(KEY) == LONG_NAME:
                told = entry.get(VALUE, b"")
                name = told.decode(errors="replace").rpartition(":")[0] if isinstance(told, bytes) else ""
    return name, duration_ps


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of the fields of a message (protobuf's wire format)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(kind, 0)
        if kind == BYTES:
            length, at = _varint(data, at)
        elif not length:
            raise ProfileError(f"TensorFlow's trace has a field of an unknown kind, {kind}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & PAYLOAD) << shift
        if not byte & MORE_BITS:
            return value, at
        shift += 7
    raise ProfileError("TensorFlow's trace ends in the middle of a number")
