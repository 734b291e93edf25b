"""``lmsrun check``: what is here, and what is missing for a run."""

from collections.abc import Mapping, Sequence

from launch.model.errors import UsageError
from lmsrun.check import Finding, read_around, report
from lmsrun.command_steps import answer_wish, describe_origin, find_folder, refuse_program
from lmsrun.options import LaunchOptions
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
    options, finding = _check_options(environ)
    around = read_around(parsed.values.get("jobs_dir", options.jobs_dir))
    return report(bool(parsed.values.get("json")), around, more=(finding,))


def _check_options(environ: Mapping[str, str]) -> tuple[LaunchOptions, Finding]:
    """Look at what files and variables say of options: what is wrong there ends every run."""
    try:
        request = read_request(Parsed({}, {}), environ, find_folder())
    except UsageError as error:
        finding = Finding("options", "missing", str(error), "mend that, or give --config FILE")
        return LaunchOptions(), finding
    given = [describe_origin(request, field) for field in request.origins]
    return request.options, Finding("options", "ok", "; ".join(given) or "none from files or variables")
