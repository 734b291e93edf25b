"""What a user sees where something around the command line is odd."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import LMSRUN, wait_until


def lmsrun(
    folder: Path, *words: str, environ: Mapping[str, str] | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command line; ``before`` is a shell's preparation in a mount namespace of its own."""
    head = ["unshare", "--mount", "sh", "-ec", f'{before}; exec "$@"', "sh"] if before else []
    done = subprocess.run(
        [*head, *LMSRUN, *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "LMSRUN_JOBS_DIR": os.environ["LMSRUN_JOBS_DIR"], **(environ or {})},
        capture_output=True,
        timeout=300,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    if before and "unshare" in err:
        pytest.skip("no mount namespace can be made here")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def test_a_tree_under_ascii_is_drawn_in_ascii(tmp_path: Path) -> None:
    done = lmsrun(tmp_path, "topo", environ={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "`-- " in done.stdout
    assert "\\u" not in done.stdout


def test_the_number_of_ranks_is_said_where_nobody_gave_one(tmp_path: Path) -> None:
    said = "(one per core; -np N starts N)"
    assert said in lmsrun(tmp_path, "true").stderr
    assert said not in lmsrun(tmp_path, "-q", "true").stderr
    assert said not in lmsrun(tmp_path, "-np", "1", "true").stderr


def test_a_quiet_plan_has_no_warnings(tmp_path: Path) -> None:
    words = ("-np", "1", "-x", "NOT_THERE", "true")
    assert "NOT_THERE is not set here" in lmsrun(tmp_path, "plan", *words).stdout
    assert "NOT_THERE" not in lmsrun(tmp_path, "plan", "-q", *words).stdout


def test_a_forecast_says_which_variable_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("")
    said = "NOT_THERE: NOT_THERE is not set here, so it is not handed on"
    environ = {"LMSRUN_FORWARD": "NOT_THERE"}
    assert said in lmsrun(tmp_path, "fit", "nothing.py", environ=environ).stderr


def test_an_unknown_option_names_the_help_of_its_command(tmp_path: Path) -> None:
    assert "unknown option -x; `lmsrun fit --help`" in lmsrun(tmp_path, "fit", "-x", "A", "a.py").stderr
    said = lmsrun(tmp_path, "--verbos", "a.py").stderr
    assert "did you mean --verbose? `lmsrun --help` lists them all" in said


def test_a_topology_that_cannot_be_read_is_blamed_itself(tmp_path: Path) -> None:
    done = lmsrun(tmp_path, "topo", "--topology", "/proc/self/mem")
    assert done.returncode == 2
    assert done.stderr == "lmsrun: cannot read topology /proc/self/mem: Input/output error\n"


def test_check_finds_what_every_run_would_fail_of(tmp_path: Path) -> None:
    hide = "mount -t tmpfs none /sys"
    done = lmsrun(tmp_path, "check", before=hide)
    assert done.returncode == 1, done.stdout
    assert "missing machine" in done.stdout
    assert lmsrun(tmp_path, "-np", "1", "true", before=hide).returncode == 2


def test_a_full_disk_is_blamed_before_anything_starts(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    fill = f"mount -t tmpfs -o size=16k none '{full}'; head -c 16384 /dev/zero >'{full}/x'"
    words = ("-np", "1", "--no-lms", "--output-dir", "out", "--", "touch", str(tmp_path / "started"))
    done = lmsrun(tmp_path, *words, environ={"TMPDIR": str(full)}, before=fill)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"lmsrun: cannot make a folder for receipts in {full}: No space left on device; "
        "set TMPDIR to one that can be written\n"
    )
    assert not (tmp_path / "started").exists()
    assert list((tmp_path / "out").iterdir()) == [], "a job that cannot be set up leaves no folder"


@pytest.mark.parametrize(("name", "why"), [("gone", "there is no folder"), ("file", "is no folder")])
@pytest.mark.parametrize("words", [(), ("--report", "r.html"), ("--launcher", "horovodrun")])
def test_a_temporary_folder_that_is_none_is_bad_input(
    tmp_path: Path, words: tuple[str, ...], name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    folder = {"TMPDIR": str(tmp_path / name)}
    words = (*words, "-np", "1", "--gpus", "none", "--output-dir", "out", "--no-lms", "true")
    done = lmsrun(tmp_path, *words, environ=folder)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lmsrun: cannot make files in '{tmp_path / name}': ")
    assert why in line and line.endswith("needed in TMPDIR: a folder that exists and can be written to")
    assert "lmsrun run would start nothing: cannot" in lmsrun(tmp_path, "plan", *words, environ=folder).stdout


def test_a_host_that_gets_no_rank_is_told(tmp_path: Path) -> None:
    words = ("plan", "--launcher", "horovodrun", "-np", "2", "--no-host-probe")
    idle = " ".join(lmsrun(tmp_path, *words, "-H", "a:2,b:2", "true").stdout.split())
    assert "no rank runs on b: a has room for 2 ranks and is filled first" in idle
    assert "as in -H a:1,b:1" in idle
    assert "no rank runs on" not in lmsrun(tmp_path, *words, "-H", "a:1,b:1", "true").stdout


def test_ddlrun_takes_the_remedy_that_it_is_told(tmp_path: Path) -> None:
    words = (
        "--dry-run",
        "--no-host-probe",
        "--allow-run-as-root",
        "-H",
        "a,b",
        "--accelerators",
        "1",
        "true",
    )
    done = lmsrun(tmp_path, "--launcher", "horovodrun", "ddlrun", *words)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 2 hosts" in done.stdout


def test_a_batch_script_finds_lmsrun(tmp_path: Path) -> None:
    words = ("--print-script", "slurm", "-np", "1", "-H", "a:1", "--walltime", "12:00:00")
    done = lmsrun(tmp_path, *words, "--account", "phys", "--partition", "gpu", "train.py")
    assert done.returncode == 0, done.stderr
    assert {"#SBATCH --time=12:00:00", "#SBATCH --account=phys", "#SBATCH --partition=gpu"} <= set(
        done.stdout.splitlines()
    )
    assert f'export PATH={Path(LMSRUN[0]).parent}:"$PATH"' in done.stdout
    assert done.stdout.endswith("exec lmsrun run --num-proc 1 -- train.py\n")


def test_a_home_that_cannot_be_entered_holds_no_options(tmp_path: Path) -> None:
    """Not even whether a file is there can be asked: as in another user's home."""
    done = lmsrun(tmp_path, "plan", "-np", "1", "true", environ={"HOME": "/" + "x" * 5000})
    assert done.returncode == 0, done.stderr


def test_a_parent_that_ignores_the_ends_of_children_does_no_harm(tmp_path: Path) -> None:
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    argv = [sys.executable, "-c", ignore, *LMSRUN, "run", "-q", "-np", "1", "true"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_batch_script_has_the_bytes_of_an_argument(tmp_path: Path) -> None:
    argv = [*LMSRUN, "run", "-np", "1", "--print-script", "slurm", "t.py", b"data-\xff.bin"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=True, timeout=300)
    assert b"data-\xff.bin" in done.stdout


def test_a_module_of_another_python_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "lib/only_there").mkdir(parents=True)
    (tmp_path / "lib/only_there/__main__.py").write_text("print('only there')")
    other = tmp_path / "other"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/lib:$PYTHONPATH exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    done = lmsrun(tmp_path, "run", "-q", "-np", "1", "--python", str(other), "-m", "only_there")
    assert done.returncode == 0 and "only there" in done.stdout, done.stderr


def test_a_forecast_names_the_signal_that_ended_its_script(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os; os.kill(os.getpid(), 11)\n")
    done = lmsrun(tmp_path, "fit", "dies.py")
    assert done.returncode == 2
    said = "lmsrun: dies.py was killed by SIGSEGV (signal 11) before its first training step; needed a script"
    assert done.stderr.splitlines()[-1].startswith(said)


def test_a_forecast_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, time; pathlib.Path('runs').touch()\n"
        "while not pathlib.Path('stop').exists(): time.sleep(0.01)\n"
    )
    argv = ["nohup", *LMSRUN, "fit", "slow.py"]
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        wait_until((tmp_path / "runs").exists, "the script runs", 60)
        job.send_signal(signal.SIGHUP)
        (tmp_path / "stop").touch()
        assert b"ended with exit code 0 and no training step" in job.communicate(timeout=60)[1]


@pytest.mark.parametrize("launcher", ["local", "horovodrun"])
def test_a_variable_without_a_name_does_no_harm(tmp_path: Path, launcher: str) -> None:
    argv = ["env", "=x", *LMSRUN, "-q", "-np", "1", "--launcher", launcher, "echo", "came here"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0 and b"came here" in done.stdout, done.stderr


def test_a_name_that_the_locale_cannot_write_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "lmsrun.toml").write_text('output-dir = "日"', encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = lmsrun(tmp_path, "-np", "1", "true", environ=ascii_only)
    said = r"lmsrun: '\u65e5' cannot be written in this locale (ascii); try PYTHONUTF8=1"
    assert (done.returncode, done.stderr.splitlines()) == (2, [said])


def test_a_script_is_forecast_as_the_one_rank_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text("import os; print('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])")
    assert "rank 0 1" in lmsrun(tmp_path, "fit", "who.py").stderr.splitlines()
    own = {"RANK": "3", "WORLD_SIZE": "4"}
    assert "rank 3 4" in lmsrun(tmp_path, "fit", "who.py", environ=own).stderr.splitlines()


def test_a_forecast_names_its_schema(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import os; open(os.environ['LMSRUN_FIT'], 'w').write('{\"text\": \"\"}')"
    )
    assert json.loads(lmsrun(tmp_path, "fit", "--json", "told.py").stdout) == {"schema": "lmsrun.fit/1"}


def test_check_says_that_its_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    argv = ["sh", "-c", 'cd gone; rmdir ../gone; exec "$@"', "sh", *LMSRUN, "check"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert "missing options        the current folder cannot be found" in done.stdout, done.stderr


def test_a_pipe_that_does_not_block_gets_all_text(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    argv = [*LMSRUN, "plan", "--json", "--oversubscribe", "-np", "200", "true"]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=writing) as job, open(reading, "rb") as pipe:
        os.close(writing)
        with suppress(subprocess.TimeoutExpired):  # until the pipe is full
            job.wait(3)
        assert len(json.loads(pipe.read())["ranks"]) == 200
    assert job.returncode == 0


def test_a_number_of_thousands_of_digits_is_one_line(tmp_path: Path) -> None:
    words = ("--launcher", "ddlrun", "ddlrun", "-H", "a", "--accelerators", "9" * 5000, "true")
    done = lmsrun(tmp_path, "plan", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr[-500:]
