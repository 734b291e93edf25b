"""All sources together: default < file < environment < command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.model.errors import UsageError
from launch.model.settings import read_environ
from lms.config import find_free_texts
from lmsrun.options import OPTIONS, LaunchOptions
from lmsrun.sources.command_line import Parsed
from lmsrun.sources.files import read_files
from lmsrun.sources.tables import expand_home, find_free_options, parse_table
from lmsrun.sources.variables import check_variables

_CONTRADICTIONS = (
    ("numa", "off", "mem_policy", ("bind", "preferred")),
    ("numa", "off", "bind_method", ("numactl", "libnuma")),
    ("numa", "strict", "mem_policy", ("none",)),
    ("numa", "off", "omp_places", ("cores", "threads")),
    ("stall_timeout", 0.0, "stall_kill", (True,)),
    ("quiet", True, "verbose", (True,)),
)


@dataclass(frozen=True)
class Request:
    """Options with their origins, and the program that follows them."""

    options: LaunchOptions
    program: tuple[str, ...]
    origins: Mapping[str, str]
    """Field name to where its value came from, for those that are not defaults."""
    lms_table: Mapping[str, Any]
    """The ``[lms]`` tables of the TOML files, the stronger file's values over the others'."""
    warnings: tuple[str, ...] = ()
    from_files: frozenset[str] = frozenset()
    """Fields whose values stand in a file."""
    behind: tuple[str, ...] = ()
    """Options behind the program, each as it was typed, that look as if they were meant for lmsrun."""
    lms_files: tuple[str, ...] = ()
    """The files that have an ``[lms]`` table, for people."""


def read_request(parsed: Parsed, environ: Mapping[str, str], folder: Path) -> Request:
    """Bring all sources together.

    Args:
        parsed: The command line.
        environ: The environment.
        folder: Where ``lmsrun.toml`` or ``pyproject.toml`` are looked for, beside the site's and the user's.

    Raises:
        UsageError: For an unknown or contradictory option, key or variable, or a value that it cannot have.
    """
    warnings = check_variables(environ)
    from_env = read_environ(LaunchOptions, environ)
    path = parsed.values.get("config", from_env.get("config"))
    lms_table: dict[str, Any] = {}
    lms_files: list[str] = []
    from_files: list[dict[str, Any]] = []
    origins: dict[str, str] = {}
    for file in read_files(Path(path) if path else None, environ, folder):
        own = dict(file.table)
        of_lms = own.pop("lms") if isinstance(own.get("lms"), dict) else {}
        values = parse_table(own, file.name)
        file.refuse_others_texts([*find_free_options(values), *map("lms.{}".format, find_free_texts(of_lms))])
        lms_table |= expand_home(of_lms)
        lms_files += [file.name] if of_lms else []
        from_files.append(values)
        origins |= {field: f"{file.name}: {OPTIONS[field].name}" for field in values}
    levels = (*from_files, from_env, parsed.values)
    in_files = frozenset(origins)
    origins |= {**{field: OPTIONS[field].env_name for field in from_env}, **parsed.spelled}
    _refuse_contradictions(levels, origins)
    return Request(
        LaunchOptions(**{field: value for level in levels for field, value in level.items()}),
        parsed.program,
        origins,
        lms_table,
        warnings,
        in_files - from_env.keys() - parsed.spelled.keys(),
        parsed.behind,
        tuple(lms_files),
    )


def _refuse_contradictions(levels: Sequence[Mapping[str, Any]], origins: Mapping[str, str]) -> None:
    """Refuse options that cannot both hold, if they come from one source; a stronger source simply wins.

    Args:
        levels: Values by field, from the weakest source to the strongest.
        origins: How each field was named where its value came from.

    Raises:
        UsageError: Naming both.
    """
    values = {field: value for level in levels for field, value in level.items()}
    for field, word, other, others in _CONTRADICTIONS:
        together = any(level.get(field) == word and level.get(other) in others for level in levels)
        if together and values[field] == word and values[other] in others:
            one, two = (
                origins[name] if values[name] is True else f"{origins[name]} {values[name]}"
                for name in (field, other)
            )
            raise UsageError(f"{one} contradicts {two}; give one of them")
