"""``lmsrun plan``: show what ``run`` would start."""

from collections.abc import Mapping, Sequence

from lmsrun.commands.run import obey, parse_command_line

USAGE = "lmsrun plan -np N [options] [--] PROGRAM [ARGS]"
ABOUT = "Print what `run` would start: a table, or JSON. Nothing is started."
EXAMPLES = ()
OPERAND = "PROGRAM"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the plan of the job that a command line asks for."""
    return obey("plan", parse_command_line(argv), environ)
