"""Keep what the report of a job is made of: the plan and its machines beforehand, the page afterwards."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cluster.batch_script import job_name
from launch.model.errors import LmsrunError, UsageError
from launch.supervise.run_folder import make_run_folder, remove_unused
from launch.system.output_file import write_unnamed, write_whole
from lmsrun.command_steps import say
from lmsrun.render.plan import plan_to_json
from lmsrun.report.page import render_report
from lmsrun.report.record import JOB, job_to_json, read_record

if TYPE_CHECKING:
    from launch.model.plan import LaunchPlan
    from lmsrun.resolve import ResolvedJob


@contextmanager
def recorded(plan: "LaunchPlan", job: "ResolvedJob") -> Iterator[None]:
    """Have a folder for the job's records while the block runs it, and write the page when it is over.

    The folder stays where output is kept, unless the job cannot be set up.

    Raises:
        UsageError: If the folder cannot be made or written; nothing of it is left then.
    """
    if not job.record_dir:
        yield
        return
    folder = Path(job.options.output_dir or job.record_dir)
    _make(folder, keeps_output=bool(job.options.output_dir))
    try:
        _write_plan(folder, plan, job)
        yield
        _write_page(folder, job.options.report)
    except LmsrunError:
        (folder / JOB).unlink(missing_ok=True)
        remove_unused(folder)
        raise
    finally:
        if not job.options.output_dir:
            shutil.rmtree(folder, ignore_errors=True)


def _make(folder: Path, *, keeps_output: bool) -> None:
    if keeps_output:
        make_run_folder(folder)
        return
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}; set TMPDIR") from None


def _write_plan(folder: Path, plan: "LaunchPlan", job: "ResolvedJob") -> None:
    machines = {rank.host: job.machine_of(rank.host) for rank in plan.ranks}
    content = json.dumps(job_to_json(job_name(job.request.program), plan_to_json(plan), machines))
    try:
        (folder / JOB).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder / JOB}: {error.strerror}; choose another --output-dir, or set TMPDIR"
        ) from None


def _write_page(folder: Path, path: str | None) -> None:
    """Write the report; a job that is over does not fail for want of it."""
    if path is None:
        return
    try:
        write_report(folder, Path(path))
    except UsageError as error:
        say(f"no report: {error}")
    except Exception as error:  # noqa: BLE001 - the ranks' files may hold anything, and the job's code stands
        say(f"no report: {type(error).__name__}: {error}")


def write_report(folder: Path, path: Path, places: Sequence[Path] = (), *, is_named: bool = True) -> None:
    """Read a run folder and write its page.

    Args:
        folder: The job's.
        path: The page.
        places: Where the private folders of running jobs may be.
        is_named: Whether the user has named the page himself, so that a link leads to it whoever made it.

    Raises:
        UsageError: If the folder holds no job, or the page cannot be written.
    """
    page = render_report(read_record(folder, places))
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path} is a device or a pipe; needed the name of a file")
    try:
        if is_named:
            write_whole(path, page)
        else:
            write_unnamed(path, page, "choose another file by --out")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from None
    say(f"wrote {path}")
