"""Our own JSON of a machine, both ways."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from launch.discover.check import check
from launch.model.errors import TopologyError
from launch.model.idset import MAX_ID, IdParser, IdSet, format_ids
from launch.model.topology import SCHEMA, Adapter, Allowed, Core, Gpu, Limits, Machine, NumaNode, Package

MAX_TABLES = 4 * MAX_ID
"""Lists and objects in a document: one for each core, and some more. Each takes 60 bytes or more."""
MAX_VALUES = 16 * MAX_ID
Item = TypeVar("Item")


def to_json(machine: Machine) -> dict[str, Any]:
    """Build what ``lmsrun topo --json`` prints: ids as lists such as ``"0-3,8"``, unknown as null."""
    return {
        "schema": SCHEMA,
        "source": machine.source,
        "architecture": machine.architecture,
        "packages": [
            {"id": package.id, "cpus": format_ids(package.cpus), "numa_nodes": list(package.numa_nodes)}
            for package in machine.packages
        ],
        "numa_nodes": [_numa_node_to_json(node) for node in machine.numa_nodes],
        "cores": [
            {"package": core.package, "numa_node": core.numa_node, "cpus": format_ids(core.cpus)}
            for core in machine.cores
        ],
        "gpus": [gpu_to_json(gpu) for gpu in machine.gpus],
        "allowed": {"cpus": format_ids(machine.allowed.cpus), "mems": format_ids(machine.allowed.mems)},
        "limits": {
            "memory_bytes": machine.limits.memory_bytes,
            "memlock_bytes": machine.limits.memlock_bytes,
            **({} if machine.limits.cpu_millis is None else {"cpu_millis": machine.limits.cpu_millis}),
            "set_mempolicy": machine.limits.set_mempolicy,
        },
        "warnings": list(machine.warnings),
        **(
            {"adapters": [_adapter_to_json(adapter) for adapter in machine.adapters]}
            if machine.adapters
            else {}
        ),
    }


def _adapter_to_json(adapter: Adapter) -> dict[str, Any]:
    near = dict(adapter.near_gpus)
    return {"name": adapter.name, "numa_node": adapter.numa_node, "near_gpus": near}


def _numa_node_to_json(node: NumaNode) -> dict[str, Any]:
    table: dict[str, Any] = {
        "id": node.id,
        "package": node.package,
        "cpus": format_ids(node.cpus),
        "memory_bytes": node.memory_bytes,
        "kind": node.kind,
    }
    return (
        {**table, "distances": {str(other): far for other, far in node.distances}}
        if node.distances
        else table
    )


def gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    """One GPU as both the topology and the plan print it."""
    return {
        "index": gpu.index,
        "pci_bus_id": gpu.pci_bus_id,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "numa_node": gpu.numa_node,
        "cpus": format_ids(gpu.cpus),
        "memory_bytes": gpu.memory_bytes,
        "vendor": gpu.vendor,
        **({} if gpu.partition is None else {"partition": gpu.partition}),
    }


def parse_saved(content: bytes, source: str) -> Machine:
    """Read what ``to_json`` wrote.

    Raises:
        TopologyError: If it is not JSON, not of our schema, too large, or contradicts itself; the text names
            the place.
    """
    if content.count(b"{") + content.count(b"[") > MAX_TABLES or content.count(b",") > MAX_VALUES:
        raise TopologyError(
            f"{source} has more than {MAX_TABLES} lists or {MAX_VALUES} values; "
            f"needed a machine of {MAX_ID} CPUs at most"
        )
    try:
        return from_json(json.loads(content.decode("utf-8", "replace").lstrip("\ufeff")))
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TopologyError(
            f"{source} is not JSON ({error}); needed what 'lmsrun topo --save FILE' writes"
        ) from error


def from_json(table: Any) -> Machine:
    """Build the machine of a parsed JSON document.

    Raises:
        TopologyError: If a field is missing, has a wrong type or contradicts another.
    """
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        found = table.get("schema") if isinstance(table, dict) else type(table).__name__
        raise TopologyError(
            f"found schema {found!r}; needed {SCHEMA!r}, as 'lmsrun topo --save FILE' writes it"
        )
    saved = _Table(table, IdParser())
    allowed, limits = saved.table("allowed"), saved.table("limits", optional=True)
    machine = Machine(
        source=saved.text("source"),
        architecture=saved.text("architecture"),
        packages=saved.items("packages", _package),
        numa_nodes=saved.items("numa_nodes", _numa_node),
        cores=saved.items("cores", _core),
        gpus=saved.items("gpus", _gpu),
        allowed=Allowed(allowed.ids("cpus"), allowed.ids("mems")),
        limits=Limits(
            memory_bytes=limits.maybe_number("memory_bytes"),
            memlock_bytes=limits.maybe_number("memlock_bytes"),
            cpu_millis=limits.maybe_number("cpu_millis"),
            set_mempolicy=limits.maybe_flag("set_mempolicy"),
        ),
        warnings=tuple(map(str, saved.array("warnings", optional=True))),
        adapters=saved.items("adapters", _adapter, optional=True),
    )
    check(machine)
    return machine


def _adapter(table: "_Table") -> Adapter:
    near = table.table("near_gpus", optional=True)
    return Adapter(
        table.text("name"),
        table.maybe_number("numa_node"),
        tuple((address, near.number(address)) for address in near.keys()),  # noqa: SIM118 - no mapping
    )


def _package(table: "_Table") -> Package:
    return Package(id=table.number("id"), cpus=table.ids("cpus"), numa_nodes=table.numbers("numa_nodes"))


def _numa_node(table: "_Table") -> NumaNode:
    return NumaNode(
        id=table.number("id"),
        package=table.maybe_number("package"),
        cpus=table.ids("cpus"),
        memory_bytes=table.maybe_number("memory_bytes"),
        kind=table.word("kind", "dram", "gpu", "memory-only"),
        distances=table.table("distances", optional=True).by_number(),
    )


def _core(table: "_Table") -> Core:
    return Core(
        package=table.maybe_number("package"),
        numa_node=table.maybe_number("numa_node"),
        cpus=table.ids("cpus"),
    )


def _gpu(table: "_Table") -> Gpu:
    return Gpu(
        index=table.number("index"),
        pci_bus_id=table.text("pci_bus_id"),
        name=table.maybe_text("name"),
        uuid=table.maybe_text("uuid"),
        numa_node=table.maybe_number("numa_node"),
        cpus=table.maybe_ids("cpus"),
        memory_bytes=table.maybe_number("memory_bytes"),
        vendor=table.word("vendor", "nvidia", "amd", None),
        partition=table.maybe_number("partition"),
    )


class _Table:
    """A JSON object whose values are taken out by the type that each must have."""

    def __init__(self, table: Mapping[str, Any], parser: IdParser, name: str = "") -> None:
        self._table, self._parser, self._name = table, parser, name

    def _wrong(self, key: str, needed: str) -> TopologyError:
        return TopologyError(f"{key} is {str(self._table.get(key))[:80]!r}; needed {needed}")

    def number(self, key: str) -> int:
        value: object = self._table.get(key)
        if not _is_number(value):
            raise self._wrong(key, _NUMBER)
        return value

    def maybe_number(self, key: str) -> int | None:
        return None if self._table.get(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[int, ...]:
        values = self.array(key)
        if not all(map(_is_number, values)):
            raise self._wrong(key, f"a list, each of it {_NUMBER}")
        return tuple(values)

    def by_number(self) -> tuple[tuple[int, int], ...]:
        if not all(other.isascii() and other.isdigit() for other in self._table):
            raise TopologyError(f"{self._name} is {str(self._table)[:80]!r}; needed node ids as keys")
        for other, value in self._table.items():
            if not _is_number(value):
                raise self._wrong(other, _NUMBER)
        return tuple(sorted((int(other), value) for other, value in self._table.items()))

    def maybe_flag(self, key: str) -> bool | None:
        value = self._table.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true, false or null")
        return value

    def text(self, key: str) -> str:
        value = self._table.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def maybe_text(self, key: str) -> str | None:
        return None if self._table.get(key) is None else self.text(key)

    def word(self, key: str, *words: Any) -> Any:
        value = self._table.get(key)
        if value not in words:
            raise self._wrong(key, "one of " + ", ".join(str(word) for word in words if word))
        return value

    def ids(self, key: str) -> IdSet:
        try:
            return self._parser.ids(self.text(key))
        except ValueError as error:
            raise TopologyError(f"{key}: {error}") from error

    def maybe_ids(self, key: str) -> IdSet:
        return frozenset() if self._table.get(key) is None else self.ids(key)

    def array(self, key: str, *, optional: bool = False) -> list[Any]:
        value = self._table.get(key)
        if optional and value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return value

    def table(self, key: str, *, optional: bool = False) -> "_Table":
        value = self._table.get(key)
        if value is not None and not isinstance(value, dict) or (value is None and not optional):
            raise self._wrong(key, "an object")
        return _Table(value or {}, self._parser, key)

    def keys(self) -> list[str]:
        return list(self._table)

    def items(
        self, key: str, build: Callable[["_Table"], Item], *, optional: bool = False
    ) -> tuple[Item, ...]:
        built = []
        for position, one in enumerate(self.array(key, optional=optional)):
            if not isinstance(one, dict):
                raise self._wrong(key, "a list of objects")
            try:
                built.append(build(_Table(one, self._parser)))
            except TopologyError as error:
                raise TopologyError(f"{key}[{position}]: {error}") from error
        return tuple(built)


_NUMBER = "a whole number, 0 or more, of at most 63 bits"


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
