"""Where a job runs and which launcher starts it there, from the options and what is around us."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from launch.backends.backend import Backend
from launch.backends.choice import LauncherChoice, Surroundings, choose_launcher
from launch.backends.registry import FOREIGN, find_launchers, load_backend
from launch.cluster.allocation import Allocation, read_allocation
from launch.cluster.hosts import (
    Host,
    is_name_of,
    parse_hostfile,
    parse_hosts,
    refuse_aliases,
    restrict_hosts,
)
from launch.model.errors import UsageError
from lms.user_files import read_text_file
from lmsrun.options import LaunchOptions


@dataclass(frozen=True)
class Place:
    """Where a job runs and what starts it there."""

    choice: LauncherChoice
    hosts: tuple[Host, ...]
    only_here: bool
    """Whether every rank runs on this host, for sure."""
    allocation: Allocation | None
    found: Mapping[str, str]
    discovered: bool = False
    """Whether a script of the user's names the hosts while the job runs; ``hosts`` stand in for them."""

    @property
    def is_local(self) -> bool:
        """Whether lmsrun starts the ranks itself."""
        return self.choice.name not in FOREIGN

    @cached_property
    def backend(self) -> Backend:
        """The launcher, if it is not lmsrun itself."""
        return load_backend(self.choice.name)

    @property
    def program(self) -> str | None:
        """Find the path of its program; None: it is elsewhere."""
        return self.found.get(self.choice.name)


def find_place(options: LaunchOptions, environ: Mapping[str, str]) -> Place:
    """Read hosts and allocation, and pick the launcher.

    Raises:
        UsageError: If hosts, allocation and launcher contradict each other.
    """
    allocation = read_allocation(environ)
    hosts = read_hosts(options, allocation)
    discovered = options.host_discovery_script is not None
    only_here = not discovered and all(is_here(host.name) for host in hosts)
    found = find_launchers(options, environ)
    elastic = any((options.min_np, options.max_np, options.host_discovery_script))
    if elastic:
        _check_elastic(options, len(hosts))
    around = Surroundings(len(hosts), only_here, allocation, found, elastic)
    return Place(choose_launcher(options.launcher, around), hosts, only_here, allocation, found, discovered)


def _check_elastic(options: LaunchOptions, hosts: int) -> None:
    """Refuse what Horovod would refuse only once it runs."""
    counts = {"--min-np": options.min_np, "-np": options.num_proc, "--max-np": options.max_np}
    given = [(name, count) for name, count in counts.items() if isinstance(count, int)]
    for (low, fewer), (high, more) in pairwise(given):
        if fewer > more:
            raise UsageError(f"{low} {fewer} is more than {high} {more}; needed --min-np <= -np <= --max-np")
    if options.host_discovery_script is None and hosts < 2:
        raise UsageError(
            "elastic ranks need hosts that can come and go, found one; "
            "give --host-discovery-script, or at least two hosts (-H)"
        )


def read_hosts(options: LaunchOptions, allocation: Allocation | None) -> tuple[Host, ...]:
    """Read the hosts of a job, at least this one.

    Raises:
        UsageError: If they cannot be read, or contradict each other.
    """
    hosts, where = _named_hosts(options, allocation)
    refuse_aliases(hosts, os.uname().nodename, where)
    return hosts or (Host("localhost"),)


def _named_hosts(options: LaunchOptions, allocation: Allocation | None) -> tuple[tuple[Host, ...], str]:
    """Find the hosts that somebody named, and who did."""
    known: tuple[Host, ...] = ()
    where = ""
    if options.hostfile:
        known, where = read_hostfile(options.hostfile), options.hostfile
    elif allocation is not None:
        known, where = allocation.hosts, allocation.title
    if options.hosts:
        wanted = parse_hosts(options.hosts)
        return (restrict_hosts(wanted, known, where) if known else wanted), "--hosts"
    return known, where


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read the hosts of a file.

    Raises:
        UsageError: If it cannot be read, or is no hostfile.
    """
    try:
        text = read_text_file(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the hostfile {path}: {reason}") from None
    return parse_hostfile(text, path)


def is_here(name: str) -> bool:
    """Whether a host's name is this host's."""
    return is_name_of(name, os.uname().nodename)
