"""What the supervisor starts: the ranks of this host themselves, or the launcher that starts them."""

import os
import resource
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from launch.channel.messages import VARIABLE
from launch.model.plan import LaunchPlan, RankPlan
from launch.model.tf_cluster import build_tf_env
from launch.receipts.judge import Failure, Stages, adopt_binding, read_first_failure, read_receipts
from launch.supervise.job import CONNECTIONS_OF_RANK, OTHER_FILES, JobFiles, JobOptions
from launch.supervise.oom_kills import explain_memory, read_memory_counters
from launch.supervise.rendezvous import LOOPBACK, Rendezvous, free_port, slot_env
from launch.supervise.streams import Sieve
from launch.system.exit_status import describe_rank, explain_crash
from launch.system.ports import REUSE, likely_free_port, port_of, reserve_port
from lms.config import REPORT_VARIABLE

if TYPE_CHECKING:
    from launch.channel.server import RankChannel
    from launch.cluster.job import Command


@dataclass(frozen=True)
class Child:
    """One process to start. ``number`` is its rank; a launcher's is 0."""

    number: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    is_shim: bool = False
    """Whether it knows what to do about an interrupt that was held back for it."""
    reads_stdin: bool = False
    """Whether it has our standard input; else it reads nothing."""


class Children(Protocol):
    """The processes of a job as far as the supervisor starts them, and what it can know of its ranks."""

    names: Mapping[int, str]
    """Number of a child -> name of its output files."""
    mixed: bool
    """Whether lines of several children meet on one console, and so are kept whole and tagged."""
    elastic: bool
    """Whether ranks come and go."""
    channel: "RankChannel | None"
    """The way to ranks that a launcher starts, once they are prepared; None: they are our children."""

    def prepare(self, files: JobFiles, rendezvous: Rendezvous) -> Iterable[Child]:
        """Yield every child, ready to be started."""

    def open_sieve(self, files: JobFiles) -> Sieve | None:
        """Make what takes receipts out of a child's stream, where they travel there."""

    def describe(self, rank: int | None) -> str:
        """Name a rank, or (None) the launcher, for the last line of a job."""

    def explain(self, rank: int, status: int, files: JobFiles) -> str:
        """Say what more is known of a failed rank than its status, as the end of a sentence."""

    def take_in(self, rank: RankPlan, stages: Stages) -> RankPlan:
        """Give the plan by which a rank's receipts are judged."""

    def find_first_failure(self, files: JobFiles) -> Failure | None:
        """Find the rank that failed first, where a child's own status does not tell."""


class OwnRanks:
    """Every rank is a child."""

    elastic = False

    def __init__(self, plan: LaunchPlan, options: JobOptions) -> None:
        self._plan, self._options = plan, options
        self._ranks = {rank.rank: rank for rank in plan.ranks}
        self.names: Mapping[int, str] = {number: f"rank-{number}" for number in self._ranks}
        self.mixed = plan.world_size > 1
        self.channel: RankChannel | None = None
        self._memory = read_memory_counters()

    def prepare(self, files: JobFiles, rendezvous: Rendezvous) -> Iterable[Child]:
        """See ``Children``."""
        ports = (rendezvous.port, free_port())
        workers = self._reserve_workers()
        for rank, slot in zip(self._ranks.values(), rendezvous.slots, strict=True):
            meeting = {**slot_env(slot, *ports), **_tf_env(workers, rank.rank)}
            environ = _rank_environ(rank, meeting, self._options, files)
            reads = self._options.stdin == rank.rank
            yield Child(rank.rank, rank.argv, environ, "LMSRUN_EXPECT" in rank.env, reads)

    def _reserve_workers(self) -> tuple[str, ...]:
        """Keep a port for the server of each rank, for as long as the job runs."""
        if self._plan.framework != "tensorflow":
            return ()
        first = self._plan.tf_port
        wanted = range(first, first + len(self._ranks)) if first else [0] * len(self._ranks)
        self._reserved = [reserve_port(number) for number in wanted]
        return tuple(f"{LOOPBACK}:{port_of(reserved)}" for reserved in self._reserved)

    def open_sieve(self, files: JobFiles) -> None:
        """Leave receipts to the folder."""

    def describe(self, rank: int | None) -> str:
        """See ``Children``."""
        return describe_rank(self._ranks[rank or 0])

    def explain(self, rank: int, status: int, files: JobFiles) -> str:
        """See ``Children``."""
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            if memory := explain_memory(self._memory, read_memory_counters(), self._ranks[rank]):
                return memory
        receipts = read_receipts(files.receipt_dir, [rank])[rank]
        if "start" not in receipts:
            return "; its program had not started, the lines above say why"
        return explain_crash(status, self._options.environ, receipts.get("framework", {}))

    def take_in(self, rank: RankPlan, stages: Stages) -> RankPlan:
        """Keep the plan: it was carried out here."""
        del stages
        return rank

    def find_first_failure(self, files: JobFiles) -> None:
        """Leave it to the statuses, which tell."""


class ForeignLauncher:
    """The one child is a launcher, which starts the ranks; their keepers tell of them, and their receipts."""

    def __init__(self, plan: LaunchPlan, options: JobOptions, command: "Command") -> None:
        self._options, self._command = options, command
        self._name, self._ranks = plan.launcher, plan.ranks
        # Its ranks' own files are their keepers' work.
        self.names: Mapping[int, str] = {0: "launcher"}
        self.elastic = command.elastic
        self.mixed = plan.world_size > 1 and not self.elastic
        self.channel: RankChannel | None = None

    def prepare(self, files: JobFiles, rendezvous: Rendezvous) -> Iterable[Child]:
        """See ``Children``."""
        from launch.channel.server import RankChannel  # Jobs of our own ranks need no sockets and hashes.

        key, grace_s = self._command.control_key or files.job_id, self._options.grace_period_s
        self.channel = RankChannel(
            key, len(self._ranks), grace_s, self.elastic, self._has_room_for_output and not self.elastic
        )
        environ = _launcher_environ(self._command, self._options, files, rendezvous.port)
        if self._command.only_here:
            environ[VARIABLE] = self.channel.listen_here(files.receipt_dir)
        elif not self._command.shows_environ:  # Else whoever reads the id could speak for a rank.
            environ[VARIABLE] = self.channel.listen_for(dict.fromkeys(rank.host for rank in self._ranks))
        yield Child(0, self._command.argv, environ, reads_stdin=self._options.stdin is not None)

    @property
    def _has_room_for_output(self) -> bool:
        """Tell whether so many files may be open that every rank's output can come to us, beside its news."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = len(self._ranks) * CONNECTIONS_OF_RANK + OTHER_FILES
        return soft == resource.RLIM_INFINITY or needed <= soft

    def open_sieve(self, files: JobFiles) -> Sieve:
        """See ``Children``."""
        from launch.receipts.lines import ReceiptSieve  # Only a launcher of other hosts pays for it.

        return ReceiptSieve(files.job_id, files.receipt_dir)

    def describe(self, rank: int | None) -> str:
        """See ``Children``."""
        if rank is None:
            return self._name
        # An elastic job may have more ranks than it was planned with.
        return describe_rank(self._ranks[rank]) if rank < len(self._ranks) else f"rank {rank}"

    def explain(self, rank: int, status: int, files: JobFiles) -> str:
        """See ``Children``."""
        framework = read_receipts(files.receipt_dir, [rank])[rank].get("framework", {})
        return explain_crash(status, self._options.environ, framework)

    def take_in(self, rank: RankPlan, stages: Stages) -> RankPlan:
        """Take the binding that the rank has decided on its own machine."""
        return adopt_binding(rank, stages)

    def find_first_failure(self, files: JobFiles) -> Failure | None:
        """See ``Children``: the launcher's code may be that of a rank that it killed itself."""
        failure = read_first_failure(files.receipt_dir)
        # A rank that died of SIGTERM was ended by its launcher, whose own words say why.
        if failure is None or failure.rank >= len(self._ranks) or failure.exit_code == 143:
            return None
        return failure


def choose_children(plan: LaunchPlan, options: JobOptions) -> Children:
    """Choose what a job's children are: its ranks, or the launcher that starts them."""
    if options.command is None:
        return OwnRanks(plan, options)
    return ForeignLauncher(plan, options, options.command)


def _rank_environ(
    plan: RankPlan, meeting: Mapping[str, str], options: JobOptions, files: JobFiles
) -> dict[str, str]:
    """Build one rank's whole environment: inherited, then the launcher's, then the plan's with ``-x``.

    Python's output is not to wait in its buffer because it goes through a pipe, unless the user decided that.
    """
    return {
        "PYTHONUNBUFFERED": "1",
        **options.environ,
        **({"LMSRUN_VERBOSE": "1"} if options.verbose else {}),
        **meeting,
        **_report_env(options, files),
        **plan.env,
        "LMSRUN_JOB_ID": files.job_id,
        "LMSRUN_RECEIPT_DIR": str(files.receipt_dir),
    }


def _report_env(options: JobOptions, files: JobFiles) -> dict[str, str]:
    """Ask for the report of Large Model Support, unless the user wants it elsewhere."""
    if files.record_dir is None or options.environ.get(REPORT_VARIABLE):
        return {}
    return {REPORT_VARIABLE: os.path.abspath(files.record_dir)}


def _tf_env(workers: Sequence[str], rank: int) -> dict[str, str]:
    return {**REUSE, **build_tf_env(workers, rank)} if workers else {}


def _launcher_environ(command: "Command", options: JobOptions, files: JobFiles, port: int) -> dict[str, str]:
    """Build another launcher's environment: without what must not leave this host, with what ranks need."""
    without = {*command.unset, VARIABLE, "LMSRUN_TF_PORT"}
    inherited = {name: value for name, value in options.environ.items() if name not in without}
    return {
        # A launcher that passes output on puts its tag before every chunk: it must come in lines, at once.
        "LMSRUN_LINE_BUFFERED": "1",
        # Free on this host at the moment, which often is the first of the job too.
        "MASTER_PORT": str(free_port()),
        "LMSRUN_TF_PORT": str(likely_free_port()),
        **inherited,
        **_report_env(options, files),
        **command.env,
        "LMSRUN_JOB_ID": files.job_id,
        "LMSRUN_RECEIPT_DIR": str(files.receipt_dir),
        "LMSRUN_RECEIPT_LINES": "1",
        **({"LMSRUN_RENDEZVOUS_PORT": str(port)} if command.gloo else {}),
    }
