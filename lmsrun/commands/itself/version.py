"""``lmsrun version``: which lmsrun this is."""

from collections.abc import Mapping, Sequence

from launch.model.errors import UsageError
from lmsrun.command_steps import print_version

USAGE = "lmsrun version"
ABOUT = "Print the version of lmsrun, as --version and -V do."
EXAMPLES = ()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print it."""
    del environ
    if argv and argv[0] in ("-h", "--help"):
        from lmsrun.help_text import render_help

        print(render_help("version"))
        return 0
    if argv:
        raise UsageError(f"version takes nothing, but found {argv[0]!r}")
    print_version()
    return 0
