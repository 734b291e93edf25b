"""lstopo's XML, versions 1 to 3, of any machine.

The document is hostile until checked: entities are refused (so that nothing expands), external ones are never
fetched, and its size and depth are limited.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from launch.discover.check import check
from launch.discover.gpus import (
    PCI_GPU_CLASSES,
    GpuFacts,
    build_gpu,
    is_nvlink_machine,
    limit_gpus,
    parse_pci_address,
    pci_order,
    say_unplaced,
)
from launch.discover.sysfs import (
    Hardware,
    build_cores,
    build_packages,
    host_memory_nodes,
    kind_of,
    limit_numa_nodes,
    only,
    take_shared_cpus_once,
)
from launch.model.errors import TopologyError
from launch.model.idset import IdParser, IdSet, format_ids
from launch.model.topology import MAX_NUMA_NODES, Allowed, Machine, NumaNode

MAX_DEPTH = 256
MAX_ELEMENTS = 150_000
"""A machine of 256 CPUs has 3,000; each takes 500 bytes of memory and 2 us."""
MAX_TAG_BYTES = 256 << 10
"""Of one element with all its attributes."""
_PIECE_BYTES = 1 << 16
_MAX_MATRIX_BYTES = 4 * MAX_NUMA_NODES**2
"""Distances of three digits."""
_ATTRIBUTES = frozenset(
    {"type", "os_index", "cpuset", "online_cpuset", "allowed_cpuset", "allowed_nodeset", "local_memory"}
    | {"subtype", "name", "pci_busid", "pci_type"}
)

_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]")
_GPU_OS_DEVICE = re.compile(r"(nvml|cuda|rsmi)[0-9]+")
"""Names of OS devices that only a GPU has; version 1 gives no subtype. OpenCL devices may be CPUs."""
_MEMORY_INFOS = ("CUDAGlobalMemorySize", "RSMIVRAMSize")
_UUID_INFOS = ("NVIDIAUUID", "AMDUUID")


@dataclass(slots=True)
class _Object:
    """One ``<object>`` with its ``<info>`` children."""

    kind: str
    attributes: Mapping[str, str]
    parent: "_Object | None"
    parser: IdParser
    infos: dict[str, str] = field(default_factory=dict)
    children: "list[_Object]" = field(default_factory=list)

    def walk(self, *, into_devices: bool = True) -> "Iterator[_Object]":
        """Yield this object and all below it, in document order; below PCI devices only if that is wished."""
        stack = [self]
        while stack:
            one = stack.pop()
            yield one
            below = one.children
            stack.extend(
                reversed(below if into_devices else [each for each in below if each.kind != "PCIDev"])
            )

    def mask(self, name: str) -> IdSet | None:
        """Parse a set attribute; None when it is absent or infinite."""
        text = self.attributes.get(name)
        if text is None or text.startswith("0xf...f"):
            return None
        return self.parser.mask(text)

    def number(self, name: str) -> int | None:
        """Parse a whole number attribute; None when it is absent or none."""
        text = self.attributes.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


@dataclass
class _Document:
    """What the parser gathered."""

    root: _Object | None = None
    is_topology: bool = False
    infos: dict[str, str] = field(default_factory=dict)
    distance_ids: list[int] = field(default_factory=list)
    distance_values: list[int] = field(default_factory=list)


def parse_hwloc_xml(content: bytes, source: str) -> Machine:
    """Read an XML export of hwloc.

    Args:
        content: The document.
        source: Its name, for errors and for the machine.

    Raises:
        TopologyError: If it is not well-formed, not a topology, hostile, or contradicts itself.
    """
    try:
        machine = _build(_parse(content), source)
        check(machine)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise TopologyError(
            f"{source} is damaged XML ({error}); needed what 'lstopo FILE.xml' writes"
        ) from error
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from error
    return machine


class _Reader:
    """Receives the parser's events and builds a ``_Document``."""

    def __init__(self) -> None:
        self.document = _Document()
        self._open: list[_Object] = []
        self._depth = self._objects = 0
        self._parser = IdParser()
        self._text: list[str] | None = None
        self._text_bytes = 0
        self._in_latencies = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        self._objects += 1
        if self._depth > MAX_DEPTH or self._objects > MAX_ELEMENTS:
            raise TopologyError(f"more than {MAX_ELEMENTS} elements or {MAX_DEPTH} levels; needed a machine")
        if tag == "topology":
            self.document.is_topology = True
        elif tag == "object":
            self._start_object(attributes)
        elif tag == "info":
            infos = self._open[-1].infos if self._open else self.document.infos
            infos[attributes.get("name", "")] = attributes.get("value", "")
        elif tag == "distances2":
            self._in_latencies = _is_numa_latency(attributes) and not self.document.distance_values
        elif tag in ("indexes", "u64values") and self._in_latencies:
            self._text, self._text_bytes = [], 0

    def _start_object(self, attributes: dict[str, str]) -> None:
        parent = self._open[-1] if self._open else None
        # Version 1 calls a package "Socket" in its oldest files.
        kind = attributes.get("type", "").replace("Socket", "Package")
        known = {name: text for name, text in attributes.items() if name in _ATTRIBUTES}
        opened = _Object(kind, known, parent, self._parser)
        if parent is not None:
            parent.children.append(opened)
        elif self.document.root is None:
            self.document.root = opened
        self._open.append(opened)

    def text(self, piece: str) -> None:
        if self._text is not None:
            self._text.append(piece)
            self._text_bytes += len(piece)
            if self._text_bytes > _MAX_MATRIX_BYTES:
                raise TopologyError(f"distances of more than {MAX_NUMA_NODES} NUMA nodes; needed a machine")

    def end(self, tag: str) -> None:
        self._depth -= 1
        if tag == "object":
            self._open.pop()
        elif tag == "distances2":
            self._in_latencies = False
        elif tag in ("indexes", "u64values") and self._text is not None:
            numbers = [int(word) for word in "".join(self._text).split() if word.isdecimal()]
            document = self.document
            (document.distance_ids if tag == "indexes" else document.distance_values).extend(numbers)
            self._text = None


def _is_numa_latency(attributes: Mapping[str, str]) -> bool:
    """Whether a matrix holds the SLIT; bit 2 of ``kind`` is hwloc's "means latency"."""
    kind = attributes.get("kind", "")
    named = attributes.get("name", "NUMALatency") == "NUMALatency"
    return attributes.get("type") == "NUMANode" and named and kind.isdecimal() and bool(int(kind) & 4)


def _refuse_entity(name: str, *_: object) -> None:
    raise TopologyError(f"it declares the entity {name!r}; needed lstopo's XML, which has none")


def _parse(content: bytes) -> _Document:
    reader, parser = _Reader(), expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    parser.EntityDeclHandler = _refuse_entity
    for start in range(0, len(content), _PIECE_BYTES):
        parser.Parse(content[start : start + _PIECE_BYTES], False)
        if start - parser.CurrentByteIndex > MAX_TAG_BYTES:
            raise TopologyError(f"an element of more than {MAX_TAG_BYTES} bytes; needed lstopo's XML")
    parser.Parse(b"", True)
    if not reader.document.is_topology or reader.document.root is None:
        raise TopologyError("no topology in it; needed what 'lstopo FILE.xml' writes")
    return reader.document


def _build(document: _Document, source: str) -> Machine:
    root = document.root
    if root is None:
        raise LookupError("no machine")
    objects = list(root.walk())
    architecture = root.infos.get("Architecture") or document.infos.get("Architecture") or "unknown"
    devices = _gpu_devices(objects)
    nvlink = is_nvlink_machine((facts for facts, _ in devices), architecture)
    hardware = _build_hardware(document, root, objects, nvlink)
    gpus = tuple(
        build_gpu(index, facts, _localities(device, hardware), hardware)
        for index, (facts, device) in enumerate(devices)
    )
    return Machine(
        source=source,
        architecture=architecture,
        packages=hardware.packages,
        numa_nodes=hardware.numa_nodes,
        cores=hardware.cores,
        gpus=gpus,
        allowed=_build_allowed(root, hardware),
        warnings=(*hardware.warnings, *say_unplaced(gpus)),
    )


def _build_hardware(
    document: _Document, root: _Object, objects: list[_Object], nvlink_machine: bool
) -> Hardware:
    online = _online(root, objects)
    package_of: dict[int, int | None] = dict.fromkeys(online)
    for package in (one for one in objects if one.kind == "Package"):
        inside = online & (package.mask("cpuset") or frozenset())
        package_of.update(dict.fromkeys(inside, package.number("os_index")))
    nodes = [one for one in objects if one.kind == "NUMANode" and one.number("os_index") is not None]
    limit_numa_nodes(len(nodes))
    node_cpus = {one.number("os_index") or 0: (one.mask("cpuset") or frozenset()) & online for one in nodes}
    memory = {one.number("os_index") or 0: one.number("local_memory") for one in nodes}
    of_gpu = {one.number("os_index") or 0 for one in nodes if one.attributes.get("subtype") == "GPUMemory"}
    warnings: list[str] = []
    if not nodes:
        warnings.append("the file shows no NUMA nodes: taken as one node 0")
        node_cpus, memory = {0: online}, {0: root.number("local_memory")}
    # hwloc gives memory-only nodes (HBM, CXL) and a GPU's memory the CPUs near them; the kernel gives none.
    node_cpus.update(dict.fromkeys(of_gpu, frozenset()))
    take_shared_cpus_once(node_cpus)
    if nvlink_machine and not of_gpu:  # an hwloc too old to tell
        of_gpu = {node for node, cpus in node_cpus.items() if not cpus}
    # lstopo leaves out nodes that have CPUs and no memory.
    if stray := online.difference(*node_cpus.values()):
        warnings.append(f"CPUs {format_ids(stray)} are on no NUMA node")
    numa_nodes = tuple(
        NumaNode(
            id=node,
            package=only(package_of[cpu] for cpu in cpus),
            cpus=cpus,
            memory_bytes=memory[node],
            kind=kind_of(cpus, node in of_gpu),
            distances=_distances(document, node, frozenset(node_cpus)),
        )
        for node, cpus in sorted(node_cpus.items())
    )
    return Hardware(
        packages=build_packages(package_of, numa_nodes),
        numa_nodes=numa_nodes,
        cores=build_cores(_core_sets(objects, online), package_of, node_cpus),
        warnings=tuple(warnings),
    )


def _online(root: _Object, objects: list[_Object]) -> IdSet:
    units = {one.number("os_index") for one in objects if one.kind == "PU"} - {None}
    listed = root.mask("online_cpuset")
    online = frozenset(unit for unit in units if unit is not None)
    online = online if listed is None else online & listed
    if not online:
        raise TopologyError("it names no online PU; needed lstopo's XML of a whole machine")
    return online


def _core_sets(objects: list[_Object], online: IdSet) -> list[IdSet]:
    cores = [one.mask("cpuset") or frozenset() for one in objects if one.kind == "Core"]
    named = [cpus & online for cpus in cores if cpus & online]
    # Without Core objects (a virtual machine that hides them) every PU counts as one.
    return named + [frozenset({cpu}) for cpu in online.difference(*named)]


def _distances(document: _Document, node: int, nodes: IdSet) -> tuple[tuple[int, int], ...]:
    ids, values = document.distance_ids, document.distance_values
    if node not in ids or len(values) != len(ids) ** 2 or not nodes.issuperset(ids):
        return ()
    row = ids.index(node) * len(ids)
    return tuple(sorted(zip(ids, values[row : row + len(ids)], strict=True)))


def _build_allowed(root: _Object, hardware: Hardware) -> Allowed:
    cpus, mems = root.mask("allowed_cpuset"), root.mask("allowed_nodeset")
    host = host_memory_nodes(hardware.numa_nodes)
    return Allowed(
        cpus=hardware.online if cpus is None else hardware.online & cpus,
        # A version 1 file of a machine without NUMA nodes has an empty node set.
        mems=host & mems if mems else host,
    )


def _gpu_devices(objects: list[_Object]) -> list[tuple[GpuFacts, _Object]]:
    """Find the GPUs in PCI order, each with its place in the tree."""
    found: dict[str, tuple[GpuFacts, _Object]] = {}
    for one in objects:
        facts = _gpu_facts(one) if one.kind == "PCIDev" else None
        if facts is not None:
            found[facts.pci_bus_id] = facts, one
    limit_gpus(len(found))
    return sorted(found.values(), key=lambda pair: pci_order(pair[0].pci_bus_id))


def _gpu_facts(device: _Object) -> GpuFacts | None:
    address = parse_pci_address(device.attributes.get("pci_busid", ""))
    matched = _PCI_TYPE.match(device.attributes.get("pci_type", "").lower())
    os_devices = [one for one in device.walk(into_devices=False) if one.kind == "OSDev"]
    of_gpu = [one for one in os_devices if _GPU_OS_DEVICE.fullmatch(one.attributes.get("name", ""))]
    vendor, classes = PCI_GPU_CLASSES.get(f"0x{matched[2]}" if matched else "", (None, ()))
    is_display = matched is not None and f"0x{matched[1]}" in classes
    if address is None or not (is_display or of_gpu):
        return None
    infos = {key: value for one in os_devices for key, value in one.infos.items()}
    return GpuFacts(
        address,
        vendor,
        name=infos.get("GPUModel") or None,
        uuid=next((infos[name] for name in _UUID_INFOS if infos.get(name)), None),
        memory_bytes=next((size for name in _MEMORY_INFOS if (size := _kib(infos.get(name, "")))), None),
    )


def _kib(text: str) -> int | None:
    """Bytes of a size that versions 1 and 2 write as ``16671616`` and version 3 as ``16671616KiB``."""
    found = re.fullmatch(r"([0-9]{1,15})(KiB)?", text)
    return int(found[1]) * 1024 if found else None


def _localities(device: _Object, hardware: Hardware) -> Iterator[int | IdSet]:
    """Yield the CPUs of the innermost object around a device; bridges have none."""
    around = device.parent
    while around is not None:
        cpus = around.mask("cpuset")
        if cpus:
            yield cpus & hardware.online
            return
        around = around.parent
