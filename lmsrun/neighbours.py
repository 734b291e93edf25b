"""Other jobs of this machine, before and while a job of ours runs."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launch.discover.tree import DirTree
from launch.model.busy import Busy, GpuUse, gpu_key
from launch.model.errors import UsageError
from launch.model.plan import LaunchPlan
from launch.preflight.occupancy import ask_gpu_uses, read_busy
from launch.system.job_board import FOLDER, MAX_ENTRIES, JobBoard, JobNote, board_folders
from lmsrun.command_steps import say
from lmsrun.options import LaunchOptions
from lmsrun.resolve import ResolvedJob


@contextmanager
def open_board(job: ResolvedJob) -> Iterator[JobBoard]:
    """Open the board of this machine for the time in which a job is planned and written down.

    Raises:
        UsageError: If the user has named a folder for it that cannot be had.
    """
    is_real = not job.options.topology
    board = JobBoard(board_folders(job.options.jobs_dir, job.environ) if is_real else ())
    try:
        asked = job.options.jobs_dir
        if is_real and not board.is_there and asked != LaunchOptions.jobs_dir:
            raise UsageError(
                f"--jobs-dir {asked}: running jobs cannot be written down in {asked}/{FOLDER}; "
                "needed a folder in which folders can be made"
            )
        yield board
    finally:
        board.close()


def ask_gpus(job: ResolvedJob) -> tuple[GpuUse, ...]:
    """Ask for the GPUs that are in use here, unless the user does not want to know.

    To be asked before this job's turn at the board: others wait a second for it, and the answer may take
    longer. A job of ours that begins meanwhile is on the board.
    """
    return ask_gpu_uses(DirTree("/")) if job.options.avoid_busy and not job.options.topology else ()


def look_around(job: ResolvedJob, board: JobBoard, gpus: tuple[GpuUse, ...]) -> Busy:
    """Read what runs here, unless the user does not want to know; ``gpus`` are in use."""
    if not job.options.avoid_busy or job.options.topology:
        return Busy()
    busy = read_busy(board, gpus, job.environ)
    if board.is_crowded and not job.options.quiet:
        where = f"{job.options.jobs_dir}/{FOLDER}"
        say(f"warning: {where} holds more than {MAX_ENTRIES} names; jobs that run may not be seen: clear it")
    return busy


def write_down(job: ResolvedJob, plan: LaunchPlan, hosts: frozenset[str], board: JobBoard) -> JobNote | None:
    """Tell later jobs what the ranks of this host have.

    Args:
        job: Whose ranks.
        plan: Where they are.
        hosts: The names that are this host's.
        board: Where to write.
    """
    ranks = [rank for rank in plan.ranks if rank.host in hosts]
    cpus = frozenset[int]().union(*(rank.cpus for rank in ranks))
    gpus = frozenset(gpu_key(rank.gpu) for rank in ranks if rank.gpu)
    temporary = os.path.abspath(job.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - only named here
    return board.write(job.request.program[0].rpartition("/")[2], cpus, gpus, temporary)


def find_places(jobs_dir: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Find where private folders of this user's jobs may be: batch systems give each job a ``TMPDIR``."""
    board = JobBoard(board_folders(jobs_dir, environ))
    try:
        places = {job.temporary for job in board.read()} - {""}
    finally:
        board.close()
    places |= {environ.get("TMPDIR") or "/tmp", "/tmp"}  # noqa: S108 - only this user's own folders are read
    return tuple(Path(place) for place in sorted(set(map(os.path.realpath, places))))
