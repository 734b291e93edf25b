"""What each subcommand takes, as values: help, shell completion and man pages are all made from these."""

from dataclasses import dataclass
from typing import Literal

from launch.model.cluster_settings import CLUSTER
from launch.model.settings import JOB, LMS, MEMORY, PLACEMENT, Option, PlanSettings, declared_options
from lmsrun.options import COMMANDS, FOR_LMSRUN, OPTIONS, OUTPUT, LaunchOptions, load_command

SUBCOMMANDS = tuple(name for name in COMMANDS if name not in FOR_LMSRUN)
"""Those that people type."""
GROUPS = (JOB, CLUSTER, PLACEMENT, MEMORY, LMS, OUTPUT)
_PLAN_FIELDS = frozenset(declared_options(PlanSettings))
"""Listed behind the command line's own options, which people look for first."""

Kind = Literal["files", "folders", "variables", "program", "text"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("FILE", "PATH", "SRC"), "files"),
    **dict.fromkeys(("DIR", "RUN-FOLDER"), "folders"),
    "NAME[=VALUE]": "variables",
    "PROGRAM": "program",
}


@dataclass(frozen=True)
class Value:
    """What follows an option, or a subcommand: words of its own, and others of a kind."""

    metavar: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words that can be typed as they stand; what is written in capitals stands for something."""
        if self.metavar == "GPUS":
            from lms.simulate.devices import NAMES  # No help text waits for it.

            return NAMES
        return tuple(word for word in self.metavar.split("|") if word.islower())

    @property
    def kind(self) -> Kind:
        """What a shell can offer beside the words."""
        return _KINDS.get(self.metavar, "text")


@dataclass(frozen=True)
class Flag:
    """One option as it is typed."""

    spellings: tuple[str, ...]
    value: Value | None
    help: str
    default: str = ""
    opposite: str = ""
    """The spelling that switches it off."""


@dataclass(frozen=True)
class Page:
    """One subcommand."""

    name: str
    usage: str
    about: str
    groups: tuple[tuple[str, tuple[Flag, ...]], ...]
    """Titles and their flags."""
    examples: tuple[tuple[str, str], ...]
    operand: Value | None
    """What it takes behind its options."""

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All flags, in the order of the help."""
        return tuple(flag for _, flags in self.groups for flag in flags)


def read_page(name: str) -> Page:
    """Describe what a subcommand takes.

    Args:
        name: One of ``SUBCOMMANDS``.
    """
    module = load_command(name)
    operand = getattr(module, "OPERAND", "")
    groups = _groups("run" if name == "plan" else name, module)
    return Page(
        name, module.USAGE, module.ABOUT, groups, module.EXAMPLES, Value(operand) if operand else None
    )


def _groups(name: str, module: object) -> tuple[tuple[str, tuple[Flag, ...]], ...]:
    own = getattr(module, "read_flags", None)
    if own is not None:
        return (("Options", own()),)
    found: dict[str, list[Flag]] = {group: [] for group in GROUPS}
    for field, declared in sorted(OPTIONS.items(), key=lambda entry: entry[0] in _PLAN_FIELDS):
        if name in declared.commands:
            found[declared.group].append(declared_flag(field, declared))
    return tuple((group, tuple(flags)) for group, flags in found.items() if flags)


def _shown(default: object) -> str:
    """Write a default for people; nothing for a switch that is off, and for what is not given."""
    if default is None or default is False or default == ():
        return ""
    return "on" if default is True else str(default)


def declared_flag(field: str, declared: Option) -> Flag:
    """Describe an option of lmsrun's own as it is typed."""
    default = getattr(LaunchOptions, field)
    return Flag(
        (*declared.flags, declared.long_flag),
        Value(declared.metavar) if declared.metavar else None,
        declared.help,
        _shown(default),
        f"--no-{declared.name}" if declared.is_switch else "",
    )
