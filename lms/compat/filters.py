"""Which tensors a script of an earlier generation lets be swapped: by scopes, by types, by where to start.

Scopes are matched as TensorFlow makes them: ``block1`` covers ``block1`` and ``block1/...``.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace

from lms.errors import LMSError
from lms.graph import Graph, Op


class LMSArgumentError(LMSError, ValueError):
    """A parameter of IBM's classes is missing or matches nothing in the graph."""


@dataclass(frozen=True)
class Filters:
    """What to leave out and what alone to take; an empty set says nothing.

    A tensor is swapped if it matches no ``excl_`` set, and one of the ``incl_`` sets if there are any.
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
    """Scopes of the backward pass, beside the gradient ops that the engine finds by itself."""


FILTER_NAMES = tuple(field.name for field in fields(Filters) if "_by_" in field.name)
"""The eight filters of the second generation, by their names."""


def select(graph: Graph, filters: Filters) -> Graph:
    """``graph`` with a reason at each tensor that ``filters`` keep on the device, and the optimizer's ops.

    Raises:
        LMSArgumentError: If a scope, type or starting op matches no op of the graph.
    """
    require_matches(graph.ops, filters)
    reached = _reached(graph, filters)
    users: list[set[int]] = [set() for _ in graph.tensors]
    for number, uses in enumerate(graph.uses):
        users[graph.roots[number]].update(use.op for use in uses)
    tensors = []
    for tensor in graph.tensors:
        root = graph.roots[tensor.id]
        maker = graph.ops[graph.tensors[root].op]
        reason = _why_stays(maker, [graph.ops[op] for op in users[root]], filters, reached)
        tensors.append(replace(tensor, forbidden=tensor.forbidden or reason) if reason else tensor)
    backward = frozenset(op.id for op in graph.ops if _in_scopes(op, filters.optimizer_scopes))
    return replace(graph, tensors=tuple(tensors), backward=backward)


def require_matches(ops: Collection[Op], filters: Filters) -> None:
    """Check that everything named is there.

    Raises:
        LMSArgumentError: Naming the first parameter that matches nothing.
    """
    names, types = {op.name for op in ops}, {op.type for op in ops}
    scopes = {prefix for name in names for prefix in _prefixes(name)}
    for field in fields(filters):
        wanted = getattr(filters, field.name)
        given = [wanted] if isinstance(wanted, str) else sorted(wanted or ())
        known = types if "types" in field.name else names if "op_names" in field.name else scopes
        for item in given:
            if (item.rstrip("/") if known is scopes else item) not in known:
                raise LMSArgumentError(
                    f"{_label(field.name)}: {item!r} matches nothing in the graph; needed one of its "
                    f"{_kind(field.name)}, such as {_examples(known)}"
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


def _reached(graph: Graph, filters: Filters) -> frozenset[int] | None:
    """The ops that depend on the starting ops; None where no start is given."""
    if filters.starting_scope is None and not filters.starting_op_names:
        return None
    start = frozenset() if filters.starting_scope is None else frozenset({filters.starting_scope})
    reached: set[int] = set()
    for op in graph.ops:
        starts = op.name in filters.starting_op_names or _in_scopes(op, start)
        if starts or any(before in reached for before in graph.predecessors[op.id]):
            reached.add(op.id)
    return frozenset(reached)


def _why_stays(maker: Op, users: list[Op], filters: Filters, reached: frozenset[int] | None) -> str | None:
    if reached is not None and maker.id not in reached:
        return "does not depend on the starting ops"
    out = ("output", [maker])
    into = ("input", users)
    for way, ops in (out, into):
        if _matches("excl", way, ops, filters):
            return f"excluded by excl_{way}_by_scopes or excl_{way}_by_types"
    if not any(getattr(filters, name) for name in FILTER_NAMES if name.startswith("incl")):
        return None
    if _matches("incl", *out, filters) or _matches("incl", *into, filters):
        return None
    return "not among what incl_ parameters name"


def _matches(kind: str, way: str, ops: Iterable[Op], filters: Filters) -> bool:
    scopes = getattr(filters, f"{kind}_{way}_by_scopes")
    types = getattr(filters, f"{kind}_{way}_by_types")
    return bool(scopes or types) and any(op.type in types or _in_scopes(op, scopes) for op in ops)


def _in_scopes(op: Op, scopes: Collection[str]) -> bool:
    return any(op.name == scope or op.name.startswith(f"{scope}/") for scope in _bare(scopes))


def _bare(scopes: Iterable[str]) -> Iterable[str]:
    return (scope.rstrip("/") for scope in scopes)
