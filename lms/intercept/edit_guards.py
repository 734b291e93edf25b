"""Guards around an edit: pause Python's cyclic collector, and make warnings name the user's line."""

import gc
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic collector for the ``with`` block.

    It would walk all of TensorFlow's graphs again and again, for nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_inside_of(owner: object, packages: Collection[str] = ()) -> bool:
    """Tell whether a method of ``owner``, in the code of ``packages`` if given, runs in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not packages or _package(frame) in packages:
            if code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is owner:
                return True
        frame = frame.f_back
    return False


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


OTHERS = ("absl", "keras", "lms", "tensorflow", "tf_keras", "wrapt")
"""Packages between the line of a user and a warning about it."""


def level_of_user() -> int:
    """Return the ``stacklevel`` that makes the caller's warning name the user's line, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if _package(frame) not in OTHERS:
            return level
        frame, level = frame.f_back, level + 1
    return 2
