"""Files and programs that options name: what would fail only late is said before anything is started."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from launch.model.errors import UsageError
from launch.model.plan import MODULE
from launch.system.program_path import NO_FILE, find_program
from lms.config import LMSConfig, find_near, nearest
from lms.errors import PlaceError
from lms.user_files import require_folder
from lmsrun.options import COMMANDS, LaunchOptions
from lmsrun.sources.request import Request


def check_named_files(request: Request, environ: Mapping[str, str]) -> None:
    """Look at what the options name; where nothing will be started, most of it may be for another machine.

    Args:
        request: The user's.
        environ: Where ``PATH`` is.

    Raises:
        UsageError: Naming the option as it was written.
    """
    options, origins = request.options, request.origins
    if "mpirun" in origins:
        _check_mpirun(options, origins["mpirun"], environ)
    refuse_same_file(options, ("svg", "png", "report", "metrics"), request.program)
    if options.rankfile_out:
        check_can_be_written(options.rankfile_out, origins["rankfile_out"])
    if options.metrics:
        check_can_be_replaced(options.metrics, origins["metrics"])
    if options.dry_run:
        return
    if options.report:
        check_can_be_replaced(options.report, origins["report"])
    if options.host_discovery_script:
        _check_script(options.host_discovery_script, origins["host_discovery_script"], environ)
    if options.output_dir:
        from launch.supervise.job import check_output_folder

        check_output_folder(Path(options.output_dir))
    check_temporary(environ)


def check_temporary(environ: Mapping[str, str]) -> None:
    """Look whether the job can have a private folder in ``TMPDIR``.

    Raises:
        UsageError: If it cannot.
    """
    try:
        require_folder(Path(environ.get("TMPDIR") or "/tmp"), "TMPDIR")  # noqa: S108 - only looked at
    except PlaceError as error:
        raise UsageError(str(error)) from None


def refuse_same_file(options: LaunchOptions, names: Sequence[str], program: Sequence[str] = ()) -> None:
    """Check what options have written: no file twice, none that the command reads, only files, and as named.

    Args:
        options: The user's.
        names: The options that name a file to write.
        program: The program and its arguments; no file that they name is written over.

    Raises:
        UsageError: Naming the options.
    """
    read = {os.path.realpath(word): "what the program is given" for word in program if os.path.isfile(word)}
    for name in ("topology", "config", "lms_config", "hostfile"):
        if path := getattr(options, name):
            read[os.path.realpath(path)] = f"what --{name.replace('_', '-')} reads"
    chosen: dict[str, str] = {}
    for name in names:
        path = getattr(options, name)
        if not path:
            continue
        if path == "-":
            raise UsageError(f"--{name} - is no file; needed the name of one")
        ending = os.path.splitext(path)[1].lower().removeprefix(".")
        if {name, ending} == {"svg", "png"}:
            raise UsageError(
                f"--{name} {path} would be {name.upper()} in a file named .{ending}; "
                f"needed --{ending} {path}, or a name that ends in .{name}"
            )
        if of := read.get(os.path.realpath(path)):
            raise UsageError(f"--{name} {path} is {of}; needed another file")
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise UsageError(f"--{name} {path} is a device or a pipe; needed the name of a file")
        if (other := chosen.setdefault(os.path.realpath(path), name)) != name:
            raise UsageError(
                f"--{other} and --{name} name the same file, {path}; needed a file for each, such as "
                f"{os.path.splitext(path)[0]}.{name}"
            )


def check_lms_places(config: LMSConfig) -> None:
    """Look whether ranks on this host can use the folders that the settings of LMS name.

    Raises:
        UsageError: Naming the setting, and its variable.
    """
    if not config.enabled or config.mode == "off":
        return
    try:
        if config.store_dir:
            require_folder(Path(config.store_dir), "store_dir (LMS_STORE)")
        if config.stats_file:  # of several ranks each has a file of its own there
            require_folder(Path(config.stats_file).parent, "the folder of stats_file (LMS_STATS_FILE)")
        if config.tensorboard:  # made by the ranks, with the folders above it
            folder = Path(config.tensorboard).absolute()
            made_in = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
            require_folder(made_in, f"tensorboard (LMS_TENSORBOARD={config.tensorboard})")
    except PlaceError as error:
        raise UsageError(f"LMS: {error}") from None


def check_timeline(request: Request) -> None:
    """Look whether the first rank, on this host, can write Horovod's timeline.

    Raises:
        UsageError: Naming the option as it was written.
    """
    if request.options.timeline:
        check_can_be_written(request.options.timeline, request.origins["timeline"])


def check_program(
    program: Sequence[str], dry: bool, environ: Mapping[str, str], python: str | None = None
) -> None:
    """Look at the program: one that is not there must not cost a job; a plan may be for another machine.

    A module is looked for where this Python finds it; not for another one (``python``).

    Raises:
        UsageError: Saying what is wrong with it.
    """
    if not program:
        raise UsageError("no program; needed lmsrun -np N [options] PROGRAM [ARGS] (see lmsrun --help)")
    name = program[0]
    if name == MODULE:
        if not dry:
            _check_module(program, is_ours=python is None)
        return
    if dry or (os.path.isfile(name) if name.endswith(".py") else find_program(name, environ.get("PATH"))):
        return
    if name in COMMANDS and not os.path.isfile(name):
        raise UsageError(f"{name!r} is a command of lmsrun and goes first: lmsrun {name} [options] PROGRAM")
    raise UsageError(f"program {name!r} {_why_not(name, program[1:])}")


def doubt_job(program: Sequence[str], lms: LMSConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """Warn of what a plan for this host names and ``run`` would refuse: its program, or a folder."""
    program_check = partial(check_program, program, False, environ)
    for check in (program_check, partial(check_lms_places, lms), partial(check_temporary, environ)):
        try:
            check()
        except UsageError as error:
            yield f"lmsrun run would start nothing: {error}"


def _check_module(program: Sequence[str], *, is_ours: bool) -> None:
    """Look for the module's package, without importing anything of it."""
    if len(program) < 2:
        raise UsageError(f"{MODULE} needs the name of a module, as in python -m MODULE [ARGS]")
    if program[1].endswith(".py") and os.path.isfile(program[1]):
        module = program[1].removesuffix(".py")
        hint = f", or {MODULE} {module} for the module" if module.isidentifier() else ""
        raise UsageError(f"{MODULE} {program[1]}: that is a file; leave {MODULE} out{hint}")
    if not is_ours:
        return
    top, *parts = program[1].split(".")
    if lack := _find_lack(top, parts):
        raise UsageError(f"{MODULE} {program[1]}: {lack}")
    # Python puts the current folder first.
    if os.path.exists(top) or os.path.isfile(f"{top}.py"):
        return
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(
            f"{MODULE} {program[1]}: there is no module {top} in this folder or for {sys.executable}; "
            "check its name, go to its folder, or name another interpreter with --python"
        )


def _find_lack(package: str, parts: Sequence[str]) -> str | None:
    """Say which part of a module's name its package lacks; ``None`` also where only an import would tell."""
    places = ["", *sys.path]
    name = package
    for part in parts:
        found = PathFinder.find_spec(name.rpartition(".")[2], places)
        if found is None or not found.submodule_search_locations or _looks_elsewhere(found.origin):
            return None
        places = list(found.submodule_search_locations)
        if PathFinder.find_spec(part, places) is None:
            from pkgutil import iter_modules  # Only a mistake pays for it.

            near = nearest(part, {module.name for module in iter_modules(places)})
            return f"there is no module {part or repr(part)} in {name}{near}"
        name += f".{part}"
    return None


def _looks_elsewhere(path: str | None) -> bool:
    """Tell whether a package's own code may find modules outside of its folder; true if that is unknown."""
    if path is None:  # a package without code
        return False
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return not path.endswith(".py") or any(way in text for way in ("__path__", "sys.modules", "meta_path"))


def check_python(python: str | None, environ: Mapping[str, str]) -> None:
    """Look at the interpreter that ``--python`` names.

    Raises:
        UsageError: If it is not here.
    """
    if python and find_program(python, environ.get("PATH")) is None:
        raise UsageError(f"--python {python} is not there, or cannot be executed; needed an interpreter")


def _check_mpirun(options: LaunchOptions, origin: str, environ: Mapping[str, str]) -> None:
    """One that is not here must not make ``auto`` take another launcher in silence."""
    if find_program(options.mpirun, environ.get("PATH", os.defpath)):
        return
    if options.launcher == "auto":
        raise UsageError(
            f"{origin} {options.mpirun} is not there, or cannot be executed; "
            "check its path, or plan for elsewhere with lmsrun plan --launcher mpirun"
        )
    if options.launcher == "mpirun" and not options.dry_run:
        raise UsageError(f"{origin} {options.mpirun} is not there, or cannot be executed; check its path")


def check_can_be_written(path: str, origin: str) -> None:
    """Look whether a file could be written.

    Raises:
        UsageError: Naming the option as it was written.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"{origin} {path} is a folder; needed the name of a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{origin} {path}: there is no folder {folder}; make it, or choose another file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{origin} {path} cannot be written; choose another file")


def check_can_be_replaced(path: str, origin: str) -> None:
    """Look whether a file could be written whole and put in the place of the one that is there.

    Raises:
        UsageError: Naming the option as it was written.
    """
    check_can_be_written(path, origin)
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{origin} {path} is a device or a pipe; needed the name of a file")


def _check_script(path: str, origin: str, environ: Mapping[str, str]) -> None:
    """Horovod hands it to a shell only once the job is to start."""
    if find_program(path, environ.get("PATH", os.defpath)):
        return
    needed = "needed an executable file that prints the hosts"
    if not os.path.isfile(path):
        raise UsageError(f"{origin} {path} is not there; {needed} (put a command with arguments into one)")
    if not os.access(path, os.X_OK):
        raise UsageError(f"{origin} {path} cannot be executed; {needed}; try chmod +x")
    raise UsageError(f"{origin} {path} is not in PATH; try ./{path}")


def _why_not(program: str, arguments: Sequence[str]) -> str:
    """Say what is wrong with a program that cannot be started, and what to do."""
    if os.path.isdir(program):
        return "is a folder; needed a program, or a script whose name ends in .py"
    if os.path.isfile(program) and os.access(program, os.X_OK):
        return f"is not in PATH; try ./{program}"
    if os.path.isfile(program):
        return "cannot be executed; try chmod +x, or for Python a name that ends in .py"
    if os.path.exists(program):
        return NO_FILE
    folder, name = os.path.split(program)
    is_there = os.path.isdir(folder or ".")
    known = {entry.name for entry in Path(folder).glob("*.py") if entry.is_file()} if is_there else set()
    known |= set() if folder or name.endswith(".py") else COMMANDS.keys()
    near = [os.path.join(folder, one) for one in find_near(name, known)]
    script = next((word for word in arguments if word.endswith(".py") and os.path.isfile(word)), None)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif script:
        hint = f"if {script} is the program, leave out what stands in front of it"
    else:
        hint = "check its path" if is_there else f"there is no folder {folder}"
    return f"is not there, or cannot be executed; {hint}"
