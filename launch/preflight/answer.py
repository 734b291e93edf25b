"""``lmsrun probe-host``: one process on a host of the job, which says what the host is like and ends.

Started by ``launch.preflight.ask``, over ssh or by the launcher that is to start the job.
"""

import itertools
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch.discover import has_driver, read_machine
from launch.discover.nvml import import_nvml
from launch.discover.tree import DirTree
from launch.installed.versions import read_tensorflow_version, read_version
from launch.model.errors import LmsrunError, UsageError
from launch.preflight.occupancy import read_occupancy
from launch.preflight.report import build_answer, pack_answer, write_lines
from launch.rank.identity import read_rank
from launch.system.own_host_name import resolve_name


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Answer on stdout.

    Args:
        argv: The word that marks this probe's lines, the limit in seconds, and ``lines`` or ``mpi``.
        environ: The environment.

    Returns:
        1 when MPI was wanted and cannot be had: the launcher then ends those that wait for this one in MPI.

    Raises:
        UsageError: If a person called this.
    """
    if len(argv) != 3 or not argv[1].isdigit() or argv[2] not in ("lines", "mpi"):
        raise UsageError("probe-host is what lmsrun starts on other hosts; see lmsrun topo and check")
    nonce, limit_s, way = argv
    # Whoever asked has gone by then; nothing that hangs here (a file system, MPI) is to stay behind.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(limit_s))
    rank = _read_rank(environ)
    content = pack_answer(describe_this_host(environ))
    _write(write_lines(nonce, "own", rank, content))
    return _gather(nonce, rank, content) if way == "mpi" else 0


def describe_this_host(environ: Mapping[str, str]) -> dict[str, Any]:
    """Build the answer of this host; say so where the machine cannot be read."""
    try:
        machine = read_machine()
    except LmsrunError as error:
        return {"trouble": str(error)}
    tree = DirTree("/")
    name = os.uname().nodename
    return build_answer(
        machine,
        read_versions(),
        read_occupancy(tree, environ, import_nvml() if has_driver(tree) else None),
        [*filter(None, [environ.get("SLURMD_NODENAME")]), name],
        resolve_name(name) is not None,
    )


def read_versions() -> dict[str, str | None]:
    """Read the versions that all hosts of a job should share."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "lmsrun": read_version("lmsrun"),
        "TensorFlow": read_tensorflow_version(),
        "Horovod": read_version("horovod"),
    }


def _read_rank(environ: Mapping[str, str]) -> int:
    try:
        return read_rank(environ).rank
    except UsageError:  # ssh starts one process alone.
        return 0


def _gather(nonce: str, rank: int, content: bytes) -> int:
    """Bring all answers together over MPI, which also shows that MPI connects the hosts."""
    try:
        import mpi4py

        mpi4py.rc(threads=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _write(write_lines(nonce, "no-mpi", rank, f"mpi4py cannot be used there: {error}".encode()[:400]))
        return 1
    world = MPI.COMM_WORLD
    if world.size == 1:  # Its MPI is not the launcher's; each has said its own.
        _write(write_lines(nonce, "no-mpi", rank, b"mpi4py belongs to another MPI than the launcher"))
        return 0
    try:
        answers = _gather_bytes(MPI, world, content)
    except MPI.Exception as error:
        sys.stderr.write(f"lmsrun: {error}\n")
        return 1
    for number, answer in enumerate(answers):
        _write(write_lines(nonce, "gathered", number, answer))
    return 0


def _gather_bytes(mpi: Any, world: Any, content: bytes) -> list[bytes]:
    """Every process's bytes at process 0, without pickle; none elsewhere."""
    sizes = _gather_sizes(mpi, world, len(content))
    everything = bytearray(sum(sizes)) if world.rank == 0 else None
    world.Gatherv([content, mpi.BYTE], everything and [everything, sizes, mpi.BYTE])
    if everything is None:
        return []
    ends = itertools.accumulate(sizes)
    return [bytes(everything[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _gather_sizes(mpi: Any, world: Any, size: int) -> list[int]:
    sizes = bytearray(8 * world.size)
    world.Allgather([size.to_bytes(8, "little"), mpi.BYTE], [sizes, mpi.BYTE])
    return [int.from_bytes(sizes[start : start + 8], "little") for start in range(0, len(sizes), 8)]


def _write(lines: bytes) -> None:
    """One line a call: a pipe takes it whole, so that no other process's output comes between."""
    for line in lines.splitlines(keepends=True):
        os.write(sys.stdout.fileno(), line)
