"""Stays beside a rank that another launcher started, and tells who failed first and why.

Launchers differ in what they make of a failing rank: mpirun has its own words, srun returns the highest code
of all tasks (that of a rank it killed itself), and Hydra ends a job when a rank dies of a signal but waits
for the others when one merely exits (seen with MPICH 4.0.2). So the shim stays as the program's parent. When
the program fails it sends a last receipt home, by which lmsrun names the rank and returns its exit code, and
under Hydra it asks for an abort over the channel that MPI itself would use: the line ``cmd=abort`` of PMI-1
on ``PMI_FD``.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from launch.causes import describe_status, exit_code_of
from launch.program_signals import restore_signals
from launch.receipt_file import END, format_line, write_receipt
from launch.warden import die_with_parent

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def needs_guard(environ: Mapping[str, str]) -> bool:
    """Whether somebody waits for news of this rank: a launcher of ours behind another one, or Hydra."""
    return bool(environ.get("LMSRUN_RECEIPT_LINES")) or is_under_hydra(environ)


def is_under_hydra(environ: Mapping[str, str]) -> bool:
    """Whether MPICH's Hydra started this rank, with a PMI-1 channel to it.

    Slurm's pmi2 has ``PMI_FD`` too, but not the local rank's variable; Intel MPI speaks a dialect of its own.
    """
    here = environ.get("PMI_FD", "").isdigit() and "MPI_LOCALRANKID" in environ
    return here and not any(name.startswith("I_MPI_HYDRA") for name in environ)


def run_guarded(argv: Sequence[str], environ: Mapping[str, str], rank: int) -> NoReturn:
    """Run the program as a child, pass signals on to it, and report its failure.

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
        _report(environ, rank, status, code)
        if is_under_hydra(environ):
            _abort(int(environ["PMI_FD"]), code)
    os._exit(code)


def _become(argv: Sequence[str], environ: Mapping[str, str], parent: int, mask: Iterable[int]) -> NoReturn:
    try:
        die_with_parent(signal.SIGKILL, parent)
        restore_signals()
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


def _report(environ: Mapping[str, str], rank: int, status: int, code: int) -> None:
    content = {"rank": rank, "host": os.uname().nodename, "code": code, "how": describe_status(status)}
    folder, job_id = environ.get("LMSRUN_RECEIPT_DIR"), environ.get("LMSRUN_JOB_ID", "")
    try:
        if folder:
            write_receipt(folder, rank, END, content)
        elif environ.get("LMSRUN_RECEIPT_LINES"):
            os.write(2, format_line(job_id, rank, END, content))
        else:
            line = f"lmsrun: rank {rank} on {content['host']} {content['how']}; ending the job\n"
            os.write(2, line.encode())
    except OSError:
        # Whoever would read it is gone, and the exit code says the rest.
        pass


def _abort(fd: int, code: int) -> None:
    try:
        os.write(fd, f"cmd=abort exitcode={code}\n".encode())
    except OSError:
        # The program's own MPI has closed the channel: it finalised, and Hydra judges by the exit code alone.
        pass
