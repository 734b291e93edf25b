"""``lmsrun help``: the help of a subcommand."""

from collections.abc import Mapping, Sequence

from launch.model.errors import UsageError
from lms.config import nearest
from lmsrun.help_text import render_help
from lmsrun.manual.pages import SUBCOMMANDS

USAGE = "lmsrun help [SUBCOMMAND]"
ABOUT = f"Print the help of a subcommand ({', '.join(SUBCOMMANDS)}), without one that of run."
EXAMPLES = ()
OPERAND = "|".join(SUBCOMMANDS)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print it."""
    del environ
    name = argv[0] if argv else "run"
    if name in ("-h", "--help"):
        name = "help"
    if name not in SUBCOMMANDS or len(argv) > 1:
        raise UsageError(
            f"help: {' '.join(argv)!r} is no subcommand{nearest(name, SUBCOMMANDS)}; "
            f"needed one of {', '.join(SUBCOMMANDS)}"
        )
    print(render_help(name))
    return 0
