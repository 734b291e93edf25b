"""The help texts, made from the declared options."""

import shutil
import textwrap

from launch.model.cluster_settings import CLUSTER
from launch.model.settings import JOB, LMS, MEMORY, PLACEMENT, Option, PlanSettings, declared_options
from lmsrun.options import COMMANDS, OPTIONS, OUTPUT, LaunchOptions, load_command

_NARROWEST, _USUAL, _WIDEST, _INDENT = 60, 96, 120, 30
SUBCOMMANDS = tuple(name for name in COMMANDS if name not in ("probe-host", "plan-rank"))
"""Those with a page of help."""
_GROUPS = (JOB, CLUSTER, PLACEMENT, MEMORY, LMS, OUTPUT)
_PLAN_FIELDS = frozenset(declared_options(PlanSettings))
"""Listed behind the command line's own options, which people look for first."""


_SOURCES = (
    "Each option can also stand in a file under its long name: in /etc/lmsrun.toml, "
    "in ~/.config/lmsrun.toml, in ./lmsrun.toml (or [tool.lmsrun] of ./pyproject.toml); and in the "
    "environment: --host-mem-limit is LMSRUN_HOST_MEM_LIMIT. The command line wins, then the "
    "environment, then the nearest file."
)


def render_help(command: str) -> str:
    """The help of one subcommand as plain text, as wide as the terminal."""
    page = load_command(command)
    width = min(max(shutil.get_terminal_size((_USUAL, 24)).columns, _NARROWEST), _WIDEST)
    parts = [
        f"usage: {page.USAGE}",
        textwrap.fill(page.ABOUT, width),
        *_render_options("run" if command == "plan" else command, width),
    ]
    if page.EXAMPLES:
        lines = [f"  {line:<50}  {meaning}" for line, meaning in page.EXAMPLES]
        parts.append("\n".join(["Examples:", *lines]))
    if command in ("run", "plan"):
        parts.append(textwrap.fill(_SOURCES, width))
    return "\n\n".join(parts)


def _render_options(command: str, width: int) -> list[str]:
    if command == "ddlrun":
        from launch.backends.ddlrun import describe_flags

        entries = [_render_entry(f"  {left}", text, width) for left, text in describe_flags()]
        return ["\n".join(["Options:", *entries])]
    groups: dict[str, list[str]] = {group: [] for group in _GROUPS}
    for field, declared in sorted(OPTIONS.items(), key=lambda entry: entry[0] in _PLAN_FIELDS):
        if command in declared.commands:
            groups[declared.group].append(_render_option(field, declared, width))
    return [f"{group}:\n" + "\n".join(lines) for group, lines in groups.items() if lines]


def _render_option(field: str, declared: Option, width: int) -> str:
    flag = f"--[no-]{declared.name}" if declared.is_switch else declared.long_flag
    left = "  " + ", ".join((*declared.flags, flag)) + (f" {declared.metavar}" if declared.metavar else "")
    default = getattr(LaunchOptions, field)
    shown = "" if default in (None, False, ()) else f" (default {default})"
    return _render_entry(left, declared.help + shown, width)


def _render_entry(left: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, width - _INDENT)
    if len(left) > _INDENT - 2:
        lines.insert(0, "")
    first, *more = lines
    return "\n".join([f"{left:<{_INDENT}}{first}".rstrip(), *(" " * _INDENT + line for line in more)])


def render_reference() -> str:
    """Every option of `run`, `plan` and `topo` as a page of Markdown tables."""
    about = (
        "Made from the declarations in `launch/model/settings.py` and its neighbours by\n"
        "`pytest --update-golden`. A switch `--NAME` has its opposite `--no-NAME`. In `lmsrun.toml`, or\n"
        "`[tool.lmsrun]` of `pyproject.toml`, the key is the long name; so in `~/.config/lmsrun.toml` and\n"
        "`/etc/lmsrun.toml`. The command line wins, then the environment, then the nearest file."
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
