"""Ends a whole MPICH job when one rank fails.

Hydra ends a job when a rank dies of a signal, but waits for all others when one merely exits with an error
(seen with MPICH 4.0.2: a rank that exits with 7 leaves its peers waiting in their next collective). So under
Hydra the shim stays as the program's parent and, when it fails, asks Hydra to abort over the channel that
MPI itself would use: the line ``cmd=abort`` of PMI-1 on ``PMI_FD``. Hydra then ends every rank on every host
and exits with that code.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from launch.causes import describe_status, exit_code_of
from launch.warden import die_with_parent

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def needs_guard(environ: Mapping[str, str]) -> bool:
    """Whether this rank was started by MPICH's Hydra, with a PMI-1 channel to it.

    Slurm's pmi2 has ``PMI_FD`` too, but not the local rank's variable; Intel MPI speaks a dialect of its own.
    """
    here = environ.get("PMI_FD", "").isdigit() and "MPI_LOCALRANKID" in environ
    return here and not any(name.startswith("I_MPI_HYDRA") for name in environ)


def run_guarded(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run the program as a child, pass signals on to it, and end the job if it fails.

    Raises:
        OSError: In the parent, if there can be no child; nothing was started then.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        _become(argv, environ, parent, before)
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: _pass_on(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _, status = os.waitpid(child, 0)
    code = exit_code_of(status)
    if code:
        _abort(int(environ["PMI_FD"]), code, environ.get("PMI_RANK", "?"), status)
    os._exit(code)


def _become(argv: Sequence[str], environ: Mapping[str, str], parent: int, mask: Iterable[int]) -> NoReturn:
    try:
        die_with_parent(signal.SIGKILL, parent)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(argv[0], list(argv), dict(environ))  # noqa: S606 - an argv list, no shell
    except OSError as error:
        os.write(2, f"lmsrun: cannot run {argv[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(126)


def _pass_on(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass


def _abort(fd: int, code: int, rank: str, status: int) -> None:
    os.write(
        2,
        f"lmsrun: rank {rank} on {os.uname().nodename} {describe_status(status)}; ending the job\n".encode(),
    )
    try:
        os.write(fd, f"cmd=abort exitcode={code}\n".encode())
    except OSError:
        # The program's own MPI has closed the channel: it finalised, and Hydra judges by the exit code alone.
        pass
