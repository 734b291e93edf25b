"""``lmsrun worker``: a rank of another launcher; its options are variables, or stand in files."""

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
    "jsrun, Slurm, Flux or torchrun. Options come as LMSRUN_... variables (see lmsrun --help) or from\n"
    "lmsrun.toml."
)
EXAMPLES = ()
OPERAND = "PROGRAM"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the program of this rank; returns only after its help."""
    if argv and argv[0] in ("-h", "--help"):
        from lmsrun.help_text import render_help

        print(render_help("worker"))
        return 0
    is_of_lmsrun = argv[:1] == [ENVIRONMENT] or bool(environ.get("LMSRUN_JOB_ID"))
    argv, environ = _take_environment(argv, environ)
    if argv and argv[0].startswith("-") and argv[0] not in ("--", "--escaped"):
        raise UsageError(
            f"worker takes no option, but found {argv[0]}; set LMSRUN_... variables instead, "
            "and write lmsrun worker -- PROGRAM ARGS"
        )
    check_variables(environ)
    if not is_of_lmsrun:  # Else lmsrun has read the files where its user is.
        environ = _read_files(environ)
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


def _read_files(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Add what the TOML files and ``LMSRUN_FORWARD`` say of ranks, as the variables that ranks read.

    Not ``output-dir``: as a variable it names the folder of one job, and a file serves many.
    """
    from lmsrun.command_steps import find_folder, say
    from lmsrun.sources.command_line import Parsed
    from lmsrun.sources.request import read_request

    request = read_request(Parsed({}, {}), environ, find_folder())
    options = request.options
    if not (request.from_files or request.lms_table or options.forward):
        return environ
    from launch.model.cluster_settings import settings_env
    from launch.model.lms_settings import read_lms_config
    from launch.plan_host.rank_env import build_lms_env, parse_forward
    from launch.rank.identity import find_rank

    given, _, unset = parse_forward(options.forward, environ, request.origins.get("forward", "-x"))
    for warning in unset if find_rank(environ) == 0 and not options.quiet else ():
        say(f"warning: {warning}")
    lms = read_lms_config(options, {**environ, **given}, request.lms_table, request.lms_files)
    switches = {"LMSRUN_QUIET": options.quiet, "LMSRUN_VERBOSE": options.verbose}
    said = {name: "1" for name, is_on in switches.items() if is_on}
    return {**environ, **settings_env(options), **build_lms_env(lms), **said, **given}
