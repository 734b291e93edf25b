"""Sets of OS indexes (CPUs, NUMA nodes) and the two ways the kernel writes them.

A set is a plain ``frozenset[int]``; ids may be sparse (0 and 8, 250-255): never counted, never assumed dense.
"""

from collections.abc import Callable, Iterable

from launch.model.errors import TopologyLimitError

IdSet = frozenset[int]
MAX_ID = 1 << 16
"""No kernel numbers CPUs or nodes this high; a larger id is a damaged or hostile file, not a machine."""
MAX_DISTINCT_IDS = 8 * MAX_ID
"""In the distinct id sets of one machine: 100 bytes each. 60,000 CPUs are in five sets each at most."""
MAX_IDS = 64 * MAX_ID
"""In all sets of one machine, equal ones counted again (the CPUs near each of many GPUs): 50 ns each."""
_HEX = frozenset("0123456789abcdef")
_BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


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
    low_first = reversed(bytes.fromhex(digits.rjust(len(digits) + len(digits) % 2, "0")))
    return frozenset(8 * index + bit for index, byte in enumerate(low_first) if byte for bit in _BITS[byte])


class IdParser:
    """Parses the id sets of one machine, each text once, and no more ids in all than a machine can have.

    A line of ten bytes names 65,000 CPUs, so a small file with many such lines would fill any memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], IdSet] = {}
        self._distinct, self._all = MAX_DISTINCT_IDS, MAX_IDS

    def ids(self, text: str) -> IdSet:
        """Parse a list as ``parse_ids`` does; TopologyLimitError if that makes too many ids in all."""
        return self._parse("list", parse_ids, text)

    def mask(self, text: str) -> IdSet:
        """Parse a mask as ``parse_mask`` does; TopologyLimitError if that makes too many ids in all."""
        return self._parse("mask", parse_mask, text)

    def _parse(self, kind: str, parse: Callable[[str], IdSet], text: str) -> IdSet:
        found = self._known.get((kind, text))
        if found is None:
            found = self._known[kind, text] = parse(text)
            self._distinct -= len(found)
        self._all -= len(found)
        if self._distinct < 0 or self._all < 0:
            self._known.clear()
            raise TopologyLimitError(
                f"its lists of CPUs and nodes name more than {MAX_DISTINCT_IDS} ids in all; needed a machine "
                f"of at most {MAX_ID} CPUs"
            )
        return found
