"""``lmsrun check``: what is here, and what is missing for a run."""

from collections.abc import Mapping, Sequence

from lmsrun.check import read_around, report
from lmsrun.commands.common import answer_wish, refuse_program
from lmsrun.options import OPTIONS, LaunchOptions, parse_argv

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
    return report(bool(parsed.values.get("json")), read_around(told or LaunchOptions.jobs_dir))
