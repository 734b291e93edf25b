"""How the ranks of a program find each other: by Horovod, or by TensorFlow's own strategy."""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from launch.model.errors import JobError
from launch.model.plan import MODULE
from launch.model.tf_cluster import TF_CONFIG
from launch.system.program_path import find_program

MAX_SCRIPT_BYTES = 1 << 20
MISSING = "Horovod is not installed for this Python; hvd.init() in a rank will not find its peers"
_TAKE_VALUE = "XWmc"
"""The options of Python that have a value."""
_PACKAGES = ("horovod", "tensorflow")
_ANSWER = "lmsrun-lacks:"
_ASK = (
    "from importlib.util import find_spec\n"
    f"print({_ANSWER!r}, *(name for name in {_PACKAGES!r} if find_spec(name) is None))"
)
"""Asks without importing them, which would take seconds."""
_STRATEGY = re.compile(rb"\bMultiWorkerMirroredStrategy\b|\bTF_CONFIG\b")
_HOROVOD = re.compile(rb"\b(horovod|hvd)\b")
_TENSORFLOW = re.compile(rb"\b(tensorflow|keras|tf_keras|lms)\b")


@dataclass(frozen=True)
class FrameworkChoice:
    """The framework, the reason for a person, and which receipt of every rank is to be expected."""

    name: str
    why: str
    last_stage: str
    """``start``, ``framework`` or ``init``, as far as the script tells."""
    warnings: tuple[str, ...] = ()
    is_apart: bool = False
    """Whether, as far as the script tells, its ranks use TensorFlow and do not know of each other."""
    misses_horovod: bool = False
    """Whether Horovod is not installed, and the script uses it, or TensorFlow without a strategy."""


@dataclass(frozen=True)
class OtherPython:
    """Another interpreter than lmsrun's own, which a program names, and the packages that it lacks."""

    name: str
    path: str
    lacks: frozenset[str]


def choose_framework(
    asked: str, program: Sequence[str], environ: Mapping[str, str], python: str | None = None
) -> FrameworkChoice:
    """Decide by what was asked for, what the script names, and what is installed.

    Args:
        asked: The option.
        program: With its arguments.
        environ: What the ranks inherit; a ``TF_CONFIG`` in it is the user's own.
        python: Another interpreter for the ranks, of which nothing is known.
    """
    script = read_script(program)
    is_known = any(names.search(script) for names in (_STRATEGY, _HOROVOD, _TENSORFLOW))
    other = find_other_python(program, environ) if is_known else None
    if other is None:
        return _choose(asked, script, environ, python is not None or horovod_installed(), "this Python")
    chosen = _choose(asked, script, environ, "horovod" not in other.lacks, other.path)
    # What is said of Horovod otherwise is about lmsrun's own Python.
    return replace(chosen, warnings=_doubt_python(other, script, chosen), misses_horovod=False)


def _choose(
    asked: str, script: bytes, environ: Mapping[str, str], installed: bool, whose: str
) -> FrameworkChoice:
    strategy, horovod = bool(_STRATEGY.search(script)), bool(_HOROVOD.search(script))
    meets = horovod or strategy
    stage = "init" if meets else "framework" if _TENSORFLOW.search(script) else "start"
    if asked == "horovod" or (asked == "auto" and horovod):
        missing = () if installed else (MISSING,)
        why = "as asked" if asked == "horovod" else "the script uses it"
        return FrameworkChoice("horovod", why, stage, missing, misses_horovod=not installed)
    if asked == "tensorflow":
        return FrameworkChoice(asked, "as asked", stage)
    if environ.get(TF_CONFIG):
        return FrameworkChoice("horovod", f"{TF_CONFIG} is set here, and stays as it is", stage)
    if strategy:
        return FrameworkChoice("tensorflow", "the script uses its strategy", stage)
    if not installed:
        why = f"Horovod is not installed for {whose}"
        return FrameworkChoice(
            "tensorflow", why, stage, is_apart=stage != "start", misses_horovod=stage != "start"
        )
    return FrameworkChoice("horovod", "it is installed", stage, is_apart=stage != "start")


def find_other_python(program: Sequence[str], environ: Mapping[str, str]) -> OtherPython | None:
    """Find the interpreter that a bare ``python`` is, if it is not lmsrun's own, and ask what it lacks.

    Returns:
        None if it is lmsrun's own, not there, or does not answer.
    """
    name = next(iter(_drop_variables(program)), "")
    path = find_program(name, environ.get("PATH")) if _is_python(name) and name.isprintable() else None
    if path is None or os.path.dirname(name) or _place(path) == _place(sys.executable):
        return None
    from launch.system.run_query import read_answer  # Only another interpreter pays for it.

    try:
        said = read_answer((path, "-c", _ASK), environ, "")
    except JobError:
        return None
    answers = [line for line in said.splitlines() if line.startswith(_ANSWER)]
    return OtherPython(name, path, frozenset(answers[-1].split()[1:])) if answers else None


def _place(python: str) -> tuple[str, str]:
    """Return where an interpreter is and what file it is: that of a virtual environment is a link."""
    return os.path.realpath(os.path.dirname(python)), os.path.realpath(python)


def _doubt_python(other: OtherPython, script: bytes, chosen: FrameworkChoice) -> tuple[str, ...]:
    """Warn of an interpreter that lacks what its script names."""
    named = {name for name in _PACKAGES if re.search(rb"\b%s\b" % name.encode(), script)}
    needed = named | ({"horovod"} if chosen.warnings else set())
    lacks = " nor ".join(sorted(needed & other.lacks))
    if not lacks:
        return ()
    doubt = (
        f"{other.name} is {other.path}, which has no {lacks}, and not lmsrun's own {sys.executable}; "
        f"leave {other.name} out, or activate the environment that has it"
    )
    return (doubt,)


def horovod_installed() -> bool:
    """Tell whether this Python has Horovod's launcher side, without importing it."""
    try:
        return importlib.util.find_spec("horovod") is not None
    except (ImportError, ValueError):
        return False


def read_script(program: Sequence[str]) -> bytes:
    """Read the beginning of the Python file that a program is, or that it names first; empty for others."""
    for name in _name_scripts(_drop_variables(program)):
        try:
            if name.endswith(".py") and os.path.isfile(name):
                with open(name, "rb") as file:
                    return file.read(MAX_SCRIPT_BYTES)
        except OSError:
            continue
    return b""


def _drop_variables(program: Sequence[str]) -> Sequence[str]:
    """Leave ``env NAME=VALUE`` in front of a program out."""
    if not program or os.path.basename(program[0]) != "env":
        return program
    return tuple(dropwhile(lambda word: "=" in word and not word.startswith("-"), program[1:]))


def _name_scripts(program: Sequence[str]) -> tuple[str, ...]:
    """Name the files that may be the script of a program: itself, a module, or what Python is given."""
    if not program:
        return ()
    if program[0] == MODULE:
        return _name_modules(program[1:2])
    if not _is_python(program[0]):
        return (program[0],)
    words = iter(program[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            return (word,)
        if word.startswith("--"):
            return (next(words, ""),) if word == "--" else ()
        # A value stands behind its letter, or is the next word: -Xdev, -X dev, -um MODULE.
        at = next((at for at, letter in enumerate(word) if letter in _TAKE_VALUE), None)
        if at is None:
            continue
        value = word[at + 1 :] or next(words, "")
        if word[at] in "mc":
            return _name_modules([value]) if word[at] == "m" else ()
    return ()


def _is_python(name: str) -> bool:
    return os.path.basename(name).startswith("python")


def _name_modules(names: Sequence[str]) -> tuple[str, ...]:
    paths = (name.replace(".", os.sep) for name in names)
    return tuple(file for path in paths for file in (f"{path}.py", os.path.join(path, "__main__.py")))
