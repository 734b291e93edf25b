"""A strict parser of IBM's explicit resource files, by the grammar of the Job Step Manager documentation.

``RANK_SPECIFICATION : RESOURCE_SET_SPECIFICATION`` lines behind a preamble of ``symbol: value`` lines;
whatever the documentation does not allow is a ValueError.
"""

import re
from dataclasses import dataclass

_VERDICTS = {"error", "warn", "allow"}
_SYMBOLS = {
    "cpu_index_using": {"logical", "physical"},
    "overlapping_rs": _VERDICTS,
    "skip_missing_cpu": _VERDICTS,
    "skip_missing_gpu": _VERDICTS,
    "skip_missing_mem": _VERDICTS,
    "oversubscribe_cpu": _VERDICTS,
    "oversubscribe_gpu": _VERDICTS,
    "oversubscribe_mem": _VERDICTS,
    "launch_distribution": {"packed", "cyclic"},
}
_RANK = re.compile(r"rank: (\d+): \{ (.*) \}")
_SET = re.compile(r"\{(\d+)(?:-(\d+))?\}")


@dataclass(frozen=True)
class ErfRank:
    """One rank and its resources; ``gpu`` and ``mem`` are ``*`` or ids."""

    rank: int
    hostname: str
    cpus: frozenset[int]
    gpu: str
    mem: str


def parse_erf(text: str) -> tuple[dict[str, str], list[ErfRank]]:
    """The preamble and the ranks."""
    if not text.endswith("\n"):
        raise ValueError("jsrun needs a newline at the end")
    preamble: dict[str, str] = {}
    ranks: list[ErfRank] = []
    for line in text.splitlines():
        match = _RANK.fullmatch(line)
        if match:
            ranks.append(_rank(int(match[1]), match[2]))
            continue
        symbol, colon, value = line.partition(": ")
        if ranks or not colon or value not in _SYMBOLS.get(symbol, ()) or symbol in preamble:
            raise ValueError(f"not an ERF line here: {line!r}")
        preamble[symbol] = value
    if [rank.rank for rank in ranks] != list(range(len(ranks))):
        raise ValueError("ranks must count from 0, each once")
    return preamble, ranks


def _rank(number: int, body: str) -> ErfRank:
    pairs = dict(part.split(": ", 1) for part in body.split("; "))
    if set(pairs) != {"hostname", "cpu", "gpu", "mem"} or len(body.split("; ")) != 4:
        raise ValueError(f"not the keys of a resource set: {body!r}")
    cpus: set[int] = set()
    for part in pairs["cpu"].split(","):
        match = _SET.fullmatch(part)
        if match is None:
            raise ValueError(f"not a set of CPUs: {part!r}")
        cpus |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ErfRank(number, pairs["hostname"], frozenset(cpus), pairs["gpu"], pairs["mem"])
