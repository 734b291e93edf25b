"""Sets of OS indexes (CPUs, NUMA nodes) and the two ways the kernel writes them.

A set is a plain ``frozenset[int]``; ids may be sparse (0 and 8, 250-255) and are never counted or assumed dense.
"""

from collections.abc import Iterable

IdSet = frozenset[int]
MAX_ID = 1 << 20
"""No kernel numbers CPUs or nodes this high; a larger id is a damaged or hostile file, not a machine."""


def parse_ids(text: str) -> IdSet:
    """Parse the kernel's list format.

    Args:
        text: Such as ``"0-3,8"``, ``"0-30:2/4"`` is not supported (the kernel never prints it); empty means no ids.

    Returns:
        The set of ids.

    Raises:
        ValueError: If the text is not such a list, a range runs backwards or an id exceeds ``MAX_ID``.
    """
    ids: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f"not an id list: {text.strip()!r} (needed something like '0-3,8')")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > MAX_ID:
            raise ValueError(f"not a possible id range: {part!r}")
        ids.update(range(low, high + 1))
    return frozenset(ids)


def format_ids(ids: Iterable[int]) -> str:
    """Write ids as the kernel's list format, ascending, runs joined: ``{0,1,2,8}`` becomes ``"0-2,8"``."""
    runs: list[list[int]] = []
    for value in sorted(set(ids)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def parse_mask(text: str) -> IdSet:
    """Parse the kernel's hexadecimal mask format, 32-bit words from high to low.

    Args:
        text: Such as ``"00000000,0000ffff"`` (sysfs) or ``"0xff"`` (hwloc).

    Raises:
        ValueError: If a word is not hexadecimal.
    """
    words = [word.strip().removeprefix("0x") for word in text.strip().split(",")]
    if words and words[0].startswith("0xf...f"):
        raise ValueError("an infinite mask names no finite set")
    value = 0
    for word in words:
        value = (value << 32) | (int(word, 16) if word else 0)
    ids = set()
    while value:
        low = value & -value
        ids.add(low.bit_length() - 1)
        value ^= low
    return frozenset(ids)
