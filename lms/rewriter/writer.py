"""Write a :class:`~lms.ir.swap_plan.SwapPlan` into the GraphDef that it was made for.

Requires: every edge of the plan goes forward in the plan's order.
Ensures: every planned use reads a swap-in, every added node is marked, and the values computed are the same.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any
from zlib import crc32

import tensorflow as tf

from lms.errors import LMSError
from lms.ir.graph import Graph, Op, Use
from lms.ir.liveness import positions
from lms.ir.op_traits import SHAPE_READERS, STREAM_IN, STREAM_LAST, STREAM_OUT, STREAM_TYPES
from lms.ir.swap_plan import Filler, SerialEdge, Swap, SwapPlan
from lms.planner.host_operands import HostRead, Relocation
from lms.reader.node_table import MARK_ATTR, SWITCHES, Source
from lms.reader.step_reader import Step
from lms.rewriter.branches import Exits
from lms.rewriter.sum_order import Beginning
from lms.transports.base import Transport, host_beside, write_copy

MARK = "lms"
"""A part of the name of every added node."""

FILLER = "LmsFiller"
"""The op of ``ops/filler.cc``."""

ASSIGN_IN_PLACE = "LmsAssign"
"""The op of ``ops/assign.cc``."""

FIRST = frozenset(one.encode() for one in ("swap_out", STREAM_IN, STREAM_LAST, STREAM_OUT))
"""The marks of copies to the host, and of all that streams a variable."""

CHEAP_BYTES = 4096
"""An op that reads and makes no more takes fewer than the 8,000 cycles from which on TensorFlow counts it as
expensive (``KernelStats`` in ``executor.cc``)."""

MOST_DELAYS = 8
"""The most nodes that delay a copy on a CPU."""

FLOATS = frozenset(
    dtype.as_datatype_enum
    for dtype in (tf.bfloat16, tf.complex64, tf.complex128, tf.float16, tf.float32, tf.float64)
)
"""Types of which another order of a sum gives other last digits."""


class RewriteError(LMSError):
    """A plan and a graph do not belong together: the step runs unedited."""


@dataclass(frozen=True)
class Edits:
    """The nodes and edges that were added to a graph."""

    nodes: Collection[str]
    """The names of the nodes that were added, and of those whose op is another one now."""
    swap_outs: int
    swap_ins: int
    control_edges: int


def write_plan(
    graph_def: Any,
    step: Step,
    plan: SwapPlan,
    transport: Transport,
    relocation: Relocation | None = None,
    sums: Mapping[int, Beginning] | None = None,
    in_place: Collection[int] = (),
) -> Edits:
    """Edit ``graph_def`` as ``plan`` says.

    Args:
        graph_def: The graph that ``step`` was read from.
        step: Its values, and the nodes behind them; :func:`relocated` where ops read from the host.
        plan: A plan for ``step.graph``.
        transport: How tensors leave and come back.
        relocation: Which ops read from the host, where some do.
        sums: The nodes of sums with what each begins with, as :func:`lms.rewriter.sum_order.beginnings`
            finds it.
        in_place: The assignments of the planned graph that write into their variables' memory.

    Raises:
        RewriteError: If the plan does not fit the graph, which is of no use then.
    """
    require_forward(step.graph, plan)
    editor = _Editor(graph_def, step, transport, plan)
    if relocation is not None:
        editor.read_from_host(relocation)
    held = {swap.tensor: editor.send(swap) for swap in sorted(plan.swaps, key=lambda swap: swap.tensor)}
    for swap, number in _in_order_of_need(plan):
        editor.bring_back(swap, number, held[swap.tensor])
    for edge in plan.serial_edges:
        editor.follow(edge)
    for node, beginning in (sums or {}).items():
        editor.fix_sum(node, beginning)
    editor.launch_copies_first(plan.serial_edges)
    for filler in plan.fillers:
        if not step.graph.ops[filler.op].conditional:  # it would be left out with what the op waits for
            editor.fill(filler)
    editor.finish()
    editor.assign_in_place(in_place)
    return Edits(editor.added.keys(), editor.swap_outs, editor.swap_ins, editor.control_edges)


def _in_order_of_need(plan: SwapPlan) -> list[tuple[Swap, int]]:
    """Return the copies back, each as a swap and a number, in the order in which ops need them.

    Of copies that begin behind the same op an executor launches those first that stand first in the graph,
    unless more than eight nodes wait for that op: these TensorFlow keeps in no order.
    """
    place = positions(plan.order)
    needed = [
        (min(place[use.op] for use in swap_in.uses), swap.tensor, number, swap)
        for swap in plan.swaps
        for number, swap_in in enumerate(swap.swap_ins)
    ]
    return [(swap, number) for _, _, number, swap in sorted(needed, key=lambda entry: entry[:3])]


def put_copies_first(graph_def: Any) -> None:
    """Put copies to the host, and those of variables, in front, once nobody needs a node's place any more.

    An executor launches the readers of a tensor in the order in which they stand in the graph. A copy waits
    for all kernels that were launched before it: behind the next one it would begin only when that is done.
    """
    graph_def.node.sort(key=lambda node: MARK_ATTR not in node.attr or node.attr[MARK_ATTR].s not in FIRST)


def _copies_at_once(device: str) -> bool:
    """Tell whether copies out of a device are done when their op has run: it is a CPU."""
    return "device:CPU:" in device


def require_forward(graph: Graph, plan: SwapPlan) -> None:
    """Check that every edge of ``plan`` goes forward in its order, so that it can make no cycle.

    Raises:
        RewriteError: Naming the first op that does not.
    """
    if sorted(plan.order) != list(range(len(graph.ops))):
        raise RewriteError(f"the plan orders {len(plan.order)} ops; the graph has {len(graph.ops)}")
    place = positions(plan.order)

    def forward(before: int, after: int, what: str) -> None:
        if place[before] >= place[after]:
            raise RewriteError(
                f"the plan runs {graph.ops[after].name} before {graph.ops[before].name}, "
                f"which has to come first ({what})"
            )

    for op, earlier in enumerate(graph.predecessors):
        for other in earlier:
            forward(other, op, "an edge of the step")
    for edge in plan.serial_edges:
        forward(edge.before, edge.after, "serial edge")
    for filler in plan.fillers:
        for edge in filler.edges:
            forward(edge.before, edge.after, "filler")
    for swap in plan.swaps:
        producer = graph.tensors[swap.tensor].op
        if swap.after != producer:
            forward(producer, swap.after, "swap-out")
        for op in swap.blocks:
            for before in (swap.after,) if swap.until is None else (swap.after, swap.until):
                forward(before, op, "swap-out blocks")
        for swap_in in swap.swap_ins:
            if place[swap_in.trigger] < place[swap.after]:
                raise RewriteError(
                    f"swap-in of {graph.tensor_name(swap.tensor)} may start before it was swapped out"
                )
            for op in [*(use.op for use in swap_in.uses), *swap_in.blocks]:
                forward(swap_in.trigger, op, "swap-in")


def relocated(step: Step, relocation: Relocation) -> Step:
    """Return the step of the relocated graph.

    The ops and tensors that the relocation adds have no nodes until these are made.
    """

    def taken(column: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return tuple(() if old is None else column[old] for old in relocation.ops)

    return replace(
        step,
        graph=relocation.graph,
        members=taken(step.members),
        slots=tuple(() if old is None else step.slots[old] for old in relocation.ops),
        starts=taken(step.starts),
        ends=taken(step.ends),
        sources=tuple(None if old is None else step.sources[old] for old in relocation.tensors),
    )


def reference(name: str, index: int) -> str:
    """Return an output as a NodeDef's input names it."""
    return name if not index else f"{name}:{index}"


class _Editor:
    def __init__(self, graph_def: Any, step: Step, transport: Transport, plan: SwapPlan) -> None:
        self._graph_def, self._step, self._transport, self._copied = graph_def, step, transport, plan.copied
        self._table = step.table
        self.added: dict[str, Any] = {}
        self.swap_outs = self.swap_ins = self.control_edges = 0
        self._waits: dict[str, dict[str, None]] = {}
        """New control inputs of each node, by its name."""
        self._made_ops: dict[int, str] = {}
        """The node of each op that a relocation has added."""
        self._moved_from: dict[int, str] = {}
        """The device of each op that runs on the host now."""
        self._made: dict[int, str] = {}
        """The reference of each tensor that a relocation has added or brought back."""
        self._backs: dict[int, list[tuple[int, int, str, str]]] = {}
        """By op the swap-ins that begin behind it: place of the first reader, tensor, node and device."""
        self._place = positions(plan.order)
        self._exits = Exits(step.table, step.conditions, self._add_node)
        self._switched: dict[int, str] = {}
        """Switches of which there is another one now, that reads what came back."""
        self._begun: dict[int, None] = {}
        """The ops behind which copies begin that read nothing of theirs."""

    @cached_property
    def _op_of(self) -> dict[int, int]:
        """The op that each node belongs to."""
        return {node: op for op, nodes in enumerate(self._step.members) for node in nodes}

    # --- what ops and tensors are called ----------------------------------------------------------------

    def _reference(self, tensor: int) -> str:
        if tensor in self._made:
            return self._made[tensor]
        source = self._step.sources[tensor]
        if source is None:
            raise RewriteError(f"{self._step.graph.tensor_name(tensor)} is no output of a node")
        return reference(self._table.names[source.node], source.index)

    def _base(self, tensor: int) -> str:
        """Return the beginning of the names of the nodes that move ``tensor``."""
        name, _, index = self._reference(tensor).partition(":")
        return f"{name}/{MARK}/{index or 0}"

    def _device(self, op: int) -> str:
        made = self._made_ops.get(op)
        node = self._table.nodes[self._step.members[op][0]] if made is None else self.added[made]
        device: str = node.device
        return device

    def _dtype(self, tensor: int) -> int:
        graph = self._step.graph
        while self._step.sources[tensor] is None:  # a copy of what its op reads
            tensor = graph.ops[graph.tensors[tensor].op].inputs[0]
        source = self._step.sources[tensor]
        assert source is not None  # noqa: S101 - the loop ends at one
        return self._step.dtypes[source]

    def _nodes(self, op: int, column: Sequence[tuple[int, ...]]) -> list[str]:
        made = self._made_ops.get(op)
        return [self._table.names[node] for node in column[op]] if made is None else [made]

    # --- host reads ------------------------------------------------------------------------------------

    def read_from_host(self, relocation: Relocation) -> None:
        """Make the copies of a relocated graph, and let its ops read them."""
        reads = {read.op: read for read in relocation.reads}
        fetched = {op for read in relocation.reads for op in read.fetches}
        for op in relocation.graph.ops:
            if op.id in reads:
                self._read_there(op, reads[op.id])
            elif op.id in fetched:
                self._fetch(op)
            elif not self._step.members[op.id]:
                self._add_op(op, self._out(op.inputs[0], "host_copy", ()))

    def _read_there(self, op: Op, read: HostRead) -> None:
        for slot, held in read.slots.items():
            self._redirect(Use(op.id, slot), self._reference(held))
        if read.on_host:
            node = self._table.nodes[self._step.members[op.id][0]]
            self._moved_from[op.id] = node.device
            node.device = host_beside(node.device)

    def _fetch(self, op: Op) -> None:
        """Copy the output of an op on the host to its device, for all that read it, also on others."""
        made = op.inputs[0]
        uses = self._step.graph.uses[op.outputs[0]]
        there = [use for use in uses if self._step.members[use.op]]
        device = self._moved_from[self._step.graph.tensors[made].op]
        back = self._in(self._reference(made), made, device, f"{self._base(made)}/fetch", ())
        self._add_op(op, back)
        for use in there:
            self._redirect(use, back)

    def _add_op(self, op: Op, name: str) -> None:
        self._made_ops[op.id] = name
        self._made[op.outputs[0]] = name

    # --- swaps -----------------------------------------------------------------------------------------

    def send(self, swap: Swap) -> str:
        """Send a tensor out, and return the node that holds it."""
        step = self._step
        if swap.tensor in self._copied:
            held = self._made_ops[self._copied[swap.tensor]]
        else:
            maker = step.graph.tensors[swap.tensor].op
            device = self._device(maker)
            waits = [] if swap.after == maker else self._begin(swap.after, device)
            if _copies_at_once(device):
                waits = self._delays(swap, device, waits)
            held = self._out(swap.tensor, "swap_out", waits)
        freed = held
        if swap.until is not None and not _copies_at_once(self._device(swap.after)):
            freed = self._hold(swap, swap.until, held)
        for op in swap.blocks:
            self.order(freed, op)
        return held

    def _delays(self, swap: Swap, device: str, waits: list[str]) -> list[str]:
        """Delay a copy on a CPU until it is all that is left for its thread; return what it waits for.

        A thread runs the cheap ops that have become ready, in their order. It goes on with an expensive op
        only where no cheap one is left, and leaves all others to threads that may be busy or asleep
        (``ExecutorState::ScheduleReady``). So one thread may run the forward pass while tensors wait for
        their copies, and fill the device. But a ``NoOp`` is cheap: while it waits for its turn, the thread
        leaves what reads the tensor to others, and then nothing but the copy becomes ready. Cheap readers of
        the tensor come between, so there is one ``NoOp`` more than cheap ops follow one another.
        """
        if host_beside(device) != device:
            return waits
        waits = waits or [self._reference(swap.tensor).partition(":")[0]]
        for number in range(min(MOST_DELAYS, 1 + self._cheap_behind(swap.after))):
            waits = [self._no_op(f"{self._base(swap.tensor)}/delay_{number}", "delay", device, waits)]
        return waits

    def _cheap_behind(self, op: int) -> int:
        """Count the cheap ops that follow one another behind an op, as far as delays go."""
        graph, count, reached = self._step.graph, 0, {op}
        while reached and count < MOST_DELAYS:
            later = {one for before in reached for one in graph.successors[before]}
            reached = {one for one in later if self._is_cheap(graph.ops[one])}
            count += bool(reached)
        return count

    def _is_cheap(self, op: Op) -> bool:
        graph = self._step.graph
        if op.id in graph.views or op.type in SHAPE_READERS:
            return True
        return all((graph.tensors[one].nbytes or 0) <= CHEAP_BYTES for one in (*op.inputs, *op.outputs))

    def _hold(self, swap: Swap, until: int, held: str) -> str:
        """Keep the buffer until its copy and the op ``until`` are done, whichever comes last.

        A buffer that is freed whenever the link has done with it is another one in each step, and so is what
        is put in its place: free memory would fall into other pieces than those that were planned.
        """
        holder = self._holder(f"{self._base(swap.tensor)}/hold", self._device(swap.after))
        holder.attr["T"].list.type.append(self._dtype(swap.tensor))
        holder.input.extend(
            [self._reference(swap.tensor), *(f"^{wait}" for wait in (held, *self._ends(until)))]
        )
        return str(holder.name)

    def _holder(self, name: str, device: str) -> Any:
        """Add an op that keeps what it reads; unlike ``Identity`` it leaves integers on a GPU, too."""
        node = self.added[self._add(name, "hold")]
        node.op, node.device = "IdentityN", device
        return node

    def bring_back(self, swap: Swap, number: int, held: str) -> None:
        """Bring a tensor back from the node that holds it, for the uses of its swap-in of that number."""
        graph, swap_in = self._step.graph, swap.swap_ins[number]
        name = f"{self._base(swap.tensor)}/swap_in_{number}"
        device = self._device(graph.tensors[swap.tensor].op)  # some uses may be on another one
        back = self._in(held, swap.tensor, device, name, self._begin(swap_in.trigger, device))
        needed = min(self._place[use.op] for use in swap_in.uses)
        self._backs.setdefault(swap_in.trigger, []).append((needed, swap.tensor, back, device))
        versions = {swap.tensor: back}
        for use in swap_in.uses:
            self._redirect(use, self._version(graph.ops[use.op].inputs[use.slot], versions, name))
        for op in swap_in.blocks:
            self.order(back, op)

    def _ends(self, op: int) -> list[str]:
        """Return the nodes to wait for where an op is waited for: they run in each step."""
        if op in self._made_ops:
            return [self._made_ops[op]]
        return [self._passed(node) for node in self._step.ends[op]]

    def _passed(self, node: int) -> str:
        """Return a node that runs in each step: this one or, under a condition, one behind it."""
        if self._step.conditions.predicate(node) is None:
            return self._table.names[node]
        name = f"{self._table.names[node]}/{MARK}/passed"
        if name not in self.added and name not in self._table.number:  # of another device's plan, too
            self._exits.write(name, [node])
        return name

    def _begin(self, op: int, device: str) -> list[str]:
        """Return the nodes behind which a copy of a device begins once ``op`` has run."""
        if self._device(op) == device and not _copies_at_once(device):
            self._begun[op] = None
        return self._ends(op)

    def _out(self, tensor: int, called: str, waits: Iterable[str]) -> str:
        device = self._device(self._step.graph.tensors[tensor].op)
        name = self._add(f"{self._base(tensor)}/{called}", "swap_out")
        node = self.added[name]
        self._transport.write_swap_out(node, self._reference(tensor), self._dtype(tensor), device)
        node.input.extend(f"^{wait}" for wait in waits)
        self.swap_outs += 1
        return name

    def _in(self, held: str, tensor: int, device: str, name: str, waits: Iterable[str]) -> str:
        name = self._add(name, "swap_in")
        node = self.added[name]
        self._transport.write_swap_in(node, held, self._dtype(tensor), device)
        node.input.extend(f"^{wait}" for wait in waits)
        self.swap_ins += 1
        return name

    def _add(self, name: str, purpose: str) -> str:
        self._add_node(name, purpose)
        return name

    def _add_node(self, name: str, purpose: str) -> Any:
        node = self._graph_def.node.add(name=name)
        node.attr[MARK_ATTR].s = purpose.encode()
        self.added[name] = node
        return node

    def _no_op(self, name: str, purpose: str, device: str, waits: Iterable[str]) -> str:
        node = self._add_node(name, purpose)
        node.op, node.device = "NoOp", device
        node.input.extend(f"^{wait}" for wait in waits)
        return name

    def _redirect(self, use: Use, version: str) -> None:
        """Let a use read ``version`` in place of what it read."""
        if (made := self._made_ops.get(use.op)) is not None:
            self.added[made].input[use.slot] = version
            return
        node, slot = self._step.slots[use.op][use.slot]
        self._table.nodes[node].input[slot] = version

    def _version(self, tensor: int, versions: dict[int, str], name: str) -> str:
        """Return the reference that replaces ``tensor`` where its uses read the copy that came back.

        ``tensor`` is the swapped tensor or an alias of it; an alias is made again on top of the copy.
        """
        if tensor not in versions:
            original = self._step.graph.tensors[tensor].alias_of
            source = self._step.sources[tensor]
            if original is None or source is None:
                what = self._step.graph.tensor_name(tensor)
                raise RewriteError(f"{what} is not an alias of what was swapped")
            shown = self._version(original, versions, name)
            versions[tensor] = self._alias_again(source, self._reference(original), shown, name)
        return versions[tensor]

    def _alias_again(self, source: Source, old: str, shown: str, name: str) -> str:
        alias = self._table.nodes[source.node]
        waits = self._table.controls[source.node]
        if alias.op in ("Identity", "IdentityN") and not waits:
            return shown
        copy = self._add(f"{name}/{alias.op.lower()}_{len(self.added)}", "alias")
        node = self.added[copy]
        if alias.op == "IdentityN":
            write_copy(node, "Identity", shown, self._step.dtypes[source], alias.device)
            node.input.append(f"^{alias.name}")
            return copy
        node.op, node.device = alias.op, alias.device
        node.input.extend(shown if text == old else text for text in alias.input if text[0] != "^")
        for key, value in alias.attr.items():
            if not key.startswith("_"):
                node.attr[key].CopyFrom(value)
        if alias.op in SWITCHES:
            self._switched[source.node] = shown
            node.input.extend(text for text in alias.input if text[0] == "^")
        elif waits:  # what reads the alias waits for what it waits for
            node.input.append(f"^{alias.name}")
        return reference(copy, source.index)

    # --- sums ------------------------------------------------------------------------------------------

    def fix_sum(self, number: int, beginning: Beginning) -> None:
        """Have a sum add its terms in the order in which it does unedited: see ``sum_order``."""
        node, slot = self._table.nodes[number], beginning.slot
        if node.attr["T"].type not in FLOATS or not beginning.held:
            return
        held = [node.input[one] for one in beginning.held]
        node.input[0], node.input[slot] = node.input[slot], node.input[0]
        dtype = node.attr["T"].type
        holder = self._holder(f"{node.name}/{MARK}/hold", node.device)
        holder.attr["T"].list.type.extend([dtype] * len(held))
        holder.input.extend([*held, f"^{node.name}"])
        ops, members = self._step.graph.ops, self._step.members
        readers = {self._op_of[node] for node, _ in self._table.readers[number] if node in self._op_of}
        free = [op for op in readers if not ops[op].unordered or len(members[op]) == 1]
        if free:  # who waits for it keeps it from being taken for an op without use
            self.order(holder.name, min(free, key=lambda op: (ops[op].unordered, op)))

    # --- order -----------------------------------------------------------------------------------------

    def launch_copies_first(self, edges: Iterable[SerialEdge]) -> None:
        """Let what follows an op on a GPU be launched behind the copies that begin with the op.

        A copy waits for all kernels that were launched before it, and what comes gets its buffer when it is
        launched: behind the plan's next op it would come late, and lie elsewhere. An executor launches the
        readers of a tensor before what only waits for its op; a node between the op and its readers makes
        these the last, whether it runs before or after the copies. The readers wait for the op in any case.
        """
        ops, followers = self._step.graph.ops, dict[int, list[int]]()
        for before, after in edges:
            if ops[after].type not in STREAM_TYPES:
                followers.setdefault(before, []).append(after)
            elif ops[before].type not in STREAM_TYPES:
                self._begin(before, self._device(after))
        for op in self._begun:
            later = dict.fromkeys([*self._step.graph.successors[op], *followers.get(op, ())])
            ends = self._ends(op)  # of an op under a condition a node that streaming has added behind it
            kernels = [
                one
                for one in later
                if self._is_kernel_of(self._device(op), one)
                and not {*ends}.intersection(self._nodes(one, self._step.starts))
            ]
            if kernels:
                gate = self._no_op(f"{ends[0]}/{MARK}/launched", "gate", self._device(op), ends)
                for one in kernels:
                    self.order(gate, one)

    def _is_kernel_of(self, device: str, op: int) -> bool:
        """Tell whether an op is one of a device that may wait, and no copy."""
        found = self._step.graph.ops[op]
        is_copy = found.type in STREAM_TYPES or op in self._made_ops
        return not is_copy and not found.unordered and self._device(op) == device

    # --- fillers ---------------------------------------------------------------------------------------

    def fill(self, filler: Filler) -> None:
        """Take memory while an op, or the copies back that begin behind it, get theirs; see ``Filler``."""
        ends = self._ends(filler.op)
        # The order of the copies is the one in which they were simulated.
        copies = sorted(self._backs[filler.op]) if filler.copies else []
        backs = [back for _, _, back, _ in copies]
        device = copies[0][3] if copies else self._device(filler.op)
        # A session keeps kernels by their nodes' names, also for another plan.
        takes = crc32(repr((filler.sizes, filler.least)).encode())
        node = self.added[self._add(f"{ends[0]}/{MARK}/filler_{int(filler.copies)}_{takes:08x}", "filler")]
        node.op, node.device = FILLER, device
        node.attr["sizes"].list.i.extend(filler.sizes)
        node.attr["least"].i = filler.least
        node.input.extend(f"^{wait}" for wait in (ends if copies else self._waited_for(filler.op)))
        for before, back in pairwise((node.name, *backs)):
            self.added[back].input.append(f"^{before}")
        self.order(node.name, filler.follower if copies else filler.op)
        holder = self._holder(f"{node.name}/hold", device)
        holder.attr["T"].list.type.append(tf.uint8.as_datatype_enum)
        waits = (*backs, *self._ends(filler.last)) if copies else ends
        holder.input.extend([node.name, *(f"^{wait}" for wait in dict.fromkeys(waits))])
        self.order(holder.name, filler.until)

    def _waited_for(self, op: int) -> list[str]:
        """Return the nodes that an op reads from or waits for, without its own."""
        own = {*self._nodes(op, self._step.members)}
        texts: list[str] = []
        for name in self._nodes(op, self._step.starts):
            texts += [*self._node(name).input, *self._waits.get(name, ())]
        names = dict.fromkeys(text.removeprefix("^").partition(":")[0] for text in texts)
        return [name for name in names if name not in own]

    def _node(self, name: str) -> Any:
        return self.added[name] if name in self.added else self._table.nodes[self._table.number[name]]

    def follow(self, edge: SerialEdge) -> None:
        """Let an op wait for another one; both may be left out by a condition."""
        step = self._step
        starts = step.starts[edge.after]  # none: a copy that a relocation has added
        for node in step.ends[edge.before]:
            is_beside = starts and all(step.conditions.runs_with(node, start) for start in starts)
            self.order(self._table.names[node] if is_beside else self._passed(node), edge.after)
        if edge.before in self._made_ops:
            self.order(self._made_ops[edge.before], edge.after)

    def order(self, before: str, after: int) -> None:
        """Let an op wait for a node."""
        for name in self._nodes(after, self._step.starts):
            waits = self._waits.setdefault(name, {})
            if before != name and before not in waits:
                waits[before] = None

    def finish(self) -> None:
        """Write the new control inputs, each once, behind those that are there."""
        if self._switched:
            self._free_switches()
        for name, waits in self._waits.items():
            node = self._node(name)
            known = {text[1:] for text in node.input if text[0] == "^"}
            new = [f"^{before}" for before in waits if before not in known]
            node.input.extend(new)
            self.control_edges += len(new)

    def _free_switches(self) -> None:
        """Let switches that nobody reads any more read what came back.

        TensorFlow runs them all the same: they would keep what left until their predicate is known.
        """
        texts = (text for node in self._graph_def.node for text in node.input)
        read = {text.removeprefix("^").partition(":")[0] for text in texts}
        for number, shown in self._switched.items():
            if self._table.names[number] not in read:
                self._table.nodes[number].input[0] = shown

    def assign_in_place(self, ops: Iterable[int]) -> None:
        """Let assignments write into their variables' memory."""
        for op in ops:
            node = self._table.nodes[self._step.members[op][0]]
            node.op = ASSIGN_IN_PLACE
            node.attr[MARK_ATTR].s = b"assign"
            self.added[node.name] = node
