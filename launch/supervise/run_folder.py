"""A folder for the output of each job, below the one that the user named: no job writes over another."""

import json
import os
import secrets
import time
from pathlib import Path

from launch.model.errors import UsageError
from launch.supervise.job import RECEIPTS

LATEST = "latest"
"""The link beside the jobs' folders that leads to the last one."""


def name_run_folder(output_dir: str, name: str, now_s: float) -> Path:
    """Name a folder that is not there yet.

    Args:
        output_dir: The user's folder.
        name: The job's.
        now_s: Seconds since the epoch.
    """
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    return Path(output_dir) / f"{name}-{when}-{secrets.token_hex(2)}"


def make_run_folder(folder: Path) -> None:
    """Make a job's folder, and have ``latest`` lead to it.

    No link that somebody else has put in the way is followed: the folder is new, and a link is replaced.

    Raises:
        UsageError: If that cannot be done.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _refuse_others_link(folder.parent)
        folder.mkdir()
        link = folder.parent / LATEST
        if link.is_symlink() or not link.exists():
            draft = link.with_name(f".{LATEST}.{folder.name}")
            draft.symlink_to(folder.name)
            os.replace(draft, link)
    except OSError as error:
        raise UsageError(
            f"cannot make {error.filename or folder}: {error.strerror}; choose another --output-dir"
        ) from error


def remove_unused(folder: Path) -> None:
    """Remove the folder of a job that could not be set up: nothing is in it, and ``latest`` leads nowhere."""
    try:
        if any(path.stat().st_size for path in folder.iterdir()):
            return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    except OSError:
        return
    link = folder.parent / LATEST
    if link.is_symlink() and os.readlink(link) == folder.name:
        link.unlink()


def set_aside(folder: Path, attempt: int) -> dict[str, object]:
    """Keep an attempt's receipts where the next one's take their place, and sum the attempt up.

    Args:
        folder: The whole job's.
        attempt: Counted from 0; all but the first have folders, and receipts, of their own.

    Returns:
        What the next attempt's ``receipts.json`` says of it.
    """
    kept = f"receipts-{attempt}.json" if attempt == 0 else f"{restart_folder(attempt)}/{RECEIPTS}"
    try:
        if attempt == 0:
            os.replace(folder / RECEIPTS, folder / kept)
        document = json.loads((folder / kept).read_text())
    except (OSError, ValueError):
        # That it could not be written was told.
        return {"attempt": attempt}
    told = ("started", "ended", "exit_code", "exit_codes")
    return {"attempt": attempt, "receipts": kept, **{name: document.get(name) for name in told}}


def restart_folder(attempt: int) -> str:
    """Name the folder of a restart below the job's."""
    return f"restart-{attempt}"


def _refuse_others_link(output_dir: Path) -> None:
    owner = output_dir.lstat().st_uid
    if output_dir.is_symlink() and owner not in (os.geteuid(), 0):
        raise UsageError(
            f"{output_dir} is a link of user {owner}, who may lead it anywhere; choose another --output-dir"
        )
