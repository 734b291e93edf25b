"""ddlrun: IBM's launcher of PowerAI and WML CE. Its command line is read, and a real ddlrun can be driven.

The options are those of "Using the ddlrun tool" in the documentation of IBM Watson Machine Learning CE
1.6.2; each is accepted with one or two dashes, and the first word that is none of them is the program.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from launch.backends.backend import Backend, Order
from launch.backends.mpirun import render_rankfile
from launch.cluster.hosts import Host
from launch.cluster.job import ClusterJob, Command
from launch.model.errors import UsageError
from launch.model.plan import RankPlan

Meaning = Literal[
    "hosts", "hostfile", "rankfile", "accelerators", "mpiarg", "env", "verbose", "tcp", "own", "none"
]
_NOTED = frozenset({"rankfile", "none"})
"""Whatever was asked for, it is not done."""


@dataclass(frozen=True)
class _Flag:
    names: tuple[str, ...]
    meaning: Meaning
    metavar: str
    """Empty: it takes no value."""
    text: str

    @property
    def spellings(self) -> tuple[str, ...]:
        """For people; IBM's documentation writes one dash before a letter."""
        return tuple(f"{'-' if len(name) == 1 else '--'}{name}" for name in self.names)


_FLAGS = (
    _Flag(("H", "host"), "hosts", "H1,H2", "hosts of the job"),
    _Flag(("hostfile",), "hostfile", "FILE", "file of hosts"),
    _Flag(("accelerators",), "accelerators", "N", "ranks, and so GPUs, a host"),
    _Flag(("mpiarg",), "mpiarg", "WORDS", "further words for mpirun"),
    _Flag(("x",), "env", "NAME[=VALUE]", "hand a variable on to every rank; may repeat"),
    _Flag(("tcp",), "tcp", "", "-tcp for Spectrum MPI"),
    _Flag(("v", "verbose"), "verbose", "", "say more of what is done"),
    _Flag(("no-host-probe",), "own", "", "start without asking the hosts first"),
    _Flag(("dry-run",), "own", "", "print the plan and start nothing"),
    _Flag(("allow-run-as-root",), "own", "", "consent that Open MPI starts ranks as root"),
    _Flag(("rf", "rankfile"), "rankfile", "FILE", "lmsrun places ranks itself; the rank file is not read"),
    _Flag(("m", "mode"), "none", "MODE", "DDL's reduction mode has no meaning without DDL"),
    _Flag(("ddlarg", "ddloption"), "none", "WORDS", "DDL's arguments have no meaning without DDL"),
    _Flag(("no_ddloptions",), "none", "", "DDL_OPTIONS is never set"),
    _Flag(("aisles",), "none", "N", "the network's aisles were for DDL's reduction"),
    _Flag(("racks",), "none", "N", "the network's racks were for DDL's reduction"),
    _Flag(("nodes",), "none", "N", "the hosts of a rack were for DDL's reduction"),
    _Flag(("cores",), "none", "N", "cores are read from the machine"),
    _Flag(("sockets",), "none", "N", "sockets are read from the machine"),
    _Flag(("skipchecks",), "none", "", "hosts are checked anyway"),
    _Flag(("t", "timestamp"), "none", "", "timestamps of the output have no counterpart"),
)
_BY_NAME = {dashes + name: flag for flag in _FLAGS for name in flag.names for dashes in ("-", "--")}
_HELP = frozenset({"-h", "-help", "--help"})


@dataclass(frozen=True)
class DdlRequest:
    """A ddlrun command line, as lmsrun's options."""

    options: tuple[str, ...]
    """The same request in lmsrun's own words, to be read by its parser."""
    program: tuple[str, ...]
    notes: tuple[str, ...]
    """What was typed and has no meaning today, one line each."""


def parse_ddlrun(argv: Sequence[str], read_hostfile: Callable[[str], Iterable[Host]]) -> DdlRequest:
    """Read what follows ``ddlrun`` on a command line.

    Args:
        argv: The words.
        read_hostfile: Gives the hosts of a file; ``--accelerators`` counts for each of them.

    Raises:
        UsageError: If an option is unknown or lacks its value, or there is no program.
    """
    given: dict[Meaning, list[str]] = {}
    notes: list[str] = []
    position = 0
    while position < len(argv) and argv[position].startswith("-"):
        word = argv[position]
        if word in _HELP:
            return DdlRequest(("--help",), (), ())
        flag = _BY_NAME.get(word)
        if flag is None:
            raise UsageError(
                f"ddlrun has no option {word!r}; needed one of {', '.join(_known())}, then the program"
            )
        if flag.metavar and position + 1 >= len(argv):
            raise UsageError(f"ddlrun's {word} needs a value: {word} {flag.metavar}")
        typed = argv[position : position + (2 if flag.metavar else 1)]
        given.setdefault(flag.meaning, []).append(typed[1] if flag.metavar else flag.names[0])
        if flag.meaning in _NOTED:
            notes.append(f"ddlrun {' '.join(typed)}: {flag.text}")
        position += len(typed)
    if position == len(argv):
        raise UsageError("ddlrun names no program; needed something like 'ddlrun -H h1,h2 python train.py'")
    if "rankfile" in given and not given.keys() & {"hosts", "hostfile"}:
        raise UsageError("ddlrun's rank file is not read; give its hosts with -H H1,H2, or leave it out")
    return DdlRequest(_options(given, read_hostfile), tuple(argv[position:]), tuple(notes))


def build_ddlrun(job: ClusterJob, extra: tuple[str, ...] = (), ddlrun: str = "ddlrun") -> Command:
    """Build the command by which a real ddlrun starts a job; ``extra`` are the user's words for its mpirun.

    Raises:
        UsageError: If hosts differ in ranks, which ddlrun cannot express without a rank file.
    """
    if job.even_ranks is None:
        raise UsageError("ddlrun starts the same number of ranks on every host; try --launcher mpirun")
    root = ("--allow-run-as-root",) if job.allow_root else ()
    argv = (
        ddlrun,
        *("-H", ",".join(share.host for share in job.shares)),
        *("--accelerators", str(job.even_ranks)),
        *("--mpiarg", shlex.join(("--bind-to", "none", *root, *extra))),
        *(word for name in job.names for word in ("-x", name)),
        *job.worker,
    )
    return Command(argv, job.env, job.withhold)


def _options(
    given: dict[Meaning, list[str]], read_hostfile: Callable[[str], Iterable[Host]]
) -> tuple[str, ...]:
    words: list[str] = []
    slots = given.get("accelerators", [""])[-1]
    if "accelerators" in given and not (slots.isascii() and slots.isdigit() and slots.strip("0")):
        raise UsageError(f"ddlrun's --accelerators is {slots!r}; needed a whole number of GPUs a host")
    names = [name.strip() for text in given.get("hosts", ())[-1:] for name in text.split(",")]
    if slots and not names:
        listed = read_hostfile(given["hostfile"][-1]) if "hostfile" in given else (Host("localhost"),)
        names = [f"[{host.name}]" if ":" in host.name else host.name for host in listed]
    if names:
        words += ["--hosts", ",".join(f"{name}:{slots}" if slots else name for name in names)]
    if "hostfile" in given:
        words += ["--hostfile", given["hostfile"][-1]]
    for text in (*given.get("env", ()),):
        words += ["-x", text]
    mpi_args = [word for text in given.get("mpiarg", ()) for word in _split(text)]
    if "tcp" in given:
        mpi_args.append("-tcp")
    if mpi_args:
        words.append(f"--mpi-args={shlex.join(mpi_args)}")
    words += [f"--{name}" for name in given.get("own", ())]
    return (*words, *(("-v",) if "verbose" in given else ()))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"ddlrun's --mpiarg is {text!r}: {error}") from error


def _known() -> list[str]:
    return [flag.spellings[0] for flag in _FLAGS]


def describe_flags() -> list[tuple[tuple[str, ...], str, str]]:
    """Every flag's spellings, what follows it, and what becomes of it, for a page of help."""
    return [
        (flag.spellings, flag.metavar, f"not used: {flag.text}" if flag.meaning in _NOTED else flag.text)
        for flag in _FLAGS
    ]


class Ddlrun(Backend):
    """IBM's launcher; below it stands an mpirun."""

    name = "ddlrun"

    def build(self, order: Order) -> Command:
        """See ``Backend``."""
        return build_ddlrun(order.job, order.extra, order.program)

    def render_rankfile(self, ranks: Sequence[RankPlan]) -> str:
        """See ``Backend``."""
        return render_rankfile(ranks)


BACKEND = Ddlrun()
