"""Sets of OS indexes (CPUs, NUMA nodes) and the two ways the kernel writes them.

A set is a plain ``frozenset[int]``; ids may be sparse (0 and 8, 250-255): never counted, never assumed dense.
"""

from collections.abc import Iterable

IdSet = frozenset[int]
MAX_ID = 1 << 16
"""No kernel numbers CPUs or nodes this high; a larger id is a damaged or hostile file, not a machine."""
_HEX = frozenset("0123456789abcdef")


def parse_ids(text: str) -> IdSet:
    """Parse the kernel's list format.

    Args:
        text: Such as ``"0-3,8"``; empty means no ids. The form with strides (``"0-30:2/4"``), which the
            kernel reads but never prints, is refused.

    Returns:
        The set of ids.

    Raises:
        ValueError: If the text is not such a list, a range runs backwards or an id exceeds ``MAX_ID``.
    """
    ids: set[int] = set()
    budget = MAX_ID  # the same huge range a thousand times over would take for ever
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f"not an id list: {text.strip()!r} (needed something like '0-3,8')")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high > MAX_ID or (budget := budget - (high - low)) < 0:
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
        ValueError: If a word is not hexadecimal, or the mask is infinite or names an id above ``MAX_ID``.
    """
    if text.strip().startswith("0xf...f"):
        raise ValueError("an infinite mask names no finite set")
    words = [word.strip().lower().removeprefix("0x") for word in text.strip().split(",")]
    if not all(map(_HEX.issuperset, words)):
        raise ValueError(
            f"not a mask: {text.strip()!r} (needed hexadecimal words such as '00000000,0000ffff')"
        )
    digits = "".join(word.rjust(8, "0") for word in words).lstrip("0")
    if len(digits) * 4 > MAX_ID:
        raise ValueError(f"a mask of {len(digits)} digits names ids above {MAX_ID}")
    bits = reversed(bin(int(digits or "0", 16))[2:])
    return frozenset(index for index, bit in enumerate(bits) if bit == "1")
