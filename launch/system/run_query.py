"""Asks a launcher what it is: runs one of its commands and gives back what it printed."""

import subprocess
from collections.abc import Mapping, Sequence

from launch.model.errors import JobError

PROBE_TIMEOUT_S = 10.0


def read_answer(argv: Sequence[str], environ: Mapping[str, str], remedy: str) -> str:
    """Read what a command prints, on either stream.

    Args:
        argv: The command; its first word is a path.
        environ: Its environment.
        remedy: What to try when there is no answer.

    Raises:
        JobError: If it cannot be run or does not answer.
    """
    try:
        answer = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise JobError(f"cannot run {argv[0]!r}: {error.strerror or error}; {remedy}") from error
    except subprocess.TimeoutExpired as error:
        words = " ".join(argv[1:])
        raise JobError(f"{argv[0]!r} {words} gave no answer in {PROBE_TIMEOUT_S:g} s; {remedy}") from error
    return answer.stdout.decode(errors="replace")
