"""Which tensors a script of an earlier generation lets be swapped: by scopes, by types, by where to start.

Scopes are matched as IBM's generations did. Those of the first are whole: ``block1`` covers ``block1`` and
``block1/...``. Those of the second are how names begin: ``block1`` covers ``block10/...`` as well.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from lms.errors import LMSError
from lms.graph import Graph, Op


class LMSArgumentError(LMSError, ValueError):
    """A parameter of IBM's classes is missing or matches nothing in the graph."""


@dataclass(frozen=True)
class Filters:
    """What to leave out and what alone to take; an empty set says nothing.

    A tensor is swapped if it matches no ``excl_`` set. Where ``incl_output_`` sets are given, one of them has
    to match, and where ``incl_input_`` sets are given, one of those.
    """

    excl_output_by_scopes: frozenset[str] = frozenset()
    """Scopes of ops whose outputs stay."""
    excl_output_by_types: frozenset[str] = frozenset()
    excl_input_by_scopes: frozenset[str] = frozenset()
    """Scopes of ops whose inputs stay."""
    excl_input_by_types: frozenset[str] = frozenset()
    incl_output_by_scopes: frozenset[str] = frozenset()
    incl_output_by_types: frozenset[str] = frozenset()
    incl_input_by_scopes: frozenset[str] = frozenset()
    incl_input_by_types: frozenset[str] = frozenset()
    starting_scope: str | None = None
    """Only what depends on the ops of this scope is swapped."""
    starting_op_names: frozenset[str] = frozenset()
    """Only what depends on these ops is swapped."""
    optimizer_scopes: frozenset[str] = frozenset()
    """How the names of backward ops begin, beside the gradient ops that the engine finds by itself."""
    beginnings: bool = False
    """The eight filters' scopes are how names begin, as in the second generation."""


FILTER_NAMES = tuple(field.name for field in fields(Filters) if "_by_" in field.name)
"""The eight filters of the second generation, by their names."""

NAMING = (*FILTER_NAMES, "starting_scope", "starting_op_names", "optimizer_scopes")
"""The fields that name scopes, types or ops."""


def select(graph: Graph, filters: Filters) -> Graph:
    """``graph`` with a reason at each tensor that ``filters`` keep on the device, and the optimizer's ops.

    Raises:
        LMSArgumentError: If a scope, type or starting op matches no op of the graph.
    """
    named = named_ops(graph.ops, filters)
    reached = _reached(graph, filters, named)
    users: list[set[int]] = [set() for _ in graph.tensors]
    for number, uses in enumerate(graph.uses):
        users[graph.roots[number]].update(use.op for use in uses)
    tensors = []
    for tensor in graph.tensors:
        root = graph.roots[tensor.id]
        reason = _why_stays(graph.tensors[root].op, users[root], named, reached)
        tensors.append(replace(tensor, forbidden=tensor.forbidden or reason) if reason else tensor)
    backward = named.get("optimizer_scopes", frozenset())
    return replace(graph, tensors=tuple(tensors), backward=backward)


def named_ops(ops: Sequence[Op], filters: Filters) -> Mapping[str, frozenset[int]]:
    """The ops that each filter names, by the filters that are given.

    Raises:
        LMSArgumentError: Naming the first item that matches nothing; of ``optimizer_scopes`` one has to.
    """
    named: dict[str, frozenset[int]] = {}
    for name in NAMING:
        wanted = getattr(filters, name)
        items = [wanted] if isinstance(wanted, str) else sorted(wanted or ())
        found = {item: _ops_of(ops, name, item, filters.beginnings) for item in items}
        for item, matching in found.items():
            if not matching and not (name == "optimizer_scopes" and any(found.values())):
                raise LMSArgumentError(_nothing_matches(ops, name, item))
        if items:
            named[name] = frozenset(op for matching in found.values() for op in matching)
    return named


def scopes_without_ops(ops: Sequence[Op], scopes: Iterable[str]) -> list[str]:
    """Those of the optimizer's ``scopes`` that no op's name begins with."""
    return [scope for scope in sorted(scopes) if not _ops_of(ops, "optimizer_scopes", scope, True)]


def _ops_of(ops: Sequence[Op], name: str, item: str, beginnings: bool) -> frozenset[int]:
    """The ops that ``item`` of the filter ``name`` stands for."""
    if "types" in name:
        return frozenset(op.id for op in ops if op.type == item)
    if name == "starting_op_names":
        return frozenset(op.id for op in ops if op.name == item)
    if beginnings or name in ("optimizer_scopes", "starting_scope"):
        found = frozenset(op.id for op in ops if op.name.startswith(item))
    else:
        found = frozenset(op.id for op in ops if _lies_in(op.name, item))
    return found or _in_layer(ops, item, beginnings)


def _lies_in(name: str, scope: str) -> bool:
    bare = scope.rstrip("/")
    return name == bare or name.startswith(f"{bare}/")


def _in_layer(ops: Sequence[Op], scope: str, beginnings: bool) -> frozenset[int]:
    """The same one level down, for ``functional_1/conv1_1/...``.

    In a traced function Keras puts the model's name in front of each layer's, and Keras 3 a number behind it.
    """
    open_end = beginnings and not scope.endswith("/")
    layer = re.compile(re.escape(scope.rstrip("/")) + ("" if open_end else r"(_\d+)?(/|$)"))
    return frozenset(op.id for op in ops if layer.match(op.name.partition("/")[2]))


def _nothing_matches(ops: Sequence[Op], name: str, item: str) -> str:
    known = {op.type for op in ops} if "types" in name else {op.name for op in ops}
    if "scope" in name:
        known = {prefix for op in known for prefix in _prefixes(op)}
    return (
        f"{_label(name)}: {item!r} matches nothing in the graph; needed one of its {_kind(name)}, such as "
        f"{_examples(known)}"
    )


def _label(name: str) -> str:
    """A filter's name, with that of the first generation beside it."""
    return f"{name} (or {name.replace('_output_by', '')})" if "_output_by_" in name else name


def _kind(name: str) -> str:
    return "op types" if "types" in name else "ops" if "op_names" in name else "name scopes"


def _examples(known: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(known, key=lambda name: (name.count("/"), name))[:4])


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _reached(graph: Graph, filters: Filters, named: Mapping[str, frozenset[int]]) -> frozenset[int] | None:
    """The ops that depend on the starting ops; None where no start is given."""
    if filters.starting_scope is None and not filters.starting_op_names:
        return None
    start = named.get("starting_scope", frozenset()) | named.get("starting_op_names", frozenset())
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
        if _matches("excl", way, ops, named):
            return f"excluded by excl_{way}_by_scopes or excl_{way}_by_types"
        if _matches("incl", way, ops, named) is False:
            return f"not among what incl_{way}_by_scopes and incl_{way}_by_types name"
    return None


def _matches(kind: str, way: str, ops: Iterable[int], named: Mapping[str, frozenset[int]]) -> bool | None:
    """Whether one of ``ops`` is named; None where nothing of the kind is given."""
    given = [named[name] for what in ("scopes", "types") if (name := f"{kind}_{way}_by_{what}") in named]
    return any(op in matching for matching in given for op in ops) if given else None
