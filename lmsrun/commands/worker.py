"""``lmsrun worker``: a rank of another launcher; its options are variables, checked as options are."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.model.errors import UsageError
from launch.model.rank_variables import ENVIRONMENT
from lmsrun.sources.variables import check_variables

USAGE = "lmsrun worker -- PROGRAM ARGS"
ABOUT = (
    "Bind this rank on its own machine, verify it, and become the program. Which rank it is, say\n"
    "the variables of the launcher that started it: Horovod, Open MPI, Spectrum MPI, MPICH, Intel MPI,\n"
    "jsrun, Slurm, Flux or torchrun. Options come as LMSRUN_... variables: see lmsrun --help."
)
EXAMPLES = ()
OPERAND = "PROGRAM"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the program of this rank; returns only after its help."""
    if argv and argv[0] in ("-h", "--help"):
        from lmsrun.help_text import render_help

        print(render_help("worker"))
        return 0
    argv, environ = _take_environment(argv, environ)
    if argv and argv[0].startswith("-") and argv[0] not in ("--", "--escaped"):
        raise UsageError(
            f"lmsrun worker takes no option, but found {argv[0]}; set LMSRUN_... variables instead, "
            "and write lmsrun worker -- PROGRAM ARGS"
        )
    check_variables(environ)
    from launch.rank.shim import main as work

    work(argv, environ)


def _take_environment(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """Read the job's environment from lmsrun's own file where a launcher would put it on command lines."""
    if argv[:1] != [ENVIRONMENT] or len(argv) < 2:
        return argv, environ
    try:
        table = json.loads(Path(argv[1]).read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the environment of the job in {argv[1]}: {error}") from error
    return argv[2:], {**environ, **table}
