"""What a launcher that starts ranks in our place is to us: one object, told everything in one order."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from launch.cluster.allocation import Allocation, BatchSystem
from launch.cluster.job import ClusterJob, Command
from launch.model.cluster_settings import ClusterSettings
from launch.model.errors import UsageError
from launch.model.plan import RankPlan


@dataclass(frozen=True)
class Needed:
    """The allocation without which a launcher cannot start anything, and what to try where it is missing."""

    system: BatchSystem
    title: str
    remedy: str


@dataclass(frozen=True)
class Order:
    """All that a launcher's command depends on."""

    program: str
    """Path of its executable, or the name where it is elsewhere."""
    is_here: bool
    """Whether the program is on this host, and can be asked what it is."""
    only_here: bool
    """Whether every rank runs on this host."""
    settings: ClusterSettings
    job: ClusterJob
    ranks: Sequence[RankPlan]
    """As planned; none for a probe."""
    environ: Mapping[str, str]
    dry: bool
    """Whether the command is only to be shown."""
    files_dir: str
    """A folder that is not there yet, under a name that nobody can guess."""

    @property
    def extra(self) -> tuple[str, ...]:
        """Cut the user's own words for the launcher."""
        return tuple(shlex.split(self.settings.mpi_args or ""))


class Backend(ABC):
    """A launcher. What is said here holds for most; each says where it differs."""

    name: ClassVar[str]
    needs: ClassVar[Needed | None] = None
    elastic: ClassVar[bool] = False
    """Whether its ranks may come and go."""
    takes_ssh: ClassVar[bool] = False
    """Whether it reaches hosts over ssh where there is no allocation; then ssh can tell why it does not."""

    def executables(self, settings: ClusterSettings) -> tuple[str, ...]:
        """Name its program, or paths of it: the first that is here counts, and the first of all is shown."""
        del settings
        return (self.name,)

    @abstractmethod
    def build(self, order: Order) -> Command:
        """Build the command that starts the job.

        Raises:
            LmsrunError: If the launcher cannot start such a job.
        """

    def build_probe(self, order: Order) -> Command | None:
        """Build the command that starts one answering process on each host; None: they are asked over ssh.

        Raises:
            LmsrunError: If the launcher cannot start it.
        """
        del order
        return None

    def connects_probe(self) -> bool:
        """Say whether processes of its probe can meet over MPI, to see which hosts MPI connects."""
        return False

    def render_rankfile(self, ranks: Sequence[RankPlan]) -> str:
        """Render the plan as a file by which the launcher itself binds ranks.

        Raises:
            UsageError: If the launcher reads no such file, or a rank has no CPUs to name in it.
        """
        del ranks
        raise UsageError(f"{self.name} reads no file of ranks; leave --rankfile-out out")

    def needs_own_name(self, settings: ClusterSettings) -> bool:
        """Say whether ranks look up their own host's name (Gloo)."""
        del settings
        return False

    def find_obstacle(self, is_here: bool, allocation: Allocation | None) -> str | None:
        """Find what keeps it from starting a job from here."""
        if not is_here:
            return f"{self.name} is not in PATH"
        if self.needs is not None and (allocation is None or allocation.system != self.needs.system):
            return f"this is not inside {self.needs.title}"
        return None

    def refuse_obstacle(self, is_here: bool, allocation: Allocation | None) -> None:
        """Refuse what ``find_obstacle`` finds.

        Raises:
            UsageError: With the remedy.
        """
        if obstacle := self.find_obstacle(is_here, allocation):
            remedy = (
                self.needs.remedy if self.needs and is_here else "try --launcher auto, or load its module"
            )
            raise UsageError(f"--launcher {self.name}: {obstacle}; {remedy}")
