"""What several subcommands do before their own work."""

import sys
from collections.abc import Mapping
from pathlib import Path

from launch.model.errors import UsageError
from launch.model.text import printable
from lmsrun.options import OPTIONS, LaunchOptions
from lmsrun.sources.command_line import Parsed
from lmsrun.sources.request import Request, read_request


def say(text: str) -> None:
    """Print one line for a person to stderr, whatever is in the text."""
    print(f"lmsrun: {printable(text, instead=' ')}", file=sys.stderr, flush=True)


def answer_wish(command: str, parsed: Parsed) -> bool:
    """Print the version or the help, if that is what was asked for."""
    if parsed.wish == "version":
        print_version()
    elif parsed.wish == "help":
        from lmsrun.help_text import render_help

        print(render_help(command))
    return bool(parsed.wish)


def print_version() -> None:
    """Print what ``--version`` promises."""
    from lms import __version__

    print(f"lmsrun {__version__}")


def refuse_program(command: str, parsed: Parsed) -> None:
    """Refuse a program where none is started.

    Raises:
        UsageError: If there is one.
    """
    if parsed.program:
        raise UsageError(f"{command} takes no program, but found {parsed.program[0]!r}")


def read_sources(parsed: Parsed, environ: Mapping[str, str]) -> Request:
    """Bring the command line together with the file of this folder and the environment.

    Raises:
        UsageError: If they cannot be met, or there is no folder.
    """
    request = read_request(parsed, environ, find_folder())
    for warning in () if request.options.quiet else request.warnings:
        say(f"warning: {warning}")
    if request.options.verbose:
        for name in request.origins:
            say(describe_origin(request, name))
    return request


def find_folder() -> Path:
    """Find the current folder, where options may stand in a file.

    Raises:
        UsageError: If there is none any more.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(f"the current folder cannot be found ({error.strerror}); try to cd again") from None


def describe_origin(request: Request, field: str) -> str:
    """Say what an option is, and who said so."""
    value = getattr(request.options, field)
    # The values of variables may be secrets.
    shown = tuple(item.partition("=")[0] for item in value) if field == "forward" else value
    return f"{OPTIONS[field].name} = {shown} (from {request.origins[field]})"


def write_drawings(svg: str, options: LaunchOptions, environ: Mapping[str, str]) -> None:
    """Write a drawing into the files that ``--svg`` and ``--png`` name.

    Raises:
        UsageError: If one cannot be written.
    """
    from lmsrun.draw.files import write_drawing, write_png

    if options.svg:
        write_drawing(svg, options.svg, "--svg")
        say(f"wrote {options.svg}")
    if options.png:
        write_png(svg, options.png, "--png", environ)
        say(f"wrote {options.png}")
