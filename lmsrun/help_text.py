"""The help texts, made from the declared options."""

import textwrap

from launch.model.cluster_settings import CLUSTER
from launch.model.settings import JOB, LMS, MEMORY, PLACEMENT, Option, PlanSettings, declared_options
from lmsrun.options import OPTIONS, OUTPUT, LaunchOptions

_WIDTH, _INDENT = 96, 30
_GROUPS = (JOB, CLUSTER, PLACEMENT, MEMORY, LMS, OUTPUT)
_PLAN_FIELDS = frozenset(declared_options(PlanSettings))
"""Listed behind the command line's own options, which people look for first."""
_HEADS = {
    "run": "lmsrun [run] -np N [options] [--] PROGRAM [ARGS]\n"
    "       lmsrun plan|topo|check|worker|ddlrun --help",
    "plan": "lmsrun plan -np N [options] [--] PROGRAM [ARGS]",
    "topo": "lmsrun topo [options]",
    "check": "lmsrun check [--json]",
    "worker": "lmsrun worker -- PROGRAM ARGS",
    "ddlrun": "lmsrun [options] ddlrun [ddlrun's options] PROGRAM [ARGS]\n"
    "       lmsrun plan [options] ddlrun ...",
}
_ABOUT = {
    "run": "Start one bound process a GPU (or CPU ranks without GPUs), with Large Model Support on in each.\n"
    "A PROGRAM ending in .py runs under this Python. Everything after PROGRAM belongs to it.",
    "plan": "Print what `run` would start: a table, or JSON. Nothing is started.",
    "topo": "Show this machine, or a saved one: packages, NUMA nodes, cores, GPUs.",
    "check": "Say what is here and what is missing for a run; exit 1 when one could not work.",
    "worker": "Bind this rank on its own machine, verify it, and become the program. Which rank it is, say\n"
    "the variables of the launcher that started it: Horovod, Open MPI, Spectrum MPI, MPICH, Intel MPI,\n"
    "jsrun, Slurm or torchrun. Options come as LMSRUN_... variables: see lmsrun --help.",
    "ddlrun": "IBM's command line as it was typed, with one dash or two, started by lmsrun. Options of\n"
    "lmsrun go in front, or come as LMSRUN_... variables: see lmsrun --help.",
}
_EXAMPLES = {
    "run": (
        ("lmsrun -np 4 train.py --epochs 3", "four ranks on this machine"),
        ("lmsrun plan -np 6 --topology ac922.json train.py", "what it would be on another"),
        ("mpirun -np 4 lmsrun worker -- python train.py", "bound and verified under your own launcher"),
    ),
    "topo": (("lmsrun topo --save node.json", "for --topology node.json elsewhere"),),
    "ddlrun": (
        ("lmsrun ddlrun -H h1,h2 --accelerators 4 train.py", "four ranks on each of two hosts"),
        ("lmsrun plan ddlrun -H h1,h2 train.py", "what would be started"),
    ),
}


def render_help(command: str) -> str:
    """The help of one subcommand as plain text."""
    examples = _EXAMPLES.get(command, ())
    parts = [
        f"usage: {_HEADS[command]}",
        _ABOUT[command],
        *_render_options("run" if command == "plan" else command),
    ]
    if examples:
        lines = [f"  {line:<50}  {meaning}" for line, meaning in examples]
        parts.append("\n".join(["Examples:", *lines]))
    if command in ("run", "plan"):
        parts.append(
            "Each option can also stand in lmsrun.toml (or [tool.lmsrun] of pyproject.toml) under its\n"
            "long name, and in the environment: --host-mem-limit is LMSRUN_HOST_MEM_LIMIT. The command line\n"
            "wins, then the environment, then the file."
        )
    return "\n\n".join(parts)


def _render_options(command: str) -> list[str]:
    if command == "ddlrun":
        from launch.backends.ddlrun import describe_flags

        return ["Options:\n" + "\n".join(_render_entry(f"  {left}", text) for left, text in describe_flags())]
    groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for field, declared in sorted(OPTIONS.items(), key=lambda entry: entry[0] in _PLAN_FIELDS):
        if command in declared.commands:
            groups[declared.group].append(_render_option(field, declared))
    return [f"{group}:\n" + "\n".join(lines) for group, lines in groups.items() if lines]


def _render_option(field: str, declared: Option) -> str:
    flag = f"--[no-]{declared.name}" if declared.is_switch else declared.long_flag
    left = "  " + ", ".join((*declared.flags, flag)) + (f" {declared.metavar}" if declared.metavar else "")
    default = getattr(LaunchOptions, field)
    shown = "" if default in (None, False, ()) else f" (default {default})"
    return _render_entry(left, declared.help + shown)


def _render_entry(left: str, text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH - _INDENT)
    if len(left) > _INDENT - 2:
        lines.insert(0, "")
    first, *more = lines
    return "\n".join([f"{left:<{_INDENT}}{first}".rstrip(), *(" " * _INDENT + line for line in more)])


def render_reference() -> str:
    """Every option of `run`, `plan` and `topo` as a page of Markdown tables."""
    about = (
        "Made from the declarations in `launch/model/settings.py` and its neighbours by\n"
        "`pytest --update-golden`. A switch `--NAME` has its opposite `--no-NAME`. In `lmsrun.toml`, or\n"
        "`[tool.lmsrun]` of `pyproject.toml`, the key is the long name. The command line wins, then the\n"
        "environment, then the file."
    )
    return "\n\n".join(["# Options", about, *map(_reference_table, _GROUPS)]) + "\n"


def _reference_table(group: str) -> str:
    rows = [_reference_row(field, declared) for field, declared in OPTIONS.items() if declared.group == group]
    heads = ["| option | variable | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {group}", "", *heads, *rows])


def _reference_row(field: str, declared: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in (*declared.flags, declared.long_flag))
    value = f" `{declared.metavar}`" if declared.metavar else ""
    default = getattr(LaunchOptions, field)
    shown = "" if default in (None, False, ()) else f"`{default}`"
    cells = (flags + value, f"`{declared.env_name}`", shown, declared.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
