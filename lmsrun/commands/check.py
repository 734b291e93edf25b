"""``lmsrun check``: what is here, and what is missing for a run."""

from collections.abc import Mapping, Sequence

from lmsrun.check import report
from lmsrun.commands.common import answer_wish, refuse_program
from lmsrun.options import parse_argv

USAGE = "lmsrun check [--json]"
ABOUT = "Say what is here and what is missing for a run; exit 1 when one could not work."
EXAMPLES = ()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the findings; returns 1 when a training run could not work."""
    del environ
    parsed = parse_argv("check", argv)
    if answer_wish("check", parsed):
        return 0
    refuse_program("check", parsed)
    return report(bool(parsed.values.get("json")))
