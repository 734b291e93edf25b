"""Select the tensors that may be swapped by names and types: exclude, include only, start at an op.

Scopes are matched as IBM's generations did. Those of the first (``excl_scopes``, ``incl_scopes``) are whole:
``block1`` covers ``block1`` and ``block1/...``. Those of the second (``excl_output_by_scopes``, ...) are how
names begin: ``block1`` covers ``block10/...`` as well. The first filters what ops make, as ``_output_`` does.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lms.config import LMSConfig
from lms.ir.graph import Graph, Op

FIRST_GENERATION = (
    "starting_scope",
    "starting_op_names",
    "excl_scopes",
    "incl_scopes",
    "excl_types",
    "incl_types",
    "optimizer_scopes",
)
"""The fields of LMSConfig that name scopes, types or ops as the first generation did."""

SECOND_GENERATION = (
    "excl_output_by_scopes",
    "excl_output_by_types",
    "excl_input_by_scopes",
    "excl_input_by_types",
    "incl_output_by_scopes",
    "incl_output_by_types",
    "incl_input_by_scopes",
    "incl_input_by_types",
)
"""The eight filters of the second generation."""

EXCLUDING = {
    "output": ("excl_scopes", "excl_types", "excl_output_by_scopes", "excl_output_by_types"),
    "input": ("excl_input_by_scopes", "excl_input_by_types"),
}
"""A tensor stays if one of these names the op that makes it (output), or one that reads it (input)."""

INCLUDING = {
    "output": ("incl_scopes", "incl_types", "incl_output_by_scopes", "incl_output_by_types"),
    "input": ("incl_input_by_scopes", "incl_input_by_types"),
}
"""Where some of these are given, a tensor stays unless one names its maker (output) or a reader (input)."""

BEGINNINGS = frozenset(SECOND_GENERATION) | {"optimizer_scopes", "starting_scope"}
"""The filters whose scopes are beginnings of names."""


@dataclass(frozen=True)
class Unmatched:
    """A name in the configuration that stands for no op of a graph."""

    filter: str
    item: str
    text: str = field(compare=False)
    """The message: the name that was looked for, and examples of names that are there."""


@dataclass(frozen=True)
class Selection:
    """The graph with the filters applied."""

    graph: Graph
    """With a reason at each tensor that has to stay, and the optimizer's ops as the backward pass."""
    unmatched: tuple[Unmatched, ...]


def select(graph: Graph, config: LMSConfig) -> Selection:
    """Apply the filters of ``config`` to ``graph``.

    An excluding filter whose name stands for no op excludes nothing. An including filter whose names all
    stand for no op includes nothing.
    """
    names = (*FIRST_GENERATION, *SECOND_GENERATION)
    asked = {name: items for name in names if (items := _items(config, name))}
    if not asked:
        return Selection(graph, ())
    found = {(name, item): _ops_of(graph.ops, name, item) for name, items in asked.items() for item in items}
    named = {name: frozenset[int]().union(*(found[name, item] for item in asked[name])) for name in asked}
    unmatched = (Unmatched(*key, _nothing_matches(graph.ops, *key)) for key, ops in found.items() if not ops)
    return Selection(_marked(graph, named), tuple(unmatched))


def has_filters(config: LMSConfig) -> bool:
    """Tell whether the configuration selects tensors by names or types."""
    return any(getattr(config, name) for name in (*FIRST_GENERATION, *SECOND_GENERATION))


def unmatched(names: Iterable[tuple[str, str]], config: LMSConfig) -> tuple[Unmatched, ...]:
    """Return the names in the filters of ``config`` that stand for none of these ops.

    Args:
        names: Name and type of each op.
        config: The filters.
    """
    ops = tuple(Op(number, name, op_type, (), ()) for number, (name, op_type) in enumerate(names))
    return select(Graph(ops, ()), config).unmatched


def _items(config: LMSConfig, name: str) -> tuple[str, ...]:
    given = getattr(config, name)
    return (given,) if isinstance(given, str) else tuple(given or ())


def _marked(graph: Graph, named: Mapping[str, frozenset[int]]) -> Graph:
    reached = _reached(graph, named)
    users: list[set[int]] = [set() for _ in graph.tensors]
    for number, uses in enumerate(graph.uses):
        users[graph.roots[number]].update(use.op for use in uses)
    tensors = []
    for tensor in graph.tensors:
        root = graph.roots[tensor.id]
        reason = _why_stays(graph.tensors[root].op, users[root], named, reached)
        tensors.append(tensor._replace(forbidden=tensor.forbidden or reason) if reason else tensor)
    return replace(graph, tensors=tuple(tensors), backward=named.get("optimizer_scopes", frozenset()))


def _ops_of(ops: Sequence[Op], name: str, item: str) -> frozenset[int]:
    """Return the ops that ``item`` of the filter ``name`` stands for."""
    if "types" in name:
        return frozenset(op.id for op in ops if op.type == item or item in op.parts)
    if name == "starting_op_names":
        return frozenset(op.id for op in ops if op.name == item)
    if name in BEGINNINGS:
        found = frozenset(op.id for op in ops if op.name.startswith(item))
    else:
        found = frozenset(op.id for op in ops if _lies_in(op.name, item))
    return found or _in_layer(ops, item, name in SECOND_GENERATION)


def _lies_in(name: str, scope: str) -> bool:
    bare = scope.rstrip("/")
    return name == bare or name.startswith(f"{bare}/")


def _in_layer(ops: Sequence[Op], scope: str, beginning: bool) -> frozenset[int]:
    """Return the ops that ``scope`` covers behind the first part of their names.

    That finds ``conv1`` in ``functional_1/conv1_1/...``: in a traced function Keras puts the model's name in
    front of each layer's, and Keras 3 a number behind it.
    """
    open_end = beginning and not scope.endswith("/")
    layer = re.compile(re.escape(scope.rstrip("/")) + ("" if open_end else r"(_\d+)?(/|$)"))
    return frozenset(op.id for op in ops if layer.match(op.name.partition("/")[2]))


def _nothing_matches(ops: Sequence[Op], name: str, item: str) -> str:
    known = (
        {one for op in ops for one in (op.type, *op.parts)} if "types" in name else {op.name for op in ops}
    )
    if "scope" in name:
        known = {prefix for op in known for prefix in _prefixes(op)} or known
    return (
        f"{name}: {item!r} matches nothing in the graph; needed one of its {_kind(name)}, such as "
        f"{_examples(known)}"
    )


def _kind(name: str) -> str:
    return "op types" if "types" in name else "ops" if "op_names" in name else "name scopes"


def _examples(known: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(known, key=lambda name: (name.count("/"), name))[:4])


def _prefixes(name: str) -> Iterable[str]:
    """Yield the scopes that an op lies in; its own name is one, too, and no example that helps."""
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _reached(graph: Graph, named: Mapping[str, frozenset[int]]) -> frozenset[int] | None:
    """Return the ops that depend on the starting ops, or None where no start is given."""
    starts = [named[name] for name in ("starting_scope", "starting_op_names") if name in named]
    if not starts:
        return None
    start = frozenset[int]().union(*starts)
    reached: set[int] = set()
    for op in graph.ops:
        if op.id in start or any(before in reached for before in graph.predecessors[op.id]):
            reached.add(op.id)
    return frozenset(reached)


def _why_stays(
    maker: int, users: Collection[int], named: Mapping[str, frozenset[int]], reached: frozenset[int] | None
) -> str | None:
    if reached is not None and maker not in reached:
        return "does not depend on the starting ops"
    for way, ops in (("output", (maker,)), ("input", users)):
        for name in EXCLUDING[way]:
            if not named.get(name, frozenset()).isdisjoint(ops):
                return f"excluded by {name}"
        given = [name for name in INCLUDING[way] if name in named]
        if given and all(named[name].isdisjoint(ops) for name in given):
            return f"not included by {' or '.join(given)}"
    return None
