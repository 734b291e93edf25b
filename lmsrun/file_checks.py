"""Files and programs that options name: what would fail only late is said before anything is started."""

import os
from collections.abc import Mapping
from pathlib import Path

from launch.model.errors import UsageError
from launch.system.program_path import find_program
from lmsrun.options import LaunchOptions, Request


def check_named_files(request: Request, environ: Mapping[str, str], dry: bool) -> None:
    """Look at what the options name.

    Args:
        request: The user's.
        environ: Where ``PATH`` is.
        dry: Whether nothing will be started, so that most of it may be for another machine.

    Raises:
        UsageError: Naming the option as it was written.
    """
    options, origins = request.options, request.origins
    if "mpirun" in origins:
        _check_mpirun(options, origins["mpirun"], environ, dry)
    if options.rankfile_out:
        _check_can_be_written(options.rankfile_out, origins["rankfile_out"])
    if dry:
        return
    if options.host_discovery_script:
        _check_script(options.host_discovery_script, origins["host_discovery_script"], environ)
    if options.output_dir:
        from launch.supervise.job import check_output_folder

        check_output_folder(Path(options.output_dir))


def check_timeline(request: Request) -> None:
    """Look whether the first rank, on this host, can write Horovod's timeline.

    Raises:
        UsageError: Naming the option as it was written.
    """
    if request.options.timeline:
        _check_can_be_written(request.options.timeline, request.origins["timeline"])


def _check_mpirun(options: LaunchOptions, origin: str, environ: Mapping[str, str], dry: bool) -> None:
    """One that is not here must not make ``auto`` take another launcher in silence."""
    if find_program(options.mpirun, environ.get("PATH", os.defpath)):
        return
    if options.launcher == "auto":
        raise UsageError(
            f"{origin} {options.mpirun} is not there, or cannot be executed; "
            "check its path, or plan for elsewhere with lmsrun plan --launcher mpirun"
        )
    if options.launcher == "mpirun" and not dry:
        raise UsageError(f"{origin} {options.mpirun} is not there, or cannot be executed; check its path")


def _check_can_be_written(path: str, origin: str) -> None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"{origin} {path} is a folder; needed the name of a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{origin} {path}: there is no folder {folder}; make it, or choose another file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{origin} {path} cannot be written; choose another file")


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
