"""``lmsrun check``: what is here, and what is missing for a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.model.errors import UsageError
from lmsrun.check import Finding, read_around, report
from lmsrun.command_steps import answer_wish, describe_origin, refuse_program
from lmsrun.options import OPTIONS, LaunchOptions
from lmsrun.sources.command_line import Parsed, parse_argv
from lmsrun.sources.request import read_request

USAGE = "lmsrun check [--json]"
ABOUT = "Say what is here and what is missing for a run; exit 1 when one could not work."
EXAMPLES = ()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the findings; returns 1 when a training run could not work."""
    parsed = parse_argv("check", argv)
    if answer_wish("check", parsed):
        return 0
    refuse_program("check", parsed)
    declared = OPTIONS["jobs_dir"]
    told = parsed.values.get("jobs_dir") or environ.get(declared.env_name)
    around = read_around(declared.parse(told or LaunchOptions.jobs_dir))
    return report(bool(parsed.values.get("json")), around, more=(_check_options(environ),))


def _check_options(environ: Mapping[str, str]) -> Finding:
    """Look at what files and variables say of options: what is wrong there ends every run."""
    try:
        request = read_request(Parsed({}, {}), environ, Path.cwd())
    except (UsageError, OSError) as error:
        return Finding("options", "missing", str(error), "mend that, or give --config FILE")
    given = [describe_origin(request, field) for field in request.origins]
    return Finding("options", "ok", "; ".join(given) or "none from files or variables")
