"""Copy functions that XLA compiles whole, so that TensorFlow runs their ops and its optimizers see them.

A function with ``jit_compile=True`` is traced as its user asked. Which of the two runs, it or its copy, is
chosen anew for each call, and neither is traced again for that.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorflow.python.eager import context

from lms.ir.op_traits import is_backward
from lms.reader.function_bodies import MUST_COMPILE

NO_INLINE = "_noinline"
"""TensorFlow sets it for functions that XLA compiles."""

LOWERED = "_lower_using_switch_merge"
"""Has TensorFlow turn a loop or a condition into ops of the graph around it; a trace for XLA lacks it."""
FUNCTIONAL = frozenset({"Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"})
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"}) | FUNCTIONAL

LAYERS = ("__conv_xla_", "__jit_compiled_convolution_op_")
"""Parts of the names of functions of one convolution that only XLA can run everywhere: each stays an op."""

SUFFIX = "_without_xla"


@dataclass(frozen=True)
class Copy:
    """A function that trains, copied so that XLA compiles nothing of it."""

    name: str
    types: frozenset[str]
    """The types of the ops that XLA has to compile in the original."""


@dataclass
class _Seen:
    """What is known of a function with those that it calls."""

    types: set[str] = field(default_factory=set)
    """The types of all ops."""
    compiled: set[str] = field(default_factory=set)
    """The types of those that XLA compiles."""
    trains: bool = False
    """Whether XLA compiles an op of a backward pass."""
    has_backward: bool = False


class CompiledFunctions:
    """Makes the copies of this process's functions, each once."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._copies: dict[str, str] = {}
        self._lock = threading.Lock()

    def copy_of(self, name: str) -> Copy | None:
        """Return the copy of a function; ``None`` where XLA compiles no part of a training step in it."""
        with self._lock:
            seen = self._look_anew(name)
            return Copy(self._copied(name), frozenset(seen.compiled)) if seen.trains else None

    def without_xla(self, name: str) -> str:
        """Return the name of a copy that XLA compiles nothing of; empty where it compiles nothing anyway."""
        with self._lock:
            self._look_anew(name)
            copy = self._copied(name)
            return "" if copy == name else copy

    def _look_anew(self, name: str) -> _Seen:
        if name not in self._seen:
            self._forget_what_is_gone()
        return self._look(name)

    def _forget_what_is_gone(self) -> None:
        """Remove the copies of functions that TensorFlow has removed."""
        runtime = context.context()
        for name in [one for one in self._seen if not runtime.has_function(one)]:
            del self._seen[name]
            copy = self._copies.pop(name, name)
            if copy != name:
                runtime.remove_function(copy)

    def _look(self, name: str) -> _Seen:
        known = self._seen.get(name)
        if known is not None:
            return known
        seen = self._seen[name] = _Seen()
        if (definition := _definition(name)) is None:
            return seen
        for node in definition.node_def:
            seen.has_backward |= is_backward(node.name, node.op)
            if node.op not in CALLS:
                seen.types.add(node.op)
            for called in _called(node):
                inner = self._look(called.name)
                seen.types |= inner.types
                seen.compiled |= inner.compiled
                seen.has_backward |= inner.has_backward
                seen.trains |= inner.trains
        if _is_marked(definition.attr):
            seen.compiled, seen.trains = seen.compiled | seen.types, seen.has_backward
        return seen

    def _copied(self, name: str) -> str:
        """Return the name of a copy of a function; its own where XLA compiles nothing of it."""
        known = self._copies.get(name)
        if known is not None:
            return known
        self._copies[name] = name
        if not self._look(name).compiled or (definition := _definition(name)) is None:
            return name
        _unmark(definition)
        for node in definition.node_def:
            for called in _called(node):
                called.name = self._copied(called.name)
        copy = self._copies[name] = definition.signature.name = name + SUFFIX
        context.context().add_function_def(definition)
        return copy


def _definition(name: str) -> Any:
    """Return the definition of a function; ``None`` where there is none, or it is one layer."""
    runtime = context.context()
    if any(layer in name for layer in LAYERS) or not runtime.has_function(name):
        return None
    return runtime.get_function_def(name)


def _is_marked(attributes: Any) -> bool:
    return MUST_COMPILE in attributes and bool(attributes[MUST_COMPILE].b)


def _unmark(definition: Any) -> None:
    if _is_marked(definition.attr):
        definition.attr.pop(NO_INLINE, None)
    definition.attr.pop(MUST_COMPILE, None)
    for node in definition.node_def:
        if not any(layer in called.name for called in _called(node) for layer in LAYERS):
            node.attr.pop(MUST_COMPILE, None)
        if node.op in FUNCTIONAL:
            node.attr[LOWERED].b = True


def _called(node: Any) -> Iterator[Any]:
    """Yield the functions among a node's attributes; a change of their names is one of the node."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func
