"""Text on its way to a person's terminal, also from outside (a saved topology, a receipt, a file name)."""

import re

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]|\x08")
"""A sequence that a terminal obeys: of CSI, of OSC, or a short one; and a backspace."""


def printable(text: str, instead: str = "?", keep: str = "") -> str:
    """Replace what a terminal would obey instead of show, such as escape sequences.

    Args:
        text: Any text, also one that UTF-8 cannot write.
        instead: Stands for each character that is not printable.
        keep: Such characters that are wanted all the same, for example line ends.
    """
    return "".join(char if char.isprintable() or char in keep else instead for char in text)


def shown_line(line: str, keep: str = "") -> str:
    """Return a line without colours and other controls of a terminal; of a bar its last state.

    Args:
        line: What a program has printed up to the end of the line, such as a progress bar of Keras.
        keep: As in ``printable``.
    """
    written = [part for part in _CONTROL.sub("", line).split("\r") if part.strip()]
    return printable(written[-1].rstrip(), keep=keep) if written else ""


def count_of(number: int, what: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {what}{'s' * (number != 1)}"


def name_ids(what: str, ids: str) -> str:
    """``node 0``, ``nodes 0,8``, ``no node``, for ids as ``format_ids`` writes them."""
    return f"{what}{'s' * (not ids.isdigit())} {ids}" if ids else f"no {what}"
