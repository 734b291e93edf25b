"""Batch scripts for Slurm, LSF, PBS and Flux: the allocation of a plan, and the command that runs in it."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launch.model.errors import UsageError
from launch.model.plan import MODULE

_WALLTIME = "01:00:00"


@dataclass(frozen=True)
class BatchJob:
    """What a batch system is asked for. ``gpus_per_node`` 0 asks for none."""

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cores_per_node: int
    """All of a node's: the ranks share them, and some systems confine a job to what it asked for."""
    argv: tuple[str, ...]
    """The lmsrun command line that finds the allocation again by itself."""
    walltime: str | None = None
    account: str | None = None
    partition: str | None = None
    path: str = ""
    """A folder for the front of PATH in the job: where lmsrun and its Python are."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks. They stand in the script, which has an owner, and on no command line."""
    inherited: Sequence[str] = ()
    """Names of variables that the ranks get from the shell that hands the script in."""
    cleared: Sequence[str] = ()
    """Names of variables of that shell that were for the script, and would be wrong in the job."""


def render_script(system: str, job: BatchJob) -> str:
    """Render a complete script, to be handed in as it is or edited.

    Args:
        system: ``slurm``, ``lsf``, ``pbs`` or ``flux``.
        job: What to ask for and to run.
    """
    job = replace(job, walltime=job.walltime or _WALLTIME)
    path = [f'export PATH={shlex.quote(job.path)}:"$PATH"'] if job.path else []
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.exports.items()]
    # Flux starts a script in the folder in which it was handed in.
    folder = [f'cd "${{{_FOLDERS[system]}:-$PWD}}"'] if system in _FOLDERS else []
    lines = [
        *_DIRECTIVES[system](job),
        *_names(system, job),
        *_inherited(system, job),
        "",
        "set -eu",
        *([f"unset {' '.join(job.cleared)}"] if job.cleared else ()),
        *path,
        *exports,
        *folder,
        _line(job.argv),
    ]
    return "#!/bin/bash\n" + "\n".join(lines) + "\n"


def _names(system: str, job: BatchJob) -> list[str]:
    """Who pays and which queue takes the job, as far as the user said."""
    head, account, partition = _NAMES[system]
    given = ((account, job.account), (partition, job.partition))
    return [f"{head} {flag}{value}" for flag, value in given if value]


def _inherited(system: str, job: BatchJob) -> list[str]:
    """Name what the job inherits; only PBS has to be told, the others take a shell's whole environment."""
    if not job.inherited:
        return []
    directives = [f"#PBS -v {','.join(job.inherited)}"] if system == "pbs" else []
    return [f"# From the shell that hands this in: {', '.join(job.inherited)}", *directives]


def job_name(program: Sequence[str]) -> str:
    """Make a name that every batch system accepts, from the program's own."""
    named = program[1].rpartition(".")[2] if program[0] == MODULE else program[0]
    last = named.rpartition("/")[2].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-")[:15] or "lmsrun"


def nodes_for(ranks: int, ranks_per_node: int) -> int:
    """How many nodes take so many ranks, all with the same number.

    Raises:
        UsageError: If they do not divide, for batch systems ask for equal nodes.
    """
    if ranks % ranks_per_node:
        fitting = ranks - ranks % ranks_per_node
        raise UsageError(f"{ranks} ranks do not fill nodes of {ranks_per_node} evenly; try -np {fitting}")
    return ranks // ranks_per_node


def _slurm(job: BatchJob) -> list[str]:
    gpus = [f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    return [
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={job.ranks_per_node}",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.out",
        f"#SBATCH --time={job.walltime}",
        "# The whole node's memory and cores: lmsrun shares them out.",
        "#SBATCH --mem=0",
    ]


def _walltime_s(job: BatchJob) -> int:
    hours, minutes, seconds = map(int, str(job.walltime).split(":"))
    return (hours * 60 + minutes) * 60 + seconds


def _lsf(job: BatchJob) -> list[str]:
    gpus = [f'#BSUB -gpu "num={job.gpus_per_node}:mode=shared"'] if job.gpus_per_node else []
    # LSF counts whole minutes (-W [hour:]minute); a job gets no less than was asked for.
    minutes = -(-_walltime_s(job) // 60)
    return [
        f"#BSUB -J {job.name}",
        f"#BSUB -n {job.nodes * job.ranks_per_node}",
        f'#BSUB -R "span[ptile={job.ranks_per_node}]"',
        *gpus,
        "#BSUB -x",
        "#BSUB -o %J.out",
        f"#BSUB -W {minutes // 60:02}:{minutes % 60:02}",
        "# Under CSM (Summit, Sierra) replace -n, -R and -gpu by: -nnodes N -alloc_flags smt4",
    ]


def _pbs(job: BatchJob) -> list[str]:
    gpus = f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    ranks = job.ranks_per_node
    cores = max(ranks, job.cores_per_node)
    return [
        f"#PBS -N {job.name}",
        f"#PBS -l select={job.nodes}:ncpus={cores}:mpiprocs={ranks}{gpus}",
        "#PBS -l place=scatter:excl",
        f"#PBS -l walltime={job.walltime}",
        "#PBS -j oe",
    ]


def _flux(job: BatchJob) -> list[str]:
    gpus = [f"# flux: --gpus-per-slot={job.gpus_per_node}"] if job.gpus_per_node else []
    return [
        f"# flux: --job-name={job.name}",
        f"# flux: --nodes={job.nodes}",
        "# flux: --exclusive",
        f"# flux: --nslots={job.nodes}",
        *gpus,
        "# flux: --output={{name}}-{{id}}.out",
        f"# flux: --time-limit={_walltime_s(job)}s",
    ]


_DIRECTIVES: Mapping[str, Callable[[BatchJob], list[str]]] = {
    "slurm": _slurm,
    "lsf": _lsf,
    "pbs": _pbs,
    "flux": _flux,
}
_NAMES = {
    "slurm": ("#SBATCH", "--account=", "--partition="),
    "lsf": ("#BSUB", "-P ", "-q "),
    "pbs": ("#PBS", "-A ", "-q "),
    "flux": ("# flux:", "--bank=", "--queue="),
}
_FOLDERS = {"slurm": "SLURM_SUBMIT_DIR", "lsf": "LS_SUBCWD", "pbs": "PBS_O_WORKDIR"}


def _line(argv: Sequence[str]) -> str:
    return "exec " + shlex.join(argv)
