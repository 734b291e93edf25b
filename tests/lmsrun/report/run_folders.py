"""Run folders as jobs leave them, for the report."""

import json
from pathlib import Path
from typing import Any

import machines

from launch.discover.saved import gpu_to_json
from launch.model.idset import format_ids
from launch.model.topology import Machine
from launch.receipts.judge import RankReceipt, to_json
from lmsrun.report.record import JOB, job_to_json

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
LMS_REPORT: dict[str, Any] = json.loads((GOLDEN / "lms-report.json").read_text())


def rank_entry(rank: int, host: str, cpus: str, gpu: dict[str, Any] | None = None) -> dict[str, Any]:
    """One rank of a plan, as ``lmsrun plan --json`` prints it."""
    return {
        "rank": rank,
        "host": host,
        "gpu": gpu,
        "cpus": cpus,
        "mem_policy": "bind",
        "mem_nodes": "0",
        "host_mem_limit_mb": 4096,
    }


def receipt_of(
    entry: dict[str, Any], *, verified: bool | None = True, cpus: str | None = None
) -> RankReceipt:
    """What the rank found."""
    reasons = () if verified else ("bound elsewhere",)
    gpu = entry["gpu"]["pci_bus_id"] if entry["gpu"] else None
    return RankReceipt(
        entry["rank"], 0, entry["host"], gpu, 0, cpus or entry["cpus"], "bind", "0", 4096, "graph",
        verified, reasons, ("start", "framework", "init"),
    )  # fmt: skip


def write_folder(folder: Path, ranks: int = 2, *, per_host: int = 8, machine: Machine | None = None) -> Path:
    """Write the folder of a job of so many ranks, all verified, each with the report of one step."""
    machine = machine or machines.with_gpu_memory(machines.machine("dgx"), 40 << 30)
    entries = []
    for rank in range(ranks):
        local, host = rank % per_host, f"node{rank // per_host}"
        node = machine.numa_nodes[local % len(machine.numa_nodes)]
        gpu = machine.gpus[local] if machine.gpus else None
        cpus = node.cpus if gpu is None else (machine.numa_node(gpu.numa_node or 0) or node).cpus
        entries.append(rank_entry(rank, host, format_ids(cpus), gpu_to_json(gpu) if gpu else None))
    plan = {"ranks": entries, "warnings": ["a warning of the plan"]}
    hosts = {entry["host"]: machine for entry in entries}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JOB).write_text(json.dumps(job_to_json("train", plan, hosts)))
    write_receipts(folder, [receipt_of(entry) for entry in entries])
    for rank in range(ranks):
        steps = [[number, 0.2 + 0.001 * rank, 1 << 28] for number in range(12)]
        report = {**LMS_REPORT, "rank": rank, "steps": steps, "step_count": 12}
        (folder / f"rank-{rank}.lms.json").write_text(json.dumps(report))
    return folder


def write_receipts(folder: Path, receipts: list[RankReceipt], **told: Any) -> None:
    """Write ``receipts.json``."""
    more = {
        "command": ["lmsrun", "-np", str(len(receipts)), "train.py", "--data", "a b"],
        "host": "node0",
        "versions": {"python": "3.11.2", "lmsrun": "0.1.0"},
        "started": "2026-01-01T00:00:00Z",
        "ended": "2026-01-01T00:01:00Z",
        "exit_code": 0,
        "exit_codes": {str(receipt.rank): 0 for receipt in receipts},
    }
    (folder / "receipts.json").write_text(json.dumps(to_json("abc", receipts) | more | told))
