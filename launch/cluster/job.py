"""What every cluster launcher is given and gives back: a job over hosts, and the command that starts it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launch.cluster.hosts import HostShare
from launch.model.errors import UsageError
from launch.model.rank_variables import IDENTITY, TRANSPORT


@dataclass(frozen=True)
class ClusterJob:
    """One job for a launcher that starts ranks on its own: where, what, and with which environment."""

    shares: tuple[HostShare, ...]
    worker: tuple[str, ...]
    """The argv of every rank: the per-rank shim, then ``--``, then the program."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that lmsrun adds; every rank gets them."""
    forward: tuple[str, ...] = ()
    """Names of inherited variables that every rank shall get, wherever it runs."""
    withhold: tuple[str, ...] = ()
    """Names of inherited variables that must not leave this host."""
    allow_root: bool = False
    oversubscribe: bool = False
    tag_output: bool = False
    whole_lines: bool = False
    """Whether output may wait until its line is whole, so that lines of several ranks do not mix."""

    stdin: int | None = None
    """The rank that reads the launcher's standard input."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(share.ranks for share in self.shares)

    @property
    def even_ranks(self) -> int | None:
        """Ranks a host where every host has the same number, else None."""
        counts = {share.ranks for share in self.shares}
        return counts.pop() if len(counts) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all variables that a launcher has to hand on, each once, sorted."""
        return tuple(sorted({*self.env, *self.forward}))


@dataclass(frozen=True)
class Command:
    """How to start a job. Values of variables stay out of ``argv``, which every user of the host can read."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """To add to the launcher's environment."""
    unset: tuple[str, ...] = ()
    """To remove from it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> content of what has to be written first."""
    gloo: bool = False
    """Whether ranks meet over our own rendezvous, because Horovod is linked with another MPI than this."""
    elastic: bool = False
    """Whether ranks come and go."""
    only_here: bool = True
    """Whether every rank runs on this host."""
    shows_environ: bool = False
    """Whether the launcher writes its environment into command lines, for all to read."""
    control_key: str = ""
    """What a rank says to show that it is one of the job's; empty: the job's id, which nobody else knows."""
    elsewhere: tuple[str, ...] = ()
    """Other hosts that need the files, too, before the launcher starts."""
    warnings: tuple[str, ...] = ()


# What a program needs to find itself and its libraries, and the families of variables that tune the job.
# Everything else stays where it is: another host has its own.
_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHON[A-Z]*|VIRTUAL_ENV|CONDA_(?:PREFIX|DEFAULT_ENV)|LANG|LC_[A-Z]+|TZ|"
    r"(?:LMSRUN|LMS|TF|TPU|KERAS|XLA|NCCL|HOROVOD|OMP|KMP|MKL|OPENBLAS|GLOO|UCX|GRPC)_.*|MASTER_(?:ADDR|PORT)"
)
_SECRET = re.compile(
    r".*(?:TOKEN|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|PRIVATE_?KEY|API_?KEY|ACCESS_?KEY|AUTH_?KEY).*|.*_KEY|.*_PWD"
)
_OF_ONE_HOST = re.compile(r"CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL")


def forwarded_names(environ: Iterable[str], asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Choose the inherited variables that ranks on other hosts get.

    Args:
        environ: Names of the launcher's environment.
        asked: Names that the user gave with ``-x``; they are forwarded whatever they are called.

    Returns:
        Sorted names. Never, unless asked for, what looks like a secret; never what belongs to one host or
        one rank.
    """
    present = set(environ)
    portable = {name for name in present if _FORWARDED.fullmatch(name) and not is_private(name)}
    return tuple(sorted(portable | (present & set(asked))))


def withheld_names(environ: Iterable[str], asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Choose the inherited variables to keep from a launcher, lest it sends them to other hosts; sorted."""
    return tuple(sorted(name for name in set(environ) - set(asked) if is_private(name)))


def is_private(name: str) -> bool:
    """Whether a variable belongs to one host or one rank, or looks like a secret."""
    if name in IDENTITY or name in TRANSPORT:
        return True
    return bool(_SECRET.fullmatch(name.upper()) or _OF_ONE_HOST.fullmatch(name))


def refuse_ipv6(job: ClusterJob, launcher: str) -> None:
    """For launchers whose syntax of hosts takes a colon for the end of the name.

    Raises:
        UsageError: If a host is an IPv6 address.
    """
    address = next((share.host for share in job.shares if ":" in share.host), None)
    if address is not None:
        raise UsageError(
            f"{launcher} cannot carry the IPv6 address {address!r}; give the host a name in /etc/hosts"
        )


def escape_args(args: Iterable[str]) -> tuple[str, ...]:
    """Write arguments without ``:``, which alone every mpirun and jsrun takes for the end of a program."""
    return tuple(arg.replace("%", "%25").replace(":", "%3A") for arg in args)


def unescape_args(args: Iterable[str]) -> tuple[str, ...]:
    """Reverse ``escape_args``."""
    return tuple(arg.replace("%3A", ":").replace("%25", "%") for arg in args)
