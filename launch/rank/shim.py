"""The per-rank shim ``lmsrun worker -- PROGRAM ARGS``: who are we, bind, verify, leave a receipt, exec.

With ``LMSRUN_EXPECT`` the binding is decided and (unless its method is ``libnuma``) done: verify it. Without,
another launcher started this rank: plan for it here, then start over with the binding in front. The shim
becomes the program; only where somebody waits for news of its end does it stay, as the program's parent (see
``launch.rank.guard``).

Every rank pays for what is imported here: dataclasses, pathlib, shutil and typing would take longer than the
work.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence

from launch.model.errors import LmsrunError, UsageError
from launch.model.idset import IdSet, format_ids
from launch.model.text import printable
from launch.receipts.file import END, MOVED, compare_binding, parse_expected_ids, send_receipt
from launch.system.numa_policy import BindingError, FoundBinding, apply_cpus, apply_mem_policy, read_binding
from launch.system.program_path import NO_FILE, find_program
from launch.system.program_signals import restore_signals, take_interrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from launch.model.plan import MemPolicy, RankPlan

_ROOT = os.path.realpath(__file__).rsplit(os.sep, 3)[0]
BOOTSTRAP = os.path.join(_ROOT, "lms", "bootstrap")
_HOST_LIMIT = "TF_GPU_HOST_MEM_LIMIT_IN_MB"
_POLICIES: tuple[MemPolicy, ...] = ("bind", "preferred", "preferred-many", "none")
_STAYS_FOR = ("PMI_FD", "SLURM_PROCID", "LMSRUN_CONTROL", "LMSRUN_RECEIPT_LINES", "LMSRUN_RANK_OUTPUT")
"""Variables of ranks whose shim may have to stay beside its program."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""A shell's exit codes for a program that is not there, or cannot be run."""


class Expectation:
    """What was decided for this rank, as ``LMSRUN_EXPECT`` tells it."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        host: str,
        gpu: str | None,
        numa_node: int | None,
        cpus: IdSet,
        mem_policy: MemPolicy,
        mem_nodes: IdSet,
        bind_method: str,
        numa: str,
    ) -> None:
        self.rank, self.local_rank, self.host = rank, local_rank, host
        self.gpu, self.numa_node, self.cpus = gpu, numa_node, cpus
        self.mem_policy, self.mem_nodes = mem_policy, mem_nodes
        self.bind_method, self.numa = bind_method, numa


class ProgramError(LmsrunError):
    """The program cannot be started."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def main(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the program of this rank.

    Args:
        argv: ``PROGRAM ARGS``, with or without a ``--`` in front; ``--escaped --`` says that
            ``escape_args`` of ``launch.cluster.job`` wrote them, for a launcher to which ``:`` is special.
        environ: The environment, which the program gets with ours added.
    """
    try:
        command = _read_command(argv)
        if not command:
            raise UsageError("no program; needed lmsrun worker -- PROGRAM ARGS")  # noqa: TRY301
        if environ.get("LMSRUN_EXPECT"):
            _start_program(command, dict(environ))
        _start_over(command, dict(environ))
    except LmsrunError as error:
        _give_up(str(error), error.exit_code, environ)
    except OSError as error:
        why = f"cannot start the rank: {error.filename or 'the system refuses'}: {error.strerror or error}"
        _give_up(why, NOT_EXECUTABLE, environ)


def parse_expectation(text: str) -> Expectation:
    """Read ``LMSRUN_EXPECT``.

    Raises:
        UsageError: If it is not what lmsrun writes.
    """
    try:
        fields = json.loads(text)
        policy = fields["mem_policy"]
        if policy not in _POLICIES:
            raise ValueError(f"mem_policy {policy!r}")  # noqa: TRY301
        return Expectation(
            rank=int(fields["rank"]),
            local_rank=int(fields["local_rank"]),
            host=str(fields["host"]),
            gpu=fields["gpu"],
            numa_node=fields["numa_node"],
            cpus=parse_expected_ids(fields["cpus"]),
            mem_policy=policy,
            mem_nodes=parse_expected_ids(fields["mem_nodes"]),
            bind_method=str(fields["bind_method"]),
            numa=str(fields["numa"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"LMSRUN_EXPECT is damaged ({error}); leave it to lmsrun to set it") from error


def verify(expected: Expectation, found: FoundBinding) -> tuple[bool, list[str]]:
    """Compare a binding that was read back with the one decided, at the start of the rank."""
    fields = {
        "cpus": format_ids(found.cpus),
        "mem_policy": found.mem_policy,
        "mem_nodes": format_ids(found.mem_nodes),
    }
    reasons = compare_binding(expected.cpus, expected.mem_policy, expected.mem_nodes, fields, "at start")
    bound = bool(expected.cpus) or expected.mem_policy != "none"
    return bound and not reasons, reasons


def resolve_program(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Resolve the argv to exec: ``.py`` and ``-m`` under ``LMSRUN_PYTHON`` or this Python, the rest by PATH.

    Raises:
        ProgramError: If it is not there or cannot be run.
    """
    program = command[0]
    if program == "-m":
        return [_find(environ.get("LMSRUN_PYTHON") or sys.executable, environ), *command]
    if program.endswith(".py"):
        _require_file(program)
        if not os.path.isfile(program):
            raise ProgramError(
                f"{program} is not here ({_folder()}); give a path from this folder, or an absolute one",
                NOT_FOUND,
            )
        # Python takes a name with a dash in front for an option of its own.
        script = f"./{program}" if program.startswith("-") else program
        return [_find(environ.get("LMSRUN_PYTHON") or sys.executable, environ), script, *command[1:]]
    return [_find(program, environ), *command[1:]]


def program_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Build the program's environment: ours, with the bootstrap in front of ``PYTHONPATH``.

    An empty entry is the current folder, but a variable that is empty as a whole names none.
    """
    text = environ.get("PYTHONPATH", "")
    later = [entry for entry in text.split(os.pathsep) if entry != BOOTSTRAP]
    path = [BOOTSTRAP, *(later if text else ())]
    kept = {name: value for name, value in environ.items() if name != "LMSRUN_RANK_OUTPUT"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def _read_command(argv: Sequence[str]) -> list[str]:
    if list(argv[:2]) == ["--escaped", "--"]:
        from launch.cluster.job import unescape_args

        return list(unescape_args(argv[2:]))
    return list(argv[1:] if argv[:1] == ["--"] else argv)


def _start_program(command: Sequence[str], environ: dict[str, str]) -> NoReturn:
    """Bind if that is left to us, verify, leave the receipt, and exec."""
    expected = parse_expectation(environ["LMSRUN_EXPECT"])
    refusals = _apply(expected) if expected.bind_method == "libnuma" else []
    found = read_binding()
    verified, reasons = verify(expected, found)
    reasons = refusals + reasons
    argv = resolve_program(command, environ)
    _leave_receipt(expected, found, verified and not refusals, reasons, environ)
    if reasons and expected.numa == "strict":
        raise BindingError(
            f"--numa strict: rank {expected.rank} is not bound as planned: {'; '.join(reasons)}"
        )
    _leave_input(expected.rank, environ)
    take_interrupts()
    if any(environ.get(name) for name in _STAYS_FOR):
        _exec_guarded(argv, environ, expected.rank)
    restore_signals()
    _exec(argv, program_environ(environ))


def _leave_input(rank: int, environ: Mapping[str, str]) -> None:
    """Read nothing where another rank was chosen to read: under Hydra this rank would wait for ever."""
    reader = environ.get("LMSRUN_STDIN")
    if reader and reader != str(rank):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.set_inheritable(0, True)  # where 0 was closed it is the one just opened


def _apply(expected: Expectation) -> list[str]:
    refusals = []
    try:
        apply_cpus(expected.cpus)
    except BindingError as error:
        refusals.append(str(error))
    try:
        apply_mem_policy(expected.mem_policy, expected.mem_nodes)
    except BindingError as error:
        refusals.append(str(error))
    return refusals


def _leave_receipt(
    expected: Expectation, found: FoundBinding, verified: bool, reasons: list[str], environ: Mapping[str, str]
) -> None:
    limit = environ.get(_HOST_LIMIT, "")
    content = {
        "rank": expected.rank,
        "local_rank": expected.local_rank,
        "host": expected.host,
        "pid": os.getpid(),
        "gpu": expected.gpu,
        "numa_node": expected.numa_node,
        "cpus": format_ids(found.cpus),
        "mem_policy": found.mem_policy,
        "mem_nodes": format_ids(found.mem_nodes),
        "host_mem_limit_mb": int(limit) if limit.isascii() and limit.isdigit() else None,
        "verified": verified,
        "reasons": reasons,
    }
    try:
        told = send_receipt(environ, expected.rank, "start", content)
        if told and environ.get("LMSRUN_REPLAN"):
            send_receipt(environ, expected.rank, f"{MOVED}.{os.getpid()}.0", content)
    except OSError as error:
        _say(f"cannot leave a receipt in {environ.get('LMSRUN_RECEIPT_DIR') or 'stderr'}: {error.strerror}")
        return
    if not told and reasons and expected.numa != "off":
        _say(f"rank {expected.rank} is not bound as planned: {'; '.join(reasons)}")


def _start_over(command: Sequence[str], environ: dict[str, str]) -> NoReturn:
    """Plan this rank's binding on its own machine and exec the shim again with the binding in front."""
    from launch.rank.self_plan import plan_this_rank

    rank = plan_this_rank(command, environ)
    _warn_of_unbound(rank, environ)
    argv = list(rank.argv)
    argv[0] = _find(argv[0], environ)
    _exec(argv, {**environ, **rank.env})


def _exec_guarded(argv: Sequence[str], environ: Mapping[str, str], rank: int) -> None:
    from launch.rank.guard import needs_guard, run_guarded

    if needs_guard(environ):
        run_guarded(argv, program_environ(environ), rank, environ.get("LMSRUN_RANK_OUTPUT", ""))


def _give_up(why: str, code: int, environ: Mapping[str, str]) -> NoReturn:
    """End without having become the program; the launcher learns why, if this rank's number is known."""
    from launch.rank.identity import find_rank

    _say(why)
    rank, how = find_rank(environ), f"did not start its program: {why}"
    try:
        if rank is not None:
            content = {"rank": rank, "host": os.uname().nodename, "code": code, "how": how}
            send_receipt(environ, rank, END, content)
    except OSError:
        # The line above is all that can be told.
        pass
    if environ.get("PMI_FD"):
        from launch.rank.guard import abort_hydra

        abort_hydra(environ, code)
    sys.exit(code)


def _warn_of_unbound(rank: RankPlan, environ: Mapping[str, str]) -> None:
    if not rank.cpus and environ.get("LMSRUN_NUMA") != "off":
        _say(f"rank {rank.rank} is not bound")


def _find(program: str, environ: Mapping[str, str]) -> str:
    """Find the file that exec would run, or raise an error that says why there is none."""
    if found := find_program(program, environ.get("PATH", os.defpath)):
        return found
    _require_file(program)
    if os.path.dirname(program) and os.path.exists(program):
        raise ProgramError(
            f"{program} is not executable; needed a program, or a script whose name ends in .py",
            NOT_EXECUTABLE,
        )
    raise ProgramError(f"{program} is not a program here; give its path, or check PATH", NOT_FOUND)


def _require_file(program: str) -> None:
    if os.path.isdir(program):
        raise ProgramError(
            f"{program} is a folder; needed a program, or a script whose name ends in .py", NOT_EXECUTABLE
        )
    if os.path.exists(program) and not os.path.isfile(program):
        raise ProgramError(f"{program} {NO_FILE}", NOT_EXECUTABLE)


def _exec(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(argv[0], list(argv), dict(environ))  # noqa: S606 - an argv list, no shell
    except OSError as error:
        raise ProgramError(f"cannot run {argv[0]}: {_why_not(argv[0], error)}", NOT_EXECUTABLE) from error


def _why_not(program: str, error: OSError) -> str:
    """Say why the kernel does not run a file that is there and executable."""
    if error.errno == errno.ENOENT:
        return _lacks(program)
    if error.errno == errno.ENOEXEC:
        return "neither a program for this machine nor a script that begins with #!"
    return error.strerror or str(error)


def _lacks(program: str) -> str:
    """Say what the kernel would have started for a file, and has not found."""
    try:
        with open(program, "rb") as file:
            first = os.fsdecode(file.readline(256))
    except OSError as error:
        return error.strerror or str(error)
    if not first.startswith("#!"):
        return "the loader that it was linked for is not here; needed a program for this machine"
    # The kernel takes a carriage return for a part of the name.
    name = first[2:].rstrip("\n").replace("\t", " ").strip(" ").partition(" ")[0]
    hint = "; its lines end as on Windows; try dos2unix" if name.endswith("\r") else ""
    what = "cannot be started itself" if os.path.exists(name) else "is not here"
    return f"its first line names the interpreter {name!r}, which {what}{hint}"


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that is no more"


def _say(text: str) -> None:
    sys.stderr.write(f"lmsrun: {printable(text)}\n")
