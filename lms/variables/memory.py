"""Give each variable that a step changes memory of its own, before the step is planned.

Momenta start as zeros, and a function that makes them keeps one constant for all of one shape: they share its
buffer until each is written to for the first time. A plan that trusts the bytes in use before the first step
then lacks most of an optimizer's state: 139 MiB of the 180 of Adam, for a ResNet-50 under Keras 3.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from lms.variables.handles import static_bytes, value_shape, value_type, variable_handles

OF_OBJECTS = frozenset({tf.string, tf.variant, tf.resource})
"""The types of tensors whose buffers hold objects, and no numbers."""
WORTH_BYTES = 4 << 10
"""Smaller values may share a buffer: that they are looked at takes longer than they take room."""


def give_own_memory(
    inputs: Sequence[Any], changed: Collection[int], has_room: Callable[[Any, int], bool]
) -> list[int]:
    """Copy the values that variables share with others, for those that a step changes.

    The values stay the same. Without room for a copy none is tried: TensorFlow would wait ten seconds for it.

    Args:
        inputs: What the step's function is called with.
        changed: The numbers of those inputs that it does more with than read.
        has_room: Tells whether the device of a variable's handle has room for so many bytes.

    Returns:
        The bytes of each variable that gets its memory in the step: one without a value, or with a shared one
        for whose copy there is no room.
    """
    owners: set[int] = set()
    pending: list[int] = []
    changed_last = sorted(range(len(inputs)), key=lambda number: number in changed)
    for number in changed_last:
        for handle in variable_handles([inputs[number]]):
            nbytes = static_bytes(value_shape(handle), value_type(handle))
            if nbytes < WORTH_BYTES:
                continue
            try:
                where = address_of(tf.raw_ops.ReadVariableOp(resource=handle, dtype=value_type(handle)))
            except tf.errors.FailedPreconditionError:
                pending.append(nbytes)
                continue
            if where in owners and number in changed:
                if has_room(handle, nbytes):
                    _give(handle)
                else:
                    pending.append(nbytes)
            elif where is not None:
                owners.add(where)
    return pending


def _give(handle: Any) -> None:
    with suppress(tf.errors.ResourceExhaustedError, tf.errors.NotFoundError):
        _copied_bytes(handle)  # else no room, or a type for whose slices this device has no op


def _copied_bytes(handle: Any) -> int:
    """Copy a variable's value under its own lock, and return the bytes of the copy.

    A step in another thread may be writing the value. Before an op assigns to a slice, here an empty one, it
    makes sure that the variable has its buffer alone. It has every later read make a copy, too, until that is
    switched off.
    """
    shape, dtype = value_shape(handle), value_type(handle)
    nothing = tf.zeros((0, *shape[1:]), dtype)
    tf.raw_ops.ResourceStridedSliceAssign(ref=handle, begin=[0], end=[0], strides=[1], value=nothing)
    tf.raw_ops.DisableCopyOnRead(resource=handle)
    return static_bytes(shape, dtype)


def address_of(value: Any) -> int | None:
    """Return the address of a tensor's buffer in its device's memory; ``None`` where it cannot be known."""
    if value.dtype in OF_OBJECTS:  # TensorFlow ends the process instead of raising an error
        return None
    try:
        capsule = tf.experimental.dlpack.to_dlpack(value)
    except (tf.errors.OpError, TypeError, ValueError):
        return None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # Of the structure behind it the first field is the address (dlpack.h: ``DLTensor.data``).
    return ctypes.c_void_p.from_address(pointer_of(capsule, b"dltensor")).value
