"""Stays beside a rank that another launcher started, and tells who failed first and why.

Launchers differ in what they make of a failing rank: mpirun has its own words, srun returns the highest code
of all tasks (that of a rank it killed itself), and Hydra waits for the others: MPICH's (4.0 and 5.0) when a
rank merely exits, Intel MPI's (2021.19) also when one dies of a signal. So the shim stays as the program's
parent. When the program fails it sends a last receipt home, by which lmsrun names the rank and returns its
exit code, and under Hydra it asks for an abort over the channel that MPI itself would use: the line
``cmd=abort`` of PMI-1 on ``PMI_FD``.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from launch.receipts.file import END, send_receipt
from launch.system.exit_status import describe_status, exit_code_of
from launch.system.process_tree import die_with_parent
from launch.system.program_signals import restore_signals

if TYPE_CHECKING:
    from launch.rank.output import Tee

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def needs_guard(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of ours or Hydra waits for news of this rank, or its output is kept."""
    keeps = environ.get("LMSRUN_RECEIPT_LINES") or environ.get("LMSRUN_RANK_OUTPUT")
    return bool(keeps) or is_under_hydra(environ)


def is_under_hydra(environ: Mapping[str, str]) -> bool:
    """Whether Hydra (MPICH's or Intel MPI's) started this rank, with a PMI-1 channel to it.

    Slurm's pmi2 has ``PMI_FD`` too, but not the local rank's variable.
    """
    return environ.get("PMI_FD", "").isdigit() and "MPI_LOCALRANKID" in environ


def run_guarded(argv: Sequence[str], environ: Mapping[str, str], rank: int, output_dir: str = "") -> NoReturn:
    """Run the program as a child, pass signals and output on, and report its failure.

    Raises:
        OSError: In the parent, if there can be no child; nothing was started then.
        UsageError: If its output cannot be kept; nothing was started then either.
    """
    tees, alarm = _open_tees(environ, rank, output_dir) if output_dir else ([], -1)
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        _become(argv, environ, parent, before, tees)
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: _pass_on(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    how, code = _wait(child, tees, alarm)
    if code:
        _report(environ, rank, how, code)
        abort_hydra(environ, code)
    os._exit(code)


def _open_tees(environ: Mapping[str, str], rank: int, folder: str) -> "tuple[list[Tee], int]":
    from launch.rank.output import open_tees, watch_children

    return open_tees(environ, rank, folder), watch_children()


def _wait(child: int, tees: "Sequence[Tee]", alarm: int) -> tuple[str, int]:
    """How the program ended, in words and as an exit code; output that could not be kept is a failure too."""
    if not tees:
        status = _let_go(child)
        return describe_status(status), exit_code_of(status)
    from launch.rank.output import carry

    for tee in tees:
        tee.start()
    carry(child, tees, alarm)
    status = _let_go(child)
    code, how = exit_code_of(status), describe_status(status)
    for tee in tees:
        if tee.error is not None:
            how, code = (f"could not write {tee.name} ({tee.error.strerror}); it {how}", code or 1)
    return how, code


def _let_go(child: int) -> int:
    """Wait for the program's end; returns its status.

    Its number may be somebody else's from then on, so nothing is passed on any more.
    """
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    return os.waitpid(child, 0)[1]


def _become(
    argv: Sequence[str],
    environ: Mapping[str, str],
    parent: int,
    mask: Iterable[int],
    tees: "Sequence[Tee]",
) -> NoReturn:
    try:
        die_with_parent(signal.SIGKILL, parent)
        for tee in tees:
            tee.become_output()
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


def _report(environ: Mapping[str, str], rank: int, how: str, code: int) -> None:
    content = {"rank": rank, "host": os.uname().nodename, "code": code, "how": how}
    try:
        if not send_receipt(environ, rank, END, content):
            line = f"lmsrun: rank {rank} on {content['host']} {content['how']}; ending the job\n"
            os.write(2, line.encode())
    except OSError:
        # Whoever would read it is gone, and the exit code says the rest.
        pass


def abort_hydra(environ: Mapping[str, str], code: int) -> None:
    """End the whole job, where Hydra would wait for the other ranks."""
    if not is_under_hydra(environ):
        return
    try:
        os.write(int(environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    except OSError:
        # The program's own MPI has closed the channel: it finalised, and Hydra judges by the exit code alone.
        pass
