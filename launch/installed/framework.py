"""How the ranks of a program find each other: by Horovod, or by TensorFlow's own strategy."""

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.model.plan import MODULE
from launch.model.tf_cluster import TF_CONFIG

MAX_SCRIPT_BYTES = 1 << 20
MISSING = "Horovod is not installed for this Python; hvd.init() in a rank will not find its peers"
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
    strategy, horovod = bool(_STRATEGY.search(script)), bool(_HOROVOD.search(script))
    meets = horovod or strategy
    stage = "init" if meets else "framework" if _TENSORFLOW.search(script) else "start"
    installed = python is not None or horovod_installed()
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
        why = "Horovod is not installed for this Python"
        return FrameworkChoice(
            "tensorflow", why, stage, is_apart=stage != "start", misses_horovod=stage != "start"
        )
    return FrameworkChoice("horovod", "it is installed", stage, is_apart=stage != "start")


def horovod_installed() -> bool:
    """Tell whether this Python has Horovod's launcher side, without importing it."""
    try:
        return importlib.util.find_spec("horovod") is not None
    except (ImportError, ValueError):
        return False


def read_script(program: Sequence[str]) -> bytes:
    """Read the beginning of the Python file that a program is, or that it names first; empty for others."""
    if not program:
        return b""
    names = program[:2] if os.path.basename(program[0]).startswith("python") else program[:1]
    if MODULE in names[-1:] and len(program) > len(names):
        path = program[len(names)].replace(".", os.sep)
        names = (f"{path}.py", os.path.join(path, "__main__.py"))
    for name in names:
        try:
            if name.endswith(".py") and os.path.isfile(name):
                with open(name, "rb") as file:
                    return file.read(MAX_SCRIPT_BYTES)
        except OSError:
            continue
    return b""
