"""``lmsrun ddlrun``: IBM's command line, started by lmsrun."""

from collections.abc import Mapping, Sequence

from launch.backends.ddlrun import describe_flags, parse_ddlrun
from lmsrun.command_steps import say
from lmsrun.commands.run import obey
from lmsrun.manual.pages import Flag, Value
from lmsrun.place import read_hostfile
from lmsrun.sources.command_line import parse_argv

USAGE = "lmsrun [options] ddlrun [ddlrun's options] PROGRAM [ARGS]\n       lmsrun plan [options] ddlrun ..."
ABOUT = (
    "IBM's command line as it was typed, with one dash or two, started by lmsrun. Options of\n"
    "lmsrun go in front, or come as LMSRUN_... variables: see lmsrun --help."
)
EXAMPLES = (
    ("lmsrun ddlrun -H h1,h2 --accelerators 4 train.py", "four ranks on each of two hosts"),
    ("lmsrun plan ddlrun -H h1,h2 train.py", "what would be started"),
)
OPERAND = "PROGRAM"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the job that a command line of IBM's asks for."""
    return obey("ddlrun", parse_argv("run", translate(argv)), environ)


def translate(argv: Sequence[str]) -> list[str]:
    """Say IBM's command line in our words; what has no meaning today is said."""
    request = parse_ddlrun(argv, read_hostfile)
    for note in request.notes:
        say(note)
    return [*request.options, "--", *request.program]


def read_flags() -> tuple[Flag, ...]:
    """Its own options, for pages and shells."""
    return tuple(
        Flag(spellings, Value(metavar) if metavar else None, text)
        for spellings, metavar, text in describe_flags()
    )
