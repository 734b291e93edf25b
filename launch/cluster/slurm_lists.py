"""Slurm's compressed forms: host lists such as ``node[01-03,7]`` and counts such as ``4(x2),3``."""

import re
from collections.abc import Iterator

from launch.cluster.hosts import is_host_name
from launch.model.errors import UsageError
from launch.model.text import count_of

MAX_HOSTS = 65536
"""A list that expands further is damaged or hostile; the largest machines have about 10,000 hosts."""

_PIECE = re.compile(r"\[([^][]*)\]|([^][]+)")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def parse_hostlist(text: str, where: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Expand ``a[1-2]b[3,07],login`` into host names, in order, leading zeros kept.

    Raises:
        UsageError: If brackets do not match, a range runs backwards, a name is none, or it expands past
            ``MAX_HOSTS``.
    """
    names: list[str] = []
    for part in _split(text.strip(), where):
        names += _expand(part, where, MAX_HOSTS - len(names))
    if not names:
        raise UsageError(f"{where} is empty; needed a host list such as 'node[01-03]'")
    bad = next((name for name in names if not is_host_name(name)), None)
    if bad is not None:
        raise UsageError(f"{where}: {bad!r} is not a host name")
    return tuple(names)


def parse_counts(text: str, hosts: int, where: str) -> tuple[int, ...]:
    """Expand ``4(x2),3`` into one number a host.

    Raises:
        UsageError: If the text is not such a list or does not fit the number of hosts.
    """
    counts = expand_counts(text, where, hosts + 1)
    if len(counts) != hosts:
        raise UsageError(
            f"{where} is {text!r}, which counts {count_of(len(counts), 'host')}; the allocation has {hosts}"
        )
    return counts


def expand_counts(text: str, where: str, most: int) -> tuple[int, ...]:
    """Expand ``4(x2),3`` into 4, 4, 3; each repetition is cut at ``most``.

    Raises:
        UsageError: If the text is not such a list.
    """
    return tuple(count for count, times in _read_counts(text, where) for _ in range(min(times, most)))


def find_count(text: str, place: int, where: str) -> int:
    """Find the number of one host, by its place in a list such as ``4(x2),3``.

    Raises:
        UsageError: If the text is not such a list, or ends before that host.
    """
    before = 0
    for count, times in _read_counts(text, where):
        before += times
        if place < before:
            return count
    raise UsageError(
        f"{where} is {text[:200]!r}, which counts {count_of(before, 'host')}; needed {place + 1}"
    )


def _read_counts(text: str, where: str) -> Iterator[tuple[int, int]]:
    """Each number, and how many hosts in a row have it."""
    for part in text.strip().split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{where} is {text[:200]!r}; needed numbers such as '4(x2),3'")
        yield int(match[1]), int(match[2] or 1)


def _split(text: str, where: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise UsageError(f"{where} is {text!r}; its brackets do not match")
        if char == "," and not depth:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise UsageError(f"{where} is {text!r}; its brackets do not match")
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _expand(part: str, where: str, room: int) -> list[str]:
    names = [""]
    for inside, plain in _PIECE.findall(part):
        endings = _ranges(inside, where, room) if not plain else [plain]
        if len(names) * len(endings) > room:
            raise UsageError(f"{where} expands to more than {MAX_HOSTS} hosts")
        names = [name + ending for name in names for ending in endings]
    return names


def _ranges(text: str, where: str, room: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        last = high if dash else low
        if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in (low, last)):
            raise UsageError(f"{where}: cannot read the range {part!r}; needed something like '01-03'")
        if int(last) < int(low):
            raise UsageError(f"{where}: the range {part!r} runs backwards")
        if int(last) - int(low) >= room - len(numbers):
            raise UsageError(f"{where} expands to more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(last) + 1)]
    return numbers
