"""Hosts of a job and their slots: parsed from ``-H``, hostfiles and allocations, then dealt to ranks.

A host name ends in the argv of ssh and of MPI launchers, so a text that could be taken for an option or for
shell syntax there is refused here, before anything is started.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from launch.model.errors import PlanError, UsageError
from launch.model.text import count_of

MAX_SLOTS = 65536
"""More ranks on one host is a typing error or a damaged file."""

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")
_LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain"})
_SLOT_KEYS = frozenset({"slots", "slot", "cpu", "count"})
_IGNORED_KEYS = frozenset({"max_slots", "max-slots", "slots_max", "port", "ifname", "binding"})


@dataclass(frozen=True)
class Host:
    """One machine of the job. ``slots`` None is unknown: as many as the machine itself turns out to have."""

    name: str
    slots: int | None = None
    may_count_cores: bool = False
    """Marks slots as a batch system's own count: of a host with GPUs they are no more than those."""


@dataclass(frozen=True)
class HostShare:
    """The ranks ``first_rank .. first_rank + ranks - 1`` run on ``host``."""

    host: str
    first_rank: int
    ranks: int


def parse_hosts(text: str, where: str = "--hosts") -> tuple[Host, ...]:
    """Parse ``a:4,b:4,[fe80::1]:2,::1``; a host without a number has unknown slots.

    Raises:
        UsageError: If a host is misspelt, named twice or given no slots.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    if not any(pieces):
        raise UsageError(f"{where} names no host; needed something like 'a:4,b:4'")
    return refuse_twice((_parse_host(piece, where) for piece in pieces), where)


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Parse a hostfile as Open MPI and Horovod (``a slots=4``) or MPICH and Intel MPI (``a:4``) write it.

    Args:
        text: The content; ``#`` starts a comment, empty lines count for nothing.
        where: The file's name, for messages.

    Raises:
        UsageError: If a line is neither, a host is named twice, or no host is left.
    """
    lines = ((number, _split_line(line)) for number, line in enumerate(text.splitlines(), 1))
    hosts = [_parse_line(words, f"{where}, line {number}") for number, words in lines if words]
    if not hosts:
        raise UsageError(f"{where} names no host; needed lines such as 'a slots=4'")
    return refuse_twice(hosts, where)


def parse_nodefile(text: str, where: str) -> tuple[Host, ...]:
    """Parse a batch system's node file: one line a slot, so that a host named four times has four slots.

    Raises:
        UsageError: If a line is not a host name, or no host is left.
    """
    names = [_check_name(line.strip(), where) for line in text.splitlines() if line.strip()]
    if not names:
        raise UsageError(f"{where} names no host; needed one host name a line")
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return tuple(Host(name, count) for name, count in slots.items())


def restrict_hosts(wanted: Sequence[Host], known: Sequence[Host], where: str) -> tuple[Host, ...]:
    """Pick the ``wanted`` hosts, with the slots of ``known`` where they name none of their own.

    Args:
        wanted: From ``--hosts``.
        known: From the hostfile or the allocation.
        where: What ``known`` is, for messages.

    Raises:
        UsageError: If a wanted host is unknown, or wants more slots than it has.
    """
    by_name = {_key(host.name): host for host in known}
    chosen = []
    for host in wanted:
        match = by_name.get(_key(host.name))
        if match is None:
            raise UsageError(f"--hosts: host {host.name!r} is not in {where}; it has {_some_names(known)}")
        if host.slots and match.slots and host.slots > match.slots:
            raise UsageError(
                f"--hosts: host {host.name!r} was given {count_of(host.slots, 'slot')}; "
                f"{where} has {match.slots} there"
            )
        chosen.append(Host(match.name, host.slots) if host.slots else match)
    return tuple(chosen)


def resolve_slots(hosts: Iterable[Host], slots: Callable[[Host], int]) -> tuple[Host, ...]:
    """Give every host whose slots depend on its machine those that ``slots(host)`` counts there."""
    return tuple(replace(host, slots=slots(host)) if depends_on_machine(host) else host for host in hosts)


def depends_on_machine(host: Host) -> bool:
    """Tell whether a host's slots are known only when its machine is."""
    return host.slots is None or host.may_count_cores


def count_slots(hosts: Iterable[Host]) -> int:
    """All slots of hosts whose slots are known."""
    return sum(host.slots or 0 for host in hosts)


def share_ranks(
    hosts: Sequence[Host], ranks: int | None, oversubscribe: bool = False
) -> tuple[HostShare, ...]:
    """Deal ranks to hosts in their order, filling one before the next.

    Args:
        hosts: With known slots.
        ranks: How many in all; None takes every slot.
        oversubscribe: Deal what exceeds the slots evenly, the first hosts getting the remainder.

    Returns:
        One share a host that got ranks, in rank order.

    Raises:
        PlanError: If there are more ranks than slots.
    """
    total = count_slots(hosts)
    wanted = total if ranks is None else ranks
    if wanted > total and not oversubscribe:
        raise PlanError(
            f"{count_of(wanted, 'rank')} do not fit on {count_of(len(hosts), 'host')} with "
            f"{count_of(total, 'slot')}; try -np {total}, more hosts, or --oversubscribe"
        )
    more, odd = divmod(max(0, wanted - total), len(hosts))
    shares, first = [], 0
    for position, host in enumerate(hosts):
        count = min(host.slots or 0, wanted - first) + more + (position < odd)
        if count:
            shares.append(HostShare(host.name, first, count))
        first += count
    return tuple(shares)


def is_host_name(text: str) -> bool:
    """Whether a text is a host name or an IP address and nothing else."""
    return bool(_NAME.fullmatch(text)) or _is_ipv6(text)


def is_name_of(name: str, own: str) -> bool:
    """Whether a host that calls itself ``own`` is meant, also without its domain or as localhost.

    Two names that both have a domain are the same only if the domains are.
    """
    name, own = _key(name), _key(own)
    if name in _LOCAL_NAMES or _is_loopback(name) or name == own:
        return True
    whole = "." in name and "." in own
    return not whole and name.partition(".")[0] == own.partition(".")[0] != ""


def refuse_aliases(hosts: Iterable[Host], own: str, where: str) -> None:
    """Refuse two names of the one host that this is, whose slots would count twice.

    Args:
        hosts: Of the job, each name once.
        own: What this host calls itself.
        where: What names them, for the message.

    Raises:
        UsageError: Naming them.
    """
    names = [host.name for host in hosts if is_name_of(host.name, own)]
    if len(names) > 1:
        raise UsageError(
            f"{where} names this host twice, as {' and '.join(map(repr, names))}; "
            "give it once, with all of its slots"
        )


def refuse_twice(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    """Return the hosts as a tuple if none is named twice.

    Raises:
        UsageError: If one is named twice: whether its slots add up or the second line replaces the first
            differs between launchers, so that it is asked instead of guessed.
    """
    seen: dict[str, Host] = {}
    for host in hosts:
        if _key(host.name) in seen:
            raise UsageError(f"{where} names host {host.name!r} twice; give it once, with all of its slots")
        seen[_key(host.name)] = host
    return tuple(seen.values())


def _parse_host(piece: str, where: str) -> Host:
    if _is_ipv6(piece):
        return Host(_check_name(piece, where))
    name, colon, slots = (
        piece.rpartition(":") if ":" in piece and not piece.endswith("]") else (piece, "", "")
    )
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return Host(_check_name(bare, where), _parse_slots(slots, bare, where) if colon else None)


def _split_line(line: str) -> list[str]:
    """Cut a line of a hostfile into words; blanks around ``=`` count for nothing, as in Open MPI's parser."""
    return "=".join(map(str.strip, line.partition("#")[0].split("="))).split()


def _parse_line(words: list[str], where: str) -> Host:
    host = _parse_host(words[0], where)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _SLOT_KEYS | _IGNORED_KEYS:
            raise UsageError(f"{where}: cannot read {word!r}; needed 'HOST slots=N' or 'HOST:N'")
        if key in _SLOT_KEYS and host.slots is not None:
            raise UsageError(f"{where}: host {host.name!r} gets its slots twice; give one number")
        if key in _SLOT_KEYS:
            host = replace(host, slots=_parse_slots(value, host.name, where))
    return host


def _parse_slots(text: str, name: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{where}: host {name!r} has {text!r} slots; needed a whole number")
    slots = int(text) if len(text) < 10 else MAX_SLOTS + 1
    if slots == 0:
        raise UsageError(f"{where}: host {name!r} has zero slots; give it at least one or leave it out")
    if slots > MAX_SLOTS:
        raise UsageError(f"{where}: host {name!r} has {text} slots; needed at most {MAX_SLOTS}")
    return slots


def _check_name(name: str, where: str) -> str:
    if _is_ipv6(name):
        return str(ipaddress.IPv6Address(name))
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}: {name!r} is not a host name; needed letters, digits, '.', '-', '_', or an IP address "
            "(a user name or port belongs into ~/.ssh/config)"
        )
    return name


def _is_ipv6(text: str) -> bool:
    # A zone such as %eth0 may hold any character for ipaddress, so it is held to a host name's letters.
    address, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or bool(_NAME.fullmatch(zone))


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _key(name: str) -> str:
    return name.lower().rstrip(".")


def _some_names(hosts: Sequence[Host]) -> str:
    names = ", ".join(host.name for host in hosts[:5])
    return names + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
