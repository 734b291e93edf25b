"""The command line: options up to the program, and what looks like an option of ours behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from launch.model.errors import UsageError
from launch.model.plan import MODULE
from launch.model.settings import parse_option
from lms.config import LMSConfig, env_name, find_near, nearest
from lmsrun.options import OPTIONS, OUTPUT

CONFIG_FLAG = "--lms-config"

_WISHES: dict[str, Literal["help", "version"]] = {
    **dict.fromkeys(("-h", "--help"), "help"),
    **dict.fromkeys(("-V", "--version"), "version"),
}


@dataclass(frozen=True)
class Parsed:
    """What the command line itself says."""

    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    """Field name to how the option was written."""
    program: tuple[str, ...] = ()
    wish: Literal["", "help", "version"] = ""
    """What the user asked for instead of a run."""
    behind: tuple[str, ...] = ()
    """Options behind the program, each as it was typed, that look as if they were meant for lmsrun."""


def parse_argv(command: str, argv: Sequence[str]) -> Parsed:
    """Parse options up to the program; everything from the program (or ``-m MODULE``) on is left alone.

    Args:
        command: Whose options ``argv`` may name, such as run or fit.
        argv: The command line behind the subcommand.

    Raises:
        UsageError: If an option is unknown, lacks its value, or is given twice with different values.
    """
    spellings = _spellings(command)
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    rest = list(argv)
    is_marked = False
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            is_marked = True
            break
        if word == MODULE and command in ("run", "fit"):
            if not rest:
                raise UsageError(f"{MODULE} needs the name of a module, as in python -m MODULE [ARGS]")
            rest.insert(0, word)
            break
        if word in _WISHES:
            return Parsed({}, {}, wish=_WISHES[word])
        flag, equals, text = word.partition("=")
        if flag not in spellings:
            raise UsageError(f"unknown option {flag}{_hint(flag, spellings, command)}")
        field, switched = spellings[flag]
        value: Any = switched if OPTIONS[field].is_switch else None
        if value is None:
            if not equals and (not rest or rest[0] == "--"):
                raise UsageError(f"{flag} needs a value: {flag} {OPTIONS[field].metavar}")
            if not equals and (rest[0] in spellings or rest[0] in _WISHES):
                raise UsageError(
                    f"{flag} needs a value ({OPTIONS[field].metavar}), but the option {rest[0]} follows; "
                    f"if that is the value, write {flag}={rest[0]}"
                )
            value = parse_option(OPTIONS[field], text if equals else rest.pop(0), flag)
        elif equals:
            raise UsageError(f"{flag} takes no value; write {flag} alone, or --no-{OPTIONS[field].name}")
        if OPTIONS[field].repeats:
            value = (*values.get(field, ()), *value)
        elif values.get(field, value) != value:
            raise UsageError(f"{flag} contradicts {spelled[field]} before it; give one of them")
        values[field], spelled[field] = value, flag
    behind = () if is_marked else find_behind(rest, spellings, is_strict=command != "fit")
    return Parsed(values, spelled, tuple(rest), behind=behind)


def find_behind(
    program: Sequence[str], spellings: Mapping[str, tuple[str, bool]], *, is_strict: bool = True
) -> tuple[str, ...]:
    """Find the words behind a program that look like options of lmsrun; they go to the program all the same.

    Scripts have options of their own, such as ``--output-dir``, ``--config`` or ``--gpus``. So only those
    count that hardly any script has: not for output; with a dash inside the name, declared words as values,
    or one dash before several letters; and with a value that the option can have. Where that is not strict,
    the first two do not matter: ``lmsrun fit`` has few options, and none that scripts have.
    """
    words = list(program[1:])
    found = []
    while words and words[0] != "--":
        flag, equals, text = words.pop(0).partition("=")
        if flag not in spellings:
            continue
        declared = OPTIONS[spellings[flag][0]]
        name = flag.removeprefix("--")
        is_distinct = declared.words or "-" in name.strip("-") or (name == flag and len(name) > 2)
        if is_strict and (declared.group == OUTPUT or not is_distinct):
            continue
        if declared.is_switch:
            found += [] if equals else [flag]
            continue
        value = text if equals else words[0] if words else ""
        try:
            parse_option(declared, value, flag)
        except UsageError:
            continue
        found.append(f"{flag}={value}" if equals else f"{flag} {value}")
    return tuple(found)


def _hint(flag: str, spellings: Mapping[str, Any], command: str) -> str:
    if flag.endswith(".py"):
        return f"; if that is the program, write -- {flag}"
    if CONFIG_FLAG in spellings and (setting := _lms_setting(flag)):
        return f"; it is a setting of LMS: set {setting}=..., or write it in the file of {CONFIG_FLAG}"
    # One letter is like everything: only another spelling of it can have been meant.
    letter = flag.strip("-").lower()
    near = [spelling for spelling in spellings if len(letter) > 1 or spelling.strip("-") == letter]
    meant = nearest(flag, near)
    page = "lmsrun --help" if command == "run" else f"lmsrun {command} --help"
    if not meant and CONFIG_FLAG in spellings and (setting := _nearest_setting(letter)):
        return f"; did you mean the setting {setting}=... of LMS? `{page}` lists the options"
    return f"{meant or ';'} `{page}` lists them all"


def _lms_setting(flag: str) -> str:
    """Return the variable of the setting of LMS that an option seems to mean, or an empty text."""
    name = flag.lower().removeprefix("--").removeprefix("no-").replace("-", "_")
    bare = name.removeprefix("lms_")
    found = _settings().get(bare, "")
    # Hardly anything else begins so: it is one, misspelt.
    return found or (_nearest_setting(bare) if name != bare else "")


def _settings() -> dict[str, str]:
    """Return the variables of LMS's settings by their names, in lower case."""
    settings = {declared.name: env_name(declared) for declared in fields(LMSConfig)}
    return settings | {variable.lower().removeprefix("lms_"): variable for variable in settings.values()}


def _nearest_setting(word: str) -> str:
    """Return the variable of the one setting that a word may stand for, or an empty text."""
    settings = _settings()
    near = {settings[one] for one in find_near(word.replace("-", "_"), settings)}
    return near.pop() if len(near) == 1 else ""


def _spellings(command: str) -> dict[str, tuple[str, bool]]:
    """Every spelling of the command's options to its field, and for switches to what it sets."""
    known = {}
    for field, declared in OPTIONS.items():
        if command in declared.commands:
            known.update(dict.fromkeys((declared.long_flag, *declared.flags), (field, True)))
            if declared.is_switch:
                known[f"--no-{declared.name}"] = (field, False)
    return known


def render_argv(parsed: Parsed, leave_out: frozenset[str]) -> list[str]:
    """Render a command line that says the same as ``parsed``, without the fields that are left out."""
    words: list[str] = []
    for field, value in parsed.values.items():
        declared = OPTIONS[field]
        if field in leave_out:
            continue
        if declared.is_switch:
            words.append(declared.long_flag if value else f"--no-{declared.name}")
        else:
            texts = value if declared.repeats else ["auto" if value is None else value]
            for text in map(str, texts):
                # A value that looks like an option must not stand alone.
                flag = declared.long_flag
                words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return [*words, "--", *parsed.program]
