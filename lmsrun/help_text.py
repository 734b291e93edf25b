"""The help texts, made from the declared options."""

import shutil
import textwrap
from dataclasses import Field, fields
from typing import Any

from launch.model.settings import Option
from lms.config import LMSConfig, env_name, words_of
from lmsrun.manual.pages import GROUPS, SUBCOMMANDS, Flag, declared_flag, read_page
from lmsrun.options import NOT_IN_FILES, OPTIONS

_NARROWEST, _USUAL, _WIDEST, _INDENT = 60, 96, 120, 30
SOURCES = (
    f"Each option but {', '.join(NOT_IN_FILES)} can also stand in a file under its long name: "
    "in /etc/lmsrun.toml, in ~/.config/lmsrun.toml, in ./lmsrun.toml (or [tool.lmsrun] of ./pyproject.toml). "
    "All can stand in the environment: --host-mem-limit is LMSRUN_HOST_MEM_LIMIT. The command line wins, "
    "then the environment, then the nearest file."
)


def render_help(command: str) -> str:
    """Render the help of one subcommand as plain text, as wide as the terminal."""
    page = read_page(command)
    width = min(max(shutil.get_terminal_size((_USUAL, 24)).columns, _NARROWEST), _WIDEST)
    parts = [f"usage: {page.usage}", textwrap.fill(page.about, width)]
    for title, flags in page.groups:
        parts.append("\n".join([f"{title}:", *(_render_flag(flag, width) for flag in flags)]))
    if page.examples:
        lines = [f"  {line:<50}  {meaning}" for line, meaning in page.examples]
        parts.append("\n".join(["Examples:", *lines]))
    if command in ("run", "plan"):
        parts.append(textwrap.fill(SOURCES, width))
    return "\n\n".join(parts)


def _render_flag(flag: Flag, width: int) -> str:
    *others, last = flag.spellings
    last = last.replace("--", "--[no-]", 1) if flag.opposite else last
    left = "  " + ", ".join((*others, last)) + (f" {flag.value.metavar}" if flag.value else "")
    return _render_entry(left, flag.help + (f" (default {flag.default})" if flag.default else ""), width)


def _render_entry(left: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, width - _INDENT)
    if len(left) > _INDENT - 2:
        lines.insert(0, "")
    first, *more = lines
    return "\n".join([f"{left:<{_INDENT}}{first}".rstrip(), *(" " * _INDENT + line for line in more)])


def render_reference() -> str:
    """Render every option of `run`, `plan` and `topo` as a page of Markdown tables."""
    left_out = ", ".join(f"`{flag}`" for flag in NOT_IN_FILES)
    about = (
        "Made from the declarations in `launch/model/settings.py` and its neighbours by\n"
        "`pytest --update-golden`. A switch `--NAME` has its opposite `--no-NAME`. In `lmsrun.toml`, or\n"
        "`[tool.lmsrun]` of `pyproject.toml`, the key is the long name; so in `~/.config/lmsrun.toml` and\n"
        "`/etc/lmsrun.toml`. The command line wins, then the environment, then the nearest file.\n"
        f"These stand in no file: {left_out}."
    )
    return "\n\n".join(["# Options", about, *map(_reference_table, GROUPS)]) + "\n"


def render_commands() -> str:
    """Render every subcommand as a page: how it is called, what it does, examples."""
    parts = [
        "# Commands",
        "Made from the subcommands' own help by `pytest --update-golden`.",
        "[Options](../options.md) lists their options.",
    ]
    for name in SUBCOMMANDS:
        page = read_page(name)
        usage = "\n".join(line.strip() for line in page.usage.splitlines())
        parts += [f"## lmsrun {name}", f"```text\n{usage}\n```", page.about]
        if page.examples:
            rows = [_row(f"`{line}`", meaning) for line, meaning in page.examples]
            parts.append("\n".join(["| example | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def render_settings() -> str:
    """Render every field of LMSConfig as a page with a Markdown table."""
    about = (
        "Made from the declarations in `lms/config.py` by `pytest --update-golden`. A field is a keyword of\n"
        "`lms.enable()`, a key of the file for `--lms-config`, and a variable. Sizes are bytes unless the\n"
        "name says otherwise. In a variable, commas separate several names. `v1:` and `v2:` mark rules of\n"
        "IBM's first and second generation."
    )
    rows = [
        _row(f"`{one.name}`", f"`{env_name(one)}`", _shown(one.default), _meaning(one))
        for one in fields(LMSConfig)
    ]
    heads = ["| field | variable | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n\n".join(["# Settings of Large Model Support", about, "\n".join([*heads, *rows])]) + "\n"


def _reference_table(group: str) -> str:
    rows = [_reference_row(field, declared) for field, declared in OPTIONS.items() if declared.group == group]
    heads = ["| option | variable | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {group}", "", *heads, *rows])


def _reference_row(field: str, declared: Option) -> str:
    flag = declared_flag(field, declared)
    value = f" `{flag.value.metavar}`" if flag.value else ""
    spellings = ", ".join(f"`{spelling}`" for spelling in flag.spellings)
    return _row(spellings + value, f"`{declared.env_name}`", _shown(flag.default), declared.help)


def _meaning(setting: Field[Any]) -> str:
    """Return the help of a setting, with the words that it can be where the help does not name them all."""
    told, words = setting.metadata["help"], words_of(setting)
    return told if all(word in told for word in words) else f"{told} (one of {', '.join(words)})"


def _shown(default: object) -> str:
    return "" if default is None or default in ((), "") else f"`{default}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
