"""Read a document that somebody else has written: what is not as it should be is unknown, never an error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LARGEST = 1e18
MOST_ITEMS = 4096
MOST_TEXT = 400


def number(value: Any) -> float | None:
    """Return a finite number of at least 0; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 <= value <= LARGEST else None  # Neither is true of NaN.


def whole(value: Any) -> int | None:
    """Return a whole number of at least 0."""
    known = number(value)
    return None if known is None else int(known)


def text(value: Any, instead: str = "") -> str:
    """Return a text, cut to a bearable length."""
    return value[:MOST_TEXT] if isinstance(value, str) and value else instead


def table(value: Any) -> Mapping[str, Any]:
    """Return an object."""
    return value if isinstance(value, dict) else {}


def items(value: Any, most: int = MOST_ITEMS) -> Sequence[Any]:
    """Return a list, cut to a bearable length."""
    return value[:most] if isinstance(value, list) else []


def numbers(value: Any, least: int) -> list[float | None]:
    """Return the numbers of a list of at least so many items; an empty list for anything else."""
    found = [number(one) for one in items(value)]
    return found if len(found) >= least else []


def size(nbytes: float | None) -> str:
    """Write bytes for people."""
    if nbytes is None:
        return "unknown"
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):,.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float | None) -> str:
    """Write a time for people."""
    if seconds is None:
        return "unknown"
    if seconds >= 60:
        return f"{seconds / 60:,.1f} min"
    if not seconds:
        return "0 s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


ROUND = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def byte_ticks(top: float) -> list[float]:
    """Return round numbers of bytes from 0 to ``top``, seven at most."""
    unit = 2.0 ** (max(0, int(math.log2(max(top, 1)))) // 10 * 10)
    return _ticks(top, [unit / 16, unit / 8, unit / 4, unit / 2, *(unit * one for one in ROUND)])


def time_ticks(top_s: float) -> list[float]:
    """Return round times from 0 to ``top_s``, seven at most."""
    unit = 10.0 ** math.floor(math.log10(top_s)) if top_s > 0 else 1.0
    return _ticks(top_s, [unit / 5, unit / 2, unit, 2 * unit])


def _ticks(top: float, steps: list[float]) -> list[float]:
    step = next((one for one in steps if top / one <= 6), top or 1.0)
    return [step * number for number in range(int(top / step) + 1)]
