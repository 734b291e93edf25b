"""Starts the ranks of one host, carries their output, and ends the job so that no process of it is left.

Three processes share the work. The front is the command itself: it passes signals on, waits, and exits with
the job's code. The guard, its child, does the same under another name, which nobody kills who kills lmsrun by
name. The supervisor, the guard's child, owns the ranks. Each is a subreaper and notices the others' death: if
the front or the guard is killed the supervisor kills the job; if the supervisor is killed its ranks die with
it (PR_SET_PDEATHSIG), and the guard sweeps up what they leave, with or without a front.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch.model.errors import JobError
from launch.model.plan import LaunchPlan
from launch.receipts.judge import RankReceipt
from launch.supervise.children import Children, choose_children
from launch.supervise.job import JobFiles, JobOptions, make_receipt_folder, open_job, restore_file_limit
from launch.supervise.job_loop import JobLoop
from launch.supervise.rank_process import fork_process
from launch.system.exit_status import signal_name
from launch.system.process_name import rename_process
from launch.system.process_tree import adopt_orphans, die_with_parent, read_children, sweep
from launch.system.program_signals import PASSED_ON

if TYPE_CHECKING:
    from mmap import mmap

    from launch.cluster.job import Command

__all__ = ["JobOptions", "run_job"]

RenderReceipts = Callable[[Sequence[RankReceipt]], str]

_PASSED_ON = (*PASSED_ON, signal.SIGTSTP)
"""Ctrl-Z stops the ranks, too."""
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SWEEP_S = 5.0
_GUARD_NAME = "job-guard"


def run_job(
    plan: LaunchPlan,
    options: JobOptions,
    render_receipts: RenderReceipts,
    rank_failed: "mmap | None" = None,
    heard: set[signal.Signals] | None = None,
) -> int:
    """Run a planned job on this host to its end.

    Args:
        plan: What to start, one command a rank.
        options: How to supervise it.
        render_receipts: Makes the table that is printed when the ranks have started.
        rank_failed: Memory that children share; its first item becomes 1 if the job ended because a rank
            failed by itself.
        heard: Gets the signals to end that came, also one that came too late for the ranks.

    Returns:
        The exit code: of the first rank to fail, 128 + signal for a signal, 141 when the reader of our output
        went away, 0 when all went well.

    Raises:
        UsageError: If the output folder cannot be written; nothing was started.
        JobError: If the job could not be set up; nothing was started.
    """
    children = choose_children(plan, options)
    files = open_job(children.names, options, 0 if options.command is None else plan.world_size)
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that was being ignored (nohup, a shell's background job) stays ignored.
    passed = {number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        # Not before: a Ctrl-C in between would leave it behind.
        make_receipt_folder(files, plan, options)
        spare = frozenset(read_children(os.getpid()))
        adopt_orphans()
        alive, held = os.pipe()
        guard = fork_process()
        if guard == 0:
            os.close(held)
            _guard(plan, options, children, files, render_receipts, alive, passed, rank_failed)
        os.close(alive)
        for fd in files.output_fds.values():
            os.close(fd)
        return _wait_in_front(guard, passed, spare, heard)
    finally:
        restore_file_limit(files)
        _remove_folders(files)
        signal.signal(signal.SIGCHLD, child_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _guard(
    plan: LaunchPlan,
    options: JobOptions,
    children: Children,
    files: JobFiles,
    render_receipts: RenderReceipts,
    front: int,
    passed: set[signal.Signals],
    rank_failed: "mmap | None",
) -> NoReturn:
    """Run the guard from its start to its exit; the pipe ``front`` ends when the front does."""
    code = 1
    try:
        # Its own session: a terminal's Ctrl-C then comes once, through the front.
        os.setsid()
        adopt_orphans()
        guard = os.getpid()
        supervisor = fork_process()
        if supervisor == 0:
            _supervise(plan, options, children, files, render_receipts, (front, guard), passed, rank_failed)
        os.close(front)
        rename_process(_GUARD_NAME)
        code = _end_of("supervisor", _pass_signals(supervisor, passed, set()))
        _sweep()
    except JobError as error:
        _say(str(error))
    finally:
        # The front and its caller do it too; this is for a front that was killed.
        _remove_folders(files, options.command)
        os._exit(code)


def _supervise(
    plan: LaunchPlan,
    options: JobOptions,
    children: Children,
    files: JobFiles,
    render_receipts: RenderReceipts,
    above: tuple[int, int],
    passed: set[signal.Signals],
    rank_failed: "mmap | None",
) -> NoReturn:
    """Run the supervisor from its start to its exit."""
    code = 1
    try:
        os.setsid()
        die_with_parent(signal.SIGTERM, above[1])
        adopt_orphans()
        loop = JobLoop(plan, options, children, files, render_receipts, above, passed)
        code = loop.run()
        if rank_failed is not None:
            rank_failed[0] = loop.rank_failed
    except JobError as error:
        os.write(options.stderr_fd, f"lmsrun: {error}\n".encode(errors="replace"))
        sweep(_SWEEP_S)
    except Exception as error:  # noqa: BLE001 - the last place that can say why
        os.write(options.stderr_fd, f"lmsrun: internal error: {type(error).__name__}: {error}\n".encode())
        if options.verbose:
            sys.excepthook(*sys.exc_info())
        sweep(_SWEEP_S)
    finally:
        os._exit(code)


def _wait_in_front(
    guard: int, passed: set[signal.Signals], spare: frozenset[int], heard: set[signal.Signals] | None
) -> int:
    """Pass signals on until the guard is gone, then make sure that nothing of the job is left."""
    status = _pass_signals(guard, passed, set() if heard is None else heard, is_front=True)
    _sweep(spare)
    return _end_of("guard", status)


def _pass_signals(
    child: int, passed: set[signal.Signals], heard: set[signal.Signals], is_front: bool = False
) -> int:
    """Hand signals on to a child until it ends; returns its wait status. ``heard`` gets those to end."""
    while True:
        number = signal.sigwait(passed | {signal.SIGCHLD})
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
            continue
        os.kill(child, number)
        heard.update({signal.Signals(number)} & _ENDING)
        if is_front and number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)


def _end_of(name: str, status: int) -> int:
    """Return the exit code of a process that ended so; tell who was killed."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _say(f"the {name} was killed by {signal_name(-code)}; the job was ended")
    return 128 - code if code < 0 else code


def _sweep(spare: frozenset[int] = frozenset()) -> None:
    if left := sweep(_SWEEP_S, spare):
        _say(f"processes {', '.join(map(str, left))} cannot be killed")


def _remove_folders(files: JobFiles, command: "Command | None" = None) -> None:
    """Remove what the job has in the temporary folder; a launcher's files may hold variables' values."""
    import shutil  # Not before a rank has started.

    of_launcher = command.files if command is not None else ()
    for folder in {files.receipt_dir, *(Path(path).parent for path in of_launcher)}:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    try:
        os.write(2, f"lmsrun: {text}\n".encode())
    except OSError:
        pass
