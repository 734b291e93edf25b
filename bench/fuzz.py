"""Fuzz every parser of what comes from outside, guided by coverage: 0 tracebacks, 0 slow, 0 large.

    python bench/fuzz.py [--target NAME ...] [--runs N] [--seconds S] [--corpus DIR] [--seed N] [--json FILE]

Each target runs in a process of its own under atheris (libFuzzer), and where that is not installed under
plain mutations of the seeds. An input fails that raises what is no error for a person, takes 2 s, or 200 MiB
more than the process had before; libFuzzer leaves it in the corpus folder. The default is a million
executions of each of the eleven targets.
"""

import argparse
import io
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
TARGETS = ("ids", "hosts", "batch", "toml", "options", "xml", "saved", "archive", "tree", "wire", "channel")
LIMIT_S, LIMIT_MIB = 2, 200
MAX_INPUT = 1 << 14


@dataclass(frozen=True)
class Target:
    """One parser. ``run`` lets pass what an error for a person is, and nothing else."""

    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def build_targets() -> dict[str, Target]:
    """Import the parsers and put one function before each group of them."""
    from launch.channel.messages import SOCKET
    from launch.channel.server import RankChannel
    from launch.cluster import allocation, hosts, slurm_lists
    from launch.discover import read_tree
    from launch.discover.archive import read_archive
    from launch.discover.hwloc_xml import parse_hwloc_xml
    from launch.discover.saved import parse_saved
    from launch.discover.tree import MemoryTree
    from launch.installed.mpi_flavour import parse_mpi_version
    from launch.model.busy import parse_busy
    from launch.model.errors import LmsrunError
    from launch.model.idset import parse_ids, parse_mask
    from launch.model.settings import read_environ
    from launch.preflight.report import AnswerReader, parse_answer
    from launch.rank import identity
    from launch.rank.shim import parse_expectation
    from lmsrun.options import LaunchOptions
    from lmsrun.sources import command_line, tables, variables
    from lmsrun.sources.files import read_file

    nowhere = Path("/nonexistent")
    folder = Path(tempfile.mkdtemp(prefix="lmsrun-fuzz-"))

    def words(data: bytes) -> list[str]:
        return data.decode("utf-8", "surrogateescape").split("\0")

    def environ(data: bytes) -> dict[str, str]:
        pairs = (word.partition("=") for word in data.decode("utf-8", "replace").split("\n"))
        return {name: value for name, equals, value in pairs if equals and "\0" not in value}

    def each(*calls: Callable[[], object], also: tuple[type[Exception], ...] = ()) -> None:
        for call in calls:
            with suppress(LmsrunError, *also):
                call()

    def ids(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        each(lambda: parse_ids(text), lambda: parse_mask(text), also=(ValueError,))

    def host_lists(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        each(
            lambda: hosts.parse_hosts(text),
            lambda: hosts.parse_hostfile(text, "f"),
            lambda: hosts.parse_nodefile(text, "f"),
            lambda: slurm_lists.parse_hostlist(text),
            lambda: slurm_lists.parse_counts(text, 3, "N"),
            lambda: slurm_lists.find_count(text, 1, "N"),
        )

    def batch(data: bytes) -> None:
        told = environ(data)
        each(
            lambda: allocation.read_allocation(told, nowhere),
            lambda: identity.read_rank(told),
            lambda: identity.find_rank(told),
            lambda: identity.read_slurm_cpus(told),
        )

    def toml(data: bytes) -> None:
        path = folder / "lmsrun.toml"
        path.write_bytes(data)

        def read() -> None:
            file = read_file(path, path.name)
            tables.parse_table({key: file.table[key] for key in file.table if key != "lms"}, file.name)

        each(read)

    def arguments(data: bytes) -> None:
        each(
            lambda: command_line.parse_argv("run", words(data)),
            lambda: command_line.parse_argv("topo", words(data)),
            lambda: variables.check_variables(environ(data)),
            lambda: read_environ(LaunchOptions, environ(data)),
        )

    def xml(data: bytes) -> None:
        each(lambda: parse_hwloc_xml(data, "f"))

    def saved(data: bytes) -> None:
        each(lambda: parse_saved(data, "f"))

    def archive(data: bytes) -> None:
        each(lambda: read_tree(read_archive(data, "f"), "f"))

    def tree(data: bytes) -> None:
        pairs = (entry.partition(b"=") for entry in data.split(b"\1"))
        files = {path.decode("utf-8", "replace"): text for path, _, text in pairs if path}
        each(lambda: read_tree(MemoryTree(files), "f"))

    def wire(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        reader = AnswerReader("n", 4)
        reader.feed(data)
        reader.packed()
        parse_answer("a", data)
        each(lambda: parse_mpi_version(text), lambda: parse_busy(text), lambda: parse_expectation(text))

    def channel(data: bytes) -> None:
        server = RankChannel("5ec7e7", 2, 4.5)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(server.listen_here(folder))
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            server.serve(server.filenos())
            while len(server.filenos()) > 1:
                server.serve(server.filenos())
        server.close()
        (folder / SOCKET).unlink()

    return {
        "ids": Target(ids, (b"0-3,8", b"00000000,0000ffff", b"0xff")),
        "hosts": Target(host_lists, (b"a:4,b:4", b"a slots=4\nb:2 # x\n", b"n[01-04,7]", b"4(x2),3")),
        "batch": Target(
            batch,
            (
                b"SLURM_JOB_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=2(x3)\nSLURM_JOB_ID=1\nSLURM_NNODES=3",
                b"LSB_JOBID=1\nLSB_MCPU_HOSTS=b 1 a 4\nLSB_DJOB_NUMPROC=4",
                b"OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0",
                b"SLURM_PROCID=1\nSLURM_NTASKS=2\nSLURM_LOCALID=0\nSLURM_CPU_BIND=quiet,mask_cpu:0x0F,0xF0",
            ),
        ),
        "toml": Target(toml, (b'numa = "off"\nsmt = 2\n[lms]\npolicy = "all"\n', b"forward = ['A=b']\n")),
        "options": Target(arguments, (b"-np\x004\x00--numa=off\x00t.py", b"LMSRUN_NUMA=off\nLMSRUN_SMT=2")),
        "xml": Target(
            xml,
            (
                (
                    b'<topology version="2.0"><object type="Machine" cpuset="0x3" nodeset="0x1">'
                    b'<object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="4096"/>'
                    b'<object type="Core" cpuset="0x3"><object type="PU" os_index="0" cpuset="0x1"/>'
                    b'<object type="PU" os_index="1" cpuset="0x2"/></object></object></topology>'
                ),
            ),
        ),
        "saved": Target(saved, (_saved_machine(),)),
        "archive": Target(archive, _archives()),
        "tree": Target(tree, (b"\1".join(f"{path}={text}".encode() for path, text in _files().items()),)),
        "wire": Target(wire, (b"mpirun (Open MPI) 4.1.4", b'{"jobs": [["a", "0-1", []]], "uses": []}')),
        "channel": Target(
            channel,
            (b'{"job": "5ec7e7", "rank": 0}\n{"ended": 1, "why": "; so"}\n', b'{"job":"\\ud800","rank":0}\n'),
        ),
    }


def _files() -> dict[str, str]:
    cpu, node = "sys/devices/system/cpu", "sys/devices/system/node"
    return {
        f"{cpu}/online": "0-1",
        f"{cpu}/cpu0/topology/thread_siblings_list": "0-1",
        f"{cpu}/cpu0/topology/physical_package_id": "0",
        f"{node}/online": "0",
        f"{node}/node0/cpulist": "0-1",
        f"{node}/node0/distance": "10",
        f"{node}/node0/meminfo": "Node 0 MemTotal: 4096 kB",
        "sys/bus/pci/devices/0000:04:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:04:00.0/class": "0x030200",
        "sys/bus/pci/devices/0000:04:00.0/numa_node": "0",
        "proc/self/status": "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0",
        "proc/self/cgroup": "0::/job",
        "proc/driver/nvidia/gpus/0000:04:00.0/information": "Model: \t V100",
    }


def _saved_machine() -> bytes:
    from launch.discover import read_tree
    from launch.discover.saved import to_json
    from launch.discover.tree import MemoryTree

    files = {path: text.encode() for path, text in _files().items()}
    return json.dumps(to_json(read_tree(MemoryTree(files), "seed"))).encode()


def _archives() -> tuple[bytes, ...]:
    made = []
    for mode in ("w", "w:gz"):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=mode) as packed:  # type: ignore[call-overload]
            for path, text in list(_files().items())[:8]:
                member = tarfile.TarInfo(f"m/{path}")
                member.size = len(text)
                packed.addfile(member, io.BytesIO(text.encode()))
        made.append(out.getvalue())
    return tuple(made)


def fuzz_here(name: str, arguments: argparse.Namespace, corpus: Path) -> None:
    """Fuzz one target in this process, which ends with it."""
    try:
        import atheris
    except ImportError:
        mutate(build_targets()[name], arguments)
        return
    with atheris.instrument_imports(include=["launch", "lmsrun", "lms"]):
        target = build_targets()[name]
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    most = _peak_mib() + LIMIT_MIB
    limits = [f"-runs={arguments.runs}", f"-seed={arguments.seed}", f"-max_len={MAX_INPUT}"]
    limits += [f"-max_total_time={arguments.seconds}"] if arguments.seconds else []
    # libFuzzer's own books grow with the corpus; what it cannot tell apart is given to it on top.
    limits += [f"-timeout={LIMIT_S}", f"-rss_limit_mb={most + LIMIT_MIB}", f"-malloc_limit_mb={LIMIT_MIB}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={corpus}/", str(corpus)], target.run)
    atheris.Fuzz()


def mutate(target: Target, arguments: argparse.Namespace) -> int:
    """Run mutations of the seeds, without any guide; returns how many.

    Raises:
        AssertionError: If one took too long or too much memory.
    """
    dice = random.Random(arguments.seed)  # noqa: S311 - it must replay
    before, begun, runs = _peak_mib(), time.monotonic(), 0
    while runs < arguments.runs and not 0 < arguments.seconds < time.monotonic() - begun:
        data = bytearray(dice.choice(target.seeds))
        for _ in range(dice.randint(1, 8)):
            start = dice.randrange(len(data) + 1)
            piece = dice.choice((dice.randbytes(dice.randint(1, 4)), bytes(data[: dice.randint(0, 40)])))
            data[start : start + dice.randint(0, 4)] = piece
        started = time.monotonic()
        target.run(bytes(data[:MAX_INPUT]))
        if time.monotonic() - started > LIMIT_S or _peak_mib() > before + LIMIT_MIB:
            raise AssertionError(f"too slow or too large: {bytes(data)!r}")
        runs += 1
    sys.stderr.write(f"Done {runs} runs in {time.monotonic() - begun:.0f} second(s)\n")
    return runs


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def fuzz(name: str, arguments: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    """Fuzz one target in a process of its own; returns what came of it."""
    folder = corpus / name
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, __file__, "--child", name, "--corpus", str(folder)]
    argv += [
        "--runs",
        str(arguments.runs),
        "--seconds",
        str(arguments.seconds),
        "--seed",
        str(arguments.seed),
    ]
    begun = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    runs = re.findall(r"Done (\d+) runs|#(\d+)\t", done.stderr)
    count = int(max((first or second for first, second in runs), key=int, default="0"))
    return {
        "target": name,
        "runs": count,
        "seconds": round(time.monotonic() - begun, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10,
        "failed": done.returncode != 0,
        "said": done.stderr[-4000:] if done.returncode else "",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz what the command line names; 1 when an input failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--target", action="append", help="may repeat; without it, all of them")
    parser.add_argument("--runs", type=int, default=1_000_000, help="executions of each target")
    parser.add_argument("--seconds", type=int, default=0, help="at most, for each target; 0: no limit")
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "out" / "fuzz", help="what was found lies there"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        fuzz_here(arguments.child, arguments, arguments.corpus)
        return 0
    rows = []
    for name in arguments.target or TARGETS:
        row = fuzz(name, arguments, arguments.corpus)
        print(
            f"{name:<10}{row['runs']:>10} runs{row['seconds']:>9} s  {'FAILED' if row['failed'] else 'ok'}",
            flush=True,
        )
        sys.stdout.write(row["said"])
        rows.append(row)
    print(f"{'all':<10}{sum(row['runs'] for row in rows):>10} runs")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(main())
