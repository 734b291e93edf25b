"""Compares what runs with and without LMS, op by op: nothing but LMS's own ops may differ."""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

Nodes = Mapping[str, Any]
IGNORED = frozenset({"_stream_id", "_user_specified_name", "_output_shapes"})
"""Attributes that TensorFlow numbers anew for each function, or leaves out at times; no kernel reads them."""
NUMBERED = re.compile(r"_\d+(?=\b|$)")
"""What makes a function's name its own."""
HANDLE = re.compile(r"(?<=_embedding_lookup)_\d+(?=\b)")


def is_ours(node: Any) -> bool:
    """Whether LMS has added an op."""
    return "/lms/" in node.name or node.name.startswith("lms/") or "_lms" in node.attr


def difference(plain: Iterable[Any], edited: Iterable[Any]) -> dict[str, Any]:
    """What is different between two lists of partitions of one function, by kind; lists of names."""
    before, after = _nodes(plain), _with_assignments(_nodes(edited))
    ours = {name for name, node in after.items() if is_ours(node)}
    shared = [name for name in before if name in after and name not in ours]
    pairs = [(name, before[name], after[name]) for name in shared]
    values = _Values(before, after, ours)
    return {
        "nodes": len(before),
        "ours": len(ours),
        "missing": sorted(set(before) - set(after)),
        "extra": sorted(set(after) - set(before) - ours),
        "ops": [name for name, one, other in pairs if one.op != other.op or one.device != other.device],
        "attributes": [name for name, one, other in pairs if _attributes(one) != _attributes(other)],
        "data inputs": [name for name, one, other in pairs if not values.same_inputs(one, other)],
        "control inputs missing": [name for name, one, other in pairs if _control(one) - _control(other)],
        ADDED_EDGES: [
            f"{source} -> {name}"
            for name, one, other in pairs
            for source in sorted(_control(other) - _control(one) - ours)
        ],
    }


KINDS = ("missing", "extra", "ops", "attributes", "data inputs", "control inputs missing")
"""What may not be. An edge between two of TensorFlow's ops, which puts them in order, changes no value."""

ADDED_EDGES = "control edges extra"


def paired(plain: list[Any], edited: list[Any], least: int) -> Iterator[tuple[Any, Any]]:
    """Pair functions by the names of their ops; ``None`` where one has no partner.

    Args:
        plain: Functions, each a list of partitions.
        edited: The same.
        least: Functions with fewer ops are left out.
    """
    left = [(function, set(_nodes(function))) for function in edited]
    for function in plain:
        names = set(_nodes(function))
        if len(names) < least:
            continue
        best = max(left, key=lambda one: len(names & one[1]) - len(names - one[1]), default=None)
        if best is None or not names & best[1]:
            yield function, None
        else:
            left.remove(best)
            yield function, best[0]
    yield from ((None, function) for function, names in left if len(names) >= least)


def _nodes(partitions: Iterable[Any]) -> dict[str, Any]:
    """The ops of all partitions by name, without what carries tensors from one to another."""
    made = {node.name: node for partition in partitions for node in partition.node}
    sent = {_edge(node): node for node in made.values() if node.op in SENDS}
    whole = _Whole(made, sent)
    return {_plain(name): whole.node(node) for name, node in made.items() if not whole.carries(node)}


def _with_assignments(nodes: Nodes) -> Nodes:
    """The ops, with TensorFlow's own assignment for one of LMS's, which stands in its place."""
    return {name: _assignment(node) if node.op == "LmsAssign" else node for name, node in nodes.items()}


def _assignment(node: Any) -> Any:
    attributes = {key: value for key, value in node.attr.items() if key != "_lms"}
    return SimpleNamespace(**{**vars(node), "op": "AssignVariableOp", "attr": attributes})


SENDS, RECEIVES = frozenset({"_Send", "_HostSend"}), frozenset({"_Recv", "_HostRecv"})
CARRIED_CONTROL = re.compile(r"/ctrl/_\d+$")
"""The constant that the partitioner sends in place of a control edge."""


def _edge(node: Any) -> tuple[str, ...]:
    return tuple(str(node.attr[name]) for name in ("tensor_name", "send_device", "recv_device"))


class _Whole:
    """One graph out of several partitions."""

    def __init__(self, made: Nodes, sent: Mapping[tuple[str, ...], Any]) -> None:
        self._made, self._sent = made, sent

    def carries(self, node: Any) -> bool:
        """Whether an op was added by the partitioner."""
        if node.op in SENDS | RECEIVES or (node.op == "Const" and CARRIED_CONTROL.search(node.name)):
            return True
        return node.op == "Identity" and self._control_behind(node) is not None

    def node(self, node: Any) -> Any:
        """An op that reads what was sent where it was made."""
        inputs = [self._control(text) if text.startswith("^") else self._data(text) for text in node.input]
        return SimpleNamespace(
            name=_plain(node.name),
            op=node.op,
            device=node.device,
            attr=node.attr,
            input=[*map(_plain, inputs)],
        )

    def _data(self, text: str) -> str:
        source = self._made.get(text.partition(":")[0])
        while source is not None and source.op in RECEIVES and _edge(source) in self._sent:
            text = self._sent[_edge(source)].input[0]
            source = self._made.get(text.partition(":")[0])
        return text

    def _control(self, text: str) -> str:
        source = self._made.get(text[1:])
        behind = self._control_behind(source) if source is not None and source.op == "Identity" else None
        return behind or "^" + self._data(text[1:]).partition(":")[0]

    def _control_behind(self, identity: Any) -> str | None:
        """The control edge that an ``Identity`` behind a received constant stands for."""
        constant = self._made.get(self._data(identity.input[0])) if identity.input else None
        if constant is None or constant.op != "Const" or not CARRIED_CONTROL.search(constant.name):
            return None
        return next((text for text in constant.input if text.startswith("^")), None)


def _plain(text: str) -> str:
    """A text without the numbers of functions, and of the variables that Keras 2.15 looks rows up in."""
    text = HANDLE.sub("_N", text)
    return NUMBERED.sub("_N", text) if "__inference_" in text or "__forward_" in text else text


def _attributes(node: Any) -> dict[str, str]:
    return {name: _plain(str(value)) for name, value in node.attr.items() if name not in IGNORED}


class _Values:
    """Whether two ops read the same values, in two graphs that name these differently."""

    def __init__(self, before: Nodes, after: Nodes, ours: set[str]) -> None:
        self._before, self._after, self._ours = before, after, ours

    def same_inputs(self, one: Any, other: Any) -> bool:
        """Whether an op reads what the other reads."""
        ones, others = _data(one), _data(other)
        return len(ones) == len(others) and all(map(self._same, ones, others))

    def _same(self, one: str, other: str) -> bool:
        """Whether two tensors are one: by name, as a copy of the op that makes it, or through ops of ours."""
        if one == other:
            return True
        name, _, place = other.partition(":")
        if name not in self._ours:
            return False
        copy, (made, _, output) = self._after[name], one.partition(":")
        original = self._before.get(made)
        if original is not None and output == place and original.op == copy.op:
            attributes = _attributes(original).items() <= _attributes(copy).items()
            if attributes and self.same_inputs(original, copy):
                return True
        given = _data(copy)
        return bool(given) and self._same(one, given[0])


def _data(node: Any) -> list[str]:
    return [text for text in node.input if not text.startswith("^")]


def _control(node: Any) -> set[str]:
    return {text[1:] for text in node.input if text.startswith("^")}
