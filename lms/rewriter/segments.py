"""Have XLA compile the segments of a step: find the ops that it can compile, and mark their nodes.

TensorFlow forms clusters after all of its graph optimizers, ours included, and merges only nodes of one
scope. A node that is marked as one to compile needs no option and no flag for that; all others are marked as
not to be compiled, for they might be taken into a cluster beside them.
"""

import functools
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

from lms.device.device import Device
from lms.ir.op_traits import OUTSIDE_TYPES, is_update
from lms.planner.segments import Segmentation
from lms.reader.op_facts import NOT_PLAIN
from lms.reader.step_reader import Step

COMPILE, SCOPES = "_XlaCompile", ("_XlaScope", "_XlaInternalScope")
"""The attributes that TensorFlow's pass goes by: whether a node is compiled, and what it may be merged with.
The second scope counts where clustering is on for the whole program."""
OWN = b"lms_segment:"
"""How the names of our scopes begin; the rest is the name of a node."""

RANDOM = ("Multinomial", "ParameterizedTruncated", "Random", "Stateful", "Stateless", "TruncatedNormal")
"""Beginnings of the types of ops that draw at random: TensorFlow's own kernels go on to draw."""

CONVOLUTION = "Conv"
"""A part of the types of ops that stay TensorFlow's. XLA's convolutions for a CPU copy both inputs (the
gradient of a filter of 16 MiB of inputs took 16 MiB of scratch memory) and took three times as long as
oneDNN's; for a GPU XLA calls cuDNN, as TensorFlow does."""


def why_no_xla(device: Device) -> str | None:
    """Return why XLA compiles nothing for a device; ``None`` where it does."""
    return _why_no_xla(device.name)


@functools.cache
def _why_no_xla(device: str) -> str | None:
    try:
        with tf.init_scope(), tf.device(device):
            tf.function(_probe, jit_compile=True)(tf.zeros(2))
    except (tf.errors.OpError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        return f"this TensorFlow compiles nothing for {device} ({why})"
    return None


def _probe(value: Any) -> Any:
    return value + 1.0


@functools.cache
def compiled_types(device_type: str) -> frozenset[str]:
    """Return the types of ops that XLA has kernels for.

    TensorFlow knows them once it has compiled anything: see :func:`why_no_xla`.
    """
    wanted, known = f"XLA_{device_type}_JIT", kernels.get_all_registered_kernels().kernel
    return frozenset(one.op for one in known if one.device_type == wanted)


def compilable_ops(step: Step, device_type: str) -> frozenset[int]:
    """Find the ops of a step that XLA can compile and that do nothing but compute.

    Args:
        step: The step.
        device_type: ``CPU`` or ``GPU``.
    """
    types = compiled_types(device_type)
    return frozenset(op.id for op in step.graph.ops if op.type in types and _may_compile(step, op.id))


def _may_compile(step: Step, number: int) -> bool:
    op, members = step.graph.ops[number], step.members[number]
    if len(members) > 1 or op.conditional or not op.chainable or is_update(op.type):
        return False
    # A constant that waits for an op would cut that op's segment.
    is_outside = op.type in OUTSIDE_TYPES and not (op.type == "Const" and op.controls)
    if CONVOLUTION in op.type or is_outside or op.type.startswith(RANDOM) or not op.outputs:
        return False
    if len(step.slots[number]) < len(op.inputs):
        return False
    tensors = step.graph.tensors
    sources = [step.sources[tensor] for tensor in (*op.inputs, *op.outputs)]
    if any(source is None or step.dtypes.get(source, 0) in NOT_PLAIN for source in sources):
        return False
    return all(tensors[tensor].nbytes is not None for tensor in op.outputs)


def in_segments(step: Step, made: Segmentation) -> Step:
    """Return the step whose ops are those of the segmentation's graph."""

    def joined(column: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(node for op in ops for node in column[op]) for ops in made.ops)

    return replace(
        step,
        graph=made.graph,
        members=joined(step.members),
        slots=tuple(
            tuple(step.slots[use.op][use.slot] for use in uses if use.slot < len(step.slots[use.op]))
            for uses in made.uses
        ),
        starts=joined(step.starts),
        ends=joined(step.ends),
        sources=tuple(step.sources[tensor] for tensor in made.tensors),
    )


def mark_segments(graph_def: Any, names: Iterable[Collection[str]]) -> None:
    """Mark the nodes of each segment as one scope to compile, and all others as not to be compiled.

    Args:
        graph_def: The graph.
        names: The names of each segment's nodes.
    """
    scopes = {name: OWN + min(held).encode() for held in names for name in held}
    for node in graph_def.node:
        if (scope := scopes.get(node.name)) is not None:
            node.attr[COMPILE].b = True
            for attr in SCOPES:
                node.attr[attr].s = scope
        elif not any(attr in node.attr and node.attr[attr].s.startswith(OWN) for attr in SCOPES):
            node.attr[COMPILE].b = False  # what another device or frame of the step has marked stays
