"""What users of other launchers type: modules, standard input, quiet and timed output, help and version."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from jobs import LMSRUN, JobStarter

from launch.model.busy import Busy, RunningJob, busy_to_text
from lms import __version__
from lmsrun.cli import main
from lmsrun.help_text import render_help
from lmsrun.manual.pages import SUBCOMMANDS
from lmsrun.sources.command_line import parse_argv

FAILING = """
import os, pathlib, sys, time
def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
if os.environ["RANK"] == "0":
    print("the cause", file=sys.stderr)
    pathlib.Path("told").touch()
    wait_for("said")
    sys.exit(7)
wait_for("told")
print("of another", file=sys.stderr)
pathlib.Path("said").touch()
time.sleep(60)
"""
WAITING = "import time; time.sleep(600)"
_DROP = 'for word; do shift; [ "$word" = -- ] || set -- "$@" "$word"; done; exec "$@"'
WITHOUT_DASHES = ("sh", "-c", _DROP, "sh", *LMSRUN, "run")
"""``start`` puts ``--`` between options and program; a module's arguments begin without."""


@pytest.fixture
def start(tmp_path: Path) -> "JobStarter":
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def module(folder: Path, text: str) -> str:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "train.py").write_text(text)
    return "pkg.train"


def test_a_module_ends_the_options() -> None:
    parsed = parse_argv("run", ["-np", "2", "-m", "pkg.train", "-np", "3"])
    assert (parsed.values["num_proc"], parsed.program) == (2, ("-m", "pkg.train", "-np", "3"))


@pytest.mark.ranks
def test_a_module_runs_as_under_python(start: JobStarter, tmp_path: Path) -> None:
    name = module(tmp_path, "import sys\nprint(__name__, sys.argv[1:], sys.path[0])")
    job = start("--epochs", "3", options=("--numa", "off", "-m", name), np=1, command=WITHOUT_DASHES)
    assert job.finish() == 0, job.stderr
    assert job.stdout.decode() == f"__main__ ['--epochs', '3'] {tmp_path}\n"


@pytest.mark.ranks
def test_one_rank_reads_the_input_that_it_was_given(start: JobStarter, tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))"
    command = ("sh", "-c", 'printf "one line" | "$@"', "sh", *LMSRUN, "run")
    job = start("python3", "-c", program, options=("--numa", "off", "--stdin", "1"), command=command)
    assert job.finish() == 0, job.stderr
    assert sorted(job.stdout.decode().splitlines()) == ["[0] 0 ''", "[1] 1 'one line'"]


@pytest.mark.ranks
def test_lines_have_the_time_in_front(start: JobStarter) -> None:
    job = start("echo", "here", options=("--numa", "off", "--timestamps"))
    assert job.finish() == 0
    lines = job.stdout.decode().splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \[[01]\] here", line) for line in lines)


@pytest.mark.ranks
def test_a_quiet_job_says_nothing_of_its_own(start: JobStarter) -> None:
    job = start("echo", "here", options=("-q",))
    assert job.finish() == 0
    assert job.stderr == b""


@pytest.mark.ranks
def test_a_rank_warns_of_what_it_shares_unless_nobody_wants_warnings(tmp_path: Path) -> None:
    busy = busy_to_text(
        Busy((RunningJob("job a (process 1)", frozenset(os.sched_getaffinity(0)), frozenset()),))
    )
    told = {**os.environ, "LMSRUN_BUSY": busy, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    told |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    argv = (*LMSRUN, "worker", "--", "true")
    for quiet, is_said in (("", True), ("yes", False)):
        done = subprocess.run(
            argv,
            env={**told, "LMSRUN_QUIET": quiet},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.returncode, "shared with job a" in done.stderr) == (0, is_said), done.stderr


@pytest.mark.ranks
def test_the_last_lines_of_the_rank_that_failed_are_said_again(start: JobStarter, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAILING)
    job = start("fail.py", options=("--numa", "off", "--output-dir", "out", "--grace-period", "1"))
    assert job.finish() == 7, job.stderr
    *_, head, lines, last = job.stderr.decode().splitlines()
    assert (head, lines) == ("lmsrun: the last lines of rank 0 on stderr:", "  the cause")
    assert last.startswith("lmsrun: rank 0 on localhost (no GPU) exited with code 7; its output is in out/")
    assert (tmp_path / last.rpartition(" ")[2]).read_text() == "the cause\n"


@pytest.mark.ranks
def test_a_program_without_horovod_has_its_table_at_once(start: JobStarter, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAITING)
    job = start("wait.py", np=1)
    assert job.process.stderr is not None
    assert job.process.stderr.readline() == b"lmsrun: where the ranks run, as read back from the kernel\n"
    job.process.terminate()
    assert job.finish() == 143


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("-np 1 -m", "-m needs the name of a module"),
        ("-np 1 -m nowhere.at.all", "there is no module nowhere in this folder"),
        ("topo -m x", "unknown option -m; `lmsrun topo --help`"),
        ("-np 1 -N 3 x", "unknown option -N; did you mean -n?"),
        ("-np 1 --stdin x train.py", "--stdin is 'x'; needed none or a whole number"),
        ("-np 1 --stdin 1 true", "--stdin 1: there is no such rank; needed none or 0 to 0"),
        ("plan -np 1 --stdin 1 true", "--stdin 1: there is no such rank; needed none or 0 to 0"),
        ("-np 1 -m modx.py", "-m modx.py: that is a file; leave -m out, or -m modx for the module"),
        ("-np 1 --numa off --omp-places cores true", "--numa off contradicts --omp-places cores"),
        ("-np 1 --stall-timeout 0 --stall-kill true", "--stall-timeout 0.0 contradicts --stall-kill"),
        ("-np 1 -q -v true", "-q contradicts -v; give one of them"),
        ("help plam", "'plam' is no subcommand; did you mean plan?"),
        ("help plan topo", "'plan topo' is no subcommand"),
        ("version x", "takes nothing, but found 'x'"),
    ],
)
def test_mistakes_are_told_nearby(
    argv: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modx.py").touch()
    assert main(argv.split(), {"PATH": "/bin:/usr/bin"}) == 2
    said_all = capsys.readouterr().err
    assert said in said_all and said_all.count("\n") == 1, said_all


@pytest.mark.parametrize("argv", ["version", "-V", "--version", "plan -V"])
def test_the_version(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split(), {}) == 0
    assert capsys.readouterr().out == f"lmsrun {__version__}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_is_as_wide_as_the_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["help", name], {}) == 0
    told = capsys.readouterr().out
    assert told == render_help(name) + "\n"
    options = told.partition("Job:")[2].partition("Examples:")[0]
    assert all(len(line) <= 70 for line in options.splitlines())
    monkeypatch.setenv("COLUMNS", "110")
    assert name != "run" or len(render_help(name)) < len(told)


@pytest.mark.parametrize(
    ("script", "options", "lines"),
    [
        (
            "import keras",
            (),
            ["framework: tensorflow (Horovod is not installed", "Horovod would bring Keras's fit"],
        ),
        ("import horovod.tensorflow", (), ["Horovod would bring Keras's fit"]),
        ("import keras", ("-q",), []),
        ("tf.distribute.MultiWorkerMirroredStrategy()", (), ["framework: tensorflow (the script uses"]),
        ("print()", (), ["framework: tensorflow (Horovod is not installed"]),
    ],
)
def test_who_has_no_horovod_is_told_what_it_brings_and_costs(
    script: str,
    options: tuple[str, ...],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launch.installed.framework.horovod_installed", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    assert main(["plan", "-np", "1", "--gpus", "none", *options, "train.py"], {"PATH": "/bin:/usr/bin"}) == 0
    told = capsys.readouterr().err.splitlines()
    assert [
        line.removeprefix("lmsrun: ")[: len(start)] for line, start in zip(told, lines, strict=True)
    ] == lines
    cost = r"`lmsrun build-horovod` builds it, once, in about \d+ min (on idle CPUs|at the load of .*\)); "
    assert not lines[1:] or re.search(cost, told[-1])


@pytest.mark.parametrize(
    ("script", "ranks", "options", "is_told"),
    [
        ("import keras", 2, (), True),
        ("import keras", 1, (), False),
        ("import keras, horovod", 2, (), False),
        ("import keras; keras.distribution.MultiWorkerMirroredStrategy()", 2, (), False),
        ("print()", 2, (), False),
        ("import keras", 2, ("--framework", "horovod"), False),
    ],
)
def test_ranks_that_do_not_know_of_each_other_are_told(
    script: str,
    ranks: int,
    options: tuple[str, ...],
    is_told: bool,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    argv = ["plan", "-np", str(ranks), "--oversubscribe", "--gpus", "none", *options, "train.py"]
    assert main(argv, {"PATH": "/bin:/usr/bin"}) == 0
    assert ("each rank trains a model of its own" in " ".join(capsys.readouterr().out.split())) is is_told


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        (
            "print()",
            "-np 4",
            "-np 4 stands behind train.py and goes to it; for lmsrun put it in front",
        ),
        (
            "import numpy as np\nx = 1-np.pi",
            "-np 4 --tf-port 9999",
            "-np 4, --tf-port 9999 stand behind train.py and go to it; for lmsrun put them in front",
        ),
        ("parser.add_argument('-np')", "-np 4", ""),
        ("parser.add_argument('--mem-policy')", "--mem-policy bind", ""),
        ("class Args:\n    mem_policy: str = ''", "--mem-policy bind", ""),
        ("print()", "-- -np 4", ""),
    ],
)
def test_an_option_behind_the_script_that_the_script_does_not_name_is_doubted(
    script: str,
    words: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    argv = ["plan", "-np", "1", "--json", "train.py", *words.split()]
    assert main(argv, {"PATH": "/bin:/usr/bin"}) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [warning for warning in warnings if "behind" in warning] == [told] * bool(told)


def test_no_warning_of_options_behind_a_program_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "-np", "1", "--json", "mpirun", "-np", "4"], {"PATH": "/bin:/usr/bin"}) == 0
    assert "behind" not in capsys.readouterr().out
