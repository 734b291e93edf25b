"""Find the inputs and outputs of a GPU's kernels that lie in host memory, and so must not be swapped.

Kernels say so when they are registered (``HostMemory``), mostly for shapes and other small integers. The copy
to the host refuses to read such a tensor ("must reside on the device": ``gpu_swapping_kernels.cc``).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from tensorflow.python.framework import kernels, op_def_registry

ON_GPU = ("DEFAULT", "GPU")
"""Under which devices a kernel is registered that runs on a GPU."""


def is_host_output(node: Any, index: int) -> bool:
    """Tell whether the GPU's kernel of ``node`` (a NodeDef) leaves output ``index`` in host memory."""
    return _lies_on_host(node, index, "output_arg")


def is_host_input(node: Any, slot: int) -> bool:
    """Tell whether the GPU's kernel of ``node`` (a NodeDef) reads input ``slot`` in host memory."""
    return _lies_on_host(node, slot, "input_arg")


def _lies_on_host(node: Any, index: int, kind: str) -> bool:
    held = _host_arguments(node.op)
    if not held:
        return False
    names = list(_argument_names(node, kind))
    name = names[index] if index < len(names) else ""
    return any(name in arguments and _fits(node, constraints) for constraints, arguments in held)


@cache
def _host_arguments(
    op_type: str,
) -> tuple[tuple[tuple[tuple[str, frozenset[int]], ...], frozenset[str]], ...]:
    """Return for each GPU kernel of an op the types that it takes, and its arguments in host memory."""
    found = []
    for kernel in kernels.get_registered_kernels_for_op(op_type).kernel:
        if kernel.device_type in ON_GPU and kernel.host_memory_arg:
            types = ((one.name, frozenset(one.allowed_values.list.type)) for one in kernel.constraint)
            found.append((tuple(types), frozenset(kernel.host_memory_arg)))
    return tuple(found)


def _fits(node: Any, constraints: tuple[tuple[str, frozenset[int]], ...]) -> bool:
    return all(node.attr[name].type in types for name, types in constraints)


def _argument_names(node: Any, kind: str) -> Iterator[str]:
    """Yield for each output or input (``kind``) of a node the name of its argument in the op's definition."""
    definition = op_def_registry.get(node.op)
    for argument in () if definition is None else getattr(definition, kind):
        count = 1
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        yield from [argument.name] * count
