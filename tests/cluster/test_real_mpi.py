"""Real jobs through Open MPI 4 and 5, MPICH 4 and 5 and Intel MPI.

What the distribution does not have, ``scripts/cluster_tools.py`` installs.
"""

import re
import sys
import time
from pathlib import Path

import pytest
from cluster_run import SHOW_RANK, TRAIN_SUM, digest_of, lmsrun, needs, processes_with, read_ranks, run
from hostile import ARGUMENTS, VALUES

pytestmark = [pytest.mark.ranks, pytest.mark.cluster]

BESIDE = Path(__file__).resolve().parents[2] / ".venv-mpi"
LAUNCHERS = {
    "openmpi": ("--launcher", "mpirun", "--mpirun", "mpirun.openmpi", "--allow-run-as-root"),
    "mpich": ("--launcher", "mpirun", "--mpirun", "mpirun.mpich"),
    "openmpi5": (
        *("--launcher", "mpirun", "--mpirun", str(BESIDE / "openmpi" / "bin" / "mpirun")),
        "--allow-run-as-root",
    ),
    "mpich5": ("--launcher", "mpirun", "--mpirun", str(BESIDE / "mpich" / "bin" / "mpirun")),
    "intel": ("--launcher", "mpirun", "--mpirun", str(BESIDE / "impi-rt" / "bin" / "mpiexec.hydra")),
    "horovodrun": ("--launcher", "horovodrun"),
    "local": ("--launcher", "local"),
}
MPIS = ("openmpi", "mpich", "openmpi5", "mpich5", "intel")


def options(launcher: str) -> tuple[str, ...]:
    words = LAUNCHERS[launcher]
    if "--mpirun" in words:
        needs(words[words.index("--mpirun") + 1])
    if launcher == "horovodrun":
        pytest.importorskip("horovod")
    return words


@pytest.mark.parametrize(
    "launcher", [*MPIS, "local", pytest.param("horovodrun", marks=pytest.mark.tensorflow)]
)
def test_hostile_strings_reach_the_rank_unchanged(launcher: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "a b;$(touch pwned)'q\"", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    given = [word for name, value in VALUES.items() for word in ("-x", f"{name}={value}")]
    argv = lmsrun(
        "run", *options(launcher), "-np", "2", *given, "--", str(SHOW_RANK), str(out), "ok", *ARGUMENTS
    )
    done = run(argv, folder)
    assert done.returncode == 0, done.stderr
    ranks = read_ranks(out, 2)
    assert len({(rank["env"]["MASTER_ADDR"], int(rank["env"]["MASTER_PORT"])) for rank in ranks}) == 1
    for rank in ranks:
        assert rank["argv"] == list(ARGUMENTS)
        assert {name: rank["env"].get(name) for name in VALUES} == VALUES
        assert rank["cwd"] == str(folder)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("mpi", MPIS)
def test_the_shim_alone_is_a_whole_integration(mpi: str, tmp_path: Path) -> None:
    """``mpirun -np 4 lmsrun worker -- PROGRAM``: nothing else of lmsrun is there."""
    words = options(mpi)
    mpirun = words[words.index("--mpirun") + 1]
    root = ["--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE"] if mpi.startswith("openmpi") else []
    argv = [mpirun, *root, "-np", "4", *lmsrun("worker", "--", str(SHOW_RANK), str(tmp_path), "ok", "a b")]
    done = run(argv, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = read_ranks(tmp_path, 4)
    assert [rank["sizes"] for rank in ranks] == [[str(local), "4", "4"] for local in range(4)]
    assert all(rank["cpus"] for rank in ranks)


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("how", "code"),
    [("exit:0:1", 1), ("exit:1:7", 7), ("exit:1:255", 255), ("kill:1:11", 139), ("kill:0:9", 137)],
)
def test_exit_codes_survive_and_nothing_is_left(mpi: str, how: str, code: int, tmp_path: Path) -> None:
    started = time.monotonic()
    argv = lmsrun("run", *options(mpi), "--numa", "off", "-np", "2", "--", str(SHOW_RANK), str(tmp_path), how)
    done = run(argv, tmp_path)
    assert done.returncode == code, done.stderr
    assert time.monotonic() - started < 20, "the other rank was not waited for"
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"lmsrun: rank {how.split(':')[1]} on localhost (no GPU) "), done.stderr
    assert processes_with(str(tmp_path)) == []


@pytest.mark.parametrize("mpi", MPIS)
def test_receipts_come_back(mpi: str, tmp_path: Path) -> None:
    words = (*options(mpi), "-np", "2", "--output-dir", str(tmp_path / "job"))
    done = run(lmsrun("run", *words, "--", str(SHOW_RANK), str(tmp_path), "ok"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "where the ranks run" in done.stderr
    assert (tmp_path / "job" / "latest" / "receipts.json").read_text().count('"rank"') == 2
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 is here", "[1] rank 1 is here"]
    for rank in (0, 1):
        assert (tmp_path / "job" / "latest" / f"rank-{rank}.stdout").read_text() == f"rank {rank} is here\n"
        assert (tmp_path / "job" / "latest" / f"rank-{rank}.stderr").read_text() == ""
    assert (tmp_path / "job" / "latest" / "launcher.stdout").read_text() == "", "it has nothing to say"


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_reads_its_input_finds_none(mpi: str, tmp_path: Path) -> None:
    """Hydra gives all ranks but the first a pipe that it never closes."""
    program = ("sh", "-c", 'test "$(readlink /proc/self/fd/0)" = /dev/null && wc -c')
    done = run(lmsrun("run", *options(mpi), "-np", "3", "--oversubscribe", "--", *program), tmp_path)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 0", "[1] 0", "[2] 0"]), (
        done.stderr
    )


@pytest.mark.parametrize("mpi", MPIS)
def test_lines_of_all_ranks_arrive_whole_and_in_order(mpi: str, tmp_path: Path) -> None:
    """Open MPI 4.1 drops a third of such lines where it tags them, and cuts lines into each other's."""
    program = tmp_path / "many.py"
    program.write_text(
        "import os\n"
        "rank = os.environ['RANK']\n"
        "os.write(2, b'begun')\n"
        "print(''.join(f'{rank} {line}\\n' for line in range(50_000)) + 'x' * 5000 + rank, end='')\n"
    )
    done = run(lmsrun("run", *options(mpi), "-np", "2", "--no-lms", "--", str(program)), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        said = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        assert said == [*(f"{rank} {line}" for line in range(50_000)), "x" * 5000 + str(rank)]
    assert len(lines) == 100_002
    assert "[0] begun\n" in done.stderr and "[1] begun\n" in done.stderr


@pytest.mark.parametrize("mpi", [mpi for mpi in MPIS if mpi != "openmpi5"])  # passes no end of input on
def test_one_rank_reads_standard_input(mpi: str, tmp_path: Path) -> None:
    words = (*options(mpi), "-np", "2", "--stdin", "0", "-q")
    program = "import os, sys; print(os.environ['RANK'], 'reads', len(sys.stdin.read()))"
    shell = ["sh", "-c", 'printf "one line" | "$@"', "sh"]
    done = run([*shell, *lmsrun("run", *words, "--", sys.executable, "-c", program)], tmp_path)
    assert done.returncode == 0, done.stderr
    read = sorted(re.findall(r"[01] reads \d+", done.stdout))
    assert read == ["0 reads 8", "1 reads 0"]


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_without_a_program_say_why(mpi: str, tmp_path: Path) -> None:
    words = (*options(mpi), "-np", "2", "--python", str(tmp_path / "gone"))
    done = run(lmsrun("run", *words, "--", str(SHOW_RANK), str(tmp_path), "ok"), tmp_path)
    assert done.returncode == 127, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(r"lmsrun: rank [01] on localhost \(no GPU\) did not start its program: ", last), (
        done.stderr
    )
    assert "/gone is not a program here" in last
    assert "NO: no receipt: the worker did not start its program: " in done.stderr


def test_root_must_consent(tmp_path: Path) -> None:
    words = options("openmpi")[:-1]
    done = run(lmsrun("run", *words, "-np", "2", "--", str(SHOW_RANK), str(tmp_path), "ok"), tmp_path)
    import os

    if os.geteuid() != 0:
        assert done.returncode == 0
        return
    assert done.returncode == 2
    assert done.stderr.startswith("lmsrun: Open MPI 4") and "--allow-run-as-root" in done.stderr
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("launcher", "ranks"), [("local", 2), *((mpi, 2) for mpi in MPIS), ("openmpi", 4), ("mpich", 4)]
)
def test_every_launcher_trains_to_the_same_weights(launcher: str, ranks: int, tmp_path: Path) -> None:
    if launcher == "openmpi5" and needs_open_mpi_4():
        pytest.skip("this Horovod needs Open MPI 4's C++ library, which Open MPI 5 no longer has")
    words = (*options(launcher), "--oversubscribe", "--no-lms", "-np", str(ranks))
    done = run(lmsrun("run", *words, "--", str(TRAIN_SUM)), tmp_path, timeout_s=240)
    assert done.returncode == 0, done.stderr
    found = sorted(line.partition("weights ")[2] for line in done.stdout.splitlines() if "weights" in line)
    assert found == [f"{rank} {ranks} {digest_of(ranks)}" for rank in range(ranks)]


@pytest.mark.tensorflow
def test_ranks_that_train_apart_are_told(tmp_path: Path) -> None:
    """With its own MPI's libraries back, Horovod loads under Open MPI 5, and every rank is a job of one."""
    if not needs_open_mpi_4():
        pytest.skip("this Horovod may well find its peers under Open MPI 5")
    words = (*options("openmpi5"), "--oversubscribe", "--no-lms", "-np", "2")
    own_libraries = ["env", "-u", "LD_LIBRARY_PATH", "-u", "OPAL_PREFIX", "-u", "PMIX_PREFIX"]
    program = [*own_libraries, sys.executable, str(TRAIN_SUM)]
    done = run(lmsrun("run", *words, "--", *program), tmp_path, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("NO: Horovod counts 1 rank after hvd.init(), started 2") == 2, done.stderr


def needs_open_mpi_4() -> bool:
    """Whether Horovod here is linked with the C++ bindings that Open MPI 5 has dropped."""
    horovod = pytest.importorskip("horovod")
    libraries = Path(horovod.__path__[0]).glob("tensorflow/mpi_lib*.so")
    return any(b"libmpi_cxx.so.40" in library.read_bytes() for library in libraries)
