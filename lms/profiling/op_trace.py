"""Measure the ops of the steps that run, by TensorFlow's own tracer.

The tracer notes the begin and the end of each kernel call on the CPU, under the name that its node has in the
graph that really runs, and of each kernel and copy on a GPU, under the name of the node that launched it. It
changes nothing in a step. What it hands over is a serialized ``Trace`` of TensorFlow's
``trace_events.proto``, of which :func:`calls_of` and :func:`kernels_of` read what they need.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import mode
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.profiler.internal import _pywrap_profiler

from lms.profiling.store import ProfileError

OPTIONS = {"host_tracer_level": 2, "device_tracer_level": 0, "python_tracer_level": 0}
"""TensorFlow 2.15 notes no kernels below the second level, and there not those that it takes for cheap."""
DEVICES, EVENTS = 1, 4
"""Numbers of fields of a ``Trace``: its devices by number, its events."""
DEVICE_NUMBER, RESOURCE_NUMBER, TIMESTAMP_PS, DURATION_PS, ARGS = 1, 2, 9, 10, 11
"""Of a ``TraceEvent``."""
NAME, RESOURCES = 1, 3
"""Of a device and of its resources, which are threads or streams."""
KEY, VALUE = 1, 2
"""Of a map's entry."""
HOST_OP, GPU_OP = b"long_name", b"tf_op"
"""The argument of an event that holds the node's name and its kernel's type: on the CPU, on a GPU."""
STREAM = "Stream"
"""Begins the name of a GPU's stream. Other lines of a GPU repeat its kernels, grouped by ops."""
MORE_BITS, PAYLOAD = 0x80, 0x7F
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""Kinds of fields."""
LEAST_SHARE = 0.2
"""The share of a step's ops that must have run in the profile for it to be of that step."""
PS_PER_S = 1e12


class Trace:
    """What the tracer has noted; empty until it is stopped."""

    def __init__(self) -> None:
        self.data = b""


@contextmanager
def tracing(device_type: str) -> Iterator[Trace]:
    """Have TensorFlow's tracer note what runs in the ``with`` block.

    Args:
        device_type: Of the device whose kernels it is to note, ``CPU`` or ``GPU``.

    Raises:
        ProfileError: If another profiler is at work.
    """
    session, trace = _pywrap_profiler.ProfilerSession(), Trace()
    try:
        session.start("", OPTIONS | {"device_tracer_level": int(device_type == "GPU")})
    except tf.errors.OpError as error:
        raise ProfileError(f"TensorFlow's profiler cannot start: {error.message}") from error
    try:
        yield trace
    finally:
        trace.data = session.stop()


class Event(NamedTuple):
    """A call of a kernel, or a kernel or a copy on a GPU."""

    device: int
    resource: int
    begin_ps: int
    duration_ps: int


Events = dict[str, list[Event]]
"""What a trace holds of each op, by the name that its node has where it runs."""


def calls_of(data: bytes) -> Events:
    """Return the calls of kernels on the CPU that a trace holds."""
    return _events(data, HOST_OP)


def kernels_of(data: bytes) -> Events:
    """Return the kernels and copies of GPUs that a trace holds.

    Raises:
        ProfileError: If it holds none.
    """
    streams, found = set(_streams(data)), {}
    for name, events in _events(data, GPU_OP).items():
        if launched := [event for event in events if (event.device, event.resource) in streams]:
            found[name] = launched
    if not found:
        raise ProfileError(
            "TensorFlow's profiler saw no kernel of the GPU; needed a step in the with block, and CUPTI with "
            "the right to trace: try as root, or the driver's option NVreg_RestrictProfilingToAdminUsers=0"
        )
    return found


def cpu_seconds(calls: Events, names: Collection[str]) -> dict[str, float]:
    """Return the seconds that the CPU takes for each op of a step, by its name; empty if few of them ran.

    Of several runs the lower median counts. The first one, in which kernels prepare themselves, hardly does.

    Args:
        calls: What :func:`calls_of` has found.
        names: Of the ops of the step.
    """
    found = _of_step(calls, names)
    if len(found) < LEAST_SHARE * len(names):
        return {}
    return {name: _lower_median([event.duration_ps for event in events]) for name, events in found.items()}


def gpu_seconds(kernels: Events, names: Collection[str]) -> dict[str, float]:
    """Return the seconds that a GPU takes for each op of a step, by its name; empty if few of them ran.

    A run of an op launches any number of kernels and copies, most often one. So the runs are as many as most
    ops have events. The runs of an op are told apart by the pauses between them: a step lies
    between two, and hardly anything between the kernels of one. Of several runs the lower median counts. What
    launches nothing takes no time there.

    Args:
        kernels: What :func:`kernels_of` has found.
        names: Of the ops of the step.
    """
    found = _of_step(kernels, names)
    if len(found) < LEAST_SHARE * len(names):
        return {}  # another step has a few ops of the same names
    runs = mode(len(events) for events in found.values())
    return {name: _lower_median(_runs(found.get(name, ()), runs)) for name in names}


def _of_step(events: Events, names: Collection[str]) -> Events:
    """Return the events of a step's ops by their names.

    A step that another function calls may run as a part of it: then the names of its ops begin with that of
    the call, ``StatefulPartitionedCall/``. Of several calls that with the most ops counts, and of these that
    with the shortest name.
    """
    by_call: dict[str, Events] = {}
    for name, found in events.items():
        parts = name.split("/")
        for skipped in range(len(parts)):
            if (own := "/".join(parts[skipped:])) in names:
                by_call.setdefault("/".join(parts[:skipped]), {})[own] = found
    return by_call[max(by_call, key=lambda call: (len(by_call[call]), -len(call)))] if by_call else {}


def _runs(events: Sequence[Event], count: int) -> list[int]:
    """Return the picoseconds of each of ``count`` runs, whose events lie apart; 0 for missing ones."""
    found = sorted(events, key=lambda event: event.begin_ps)
    pauses = [after.begin_ps - before.begin_ps - before.duration_ps for before, after in pairwise(found)]
    cuts = sorted(sorted(range(len(pauses)), key=pauses.__getitem__, reverse=True)[: count - 1])
    edges = [0, *(cut + 1 for cut in cuts), len(found)]
    runs = [sum(event.duration_ps for event in found[first:last]) for first, last in pairwise(edges)]
    return [*([0] * (count - len(runs))), *runs]


def _lower_median(times_ps: Sequence[int]) -> float:
    return sorted(times_ps)[(len(times_ps) - 1) // 2] / PS_PER_S


def _streams(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the numbers of device and resource of each stream of a GPU."""
    for field, entry in _fields(data):
        if field == DEVICES and isinstance(entry, bytes):
            number, device = _entry(entry)
            for part, resource in _fields(device):
                if part == RESOURCES and isinstance(resource, bytes):
                    line, told = _entry(resource)
                    name = dict(_fields(told)).get(NAME, b"")
                    if isinstance(name, bytes) and name.startswith(STREAM.encode()):
                        yield number, line


def _entry(data: bytes) -> tuple[int, bytes]:
    """Return number and message of an entry of a map."""
    fields = dict(_fields(data))
    number, message = fields.get(KEY, 0), fields.get(VALUE, b"")
    if not isinstance(number, int) or not isinstance(message, bytes):
        raise ProfileError("TensorFlow's trace has an entry of an unknown kind")
    return number, message


def _events(data: bytes, argument: bytes) -> Events:
    """Return the events that name a node in an argument, by that name."""
    found: Events = {}
    for field, event in _fields(data):
        if field == EVENTS and isinstance(event, bytes) and argument in event:
            name, numbers = "", {}
            for part, value in _fields(event):
                if isinstance(value, int):
                    numbers[part] = value
                elif part == ARGS:
                    entry = dict(_fields(value))
                    told = entry.get(VALUE, b"")
                    if entry.get(KEY) == argument and isinstance(told, bytes):
                        name = told.decode(errors="replace").rpartition(":")[0]
            if name:
                parts = (DEVICE_NUMBER, RESOURCE_NUMBER, TIMESTAMP_PS, DURATION_PS)
                found.setdefault(name, []).append(Event(*(numbers.get(part, 0) for part in parts)))
    return found


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
