"""Which launcher ``--launcher auto`` takes, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from launch.backends.registry import FOREIGN, load_backend
from launch.cluster.allocation import Allocation
from launch.model.errors import UsageError
from launch.model.text import count_of


@dataclass(frozen=True)
class Surroundings:
    """What there is to choose from."""

    hosts: int
    only_here: bool
    """Whether every rank is to run on this host."""
    allocation: Allocation | None
    found: Mapping[str, str]
    """Launcher -> path of its executable, for those that are installed."""
    elastic: bool = False


@dataclass(frozen=True)
class LauncherChoice:
    """The launcher, and the reason for a person."""

    name: str
    why: str


def choose_launcher(asked: str, around: Surroundings) -> LauncherChoice:
    """Pick a launcher.

    Args:
        asked: What the user said; ``auto`` leaves it to us.
        around: What there is.

    Raises:
        UsageError: If what was asked for contradicts the job, or nothing here can start it.
    """
    if around.elastic and asked != "auto" and not (asked in FOREIGN and load_backend(asked).elastic):
        raise UsageError(f"--launcher {asked} cannot run an elastic job; needed --launcher horovodrun")
    if asked == "local" and not around.only_here:
        hosts = "1 other host is" if around.hosts == 1 else f"{around.hosts} hosts are"
        raise UsageError(f"--launcher local starts ranks on this host only, but {hosts} asked for")
    if asked != "auto":
        return LauncherChoice(asked, "as asked")
    return _choose(around)


def _choose(around: Surroundings) -> LauncherChoice:
    allocation, hosts = around.allocation, count_of(around.hosts, "host")
    if around.elastic:
        return _needed("horovodrun", "the job is elastic", around)
    if around.only_here:
        return LauncherChoice("local", "every rank runs on this host")
    if allocation is not None and allocation.csm:
        return _needed("jsrun", f"{allocation.title} is under CSM", around)
    if allocation is not None and allocation.system == "slurm" and "srun" in around.found:
        return LauncherChoice("srun", f"this is {allocation.title} on {hosts}")
    if allocation is not None and allocation.system == "flux" and "flux" in around.found:
        return LauncherChoice("flux", f"this is {allocation.title} on {hosts}")
    for name in ("mpirun", "horovodrun"):
        if name in around.found:
            return LauncherChoice(name, f"{hosts}, and {around.found[name]} is here")
    raise UsageError(f"{hosts}: needed srun, mpirun or horovodrun; none is in PATH, try to load a module")


def _needed(name: str, why: str, around: Surroundings) -> LauncherChoice:
    if name not in around.found:
        raise UsageError(f"{why}, which needs {name}; it is not in PATH")
    return LauncherChoice(name, why)
