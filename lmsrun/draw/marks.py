"""Where ranks are on a machine: as planned, and as read back from the kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launch.model.busy import gpu_key
from launch.model.idset import IdSet, format_ids, parse_ids
from launch.model.plan import LaunchPlan, RankPlan
from launch.model.topology import Gpu
from launch.receipts.judge import RankReceipt

MIB = 1 << 20


@dataclass(frozen=True)
class Mark:
    """One rank on its machine. ``cpus`` empty: it is not bound."""

    rank: int
    host: str
    cpus: IdSet
    mem_nodes: IdSet
    policy: str
    gpu: str | None
    """The GPU, by ``gpu_key``."""
    limit_bytes: int | None = None
    """What the rank may pin of the host's memory."""
    found_cpus: IdSet | None = None
    """Where the kernel says it is; ``None``: not known."""
    state: Literal["planned", "verified", "differs", "unknown"] = "planned"
    why: str = ""
    """The reason, where it differs or is unknown."""

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [
            f"rank {self.rank}",
            f"CPUs {format_ids(self.cpus)}" if self.cpus else "CPUs not bound",
            f"memory {self.policy} {format_ids(self.mem_nodes)}".rstrip(),
        ]
        if self.gpu:
            parts.append(f"GPU {self.gpu}")
        if self.limit_bytes is not None:
            parts.append(f"host memory limit {self.limit_bytes // MIB} MiB")
        if self.state != "planned":
            parts.append(" ".join(filter(None, [STATES[self.state], self.why and f"({self.why})"])))
        return ", ".join(parts)


STATES: Mapping[str, str] = {
    "planned": "planned",
    "verified": "verified",
    "differs": "not as planned",
    "unknown": "not verified",
}


def mark_plan(plan: LaunchPlan) -> tuple[Mark, ...]:
    """Mark the ranks of a plan."""
    return tuple(map(_mark, plan.ranks))


def _mark(rank: RankPlan) -> Mark:
    limit = rank.host_mem_limit_mb
    return Mark(
        rank.rank,
        rank.host,
        rank.cpus,
        rank.mem_nodes,
        rank.mem_policy,
        gpu_key(rank.gpu) if rank.gpu else None,
        None if limit is None else limit * MIB,
    )


def with_receipts(marks: Sequence[Mark], receipts: Sequence[RankReceipt]) -> tuple[Mark, ...]:
    """Add what has been read back of the ranks."""
    found = {receipt.rank: receipt for receipt in receipts}
    return tuple(_judged(mark, found[mark.rank]) if mark.rank in found else mark for mark in marks)


def _judged(mark: Mark, receipt: RankReceipt) -> Mark:
    state: Literal["verified", "differs", "unknown"] = (
        "verified" if receipt.verified else "unknown" if receipt.verified is None else "differs"
    )
    found = _ids(receipt.cpus)
    # On another host a rank plans for itself, and is verified where that machine is not like this one, too.
    cpus = found if receipt.verified and found and mark.cpus else mark.cpus
    return replace(mark, cpus=cpus, found_cpus=found, state=state, why="; ".join(receipt.reasons))


def marks_from_json(ranks: Sequence[Any]) -> tuple[Mark, ...]:
    """Mark the ranks of a plan that was written as JSON (``lmsrun.plan/1``).

    Raises:
        ValueError: If it is not that.
    """
    try:
        return tuple(_from_json(rank) for rank in ranks)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged plan: {error!r}") from error


def _from_json(rank: Mapping[str, Any]) -> Mark:
    gpu, limit = rank["gpu"], rank["host_mem_limit_mb"]
    named = None
    if gpu is not None:
        part, uuid = gpu.get("partition"), gpu["uuid"] and str(gpu["uuid"])
        part = None if part is None else int(part)
        known = Gpu(int(gpu["index"]), str(gpu["pci_bus_id"] or ""), uuid=uuid, partition=part)
        named = gpu_key(known)
    cpus, nodes = parse_ids(str(rank["cpus"])), parse_ids(str(rank["mem_nodes"]))
    bytes_ = None if limit is None else int(limit) * MIB
    return Mark(int(rank["rank"]), str(rank["host"]), cpus, nodes, str(rank["mem_policy"]), named, bytes_)


def _ids(text: str | None) -> IdSet | None:
    if not text:
        return None
    try:
        return parse_ids(text)
    except ValueError:
        return None
