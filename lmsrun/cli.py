"""From argv to an effect: which subcommand, its exit code, and the only place that prints errors."""

import errno
import io
import os
import sys
from collections.abc import Mapping, Sequence

from launch.model.errors import LmsrunError, UsageError
from lmsrun.command_steps import say
from lmsrun.options import COMMANDS, load_command

INTERRUPTED, BROKEN_PIPE = 130, 141
_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write to a file that was opened elsewhere fails with, without a name in the error."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command line.

    Args:
        argv: Without the program's own name.
        environ: The environment.

    Returns:
        The exit code: 2 for a request that cannot be met, otherwise the command's own.
    """
    _accept_any_text()
    try:
        code = _dispatch(list(argv), environ)
        sys.stdout.flush()
    except LmsrunError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return BROKEN_PIPE
    except UnicodeEncodeError as error:  # A name from a file; those of the command line come as bytes.
        say(f"{error.object!r} cannot be written in this locale ({error.encoding}); try PYTHONUTF8=1")
        return UsageError.exit_code
    except OSError as error:
        _drop_stdout()
        where = "standard output" if error.errno in _WRITE_ERRORS else "the system refuses"
        say(f"{error.filename or where}: {error.strerror or error}")
        return 1
    return code


def _accept_any_text() -> None:
    """Escape what the encoding of stdout lacks (the lines of a tree, under ASCII) instead of failing."""
    # The C locale has surrogateescape, which refuses these as well.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Drop what is still buffered: it cannot be written, and Python would complain of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str], environ: Mapping[str, str]) -> int:
    command = argv.pop(0) if argv and argv[0] in COMMANDS else "run"
    code: int = load_command(command).main(argv, environ)
    return code
