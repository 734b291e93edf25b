"""Text on its way to a person's terminal, also from outside (a saved topology, a receipt, a file name)."""


def printable(text: str, instead: str = "?", keep: str = "") -> str:
    """Replace what a terminal would obey instead of show, such as escape sequences.

    Args:
        text: Any text, also one that UTF-8 cannot write.
        instead: Stands for each character that is not printable.
        keep: Such characters that are wanted all the same, for example line ends.
    """
    return "".join(char if char.isprintable() or char in keep else instead for char in text)


def count_of(number: int, what: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {what}{'s' * (number != 1)}"
