"""Our own JSON of a machine, both ways."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from launch.discover.check import check
from launch.model.errors import TopologyError
from launch.model.idset import IdSet, format_ids, parse_ids
from launch.model.topology import SCHEMA, Allowed, Core, Gpu, Limits, Machine, NumaNode, Package

Item = TypeVar("Item")


def to_json(machine: Machine) -> dict[str, Any]:
    """The machine as ``lmsrun topo --json`` prints it: ids as lists such as ``"0-3,8"``, unknown as null."""
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
            "set_mempolicy": machine.limits.set_mempolicy,
        },
        "warnings": list(machine.warnings),
    }


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
    }


def parse_saved(text: str, source: str) -> Machine:
    """Read what ``to_json`` wrote.

    Raises:
        TopologyError: If it is not JSON, not of our schema, or contradicts itself; the text names the place.
    """
    try:
        return from_json(json.loads(text))
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TopologyError(
            f"{source} is not JSON ({error}); needed what 'lmsrun topo --save FILE' writes"
        ) from error


def from_json(table: Any) -> Machine:
    """The machine of a parsed JSON document.

    Raises:
        TopologyError: If a field is missing, has a wrong type or contradicts another.
    """
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        found = table.get("schema") if isinstance(table, dict) else type(table).__name__
        raise TopologyError(
            f"found schema {found!r}; needed {SCHEMA!r}, as 'lmsrun topo --save FILE' writes it"
        )
    allowed, limits = _Field(table, "allowed").table(), _Field(table, "limits").table(optional=True)
    machine = Machine(
        source=_Field(table, "source").text(),
        architecture=_Field(table, "architecture").text(),
        packages=_Field(table, "packages").items(_package),
        numa_nodes=_Field(table, "numa_nodes").items(_numa_node),
        cores=_Field(table, "cores").items(_core),
        gpus=_Field(table, "gpus").items(_gpu),
        allowed=Allowed(_Field(allowed, "cpus").ids(), _Field(allowed, "mems").ids()),
        limits=Limits(
            memory_bytes=_Field(limits, "memory_bytes").maybe_number(),
            memlock_bytes=_Field(limits, "memlock_bytes").maybe_number(),
            set_mempolicy=_Field(limits, "set_mempolicy").maybe_flag(),
        ),
        warnings=tuple(map(str, _Field(table, "warnings").array(optional=True))),
    )
    check(machine)
    return machine


def _package(table: Mapping[str, Any]) -> Package:
    ids = _Field(table, "numa_nodes").array()
    return Package(
        id=_Field(table, "id").number(),
        cpus=_Field(table, "cpus").ids(),
        numa_nodes=tuple(_Field({"numa_nodes": one}, "numa_nodes").number() for one in ids),
    )


def _numa_node(table: Mapping[str, Any]) -> NumaNode:
    distances = _Field(table, "distances").table(optional=True)
    if not all(other.isascii() and other.isdigit() for other in distances):
        raise TopologyError(f"distances is {distances!r}; needed node ids as keys")
    return NumaNode(
        id=_Field(table, "id").number(),
        package=_Field(table, "package").maybe_number(),
        cpus=_Field(table, "cpus").ids(),
        memory_bytes=_Field(table, "memory_bytes").maybe_number(),
        kind=_Field(table, "kind").word("dram", "gpu", "memory-only"),
        distances=tuple(sorted((int(other), _Field(distances, other).number()) for other in distances)),
    )


def _core(table: Mapping[str, Any]) -> Core:
    return Core(
        package=_Field(table, "package").maybe_number(),
        numa_node=_Field(table, "numa_node").maybe_number(),
        cpus=_Field(table, "cpus").ids(),
    )


def _gpu(table: Mapping[str, Any]) -> Gpu:
    return Gpu(
        index=_Field(table, "index").number(),
        pci_bus_id=_Field(table, "pci_bus_id").text(),
        name=_Field(table, "name").maybe_text(),
        uuid=_Field(table, "uuid").maybe_text(),
        numa_node=_Field(table, "numa_node").maybe_number(),
        cpus=_Field(table, "cpus").ids(),
        memory_bytes=_Field(table, "memory_bytes").maybe_number(),
        vendor=_Field(table, "vendor").word("nvidia", "amd", None),
    )


class _Field:
    """One value of a JSON object, taken out by the type it must have."""

    def __init__(self, table: Mapping[str, Any], key: str) -> None:
        self._key, self._value = key, table.get(key)

    def _wrong(self, needed: str) -> TopologyError:
        return TopologyError(f"{self._key} is {str(self._value)[:80]!r}; needed {needed}")

    def number(self) -> int:
        value: object = self._value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise self._wrong("a whole number, 0 or more, of at most 63 bits")
        return value

    def maybe_number(self) -> int | None:
        return None if self._value is None else self.number()

    def maybe_flag(self) -> bool | None:
        if self._value is not None and not isinstance(self._value, bool):
            raise self._wrong("true, false or null")
        return self._value

    def text(self) -> str:
        if not isinstance(self._value, str):
            raise self._wrong("a text")
        return self._value

    def maybe_text(self) -> str | None:
        return None if self._value is None else self.text()

    def word(self, *words: Any) -> Any:
        if self._value not in words:
            raise self._wrong("one of " + ", ".join(str(word) for word in words if word))
        return self._value

    def ids(self) -> IdSet:
        try:
            return parse_ids(self.text())
        except ValueError as error:
            raise TopologyError(f"{self._key}: {error}") from error

    def array(self, *, optional: bool = False) -> list[Any]:
        if optional and self._value is None:
            return []
        if not isinstance(self._value, list):
            raise self._wrong("a list")
        return self._value

    def table(self, *, optional: bool = False) -> Mapping[str, Any]:
        if optional and self._value is None:
            return {}
        if not isinstance(self._value, dict):
            raise self._wrong("an object")
        return self._value

    def items(self, build: Callable[[Mapping[str, Any]], Item]) -> tuple[Item, ...]:
        built = []
        for position, one in enumerate(self.array()):
            if not isinstance(one, dict):
                raise self._wrong("a list of objects")
            try:
                built.append(build(one))
            except TopologyError as error:
                raise TopologyError(f"{self._key}[{position}]: {error}") from error
        return tuple(built)
