"""The report as plain values for JSON, bounded in size: what a page is drawn from."""

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lms.config import LMSConfig
from lms.report.history import History
from lms.report.render import mib
from lms.report.stats import GraphStats, Planned, Report
from lms.report.step_document import describe_step

SCHEMA = "lms.report/1"
MOST_GRAPHS, MOST_WARNINGS, MOST_TEXT = 16, 20, 400


def build_document(
    report: Report,
    config: LMSConfig | None = None,
    planned: Planned | None = None,
    history: History | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the document of one process.

    Args:
        report: What was done.
        config: What was asked for.
        planned: The step to describe.
        history: The steps that ran.
        environ: The process's variables, for its rank.
    """
    rank = (environ or {}).get("RANK", "")
    return {
        "schema": SCHEMA,
        "rank": int(rank) if rank.isdigit() and len(rank) < 9 else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": _versions(),
        "config": {} if config is None else _config(config),
        "idle": report.idle,
        "device": {"name": report.device.name, "limit_bytes": report.device.limit_bytes},
        "transport": report.transport,
        "planned_peak_bytes": report.planned_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "moved": _moved(report),
        "retries": report.retries,
        "warnings": [text[:MOST_TEXT] for text in report.warnings[:MOST_WARNINGS]],
        "warnings_left_out": max(0, len(report.warnings) - MOST_WARNINGS),
        "graphs": [_graph(graph) for graph in report.graphs[-MOST_GRAPHS:]],
        "graphs_left_out": max(0, len(report.graphs) - MOST_GRAPHS),
        "steps": [] if history is None else [list(step) for step in _rounded(history)],
        "step_count": 0 if history is None else history.count,
        "step": None if planned is None else describe_step(planned, report.device.limit_bytes, config),
    }


def _rounded(history: History) -> list[tuple[int, float, int | None]]:
    return [(step.number, float(f"{step.seconds:.4g}"), step.peak_bytes) for step in history.steps]


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    if (tensorflow := sys.modules.get("tensorflow")) is not None:  # its distribution has one of many names
        found["tensorflow"] = getattr(tensorflow, "__version__", "unknown")
    for name in ("keras", "horovod", "lmsrun"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _config(config: LMSConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    defaults = {one.name: one.default for one in fields(config)}
    return {
        name: list(map(str, value))[:50] if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != defaults[name]
    }


def _moved(report: Report) -> dict[str, int] | None:
    """Return what the transport has counted; ``None`` where nothing counts."""
    if report.transport in ("none", "device"):
        return None
    store = report.store
    return {"out_bytes": store.bytes_out, "in_bytes": store.bytes_in, "held_bytes": store.peak_bytes}


def _graph(graph: GraphStats) -> dict[str, Any]:
    return {
        "name": graph.name[:MOST_TEXT],
        "edited": graph.edited,
        "why": graph.why[:MOST_TEXT],
        "ops": graph.ops,
        "policy": graph.policy,
        "asked_policy": graph.asked_policy,
        "peak_before_bytes": graph.peak_before_bytes,
        "planned_peak_bytes": graph.planned_peak_bytes,
        "budget": None if graph.budget_bytes is None else mib(graph.budget_bytes),
        "bytes_out": graph.bytes_out,
        "bytes_in": graph.bytes_in,
        "tensors": graph.tensors,
        "swap_ins": graph.swap_ins,
        "executed": graph.executed,
        "edit_s": round(graph.edit_s, 4),
        "rejected": _reasons(graph.rejected),
        "notes": [note[:MOST_TEXT] for note in graph.notes[:8]],
        "open_sizes": None if graph.open_sizes is None else str(graph.open_sizes)[:MOST_TEXT],
    }


def _reasons(rejected: Sequence[tuple[str, int]]) -> list[list[Any]]:
    return [[reason, count] for reason, count in rejected[:20]]
