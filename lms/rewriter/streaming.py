"""Stream variables: their values lie in host memory between steps, and come to the device for their uses.

The variable itself stays where it is; what moves is the buffer that it holds
(:mod:`lms.variables.host_values`). Before the ops that update it a copy of the value comes to the device and
is assigned to the variable; behind them a copy goes to the host and is assigned in its turn. So between steps
whoever reads the variable reads host memory, and within a step the kernels are those that run without: same
device, same bits. What the forward and the backward pass read are copies of their own, each for its pass.

A variable becomes the device's once the gradient for its update is there. When its copies start is not said
here: the planner knows what room there is, and how long they take (:mod:`lms.simulate.streams`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from lms.ir.op_traits import STREAM_ENTER, STREAM_IN, STREAM_LAST, STREAM_LEAVE, STREAM_OUT, is_backward
from lms.optimizer.grappler_item import Output
from lms.reader.conditions import Conditions
from lms.reader.node_table import MARK_ATTR, NodeTable
from lms.rewriter.branches import Exits
from lms.rewriter.streamable import SPARSE, Finder, Variable, bytes_by_kind
from lms.rewriter.writer import MARK
from lms.transports.base import CopyWriter
from lms.variables.host_values import READ, ValueWriter, write_sharing, write_variable_op

VALUE = "value"
"""The purpose of the node that reads a variable's value in host memory."""


@dataclass(frozen=True)
class Streamed:
    """The variables that were made to stream."""

    state: int = 0
    """Variables that only the update reads: an optimizer's."""
    weights: int = 0
    nbytes: int = 0
    """Of all of these variables."""
    bytes_in: int = 0
    """Copied to the device in one step."""
    bytes_out: int = 0
    copies_out: int = 0
    streamable: Mapping[bool, int] = field(default_factory=dict)
    """The bytes that could stream, of variables that only updates read (True) and of others (False)."""
    handles: frozenset[str] = frozenset()
    """The nodes of their handles."""
    stay: Mapping[str, int] = field(default_factory=dict)
    """Variables that stay on the device, by reason."""
    nodes: tuple[str, ...] = ()
    """The names of the added nodes."""
    outputs: Mapping[str, Sequence[Output]] = field(default_factory=dict)
    """Type and shape of what each added node makes."""


def stream_variables(
    graph_def: Any,
    table: NodeTable,
    outputs: Sequence[Sequence[Output]],
    transport: CopyWriter,
    values: ValueWriter,
    known: Mapping[str, Output],
    holds: Callable[[str], bool],
    share: Callable[[bool], float],
    min_bytes: int,
    fetches: Collection[str] = (),
) -> Streamed:
    """Edit ``graph_def`` so that variables stream; its nodes are sorted anew.

    Args:
        graph_def: The graph.
        table: The same as a table.
        outputs: Type and shape of the outputs of each node.
        transport: How values come and go.
        values: How variables have them in host memory.
        known: Type and shape of the variables, by the names of their handles' nodes.
        holds: Whether a node with this device name runs on the device that is planned.
        share: How much streams of the bytes that only updates read (True), and of those that others read
            (False): first of those whose gradients come last, when most activations are gone.
        min_bytes: Smaller variables stay.
        fetches: Names of the nodes that are fetched.
    """
    found = Finder(table, outputs, known, holds, min_bytes, {one.partition(":")[0] for one in fetches})
    variables = list(found.variables())
    streamable = bytes_by_kind(variables)
    chosen = _chosen(variables, {kind: share(kind) * nbytes for kind, nbytes in streamable.items()}, table)
    stay = dict(found.stay.most_common())
    if not chosen:
        return Streamed(streamable=streamable, stay=stay)
    edit = _Edit(graph_def, table, found.conditions, transport, values)
    for variable in chosen:
        edit.stream(variable)
    anchor = found.anchor(chosen)
    edit.tie(anchor)
    edit.sort(found.phase, found.updates, anchor)
    weights = sum(not one.is_state for one in chosen)
    return Streamed(
        len(chosen) - weights,
        weights,
        sum(one.nbytes for one in chosen),
        edit.bytes_in,
        edit.bytes_out,
        edit.copies_out,
        streamable,
        frozenset(table.names[one.handle] for one in chosen),
        stay,
        tuple(edit.added),
        edit.outputs,
    )


def _chosen(variables: Sequence[Variable], nbytes: Mapping[bool, float], table: NodeTable) -> list[Variable]:
    """Choose so many bytes of each kind; the variables keep their order."""
    left, place = dict(nbytes), {node: index for index, node in enumerate(table.order)}
    chosen = set()
    for one in sorted(variables, key=lambda one: -min((place[gate] for gate in one.gates), default=0)):
        if left[one.is_state] > 0:
            left[one.is_state] -= one.nbytes
            chosen.add(one.handle)
    return [one for one in variables if one.handle in chosen]


class _Edit:
    """Adds the nodes that let variables stream, and sorts the graph's nodes."""

    def __init__(
        self,
        graph_def: Any,
        table: NodeTable,
        conditions: Conditions,
        transport: CopyWriter,
        values: ValueWriter,
    ) -> None:
        self._graph_def, self._table, self._conditions = graph_def, table, conditions
        self._exits = Exits(table, conditions, self._add_node)
        self._transport, self._values = transport, values
        self._nodes = {node.name: node for node in table.nodes}
        self.added: dict[str, Any] = {}
        self.outputs: dict[str, Sequence[Output]] = {}
        self.bytes_in = self.bytes_out = self.copies_out = 0
        self._leaves: list[str] = []

    def stream(self, variable: Variable) -> None:
        """Add the nodes for one variable."""
        table = self._table
        handle = table.names[variable.handle]
        user = next(iter((*variable.early, *variable.late, *variable.updates)))
        device, base = table.nodes[user].device, f"{handle}/{MARK}"
        value = self._add(f"{base}/value", VALUE)
        self._values.write_read(self.added[value], handle, variable.value.dtype, device)
        self.outputs[value] = [variable.value]
        if not variable.early:
            waits = [table.names[one] for one in variable.in_place]
            self._share(f"{base}/share_value", VALUE, handle, device, value, variable.in_place, waits)
        readers = [one for read in variable.early for one in table.readers[read]]
        passes: dict[bool, list[tuple[int, int]]] = {}
        for reader, slot in readers:
            in_backward = is_backward(table.names[reader], table.types[reader])
            passes.setdefault(in_backward, []).append((reader, slot))
        for number, in_backward in enumerate(sorted(passes)):
            fetched = self._copy_in(f"{base}/fetch_{number}", value, variable, device)
            for reader, slot in passes[in_backward]:
                table.nodes[reader].input[slot] = fetched
        if variable.updates:
            self._stay(variable, handle, base, value, device)

    def _stay(self, variable: Variable, handle: str, base: str, value: str, device: str) -> None:
        table = self._table
        back = self._copy_in(f"{base}/back", value, variable, device)
        dtype = variable.value.dtype
        enter = self._add(f"{base}/enter", STREAM_ENTER)
        self._values.write_enter(self.added[enter], handle, back, dtype, device)
        self._wait(
            enter, [*map(self._passed, variable.gates), *(table.names[one] for one in variable.in_place)]
        )
        whole = (*variable.updates, *variable.late)
        users = [table.names[one] for one in whole]
        for user in users:
            self._wait(user, [enter])
        ends = self._ends(f"{base}/passed", whole)
        last = self._add(f"{base}/last", STREAM_LAST)
        write_variable_op(self.added[last], READ, [handle], dtype, device)
        self._wait(last, ends)
        self._share(f"{base}/share_last", STREAM_LAST, handle, device, last, whole, ends)
        out = self._add(f"{base}/out", STREAM_OUT)
        self._transport.write_swap_out(self.added[out], last, dtype, device)
        self.outputs |= {last: [variable.value], out: [variable.value]}
        self.bytes_out += variable.nbytes
        self.copies_out += 1
        leave = self._add(f"{base}/leave", STREAM_LEAVE)
        self._values.write_assign(self.added[leave], handle, out, dtype, device)
        self._leaves.append(leave)

    def _passed(self, node: int) -> str:
        """Return a node that runs in each step: this one or, under a condition, one behind it.

        That has a name of its own: a plan gives it a place in the order, and what else waits for the node
        must not wait for that.
        """
        if self._conditions.predicate(node) is None:
            return self._table.names[node]
        name = f"{self._table.names[node]}/{MARK}/gate"
        if name not in self._nodes:
            self.outputs |= self._exits.write(name, [node])
        return name

    def _ends(self, name: str, users: Sequence[int]) -> list[str]:
        """Return the nodes to wait for behind the users of a variable."""
        left_out = [one for one in users if self._conditions.predicate(one) is not None]
        always = [self._table.names[one] for one in users if one not in left_out]
        if not left_out:
            return always
        self.outputs |= self._exits.write(name, left_out)
        return [*always, name]

    def _share(
        self,
        name: str,
        purpose: str,
        handle: str,
        device: str,
        read: str,
        users: Iterable[int],
        waits: Iterable[str],
    ) -> None:
        """Have ``read`` share the variable's buffer behind ``users``, some of which would have it copied.

        ``waits`` are the nodes to wait for where they are waited for.
        """
        if any(self._table.types[user].startswith(SPARSE) for user in users):
            self._add(name, purpose)
            write_sharing(self.added[name], handle, device)
            self._wait(name, waits)
            self._wait(read, [name])

    def _copy_in(self, name: str, value: str, variable: Variable, device: str) -> str:
        self._add(name, STREAM_IN)
        self._transport.write_swap_in(self.added[name], value, variable.value.dtype, device)
        self.outputs[name] = [variable.value]
        self.bytes_in += variable.nbytes
        return name

    def _add(self, name: str, purpose: str) -> str:
        self._add_node(name, purpose)
        return name

    def _add_node(self, name: str, purpose: str) -> Any:
        node = self._graph_def.node.add(name=name)
        node.attr[MARK_ATTR].s = purpose.encode()
        self.added[name] = self._nodes[name] = node
        self.outputs[name] = []
        return node

    def _wait(self, name: str, waits: Iterable[str]) -> None:
        node = self._nodes[name]
        known = set(node.input)
        node.input.extend(f"^{wait}" for wait in dict.fromkeys(waits) if f"^{wait}" not in known)

    def tie(self, anchor: int | None) -> None:
        """Have a node that is run in any case wait for the variables to leave."""
        if anchor is not None:
            self._wait(self._table.names[anchor], self._leaves)

    def sort(self, phase: Collection[int], updates: Collection[int], anchor: int | None) -> None:
        """Sort the nodes: what an update needs right behind its gradient, and one update after the other.

        Many wait for the same where all gradients are needed for the first update, to be clipped or checked.
        The ``anchor`` waits for all that leaves.
        """
        edited = NodeTable.of(self._graph_def)
        place = {node: index for index, node in enumerate(edited.order)}
        keys = [place[node] for node in range(len(edited.nodes))]
        follows = {*phase, *range(len(self._table.nodes), len(edited.nodes))}
        after: list[list[int]] = [[] for _ in keys]
        for node in edited.order:
            for one in edited.before[node]:
                after[one].append(node)
            if node in follows:
                keys[node] = max((keys[one] for one in edited.before[node]), default=keys[node])
        turns = [place[node] for node in range(len(edited.nodes))]
        """The place of the update that each node is for: of several that follow each other, the last."""
        leads = set[int]()
        for node in reversed(edited.order):
            if node in follows:
                led = [turns[one] for one in after[node] if one in leads]
                turns[node] = min(led, default=turns[node])
                if node != anchor and (led or node in updates):
                    leads.add(node)
        waiting = [len(needed) for needed in edited.before]
        ready = [(keys[node], turns[node], node) for node, count in enumerate(waiting) if not count]
        heapify(ready)
        nodes = []
        while ready:
            *_, node = heappop(ready)
            nodes.append(edited.nodes[node])
            for following in after[node]:
                waiting[following] -= 1
                if not waiting[following]:
                    heappush(ready, (keys[following], turns[following], following))
        copies = type(self._graph_def)()
        copies.node.extend(nodes)
        del self._graph_def.node[:]
        self._graph_def.node.extend(copies.node)
