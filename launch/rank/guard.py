"""Stands for a rank that another launcher started, and tells that launcher how it ended.

Launchers differ in what they make of a failing rank: mpirun has its own words, srun returns the highest code
of all tasks (that of a rank it killed itself), and Hydra waits for the others: MPICH's (4.0 and 5.0) when a
rank merely exits, Intel MPI's (2021.19) also when one dies of a signal. So the shim stays, and its child, the
keeper (``launch.rank.keeper``), runs the program. In a job of lmsrun the launcher learns of nothing before
the job's supervisor has ended all ranks in order. Without one the shim ends as the program did: under Hydra
it asks for an abort over the channel that MPI itself would use, the line ``cmd=abort`` of PMI-1 on
``PMI_FD``; and where Slurm has ended the rank, for another has failed, its code is the lowest.
"""

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from launch.channel.client import find_supervisor
from launch.channel.messages import VARIABLE
from launch.rank.keeper import Keeper, take_signals
from launch.receipts.file import END, send_receipt
from launch.system.exit_status import describe_status, exit_code_of
from launch.system.process_name import rename_process
from launch.system.process_tree import adopt_orphans, die_with_parent, sweep
from launch.system.program_signals import PASSED_ON, restore_signals

if TYPE_CHECKING:
    from launch.rank.output import Tee

_NAME = "rank-keeper"
_NOT_STARTED = 126
_ENDED = 1
"""What a rank that Slurm has ended exits with: the lowest code that is none of success."""
_SWEEP_LIMIT_S = 5.0


def needs_guard(environ: Mapping[str, str]) -> bool:
    """Whether somebody waits for more news of this rank than its exit code, or its output is kept."""
    keeps = any(map(environ.get, (VARIABLE, "LMSRUN_RECEIPT_LINES", "LMSRUN_RANK_OUTPUT")))
    return keeps or is_under_hydra(environ) or is_task(environ)


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this rank and no supervisor of ours stands behind it.

    A batch script has these variables too, and hands them on to ranks of our own; those have a folder.
    """
    names = ("SLURM_PROCID", "SLURM_LOCALID")
    return all(name in environ for name in names) and not environ.get("LMSRUN_RECEIPT_DIR")


def is_under_hydra(environ: Mapping[str, str]) -> bool:
    """Whether Hydra (MPICH's or Intel MPI's) started this rank, with a PMI-1 channel to it.

    Slurm's pmi2 has ``PMI_FD`` too, but not the local rank's variable.
    """
    return environ.get("PMI_FD", "").isdigit() and "MPI_LOCALRANKID" in environ


def run_guarded(argv: Sequence[str], environ: Mapping[str, str], rank: int, output_dir: str = "") -> NoReturn:
    """Have a keeper run the program, pass signals on to it, and end as the program did.

    Raises:
        OSError: In the process that called, if there can be no keeper; nothing was started then.
        UsageError: If the rank's output cannot be kept; nothing was started then either.
    """
    tees = _open_tees(environ, rank, output_dir) if output_dir else []
    alive, held = os.pipe()
    adopt_orphans()
    passed = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    keeper = os.fork()
    if keeper == 0:
        os.close(held)
        _keep(argv, environ, rank, tees, alive, before, passed)
    os.close(alive)
    for tee in tees:
        tee.leave()
    for number in passed:
        signal.signal(number, lambda received, _: _pass_on(keeper, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = _let_go(keeper)
    if os.WIFSIGNALED(status):
        sweep(_SWEEP_LIMIT_S)
    os._exit(exit_code_of(status))


def _keep(
    argv: Sequence[str],
    environ: Mapping[str, str],
    rank: int,
    tees: "list[Tee]",
    starter: int,
    mask: Iterable[int],
    passed: Sequence[int],
) -> NoReturn:
    """Run the keeper from its start to its exit."""
    code = _NOT_STARTED
    try:
        os.setsid()
        rename_process(_NAME)
        adopt_orphans()
        supervisor = find_supervisor(environ, rank)
        if supervisor is not None and supervisor.answers():
            tees = _carry_output(environ, rank, tees)
        alarm, parent = take_signals(passed), os.getpid()
        program = os.fork()
        if program == 0:
            _become(argv, environ, parent, mask, tees, passed)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if supervisor is not None:
            supervisor.tell({"program": program})
        for tee in tees:
            tee.start()
        keeper = Keeper(program, tees, supervisor, starter, alarm)
        status = keeper.stay(bool(environ.get("HOROVOD_ELASTIC")))
        if keeper.is_released:
            code = 0
        elif status and keeper.was_ended and is_task(environ):
            code = _ENDED
        else:
            code = _end_unreleased(environ, rank, status, keeper.why)
    except OSError as error:
        os.write(2, f"lmsrun: cannot keep rank {rank}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _end_unreleased(environ: Mapping[str, str], rank: int, status: int, why: str) -> int:
    """Tell the launcher how the program ended, for no supervisor has; returns the exit code."""
    code = exit_code_of(status)
    if code:
        _write_down(environ, code)
        _report(environ, rank, describe_status(status) + why, code)
        abort_hydra(environ, code)
    return code


def _open_tees(environ: Mapping[str, str], rank: int, folder: str) -> "list[Tee]":
    from launch.rank.output import open_tees

    return open_tees(environ, rank, folder)


def _carry_output(environ: Mapping[str, str], rank: int, kept: "list[Tee]") -> "list[Tee]":
    from launch.rank.output import carry_output

    return carry_output(environ, rank, kept)


def _let_go(child: int) -> int:
    """Wait for a child's end; returns its status.

    Its number may be somebody else's from then on, so nothing is passed on any more.
    """
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    return os.waitpid(child, 0)[1]


def _become(
    argv: Sequence[str],
    environ: Mapping[str, str],
    parent: int,
    mask: Iterable[int],
    tees: "Sequence[Tee]",
    handled: Iterable[int],
) -> NoReturn:
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL, parent)
        for tee in tees:
            tee.become_output()
        signal.set_wakeup_fd(-1)
        for number in (*handled, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        restore_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(argv[0], list(argv), dict(environ))  # noqa: S606 - an argv list, no shell
    except OSError as error:
        os.write(2, f"lmsrun: cannot run {argv[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(_NOT_STARTED)


def _pass_on(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass


def _write_down(environ: Mapping[str, str], code: int) -> None:
    """Leave the code in a file that a batch script has named, unless another rank was faster."""
    path = environ.get("LMSRUN_FAILURE_FILE")
    if not path:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, b"%d\n" % code)
        os.close(fd)
    except FileExistsError:
        return
    except OSError as error:
        os.write(2, f"lmsrun: cannot write {path}: {error.strerror}\n".encode(errors="replace"))


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
