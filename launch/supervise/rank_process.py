"""A child from the fork to its program."""

import os
import signal
import sys

from launch.model.errors import JobError
from launch.supervise.children import Child
from launch.supervise.job import JobFiles, restore_file_limit
from launch.system.process_tree import die_with_parent
from launch.system.program_path import find_program
from launch.system.program_signals import hold_interrupts, restore_signals


def fork_process() -> int:
    """``os.fork``, whose refusal is told as a user's limit.

    Raises:
        JobError: If the system refuses.
    """
    try:
        return os.fork()
    except OSError as error:
        raise JobError(
            f"the system starts no more processes ({error.strerror}); raise `ulimit -u`, or start fewer ranks"
        ) from error


def become_child(
    child: Child,
    parent: int,
    outputs: tuple[int, int],
    handled: set[signal.Signals],
    files: JobFiles,
) -> None:
    """Run the child's side of the fork: own session, death tied to the supervisor's, plain signals, exec."""
    code = 126
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL, parent)
        if not child.reads_stdin:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        signal.set_wakeup_fd(-1)
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        restore_signals()
        restore_file_limit(files)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if child.is_shim:
            hold_interrupts()
        # Looked up where the plan looked: a PATH that the user gives to the ranks is their programs'.
        program = find_program(child.argv[0]) or child.argv[0]
        os.execve(program, child.argv, child.environ)  # noqa: S606 - an argv list, no shell
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"lmsrun: cannot start {child.argv[0]}: {error.strerror}\n".encode())
    except BaseException as error:  # noqa: BLE001 - nothing may return into the supervisor's code
        os.write(2, f"lmsrun: cannot start {child.argv[0]}: {error!r}\n".encode())
    finally:
        sys.stdout = sys.stderr = None
        os._exit(code)
