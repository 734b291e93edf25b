"""A plan for people and for tools; colours come from rich where it is installed and wanted."""

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from launch.model.idset import format_ids
from launch.model.plan import SCHEMA, LaunchPlan, RankPlan
from launch.model.rank_variables import IDENTITY
from launch.model.text import count_of, printable
from launch.model.topology import Gpu, Machine
from launch.plan_host.rank_env import LIMIT_VARIABLES

_HEADS = ("rank", "host", "GPU", "NUMA", "cores", "CPUs", "memory", "host limit")
_LEAST_GPU_WIDTH = 14


def render_json(value: Any) -> str:
    """JSON for people to read too."""
    return json.dumps(value, indent=2)


def plan_to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Convert the plan to schema ``lmsrun.plan/1``; unknown is null, ids are lists such as ``"0-3,8"``."""
    return {
        "schema": SCHEMA,
        "world_size": plan.world_size,
        "launcher": plan.launcher,
        "framework": plan.framework,
        "ranks": [_rank_to_json(rank) for rank in _masked(plan).ranks],
        "commands": [list(command) for command in plan.commands],
        "warnings": list(plan.warnings),
    }


def _rank_to_json(rank: RankPlan) -> dict[str, Any]:
    from launch.discover.saved import gpu_to_json

    return {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "host": rank.host,
        "gpu": gpu_to_json(rank.gpu) if rank.gpu else None,
        "numa_node": rank.numa_node,
        "cpus": format_ids(rank.cpus),
        "mem_policy": rank.mem_policy,
        "mem_nodes": format_ids(rank.mem_nodes),
        "host_mem_limit_mb": rank.host_mem_limit_mb,
        "env": dict(rank.env),
        "argv": list(rank.argv),
    }


def print_plan(
    plan: LaunchPlan,
    machine: Machine,
    as_json: bool,
    verbose: bool,
    machines: Mapping[str, Machine] = MappingProxyType({}),
) -> None:
    """Print a plan to stdout; ``machines`` are those of hosts that are known to differ from ``machine``."""
    if as_json:
        print(render_json(plan_to_json(plan)))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    text = render_plan(plan, machine, width, verbose, machines)
    print(_coloured(text) if sys.stdout.isatty() else text)


def render_plan(
    plan: LaunchPlan,
    machine: Machine,
    width: int,
    verbose: bool = False,
    machines: Mapping[str, Machine] = MappingProxyType({}),
) -> str:
    """Render the plan: one row per rank, then warnings, environment, and commands as a shell takes them."""
    plan = _masked(plan)
    machine_of = {rank.host: machines.get(rank.host, machine) for rank in plan.ranks}
    many_hosts = len({rank.host for rank in plan.ranks}) > 1
    many_models = len(_models(plan)) > 1
    parts = [
        _head(plan, machine_of),
        _table([_row(rank, machine_of[rank.host], many_models, many_hosts) for rank in plan.ranks], width),
    ]
    if plan.warnings:
        parts.append("\n".join(["warnings:", *(_wrapped(warning, width) for warning in plan.warnings)]))
    shared = _shared(plan)
    lines = [f"  {shlex.quote(name)}={shlex.quote(value)}" for name, value in shared.items()]
    parts.append("\n".join(["environment of every rank:", *lines]))
    own = {rank.rank: _own_env(rank, shared, verbose) for rank in plan.ranks}
    lines = [f"  rank {number}: {_assignments(env)}" for number, env in own.items() if env]
    if lines:
        parts.append("\n".join(["and of each:", *lines]))
    if not verbose and (untold := _untold(plan, shared)):
        parts.append(f"of each, shown with --verbose:\n  {', '.join(untold)}")
    parts.append("\n".join(["commands:", *(f"  {shlex.join(command)}" for command in plan.commands)]))
    # A saved topology may carry any text, and so may the program's arguments.
    return printable("\n\n".join(parts), keep="\n\t")


def _head(plan: LaunchPlan, machine_of: Mapping[str, Machine]) -> str:
    hosts = list(machine_of)
    where = hosts[0] if len(hosts) == 1 else count_of(len(hosts), "host")
    architectures = ", ".join(dict.fromkeys(machine.architecture for machine in machine_of.values()))
    sources = ", ".join(dict.fromkeys(machine.source for machine in machine_of.values()))
    models = _models(plan)
    gpus = f"\nGPUs: {models[0]}" if len(models) == 1 else ""
    if plan.gpu_memory_bytes:
        gpus += f"\nplanned with {plan.gpu_memory_bytes >> 20} MiB of memory of each GPU (--gpu-memory)"
    framework = "" if plan.framework == "horovod" else f", framework: {plan.framework}"
    return (
        f"{count_of(plan.world_size, 'rank')} on {where} "
        f"({architectures}, topology: {sources}), launcher: {plan.launcher}{framework}{gpus}"
    )


def _models(plan: LaunchPlan) -> list[str]:
    """List the kinds of GPU in the plan; a single one is named once, above the table."""
    kinds = {
        (rank.gpu.name or "model unknown")
        + (f", {rank.gpu.memory_bytes >> 20} MiB each" if rank.gpu.memory_bytes else ", memory unknown"): None
        for rank in plan.ranks
        if rank.gpu
    }
    return list(kinds)


def _row(rank: RankPlan, machine: Machine, name_gpu: bool, name_host: bool) -> tuple[str, ...]:
    cores = sum(1 for core in machine.cores if core.cpus & rank.cpus)
    return (
        str(rank.rank),
        *([rank.host] if name_host else []),
        _gpu_text(rank.gpu, name_gpu),
        "-" if rank.numa_node is None else str(rank.numa_node),
        str(cores) if rank.cpus else "-",
        format_ids(rank.cpus) or "not bound",
        f"{rank.mem_policy} {format_ids(rank.mem_nodes)}".strip(),
        "-" if rank.host_mem_limit_mb is None else f"{rank.host_mem_limit_mb} MiB",
    )


def _gpu_text(gpu: Gpu | None, with_name: bool) -> str:
    if gpu is None:
        return "-"
    return " ".join(filter(None, [f"{gpu.index}:", gpu.address or gpu.uuid, gpu.name if with_name else None]))


def _table(rows: Sequence[tuple[str, ...]], width: int) -> str:
    """Aligned columns; in a narrow terminal the GPU's name gives way, for the GPU is known by its address."""
    heads = tuple(head for head in _HEADS if head != "host" or len(rows[0]) == len(_HEADS))
    lines, gpu = [heads, *rows], heads.index("GPU")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    if excess > 0:
        widths[gpu] = max(min(widths[gpu], _LEAST_GPU_WIDTH), widths[gpu] - excess)
    rendered = [
        "  ".join(_fit(cell, size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in lines
    ]
    rendered.insert(1, "  ".join("-" * size for size in widths))
    return "\n".join(rendered)


def _fit(cell: str, size: int) -> str:
    return cell.ljust(size) if len(cell) <= size else cell[: size - 1] + "…"


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(
        text,
        max(40, width),
        initial_indent="  - ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shared(plan: LaunchPlan) -> dict[str, str]:
    first, *others = plan.ranks
    return {
        name: value
        for name, value in first.env.items()
        if all(rank.env.get(name) == value for rank in others)
    }


def _own_env(rank: RankPlan, shared: Mapping[str, str], verbose: bool) -> dict[str, str]:
    """Return what this rank alone gets; with ``verbose`` also its number and limit, which the table has."""
    left_out = {"LMSRUN_EXPECT"} if verbose else {*IDENTITY, *LIMIT_VARIABLES}
    left_out |= shared.keys()
    return {name: value for name, value in rank.env.items() if name not in left_out}


def _untold(plan: LaunchPlan, shared: Mapping[str, str]) -> list[str]:
    """List the variables that ``_own_env`` has with ``verbose`` alone."""
    names = dict.fromkeys(name for rank in plan.ranks for name in _own_env(rank, shared, verbose=True))
    return [name for name in names if name in (*IDENTITY, *LIMIT_VARIABLES)]


MASK = "***"


def _masked(plan: LaunchPlan) -> LaunchPlan:
    """Mask values of the plan that may be secrets."""

    def mask(rank: RankPlan) -> RankPlan:
        env = {name: MASK if name in plan.masked else value for name, value in rank.env.items()}
        return replace(rank, env=env)

    return replace(plan, ranks=tuple(map(mask, plan.ranks)))


def _assignments(env: dict[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())


def _coloured(text: str) -> str:
    """Section heads bold and warnings yellow, where rich is installed and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR"):
        return text
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return text
    painted = Text(text)
    painted.highlight_regex(
        r"(?m)^(rank  .*|warnings:|commands:|environment of every rank:|and of each:)$", "bold"
    )
    painted.highlight_regex(r"(?m)^  - .*(\n    .*)*", "yellow")
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(painted, end="")
    return capture.get()
