"""One job before it starts: its options, its private folder, its output files, its ranks' environments."""

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launch.channel.messages import STREAMS
from launch.model.errors import JobError, UsageError
from launch.model.plan import LaunchPlan
from launch.receipts.running_note import write_running_note
from launch.system.output_file import open_output

if TYPE_CHECKING:
    from launch.cluster.job import Command

RECEIPTS = "receipts.json"
"""Its name in the output folder."""
_RECEIPT_BYTES = 16 << 10
"""Of one rank: four files of a block each."""
OTHER_FILES = 32
"""Descriptors beside those of the ranks, generously."""
CONNECTIONS_OF_RANK = 3
"""Of a rank that another launcher has started: one for news, and one for each stream of its output."""


@dataclass(frozen=True)
class JobOptions:
    """How a local job is supervised; none of it changes what runs where."""

    grace_period_s: float = 10.0
    output_dir: Path | None = None
    job_dir: Path | None = None
    """The whole job's, whose ``receipts.json`` speaks of the last attempt; None: ``output_dir``."""
    earlier: tuple[Mapping[str, object], ...] = ()
    """How the attempts before this one went, for ``receipts.json``."""
    record_dir: Path | None = None
    """Where ``receipts.json`` and the ranks' reports go although no output is kept; None: ``output_dir``."""
    tag_output: bool | None = None
    """None: tags when there is more than one rank."""
    numa: str = "auto"
    """``strict`` ends the job on a rank whose binding is not verified; ``off`` expects none."""
    receipt_timeout_s: float = 120.0
    """When to print the receipts that have arrived, if some rank never calls ``hvd.init()``."""
    stall_timeout_s: float = 60.0
    """How long no rank may print anything before it is told who waits for whom; 0: for ever."""
    stall_kill: bool = False
    """Whether a job that stands still for so long is ended."""
    verbose: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """What the ranks inherit."""
    command_line: tuple[str, ...] = ()
    """What the user typed, for ``receipts.json``, without what may be a secret."""
    title: str = ""
    """The program and its arguments, for people who look at running jobs."""
    timestamps: bool = False
    """Whether each line of the ranks begins with the time."""
    quiet: bool = False
    """Whether the table of ranks is left out where all is well."""
    stdin: int | None = None
    """The rank that reads this process's standard input."""
    last_stage: str = "init"
    """The receipt of every rank for which the table waits; when later ones come it is shown again."""
    command: "Command | None" = None
    """The launcher that starts the ranks instead of us; None: they are our own children."""
    stdout_fd: int = 1
    stderr_fd: int = 2
    words_fd: int | None = None
    """A file for what lmsrun itself says, also the last lines of the rank that failed; None: none."""


@dataclass(frozen=True)
class JobFiles:
    """What a job has on disk: the receipts' private folder and, if asked for, a file a rank and stream."""

    job_id: str
    receipt_dir: Path
    output_fds: Mapping[tuple[int, str], int]
    output_dir: Path | None
    file_limit: tuple[int, int]
    """The caller's limit of open files, which the ranks get back."""
    record_dir: Path | None = None
    """Where ``receipts.json`` and the ranks' reports go."""


def open_job(names: Mapping[int, str], options: JobOptions, foreign_ranks: int = 0) -> JobFiles:
    """Open the output files of a job and choose its receipts' folder, before anything is started.

    Args:
        names: Number -> name of the output files of each process that we start.
        options: The job's.
        foreign_ranks: How many ranks may come to talk; those for which there is no room do without.

    Raises:
        UsageError: If the output folder cannot be written.
        JobError: If too few files may be open.
    """
    needed = len(names) * (4 if options.output_dir is not None else 2) + OTHER_FILES
    file_limit = _raise_file_limit(needed, needed + foreign_ranks * CONNECTIONS_OF_RANK)
    output_fds = _open_outputs(names, options.output_dir) if options.output_dir is not None else {}
    job_id = os.urandom(8).hex()
    named = options.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - made with mode 0700 and a random name
    temporary = Path(os.path.abspath(named))  # ranks have folders of their own
    record_dir = options.record_dir or options.output_dir
    receipt_dir = temporary / f"lmsrun-{job_id}"
    return JobFiles(job_id, receipt_dir, output_fds, options.output_dir, file_limit, record_dir)


def make_receipt_folder(files: JobFiles, plan: LaunchPlan, options: JobOptions) -> None:
    """Make the receipts' private folder, with a note of the job in it; whoever calls this has to remove it.

    Raises:
        JobError: If there is no place for it.
    """
    try:
        files.receipt_dir.mkdir(mode=0o700)
        _check_room(files.receipt_dir, len(plan.ranks))
        write_running_note(files.receipt_dir, options.title, options.output_dir, plan.ranks, os.getpid())
    except OSError as error:
        with suppress(OSError):
            for path in files.receipt_dir.iterdir():
                path.unlink()
            files.receipt_dir.rmdir()
        raise JobError(
            f"cannot make a folder for receipts in {files.receipt_dir.parent}: {error.strerror}; "
            "set TMPDIR to one that can be written"
        ) from error


def _check_room(folder: Path, ranks: int) -> None:
    """Write as much as all receipts take: on a full disk ranks would be blamed for the lack of theirs."""
    trial = folder / "room"
    try:
        trial.write_bytes(bytes(_RECEIPT_BYTES * ranks))
    finally:
        trial.unlink(missing_ok=True)


def restore_file_limit(files: JobFiles) -> None:
    """Give this process the caller's limit of open files again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, files.file_limit)


def _raise_file_limit(needed: int, wanted: int) -> tuple[int, int]:
    """Let this process open as many files as it wants, or at least needs; returns the limit before."""
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise JobError(
            f"{hard} files may be open at once; needed {needed} for this job's pipes and files; "
            "raise `ulimit -Hn`, or start fewer ranks"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
    return before


def check_output_folder(folder: Path) -> None:
    """Look, without writing, whether a job's output could stand there; the folder itself may be missing.

    Raises:
        UsageError: If it could not, also for ``receipts.json``, which is written only at the end.
    """
    # os.path, because the methods of Path raise for a name that is too long or a folder that may not be read.
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"the output folder {folder} is no folder; choose another --output-dir")
    if os.path.isdir(folder / RECEIPTS):
        raise UsageError(
            f"{folder / RECEIPTS} is a folder, and the receipts are to be written there; "
            "remove it, or choose another --output-dir"
        )
    base = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not (os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)):
        raise UsageError(f"nothing can be written into {base}; choose another --output-dir")


def _open_outputs(names: Mapping[int, str], folder: Path) -> dict[tuple[int, str], int]:
    check_output_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {
            (number, stream): open_output(folder / f"{name}.{stream}")
            for number, name in names.items()
            for stream in STREAMS
        }
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or folder}: {error.strerror}; choose another --output-dir"
        ) from error
