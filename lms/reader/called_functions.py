"""Look into the functions that a graph calls.

TensorFlow inlines most calls before a graph is optimized; left are those that XLA compiles, and those that
must stay what they are. It infers no shapes through them: their bodies are inlined into a copy for that.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph, op_def_registry

SPECIAL = "_specialized_for_"
"""Behind it TensorFlow writes for which call it has made a function of its own of another one. That has fewer
arguments and results, by the same names."""

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


@cache
def calls_functions(op_type: str) -> bool:
    """Tell whether ops of this type may call functions; one that is not known may."""
    definition = op_def_registry.get(op_type)
    return definition is None or any(attr.type in ("func", "list(func)") for attr in definition.attr)


def nodes_reached(callers: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the functions of the runtime that nodes may call, and of those that these may."""
    return nodes_within(name for node in callers for name in called_by(node))


def nodes_within(names: Iterable[str]) -> Iterator[Any]:
    """Yield the nodes of functions of the runtime, and of all functions that these may call."""
    wanted = [*dict.fromkeys(names)]
    seen = {*wanted}
    while wanted:
        for node in getattr(body_of(wanted.pop()), "node_def", ()):
            yield node
            called = {*called_by(node)} - seen
            wanted += called
            seen |= called


def called_by(node: Any) -> Iterator[str]:
    """Yield the names of the functions that a node may call; old graphs call one by the type of the node."""
    if op_def_registry.get(node.op) is None:
        yield node.op
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (one.name for one in value.list.func)


def take_in_calls(graph_def: Any) -> bool:
    """Inline the bodies of called functions, and tell whether there was any.

    The result serves to infer shapes alone.
    """
    signatures = {one.signature.name: one.signature for one in graph_def.library.function}
    calls = [node for node in graph_def.node if _is_known(node, signatures)]
    for call in calls:  # which grows by the calls within the bodies
        name = call.attr["f"].func.name
        added = _take_in(graph_def, call, signatures[name], body_of(name))
        calls += [node for node in added if _is_known(node, signatures)]
    return bool(calls)


def body_of(name: str) -> Any:
    """Return the definition of a function as it was traced; ``None`` where the runtime does not know it.

    A graph's library holds the signatures alone. The functions of a session's graph are not the runtime's.
    """
    for known in (name, name.partition(SPECIAL)[0]):
        if context.context().has_function(known):
            return context.context().get_function_def(known)
    return None


def _is_known(node: Any, signatures: Mapping[str, Any]) -> bool:
    """Tell whether a node calls a known function that has results."""
    name = node.attr["f"].func.name if node.op in CALLS else ""
    return name in signatures and bool(node.attr["Tout"].list.type) and body_of(name) is not None


def _take_in(graph_def: Any, call: Any, signature: Any, body: Any) -> list[Any]:
    """Add the nodes of a body, and turn the call into an op that passes on what they make."""
    inner, flat_names = function_def_to_graph.function_def_to_graph_def(body)
    given = dict(zip((one.name for one in signature.input_arg), call.input, strict=False))
    prefix = f"{call.name}/body/"
    added = []
    for node in inner.node:
        made = graph_def.node.add(name=prefix + node.name)
        if node.name in given:
            made.op = "Identity"
            made.input.append(given[node.name])
            made.attr["T"].type = node.attr["dtype"].type
            continue
        made.op = node.op
        made.input.extend(f"^{prefix}{text[1:]}" if text[0] == "^" else prefix + text for text in node.input)
        for name, value in node.attr.items():
            made.attr[name].CopyFrom(value)
        added.append(made)
    types = list(call.attr["Tout"].list.type)
    call.op = "IdentityN"
    call.input[:] = [prefix + flat_names[body.ret[one.name]] for one in signature.output_arg]
    call.attr.clear()
    call.attr["T"].list.type.extend(types)
    return added
