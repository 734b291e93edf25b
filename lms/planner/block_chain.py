"""Choose what a chain of blocks keeps: a dynamic programme over blocks and memory.

The forward pass is a chain of blocks, and a plan cuts it into runs of neighbours. A run has *options*: what
of it is kept until the backward pass comes back to it, on the device or on the host, and what is made again
there. An option takes time, bytes on the device from the forward pass on, and more bytes while the backward
pass goes through the run. By then nothing is left of later runs, and of earlier ones all that they keep on
the device.

What comes before a block matters behind it in one thing alone: the bytes that it keeps on the
device. With these in slots, one sweep over the blocks finds the best plan (after Beaumont et
al., "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory",
2019, where a run that is made again may be cut once more; here an op is repeated once at most).

All runs share the link to the host, whose state does not fit in the slots. Bytes on it have a price instead,
and that price is looked for at which the link just has the time for them. Bytes of late blocks cost more: the
backward pass needs them first. (Which runs to keep, to move and to make again, together: Beaumont et al.,
"Efficient Combination of Rematerialization and Offloading for Training DNNs", NeurIPS 2021.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

SLOTS = 64
"""The most parts of the memory that are told apart."""
PRICES = 6
"""How often the price of a byte on the link is halved in on."""
SLOPE = 1.0
"""How much more a byte of the last block costs than one of the first, as a share of the price."""


class Option(NamedTuple):
    """A way to go through a run of neighbouring blocks."""

    end: int
    """The block behind the last of them."""
    seconds: float
    """What is made again takes so long."""
    resident: int
    """Bytes on the device from the forward pass until the backward pass has gone through the run."""
    needed: int
    """The most bytes on the device while the backward pass goes through the run, ``resident`` included."""
    moved: int = 0
    """Bytes that go to the host and come back."""
    level: int = 0
    """How much of the run is made again, as the caller counts it."""


Path = tuple[Option, ...]
"""The options taken, from the first block to the last."""


@dataclass(frozen=True)
class Link:
    """What the link can carry beside compute."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    forward_s: float
    """The time of the forward pass, beside which bytes leave."""
    backward_s: float
    """The time of the backward pass with nothing repeated, beside which they come back."""

    @property
    def most_s(self) -> float:
        """The seconds that a byte costs if compute waits for all of it."""
        return 1 / self.out_bytes_per_s + 1 / self.in_bytes_per_s

    def exposed_s(self, path: Path) -> float:
        """Return the seconds that compute waits for copies."""
        moved = sum(option.moved for option in path)
        out_s = moved / self.out_bytes_per_s - self.forward_s
        back_s = moved / self.in_bytes_per_s - self.backward_s - _again_s(path)
        return max(0.0, out_s) + max(0.0, back_s)

    def extra_s(self, path: Path) -> float:
        """Estimate how much longer a step takes than with everything kept."""
        return _again_s(path) + self.exposed_s(path)


def _again_s(path: Path) -> float:
    return sum(option.seconds for option in path)


def priced(options: Sequence[Sequence[Option]], budget_bytes: int, link: Link) -> list[Path]:
    """Find the best plans for several prices of a byte on the link, the one of the least estimate first.

    Between two prices next to each other a plan may go from too many bytes on the link to hardly any. So a
    plan is tried, too, that goes through the first blocks as the one does, and through the last as the other.

    Args:
        options: For each block those of the runs that begin with it.
        budget_bytes: The most bytes on the device.
        link: The link to the host.
    """
    found: list[Path] = []
    exposed: Path | None = None
    hidden: Path | None = None
    low, high, price_s = 0.0, link.most_s, link.most_s
    for _ in range(1 + PRICES):
        slope = (1 + SLOPE * (block / len(options) - 0.5) for block in range(len(options)))
        path = fastest(options, budget_bytes, [price_s * part for part in slope])
        if path is None:
            return []
        found.append(path)
        if link.exposed_s(path):
            exposed, low = path, price_s
        else:
            hidden, high = path, price_s
        price_s = (low + high) / 2
    if exposed is not None and hidden is not None:
        mixed = (one for one in _joined(exposed, hidden) if _fits(one, budget_bytes))
        found.append(min(mixed, key=link.extra_s))
    return sorted(dict.fromkeys(found), key=link.extra_s)


def _joined(first: Path, then: Path) -> Iterator[Path]:
    """Yield the first plan up to a block that both have a run end with, and the other from there."""
    ends = {option.end: place for place, option in enumerate(then, 1)}
    yield first
    for place, option in enumerate(first[:-1], 1):
        if option.end in ends:
            yield (*first[:place], *then[ends[option.end] :])


def _fits(path: Path, budget_bytes: int) -> bool:
    used = accumulate((option.resident for option in path), initial=0)
    return all(kept + option.needed <= budget_bytes for kept, option in zip(used, path, strict=False))


class _Way(NamedTuple):
    """The best way to come to a block with about so many bytes kept on the device."""

    seconds: float
    kept: int
    path: Path


def fastest(
    options: Sequence[Sequence[Option]], budget_bytes: int, prices_s: Sequence[float], slots: int = SLOTS
) -> Path | None:
    """Find the options through all blocks that take the least time within a budget.

    Args:
        options: For each block those of the runs that begin with it.
        budget_bytes: The most bytes on the device.
        prices_s: The seconds that a byte on the link counts, for each block that a run begins with.
        slots: The parts of the budget that are told apart. Of two ways to a block that keep about the same,
            the faster one goes on.

    Returns:
        The options; ``None`` where no plan fits.
    """
    slot = max(1, -(-budget_bytes // slots))
    ways: list[dict[int, _Way]] = [{} for _ in range(len(options) + 1)]
    ways[0][0] = _Way(0.0, 0, ())
    for block, price_s in zip(range(len(options)), prices_s, strict=False):
        coming = list(_frontier(ways[block].values()))
        for option in _undominated(options[block], price_s):
            seconds, behind = option.seconds + option.moved * price_s, ways[option.end]
            for way in coming:
                if way.kept + option.needed > budget_bytes:
                    break
                kept, total = way.kept + option.resident, way.seconds + seconds
                known = behind.get(kept // slot)
                if known is None or total < known.seconds:
                    behind[kept // slot] = _Way(total, kept, (*way.path, option))
    return min(ways[-1].values(), key=lambda way: (way.seconds, way.kept)).path if ways[-1] else None


def _frontier(ways: Iterable[_Way]) -> Iterator[_Way]:
    """Yield the ways that keep less than every faster one, those that keep the least first."""
    best_s = float("inf")
    for way in sorted(ways, key=lambda way: (way.kept, way.seconds)):
        if way.seconds < best_s:
            best_s = way.seconds
            yield way


def _undominated(options: Iterable[Option], price_s: float) -> Iterator[Option]:
    """Yield options without those that are in nothing better than another one through the same blocks."""
    kept: dict[int, list[Option]] = {}
    by_time = sorted(options, key=lambda one: (one.seconds + one.moved * price_s, one.resident, one.needed))
    for option in by_time:
        others = kept.setdefault(option.end, [])
        if not any(one.resident <= option.resident and one.needed <= option.needed for one in others):
            others.append(option)
            yield option
