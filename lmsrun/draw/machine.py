"""A machine as a drawing: packages, NUMA nodes, cores, GPUs, adapters and memory, and the ranks on them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from launch.model.busy import gpu_key
from launch.model.idset import IdSet, format_ids
from launch.model.text import count_of, name_ids
from launch.model.topology import Adapter, Core, Gpu, Machine, NumaNode, Package
from lms.page.palette import STYLE, kind
from lms.page.svg import Canvas, fitted, text_width
from lmsrun.draw.marks import STATES, Mark
from lmsrun.render.topology import describe_counts, format_size

MARGIN, PAD, GAP = 16.0, 12.0, 5.0
ONE_COLUMN, TWO_COLUMNS = 760.0, 566.0
"""How wide a package is, alone in its row and beside another."""
MOST_CELLS = 96
"""A node of more cores is drawn as ranges of alike ones."""
MOST_NAMED = 4
"""The ranks that one cell names."""
CARD_WIDTH, CARD_HEIGHT = 248.0, 42.0


@dataclass(frozen=True)
class _Cell:
    """A core, or a range of cores that are alike."""

    cores: int
    cpus: IdSet
    planned: tuple[int, ...]
    found: tuple[int, ...] | None
    """The ranks that the kernel says are here; ``None``: nobody has asked it."""
    allowed: bool

    @property
    def label(self) -> str:
        cpus = format_ids(self.cpus)
        return cpus if self.cores == 1 else f"{self.cores} cores, CPUs {cpus}"

    @property
    def ranks(self) -> str:
        here = self.planned if self.found is None else tuple(sorted({*self.planned, *self.found}))
        named = " ".join(f"r{rank}" for rank in here[:MOST_NAMED])
        return named + (f" +{len(here) - MOST_NAMED}" if len(here) > MOST_NAMED else "")

    @property
    def width(self) -> float:
        return max(text_width(self.label, 10), text_width(self.ranks, 12), 16.0) + 10  # ranks are bold


def draw_machine(
    machine: Machine,
    marks: Sequence[Mark] = (),
    *,
    title: str = "",
    key: str = "lm",
    style: bool = True,
    is_here: bool = False,
) -> str:
    """Draw a machine as SVG.

    Args:
        machine: What to draw.
        marks: The ranks on this host.
        title: What stands above it; the machine's own name without one.
        key: Begins the ids of the drawing.
        style: Whether its CSS travels with it; on a page that has it once, it need not.
        is_here: Whether it is the machine of this process, which then says what it may use of it.
    """
    return _Drawing(machine, marks, is_here).draw(title, key, STYLE if style else "")


class _Drawing:
    """Paints one machine."""

    def __init__(self, machine: Machine, marks: Sequence[Mark], is_here: bool) -> None:
        self._machine, self._marks, self._is_here = machine, marks, is_here
        self._closed = f"{'this process' if is_here else 'a job there'} may not use it"
        self._canvas = Canvas()
        self._columns = 2 if len(machine.packages) > 1 else 1
        self._column = TWO_COLUMNS if self._columns == 2 else ONE_COLUMN
        self._width = self._columns * self._column + (self._columns + 1) * MARGIN
        self._by_gpu = {mark.gpu: mark for mark in marks if mark.gpu}
        self._unbound = tuple(mark.rank for mark in marks if not mark.cpus)

    def draw(self, title: str, key: str, style: str) -> str:
        machine, canvas = self._machine, self._canvas
        name = f"{machine.source} ({machine.architecture})"
        y = self._heading(title or name, name if title else "")
        for row in range(0, len(machine.packages), self._columns):
            y = self._row(machine.packages[row : row + self._columns], y)
        y = self._elsewhere(y)
        y = self._footer(y)
        return canvas.document(
            self._width, y, title or name, describe(machine, self._marks), key=key, style=style
        )

    # --- blocks from top to bottom -----------------------------------------------------------------------

    def _heading(self, title: str, below: str) -> float:
        inner = self._width - 2 * MARGIN
        self._canvas.text(MARGIN, 30, fitted(title, inner, 18.5), "lm-head lm-title")
        told = ". ".join(filter(None, [below, describe_counts(self._machine)]))
        self._canvas.text(MARGIN, 50, fitted(told, inner), "lm-dim")
        return 64

    def _row(self, packages: Sequence[Package], y: float) -> float:
        """Paint packages side by side, each as tall as the tallest."""
        places = []
        for number, package in enumerate(packages):
            x = MARGIN + number * (self._column + MARGIN)
            places.append((x, len(self._canvas.parts), package))
            self._package(package, x, y)
        bottom = self._canvas.height + PAD
        for x, at, package in reversed(places):
            tip = f"socket {package.id}, CPUs {format_ids(package.cpus)}"
            self._insert_box(at, x, y, self._column, bottom - y, "lm-package", tip)
        self._canvas.height = bottom
        return bottom + MARGIN

    def _package(self, package: Package, x: float, y: float) -> None:
        self._canvas.text(x + PAD, y + 22, f"Socket {package.id}", "lm-head")
        self._canvas.text(
            x + self._column - PAD,
            y + 22,
            fitted(f"CPUs {format_ids(package.cpus)}", self._column - 140),
            "lm-dim",
            anchor="end",
        )
        inner, bottom = self._column - 2 * PAD, y + 32
        nodes = [node for node in self._machine.numa_nodes if node.package == package.id]
        for node in nodes:
            bottom = self._node(node, x + PAD, bottom, inner) + 8
        rest = [core for core in self._machine.cores if core.package == package.id and core.numa_node is None]
        if rest:
            self._canvas.text(x + PAD, bottom + 14, "cores whose NUMA node is unknown", "lm-dim")
            self._cores(rest, x + PAD, bottom + 22, inner)

    def _node(self, node: NumaNode, x: float, y: float, width: float) -> float:
        at, inner = len(self._canvas.parts), width - 2 * PAD
        cores = [core for core in self._machine.cores if core.numa_node == node.id]
        size = f", {format_size(node.memory_bytes)}"
        told = f"NUMA node {node.id}: {count_of(len(cores), 'core')}{size}"
        self._canvas.text(x + PAD, y + 18, told, "lm-text lm-bold")
        room = inner - text_width(told) - 24
        self._canvas.text(
            x + width - PAD,
            y + 18,
            fitted(f"CPUs {format_ids(node.cpus)}" if node.cpus else "no CPUs", room),
            "lm-dim",
            anchor="end",
        )
        bottom = self._memory(node, x + PAD, y + 26, inner) + 7
        if cores:
            bottom = self._cores(cores, x + PAD, bottom, inner) + 7
        gpus = [gpu for gpu in self._machine.gpus if gpu.numa_node == node.id]
        bottom = self._cards(gpus, x + PAD, bottom, inner)
        adapters = [one for one in self._machine.adapters if one.numa_node == node.id]
        bottom = self._adapters(adapters, x + PAD, bottom, inner)
        self._insert_box(at, x, y, width, bottom + 5 - y, "lm-node", f"NUMA node {node.id}")
        return bottom + 5

    def _memory(self, node: NumaNode, x: float, y: float, width: float) -> float:
        """Paint the node's memory as a bar, with the part that each rank may pin."""
        allowed = node.id in self._machine.allowed.mems or node.memory_bytes == 0
        class_ = "lm-bar" if allowed else "lm-off"
        why = "" if allowed else f"; {self._closed}"
        size = format_size(node.memory_bytes)
        self._canvas.box(x, y, width, 20, class_, round_=4, tip=f"memory of node {node.id}: {size}{why}")
        here = [mark for mark in self._marks if node.id in mark.mem_nodes]
        left, tail = x, "memory" if node.memory_bytes else size
        unnamed = False
        for mark in here:
            share = (mark.limit_bytes or 0) / len(mark.mem_nodes)
            part = min(share / node.memory_bytes * width, x + width - left) if node.memory_bytes else 0.0
            unnamed = unnamed or 0 < part < 1
            if part >= 1:
                self._canvas.box(left, y, part, 20, f"lm-k{kind(mark.rank)}", round_=4, tip=mark.text)
                shown = f"r{mark.rank} {format_size(int(share))}"
                for text in (shown, f"r{mark.rank}"):
                    if text_width(text, 10) + 6 <= part:
                        self._canvas.text(left + 5, y + 14, text, "lm-text lm-tiny")
                        break
                else:
                    unnamed = True
                left += part
        if not any(mark.limit_bytes for mark in here) and here:
            named = ", ".join(f"r{mark.rank}" for mark in here[:8])
            more = f" and {len(here) - 8} more" if len(here) > 8 else ""
            tail = f"{tail}: {here[0].policy} {named}{more}"
        room = x + width - left - 12
        if unnamed:
            ids = format_ids(frozenset(mark.rank for mark in here))
            named = f"{tail}: parts of ranks {ids}"
            tail = named if text_width(named, 10) <= room else f"{tail}: parts of {len(here)} ranks"
        if text_width(tail, 10) + 12 <= x + width - left:
            self._canvas.text(x + width - 6, y + 14, tail, "lm-text lm-tiny", anchor="end")
        return y + 20

    def _cores(self, cores: Sequence[Core], x: float, y: float, width: float) -> float:
        cells = self._cells(cores)
        cell_width = min(max(cell.width for cell in cells), width)
        tall = any(cell.ranks for cell in cells)
        height = 32.0 if tall else 20.0
        per_row = max(1, int((width + 4) // (cell_width + 4)))
        per_row = -(-len(cells) // -(-len(cells) // per_row))  # rows of about as many cells each
        left = x
        for number, cell in enumerate(cells):
            is_core = len(cells) == len(cores)
            step = cell_width if is_core else min(cell.width, width)
            full = number % per_row == 0 if is_core else left + step > x + width + 0.5
            if full and left > x:
                left, y = x, y + height + 4
            self._cell(cell, left, y, step, height)
            left += step + 4
        return y + height

    def _cell(self, cell: _Cell, x: float, y: float, width: float, height: float) -> None:
        here = cell.planned or cell.found or ()
        class_ = f"lm-k{kind(here[0])}" if here else "lm-core" if cell.allowed else "lm-off"
        told = [f"CPUs {format_ids(cell.cpus)}"]
        told += [f"rank {rank} planned here" for rank in cell.planned[:MOST_NAMED]]
        if cell.found is not None and set(cell.found) != set(cell.planned):
            missing = [rank for rank in cell.planned if rank not in cell.found]
            foreign = [rank for rank in cell.found if rank not in cell.planned]
            told += [f"rank {rank} is not here" for rank in missing]
            told += [f"rank {rank} is here and not planned here" for rank in foreign]
            class_ += " lm-missing" if missing and not cell.found else ""
        if not cell.allowed:
            told.append(self._closed)
        self._canvas.box(x, y, width, height, class_, round_=3, tip="; ".join(told))
        if cell.found is not None and set(cell.found) != set(cell.planned):
            self._canvas.box(x, y, width, height, "lm-badline", round_=3)
        shown = fitted(cell.label, width - 4, 10)
        self._canvas.text(x + width / 2, y + 14, shown, "lm-text lm-tiny", anchor="middle")
        if cell.ranks:
            self._canvas.text(
                x + width / 2,
                y + 26,
                fitted(cell.ranks, width - 4, 10),
                "lm-text lm-tiny lm-bold",
                anchor="middle",
            )

    def _cells(self, cores: Sequence[Core]) -> list[_Cell]:
        cells = [self._of_core(core) for core in sorted(cores, key=lambda core: min(core.cpus, default=0))]
        if len(cells) <= MOST_CELLS:
            return cells
        joined = []
        for _, run in groupby(cells, key=lambda cell: (cell.planned, cell.found, cell.allowed)):
            alike = list(run)
            cpus: IdSet = frozenset().union(*(cell.cpus for cell in alike))
            joined.append(_Cell(len(alike), cpus, alike[0].planned, alike[0].found, alike[0].allowed))
        return joined

    def _of_core(self, core: Core) -> _Cell:
        planned = tuple(mark.rank for mark in self._marks if core.cpus & mark.cpus)
        found = None
        if any(mark.state != "planned" for mark in self._marks):
            # One that is not bound may be anywhere, which says nothing of a core.
            bound = [mark for mark in self._marks if mark.found_cpus is not None and mark.cpus]
            silent = [mark.rank for mark in self._marks if mark.found_cpus is None and core.cpus & mark.cpus]
            found = tuple(
                sorted([mark.rank for mark in bound if core.cpus & (mark.found_cpus or frozenset())] + silent)
            )
        return _Cell(1, core.cpus, planned, found, bool(core.cpus & self._machine.allowed.cpus))

    def _cards(self, gpus: Sequence[Gpu], x: float, y: float, width: float) -> float:
        """Paint GPUs, as many in a row as there is room for."""
        per_row = max(1, int((width + GAP) // (CARD_WIDTH + GAP)))
        card = (width - GAP * (per_row - 1)) / per_row if len(gpus) >= per_row else CARD_WIDTH
        for number, gpu in enumerate(gpus):
            column = number % per_row
            if number and not column:
                y += CARD_HEIGHT + GAP
            self._gpu(gpu, x + column * (card + GAP), y, card)
        return y + CARD_HEIGHT + GAP if gpus else y

    def _gpu(self, gpu: Gpu, x: float, y: float, width: float) -> None:
        mark = self._by_gpu.get(gpu_key(gpu))
        size = format_size(gpu.memory_bytes)
        name = gpu.name or gpu.vendor or "model unknown"
        told = [f"GPU {gpu.index}", gpu.pci_bus_id, name, size, *([gpu.uuid] if gpu.uuid else [])]
        if gpu.numa_node is None:
            told.append("NUMA node unknown")
        tip = ", ".join(told) + (f"; {mark.text}" if mark else "")
        class_ = "lm-card" if mark is None else f"lm-k{kind(mark.rank)}"
        self._canvas.box(x, y, width, CARD_HEIGHT, class_, tip=tip)
        badge = "" if mark is None else f"rank {mark.rank}{_SIGNS[mark.state]}"
        room = width - 20 - (text_width(badge) + 8 if badge else 0)
        head = f"GPU {gpu.index}  {gpu.pci_bus_id or gpu.uuid or ''}"
        self._canvas.text(x + 10, y + 17, fitted(head, room), "lm-text lm-bold")
        told_size = "" if gpu.memory_bytes is None else f", {size}"
        self._canvas.text(x + 10, y + 33, fitted(f"{name}{told_size}", width - 20, 11), "lm-text lm-small")
        if badge:
            tone = "lm-bad" if mark is not None and mark.state == "differs" else "lm-text"
            self._canvas.text(x + width - 10, y + 17, badge, f"{tone} lm-bold", anchor="end")

    def _adapters(self, adapters: Sequence[Adapter], x: float, y: float, width: float) -> float:
        left = x
        for adapter in adapters:
            shown = f"network {adapter.name}"
            near = ", ".join(address for address, _ in adapter.near_gpus)
            step = text_width(shown, 11) + 16
            if left + step > x + width and left > x:
                left, y = x, y + 22 + GAP
            tip = f"network adapter {adapter.name}" + (f", near {near}" if near else "")
            self._canvas.box(left, y, min(step, width), 22, "lm-card", round_=11, tip=tip)
            self._canvas.text(left + 8, y + 15, fitted(shown, width - 16, 11), "lm-text lm-small")
            left += step + GAP
        return y + 22 + GAP if adapters else y

    def _elsewhere(self, y: float) -> float:
        """Paint what belongs to no package."""
        machine, inner = self._machine, self._width - 2 * MARGIN
        for node in machine.numa_nodes:
            if node.package is None and node.cpus:
                y = self._node(node, MARGIN, y, inner) + 8
        lost = [gpu for gpu in machine.gpus if gpu.numa_node is None]
        if lost:
            y = self._titled("GPUs whose NUMA node is unknown", y)
            y = self._cards(lost, MARGIN, y, inner) + 6
        adapters = [one for one in machine.adapters if one.numa_node is None]
        if adapters:
            y = self._titled("Network adapters whose NUMA node is unknown", y)
            y = self._adapters(adapters, MARGIN, y, inner) + 6
        bare = [node for node in machine.numa_nodes if node.package is None and not node.cpus]
        if bare:
            y = self._titled("NUMA nodes without CPUs", y)
            y = self._bare(bare, y)
        return y

    def _titled(self, text: str, y: float) -> float:
        self._canvas.text(MARGIN, y + 12, text, "lm-text lm-bold")
        return y + 20

    def _bare(self, nodes: Sequence[NumaNode], y: float) -> float:
        left = MARGIN
        for (what, size), run in groupby(nodes, key=lambda node: (node.kind, node.memory_bytes)):
            ids = [node.id for node in run]
            each = f" {format_size(size)}" + (" each" if len(ids) > 1 and size else "")
            used = "a GPU's own memory" if what == "gpu" else "memory only"
            if what == "gpu" and not size:
                each, used = "", f"kept for {used}, none there now"
            shown = f"{'nodes' if len(ids) > 1 else 'node'} {format_ids(ids)}:{each}, {used}"
            step = text_width(shown, 11) + 18
            if left + step > self._width - MARGIN and left > MARGIN:
                left, y = MARGIN, y + 24 + GAP
            tip = "no rank may be bound to a GPU's own memory" if what == "gpu" else shown
            self._canvas.box(left, y, step, 24, "lm-card", tip=tip)
            self._canvas.text(left + 9, y + 16, shown, "lm-text lm-small")
            left += step + GAP
        return y + 24 + 10

    # --- below it ----------------------------------------------------------------------------------------

    def _footer(self, y: float) -> float:
        inner = self._width - 2 * MARGIN
        y = self._legend(y + 4)
        allowed = self._machine.allowed
        lines = []
        if self._is_here:
            lines.append(
                f"This process may use {name_ids('CPU', format_ids(allowed.cpus))} "
                f"and memory of {name_ids('NUMA node', format_ids(allowed.mems))}."
            )
        if self._unbound:
            lines.append(f"Not bound to CPUs: {name_ids('rank', format_ids(self._unbound))}.")
        for mark in [mark for mark in self._marks if mark.state == "differs"][:4]:
            lines.append(f"Rank {mark.rank} is not as planned: {mark.why or 'no reason was given'}.")
        lines += [f"Warning: {warning}" for warning in self._machine.warnings[:3]]
        if len(self._machine.warnings) > 3:
            lines.append(f"{len(self._machine.warnings) - 3} more warnings are left out.")
        for line in lines:
            y += 18
            tone = "lm-bad" if line.startswith("Rank ") else "lm-dim"
            self._canvas.text(MARGIN, y, fitted(line, inner), tone)
        return y + MARGIN

    def _legend(self, y: float) -> float:
        samples: list[tuple[str, str]] = [("lm-core", "a core, with the numbers of its CPUs")]
        if self._marks:
            samples = [(f"lm-k{kind(self._marks[0].rank)}", "r0: a core, memory or GPU of rank 0, and so on"),
                       ("lm-core", "what no rank has")]  # fmt: skip
        if any(mark.found_cpus is not None for mark in self._marks):
            samples.append(("lm-badline", "not as planned"))
        if any(not core.cpus & self._machine.allowed.cpus for core in self._machine.cores):
            samples.append(("lm-off", self._closed))
        if any(mark.gpu and mark.state == "verified" for mark in self._marks):
            samples.append(("", "✓ read back from the kernel as planned"))
        elif self._marks and all(mark.state == "verified" for mark in self._marks):
            samples.append(("", "all of it was read back from the kernel as planned"))
        if any(cell.planned[MOST_NAMED:] for cell in map(self._of_core, self._machine.cores)):
            samples.append(("", "+2: two more ranks on the same core"))
        left = MARGIN
        for class_, text in samples:
            step = text_width(text, 11) + (38 if class_ else 18)
            if left + step > self._width - MARGIN and left > MARGIN:
                left, y = MARGIN, y + 20
            if class_:
                self._canvas.box(left, y, 16, 12, class_, round_=3)
            self._canvas.text(left + (22 if class_ else 0), y + 10, text, "lm-dim lm-small")
            left += step
        return y + 14

    def _insert_box(
        self, at: int, x: float, y: float, width: float, height: float, class_: str, tip: str
    ) -> None:
        """Paint a box below what has been painted since ``at``."""
        reached = self._canvas.height
        self._canvas.box(x, y, width, height, class_, round_=8, tip=tip)
        self._canvas.parts.insert(at, self._canvas.parts.pop())
        self._canvas.height = max(reached, y + height)


_SIGNS = {"planned": "", "verified": " ✓", "differs": " ✗", "unknown": " ?"}


def describe(machine: Machine, marks: Sequence[Mark]) -> str:
    """Say in words what the drawing shows."""
    gpus = Counter(gpu.numa_node for gpu in machine.gpus)
    nodes = [
        f"NUMA node {node.id}: "
        + (f"CPUs {format_ids(node.cpus)}, " if node.cpus else "no CPUs, ")
        + f"{format_size(node.memory_bytes)}, {count_of(gpus[node.id], 'GPU')}"
        for node in machine.numa_nodes
    ]
    ranks = [mark.text for mark in marks]
    states = sorted({STATES[mark.state] for mark in marks})
    told = f"Ranks ({', '.join(states)}): {'; '.join(ranks)}." if ranks else ""
    return f"{describe_counts(machine)}. {'; '.join(nodes)}. {told}".strip()
