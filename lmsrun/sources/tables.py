"""The table of a TOML file, whose keys are the long names of options."""

import os
from collections.abc import Mapping
from typing import Any

from launch.model.errors import UsageError
from launch.model.settings import Option, parse_option
from lms.config import nearest
from lmsrun.options import BY_SHORT_FLAG, OPTIONS

_PATHS = frozenset({"DIR", "FILE", "PATH", "SRC"})
"""The metavars of options that name a path."""
_LMS_PATHS = ("store_dir", "stats_file", "tensorboard")
_KINDS: Mapping[type, str] = {dict: "a table", list: "a list of more than texts and numbers"}
"""What TOML calls a value that no option has; all else is a date or a time."""


def parse_table(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Parse the options of a TOML table; keys are the long option names, ``-`` and ``_`` alike.

    Raises:
        UsageError: For an unknown key (naming the nearest one), an option that stands in no file, or a value
            that its option cannot have.
    """
    by_key = {declared.name: (field, declared) for field, declared in OPTIONS.items()}
    in_files = [declared.name for declared in OPTIONS.values() if declared.in_file]
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in by_key:
            short = BY_SHORT_FLAG.get(name)
            hint = f"; did you mean {short.name}?" if short else nearest(name, in_files)
            if isinstance(value, dict):
                hint = "; that is a table, and options stand in none; write them above the first table"
            raise UsageError(f"{source}: unknown key {key!r}{hint}")
        field, declared = by_key[name]
        if not declared.in_file:
            raise UsageError(
                f"{source}: {key} stands in no file; give {declared.long_flag} or {declared.env_name} instead"
            )
        if field in values:
            raise UsageError(f"{source}: {name} is there twice, as {name} and as {name.replace('-', '_')}")
        values[field] = _from_toml(declared, value, f"{source}: {key}")
    return values


def expand_home(lms_table: Mapping[str, Any]) -> dict[str, Any]:
    """Let a path of an ``[lms]`` table begin with ``~``."""
    paths = {name: lms_table[name] for name in _LMS_PATHS if isinstance(lms_table.get(name), str)}
    return {**lms_table, **{name: os.path.expanduser(path) for name, path in paths.items()}}


def find_free_options(values: Mapping[str, Any]) -> list[str]:
    """Name the options whose values are no switch, number or declared word: programs, paths, hosts ..."""
    return sorted(
        OPTIONS[field].name
        for field, value in values.items()
        if isinstance(value, (str, tuple)) and value not in OPTIONS[field].words
    )


def _from_toml(declared: Option, value: Any, where: str) -> Any:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        kind = _KINDS.get(type(value), "a date or a time")
        raise UsageError(f"{where} is {kind}; needed {declared.metavar or 'true or false'}")
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    if any("\0" in text for text in texts):  # TOML can write it; a command line and a variable cannot
        raise UsageError(f"{where} holds a NUL character; needed {declared.metavar or 'true or false'}")
    if declared.repeats:
        return tuple(texts)
    if declared.is_switch and not isinstance(value, bool):
        raise UsageError(f"{where} is {value!r}; needed true or false")
    if isinstance(value, list) and declared.join is None:
        raise UsageError(f"{where} is a list; needed one value, {declared.metavar}")
    text = declared.join(texts) if declared.join and isinstance(value, list) else texts[0]
    if declared.metavar in _PATHS:  # no shell has read it
        text = os.path.expanduser(text)
    return parse_option(declared, text, where)
