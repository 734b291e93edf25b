"""Running jobs of this machine, each written down in a file that its living process holds locked.

All users share one folder. A file counts while somebody holds its lock (flock), so that a job which was
killed is gone at once, whatever it left behind. What others wrote is data from outside; nothing is promised
by it, and no planted link is followed.
"""

import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from launch.model.busy import RunningJob
from launch.model.errors import LmsrunError
from launch.model.idset import IdParser, IdSet, format_ids
from launch.model.text import printable

FOLDER = "lmsrun-jobs"
SCHEMA = "lmsrun.job/1"
JOB_NOTE = "LMSRUN_JOB_NOTE"
"""The variable by which a job that a rank starts knows the one it belongs to."""
MAX_JOBS = 512
"""Jobs that are read; a machine has far fewer."""
MAX_ENTRIES = 1 << 14
"""Names that are looked at, whatever somebody put there beside the jobs."""
MAX_BYTES = 64 << 10
_LOCK_WAIT_S = 1.0
"""How long a job that starts waits for another that starts, and for nobody longer."""
_DRAFT_S = 60.0
"""How old a draft is when its writer, which needs milliseconds, has certainly died."""
_MAX_NAME = 60
_MAX_GPUS = 256


class JobBoard:
    """The folder in which jobs are written down; without one, nothing is read and nothing written.

    Attributes:
        is_crowded: Whether the last reading found more names than it looks at, so that jobs may be hidden.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open the first folder that can be had.

        Args:
            folders: Where to look, best first; each is made if it is missing.
        """
        self.is_crowded = False
        self._fd = next((fd for fd in map(_open_folder, folders) if fd is not None), None)

    @property
    def is_there(self) -> bool:
        """Whether there is a folder."""
        return self._fd is not None

    def close(self) -> None:
        """Leave the folder; jobs that are written down stay so."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have no other job choose and write at the same time, as far as the others keep to it."""
        if self._fd is None:
            yield
            return
        until = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(self._fd, fcntl.LOCK_EX) and time.monotonic() < until:
            time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def read(self, own: str = "") -> tuple[RunningJob, ...]:
        """Read the jobs that run, in the order of their files' names; files of dead jobs of ours go away.

        Args:
            own: The token of the job that this process belongs to, which is not another one.
        """
        if self._fd is None:
            return ()
        parser, found = IdParser(), []
        with os.scandir(self._fd) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES) if _is_to_read(entry))
            self.is_crowded = next(entries, None) is not None
        for name in names:
            if name != f"{own}.json" and (job := _read_job(self._fd, name, parser)) is not None:
                found.append(job)
                if len(found) == MAX_JOBS:
                    break
        return tuple(found)

    def write(self, program: str, cpus: IdSet, gpus: frozenset[str], temporary: str = "") -> "JobNote | None":
        """Write a job down for as long as the note, or a fork of this process, is there; None: no room."""
        if self._fd is None:
            return None
        token = secrets.token_hex(8)
        content = {
            "schema": SCHEMA,
            "program": program[:_MAX_NAME],
            "pid": os.getpid(),
            "cpus": format_ids(cpus),
            "gpus": sorted(gpus),
            "temporary": temporary,
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # Locked under a name that nobody reads: no one finds it without its lock, and takes it for dead.
            fd = os.open(f".{token}", flags, 0o644, dir_fd=self._fd)
        except OSError:
            return None
        try:
            os.fchmod(fd, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(fd, json.dumps(content).encode())
            os.rename(f".{token}", f"{token}.json", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            with suppress(OSError):
                os.unlink(f".{token}", dir_fd=self._fd)
            os.close(fd)
            return None
        return JobNote(token, fd, os.dup(self._fd))


class JobNote:
    """A job that is written down."""

    def __init__(self, token: str, fd: int, folder: int) -> None:
        self.token = token
        """The value of ``JOB_NOTE`` for its ranks."""
        self._fd, self._folder = fd, folder

    def remove(self) -> None:
        """Take the job off the board."""
        with suppress(OSError):
            os.unlink(f"{self.token}.json", dir_fd=self._folder)
        os.close(self._fd)
        os.close(self._folder)


def board_folders(jobs_dir: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Name the folders of the board: one for all users, else one that shows this user's own jobs."""
    own = environ.get("XDG_RUNTIME_DIR", "")
    return tuple(Path(folder) / FOLDER for folder in (jobs_dir, own) if os.path.isabs(folder))


def _open_folder(folder: Path) -> int | None:
    """Open a folder that nobody can have led elsewhere; make it, for all users, where it is missing."""
    try:
        is_new = _make_folder(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if is_new:
            os.fchmod(fd, 0o1777)
    except OSError:
        return None
    status = os.fstat(fd)
    # In a folder of somebody else's without the sticky bit anybody takes away what others have written.
    is_safe = status.st_uid in (os.geteuid(), 0) or status.st_mode & stat.S_ISVTX
    if is_safe and os.access(folder, os.W_OK | os.X_OK):
        return fd
    os.close(fd)
    return None


def _make_folder(folder: Path) -> bool:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    return True


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_to_read(entry: "os.DirEntry[str]") -> bool:
    """Whether a name is a job's, or of a draft that a killed job has left and reading takes away."""
    if entry.name.endswith(".json"):
        return True
    try:
        is_draft = entry.name.startswith(".") and entry.is_file(follow_symlinks=False)
        # A younger one is not to be locked: its writer is about to do so.
        return is_draft and entry.stat(follow_symlinks=False).st_mtime < time.time() - _DRAFT_S
    except OSError:
        return False


def _read_job(folder: int, name: str, parser: IdParser) -> RunningJob | None:
    """Read one file; None if no living process holds it, or it holds no job."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        if _try_lock(fd, fcntl.LOCK_SH):
            if status.st_uid == os.geteuid():
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            return None
        return _parse_job(os.read(fd, MAX_BYTES), status.st_uid, parser)
    except OSError:
        return None
    finally:
        os.close(fd)


def _parse_job(content: bytes, user: int, parser: IdParser) -> RunningJob | None:
    """Read what a job has written; None if that is damaged, or more than a machine has."""
    try:
        table = json.loads(content)
        program, pid, gpus = str(table["program"])[:_MAX_NAME], int(table["pid"]), table["gpus"]
        if not isinstance(gpus, list) or len(gpus) > _MAX_GPUS or not 0 < pid < 1 << 31:
            return None
        cpus = parser.ids(str(table["cpus"]))
        is_own, temporary = user == os.geteuid(), str(table.get("temporary", ""))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, LmsrunError):
        return None
    whose = "" if is_own else f" of user {user}"
    name = f"job {printable(program) or '?'}{whose} (process {pid})"
    names = frozenset(printable(str(gpu)[:_MAX_NAME]) for gpu in gpus)
    return RunningJob(name, cpus, names, temporary if is_own else "")
