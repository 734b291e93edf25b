"""Refuse to start a job from one of several processes of another launcher."""

from collections.abc import Mapping
from dataclasses import dataclass

from launch.model.errors import UsageError


@dataclass(frozen=True)
class StepRow:
    """The variables by which a launcher tells its processes which of how many they are."""

    starter: str
    number: str
    size: str
    remedy: str
    """The command that has each process become a rank of one job."""
    may_nest: bool = True
    """Tells whether a rank of lmsrun's own may start a job beneath it: a batch system counts it twice."""


ROWS = (
    StepRow("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "flux run lmsrun worker -- PROGRAM", False),
    StepRow("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun lmsrun worker -- PROGRAM", False),
    StepRow("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "horovodrun -np N lmsrun worker -- PROGRAM"),
    StepRow(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun -np N lmsrun worker -- PROGRAM"
    ),
    StepRow("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "jsrun lmsrun worker -- PROGRAM"),
    StepRow("mpiexec", "PMI_RANK", "PMI_SIZE", "mpiexec -n N lmsrun worker -- PROGRAM"),
    StepRow("a PMIx launcher", "PMIX_RANK", "PMIX_SIZE", "LAUNCHER lmsrun worker -- PROGRAM"),
)
"""srun comes before MPI's rows, for it may set PMI's variables too."""
_OF_RANKS = ("LMSRUN_JOB_ID", "LMSRUN_EXPECT")
"""Mark the programs of lmsrun's own ranks: a job that one of them starts is meant as one of its own."""


def refuse_inside_step(environ: Mapping[str, str]) -> None:
    """Refuse to start a job from one of several processes of a launcher: each would start a job of its own.

    Raises:
        UsageError: With the command to write instead.
    """
    is_rank = any(environ.get(name) for name in _OF_RANKS)
    for row in ROWS:
        if not environ.get(row.number) or (is_rank and row.may_nest):
            continue
        size = _read_size(row.size, environ)
        if size > 1:
            raise UsageError(
                f"this is task {environ[row.number]} of {size} that {row.starter} started; "
                f"try '{row.remedy}', or lmsrun without {row.starter} "
                "(--launcher local starts a job in each task)"
            )


def _read_size(variable: str, environ: Mapping[str, str]) -> int:
    text = environ.get(variable, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{variable} is {text[:200]!r}; needed a whole number")
    return int(text) if text else 1
