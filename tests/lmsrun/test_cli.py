"""The command line as a user meets it: subcommands, exit codes, one line for every error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import machines
import pytest

from launch.discover.saved import to_json
from launch.model.plan import SHIM
from lms import __version__
from lmsrun.cli import main

Capture = pytest.CaptureFixture[str]
PORTS = "2 ranks on localhost need ports up to 65536; needed a --tf-port of at most 65534"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program that leaves a trace, and a saved machine."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    (tmp_path / "tool").write_text("")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "fit").write_text("")
    (tmp_path / "fit").chmod(0o755)
    (tmp_path / "ac922.json").write_text(json.dumps(to_json(machines.machine("ac922"))))
    (tmp_path / "dgx.json").write_text(json.dumps(to_json(machines.machine("dgx"))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_error_of_the_plan_names_the_option_as_it_was_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["-np", "1", "train.py"]
    assert main(argv, {"LMSRUN_GPUS": "99"}) == 2
    assert capsys.readouterr().err.startswith("lmsrun: LMSRUN_GPUS names '99', which is not here")
    (here / "lmsrun.toml").write_text('gpus = "99"')
    assert main(argv, {}) == 2
    assert capsys.readouterr().err.startswith("lmsrun: lmsrun.toml: gpus names '99', which is not here")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("-np 2", "no program; needed lmsrun -np N [options] PROGRAM [ARGS]"),
        ("plan -np 2", "no program"),
        ("-np 0 train.py", "-np is '0'"),
        ("--bogus train.py", "unknown option --bogus"),
        ("-np 1 tarin.py", "program 'tarin.py' is not there, or cannot be executed; did you mean train.py?"),
        (
            "-np 1 no-such-program",
            "program 'no-such-program' is not there, or cannot be executed; check its path",
        ),
        ("-np 1 sub/tarin.py", "did you mean sub/train.py?"),
        (
            "-np 1 gone/train.py",
            "program 'gone/train.py' is not there, or cannot be executed; there is no folder gone",
        ),
        ("-np 1 train", "did you mean train.py?"),
        (
            "-np 1 --lms on train.py",
            "'on' is not there, or cannot be executed; if train.py is the program, leave out",
        ),
        ("-np 1 " + "x" * 5000 + "/t.py", "is not there"),
        ("-np 1 folder.py", "program 'folder.py' is a folder; needed a program, or a script"),
        ("-np 1 ./dgx.json", "program './dgx.json' cannot be executed; try chmod +x"),
        ("-np 1 tool", "program 'tool' is not in PATH; try ./tool"),
        ("-np 1 " + "x" * 5000 + ".py", "is not there"),
        ("-np 1 --python /nonexistent/python3 train.py", "--python /nonexistent/python3 is not there"),
        ("-np 1 --output-dir= train.py", "--output-dir is ''; needed DIR"),
        ("-np 1 --topology= train.py", "--topology is ''; needed SRC"),
        ("worker -v -- train.py", "lmsrun: worker takes no option, but found -v"),
        ("-np 1 fit", "program 'fit' is not in PATH; try ./fit"),
        ("-np 1 topo", "'topo' is a command of lmsrun and goes first: lmsrun topo"),
        ("-np 4000 train.py", "4000 ranks do not fit on localhost with"),
        ("-np 5 --topology ac922.json train.py", "5 ranks do not fit on localhost with 4 GPUs; try -np 4"),
        ("-np 1 --gpus 6 --topology dgx.json train.py", "is dgx.json another machine? try `lmsrun plan`"),
        ("--topology nowhere train.py", "nowhere"),
        ("--json -np 1 train.py", "--json prints a plan; use `lmsrun plan --json`"),
        ("-np 1 --gpus 99 train.py", "--gpus names '99', which is not here"),
        ("plan -np 2 --gpus all --topology ac922.json train.py", "; try auto for all of them, or a list"),
        ("-np 1 --lms-config nowhere.toml train.py", "LMS: cannot read nowhere.toml"),
        ("-np 1 -x RANK=3 train.py", "-x RANK: lmsrun sets RANK for each rank itself"),
        ("-np 1 -x =3 train.py", "-x is '=***'; needed NAME or NAME=VALUE"),
        ("-np 2 --framework tensorflow --tf-port 65535 --gpus none --oversubscribe train.py", PORTS),
        ("topo train.py", "lmsrun: topo takes no program"),
        ("version 1", "lmsrun: version takes nothing, but found '1'"),
        ("help nothing", "lmsrun: help: 'nothing' is no subcommand"),
        ("fit", "lmsrun: fit needs a program"),
        ("topo --gpus 0", "unknown option --gpus"),
        ("topo --save /nonexistent/x", "cannot write /nonexistent/x: No such file"),
        (
            "plan --strict --host-mem-limit 1000000 --topology ac922.json train.py",
            "--strict: host memory limit",
        ),
    ],
)
def test_mistakes_cost_one_line_and_start_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], argv: str, said: str
) -> None:
    assert main(argv.split(), {}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lmsrun: ")
    assert err.count("\n") == 1
    assert said in err
    assert not (here / "started").exists()


def test_a_launchers_tasks_start_no_jobs_of_their_own(here: Path, capsys: Capture) -> None:
    task = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert main(["-np", "1", "--gpus", "none", "train.py"], task) == 2
    err = capsys.readouterr().err
    assert err.startswith("lmsrun: this is task 1 of 2 that mpirun started") and err.count("\n") == 1
    assert "try 'mpirun -np N lmsrun worker -- PROGRAM'" in err
    assert not (here / "started").exists()
    assert main(["plan", "-np", "1", "--gpus", "none", "train.py"], task) == 0


def test_a_rank_of_another_launcher_is_told_of_a_misspelt_variable(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "--", "train.py"], {"RANK": "0", "LMSRUN_NUMAA": "strict"}) == 2
    assert capsys.readouterr().err == (
        "lmsrun: unknown variable LMSRUN_NUMAA; rename it to LMSRUN_NUMA, or unset it\n"
    )


@pytest.mark.parametrize(
    ("variable", "value", "needed"),
    [
        ("LMS_STORE", "/none", "store_dir (LMS_STORE)"),
        ("LMS_STATS_FILE", "/none/steps.csv", "the folder of stats_file (LMS_STATS_FILE)"),
    ],
)
def test_folders_of_the_settings_of_lms_are_looked_at_before_the_start(
    here: Path, capsys: pytest.CaptureFixture[str], variable: str, value: str, needed: str
) -> None:
    assert main(["-np", "1", "train.py"], {variable: value}) == 2
    said = capsys.readouterr().err
    assert said.startswith("lmsrun: LMS: cannot make files in '/none': there is no folder '/none'; needed in")
    assert needed in said and not (here / "started").exists()


def test_a_folder_for_tensorboard_that_cannot_be_made_is_refused_before_the_start(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taken").write_text("")
    assert main(["-np", "1", "train.py"], {"LMS_TENSORBOARD": "taken/logs"}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lmsrun: LMS: cannot make files in ") and f"{here / 'taken'}'" in line
    assert "tensorboard (LMS_TENSORBOARD=taken/logs)" in line and not (here / "started").exists()


def test_levels_that_are_none_are_refused_before_the_start(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-np", "1", "train.py"], {"LMS_SERIALIZATION": "7,5-3"}) == 2
    said = "lmsrun: LMS: serialization has '5-3'; needed levels such as 7 or 3:5 (set by LMS_SERIALIZATION)\n"
    assert capsys.readouterr().err == said
    (here / "lmsrun.toml").write_text("[lms]\nserialization = [1, '1:5:0']\n")
    assert main(["-np", "1", "train.py"], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("serialization has '1:5:0'; needed levels such as 7 or 3:5")


def test_a_key_of_the_file_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "lmsrun.toml").write_text("json = true\n")
    assert main(["-np", "1", "train.py"], {}) == 2
    (here / "lmsrun.toml").write_text("[lms]\nenabeld = true\n")
    assert main(["-np", "1", "train.py"], {}) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("lmsrun: lmsrun.toml: json prints a plan")
    assert second.startswith("lmsrun: LMS: [lms] of lmsrun.toml: unknown key 'enabeld'")


@pytest.mark.parametrize("command", ["run", "plan", "topo", "check", "fit", "worker"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"], {}) == 0
    assert capsys.readouterr().out.startswith("usage: lmsrun ")


def test_a_newline_in_a_name_stays_on_the_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-np", "1", "a\nb.py"], {}) == 2
    assert main(["--a\nb"], {}) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_current_folder_that_is_gone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = here / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    assert main(["plan", "-np", "1", "x.py"], {}) == 2
    assert capsys.readouterr().err == (
        "lmsrun: the current folder cannot be found (No such file or directory); try to cd again\n"
    )


def test_a_misspelt_variable_or_key_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-np", "1", "train.py"], {"LMSRUN_GPU": "0"}) == 2
    assert "rename it to LMSRUN_GPUS, or unset it" in capsys.readouterr().err
    (here / "lmsrun.toml").write_text("hostmem-limit = 3")
    assert main(["-np", "1", "train.py"], {}) == 2
    assert "did you mean host-mem-limit?" in capsys.readouterr().err
    assert not (here / "started").exists()


def test_a_variable_of_lms_that_is_none_is_one_warning_for_all_ranks(here: Path, capfd: Capture) -> None:
    (here / "quiet.sh").write_text("#!/bin/sh\n")
    (here / "quiet.sh").chmod(0o755)
    argv = ["-np", "2", "--oversubscribe", "--numa", "off", "-x", "LMS_MARGN=0.2", "./quiet.sh"]
    assert main(argv, {**os.environ, "LMS_BATCHSIZE": "8"}) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "LMS_" in line]
    assert lines == [
        "lmsrun: warning: LMS_BATCHSIZE is no variable of Large Model Support; did you mean LMS_BATCH_SIZE?",
        "lmsrun: warning: LMS_MARGN is no variable of Large Model Support; did you mean LMS_MARGIN?",
    ]
    environ = {"LMS_BATCHSIZE": "8", "LMSRUN_JOBS_DIR": os.environ["LMSRUN_JOBS_DIR"]}
    assert main(["plan", "--json", "-np", "1", "x.py"], environ) == 0
    assert "did you mean LMS_BATCH_SIZE?" in json.loads(capfd.readouterr().out)["warnings"][0]


def test_a_program_named_like_a_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["run", "--dry-run", "plan"], ["--dry-run", "--", "plan"], ["plan", "plan"]):
        assert main([*argv, "-np", "9"], {}) == 0
        assert "worker -- plan -np 9" in capsys.readouterr().out


def test_version_and_help(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"], {}) == 0
    assert capsys.readouterr().out == f"lmsrun {__version__}\n"
    for argv in (["--help"], ["-np", "2", "-h"], ["plan", "-h"], ["topo", "--help"], ["check", "-h"]):
        assert main(argv, {}) == 0
        assert capsys.readouterr().out.startswith("usage: lmsrun")
    assert main([], {}) == 2
    assert capsys.readouterr().err.startswith("lmsrun: no program; needed lmsrun -np N")


def test_topo_saves_what_topology_replays(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topo", "--topology", "ac922.json", "--json", "--save", "again.json"], {}) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads((here / "again.json").read_text())
    assert main(["plan", "-np", "4", "--json", "--topology", "again.json", "x.py"], {}) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 4


def test_lms_is_on_unless_told_otherwise(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "lms.toml").write_text("[lms]\nenabled = false\nlb = 3\n")
    cases: list[tuple[list[str], dict[str, str], str]] = [
        ([], {}, "1"),
        (["--no-lms"], {"LMS_ENABLED": "1"}, "0"),
        (["--lms-config", "lms.toml"], {}, "0"),
        (["--lms-config", "lms.toml"], {"LMS_ENABLED": "1"}, "1"),
        (["--lms-config", "lms.toml", "--lms"], {}, "1"),
    ]
    for argv, environ, enabled in cases:
        command = ["plan", "--json", "-np", "1", "--topology", "ac922.json", *argv, "x.py"]
        assert main(command, environ) == 0
        env = json.loads(capsys.readouterr().out)["ranks"][0]["env"]
        assert env["LMS_ENABLED"] == enabled
        assert env.get("LMS_LB") == ("3" if "--lms-config" in argv else None)
        assert env["LMS_HOST_MEM_LIMIT_MB"] == env["TF_GPU_HOST_MEM_LIMIT_IN_MB"]


def test_a_name_to_hand_on_is_blamed_on_who_gave_it(here: Path, capsys: Capture) -> None:
    plan = ["plan", "--json", "--topology", "ac922.json", "x.py"]
    assert main(plan, {"LMSRUN_FORWARD": "ABSENT"}) == 0
    (here / "lmsrun.toml").write_text('forward = ["A B"]\n')
    assert main(plan, {}) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"][0].startswith("LMSRUN_FORWARD ABSENT: ABSENT is not set here")
    assert err == "lmsrun: lmsrun.toml: forward is 'A B'; needed NAME or NAME=VALUE\n"


def test_files_of_windows_editors_are_read(here: Path, capsys: Capture) -> None:
    (here / "hosts").write_text("\ufeffa slots=2\r\nb slots=2\r\n")
    (here / "lmsrun.toml").write_text('\ufeffhostfile = "hosts"\r\nlauncher = "mpirun"\r\n')
    assert main(["plan", "--json", "--topology", "ac922.json", "x.py"], {}) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 4


def test_a_forwarded_value_is_never_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "-v", "--topology", "ac922.json", "-x", "SECRET", "-x", "ABSENT", "x.py"]
    assert main(argv, {"SECRET": "hunter2"}) == 0
    out, err = capsys.readouterr()
    assert "hunter2" not in out + err
    assert "ABSENT is not set here" in " ".join(out.split())


def test_verbose_says_where_a_value_came_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-v", "--topology", "ac922.json", "x.py"], {"LMSRUN_NUM_PROC": "2"}) == 0
    assert "lmsrun: num-proc = 2 (from LMSRUN_NUM_PROC)" in capsys.readouterr().err


def test_a_saved_machine_is_not_what_this_process_may_use(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topo", "--topology", "ac922.json"], {}) == 0
    saved = capsys.readouterr().out
    assert "a job there may use CPUs 0-127 and memory of NUMA nodes 0,8" in saved
    assert "this process" not in saved
    assert main(["topo"], {}) == 0
    assert "this process may use CPU" in capsys.readouterr().out


def test_oversubscription(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--json", "-np", "6", "--oversubscribe", "--topology", "ac922.json", "x.py"]
    assert main(argv, {}) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["gpu"]["index"] for rank in ranks] == [0, 1, 2, 3, 0, 1]


def test_slots_that_were_named_bind_here_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--json", "--topology", "ac922.json", "-H", "localhost:2", "x.py"]
    assert main(plan, {}) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 2
    assert main([*plan[:-1], "-np", "3", "x.py"], {}) == 2
    assert "3 ranks do not fit on 1 host with 2 slots; try -np 2" in capsys.readouterr().err
    assert main([*plan[:-1], "-np", "3", "--oversubscribe", "x.py"], {}) == 0


def test_a_reader_that_goes_away(here: Path) -> None:
    command = [sys.executable, str(SHIM), "plan", "--json", "-np", "4", "--topology", "ac922.json", "x.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(("where", "code", "said"), [(">/dev/full", 1, "No space left"), (">&-", 0, "")])
def test_an_output_that_cannot_be_written(here: Path, where: str, code: int, said: str) -> None:
    line = f"exec {sys.executable} {SHIM} plan --json --topology ac922.json x.py {where}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("moment", "environ"),
    [
        ("signal", {}),
        ("lmsrun.cli", {}),
        ("lmsrun.options", {}),
        ("launch.discover", {}),
        ("the end", {}),
        ("launch.rank.shim", {"LMSRUN_EXPECT": "{}"}),
    ],
)
def test_ctrl_c_at_any_moment_is_no_traceback(here: Path, moment: str, environ: dict[str, str]) -> None:
    """From our first line on; what comes before is Python's own start."""
    code = (
        "import atexit, os, runpy, signal, sys\n"
        "def interrupt(): os.kill(os.getpid(), signal.SIGINT)\n"
        "def watch(event, args):\n"
        f"    if event == 'import' and args[0] == {moment!r}: interrupt()\n"
        "sys.addaudithook(watch)\n"
        f"if {moment!r} == 'the end': atexit.register(interrupt)\n"
        f"if {moment!r} == 'signal': del sys.modules['signal']\n"
        f"sys.argv = ['lmsrun', *{['worker', '--', 'true'] if environ else ['plan', 'x.py']!r}]\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        f"runpy.run_path({str(SHIM)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=300,
        check=False,
    )
    assert done.returncode in (-signal.SIGINT, 130)
    assert done.stderr == b""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_text_of_a_topology_is_shown_and_never_obeyed(here: Path, encoding: str) -> None:
    table = to_json(machines.machine("ac922"))
    table["gpus"][0]["name"], table["warnings"] = "V100\x1b]0;title\x07", ["lone \ud800 surrogate"]
    (here / "evil.json").write_text(json.dumps(table))
    for command in (["topo"], ["plan", "x.py", b"\xff\x1b[31m"]):
        done = subprocess.run(
            [sys.executable, str(SHIM), command[0], "--topology", "evil.json", *command[1:]],
            capture_output=True,
            env={"PYTHONIOENCODING": encoding, "PATH": os.defpath},
            timeout=300,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"V100?]0;title?" in done.stdout
        assert b"lone ? surrogate" in done.stdout
        assert b"\x1b" not in done.stdout


@pytest.mark.parametrize("by_path", [True, False])
def test_what_is_installed_beside_us_never_stands_before_the_standard_library(
    here: Path, by_path: bool
) -> None:
    site, ahead = here / "site-packages", here / "ahead"
    for folder in (site, ahead / "launch"):
        folder.mkdir(parents=True)
    for package in ("launch", "lms", "lmsrun"):
        (site / package).symlink_to(SHIM.parents[1] / package)
    (site / "json.py").write_text("raise SystemExit('a back-port of json')\n")
    (ahead / "launch" / "__init__.py").write_text("raise SystemExit('the wrong launch')\n")
    start = f"runpy.run_path({str(site / 'lmsrun' / '__main__.py')!r}, run_name='__main__')"
    if not by_path:
        start = "from lmsrun.__main__ import main; sys.exit(main())"
    arguments = ["plan", "--json", "--topology", "ac922.json", "x.py"]
    code = f"import runpy, sys; sys.path.append({str(site)!r}); sys.argv[1:] = {arguments}; {start}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    # Another `launch` in front (ROS has one) is the greater evil: then ours goes first of all.
    code = code.replace("sys.path.append", f"sys.path.insert(0, {str(ahead)!r}); sys.path.append")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert b"the wrong launch" not in done.stderr


def test_no_color_means_no_escapes_at_all(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["plan", "--topology", "ac922.json", "train.py"], {}) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_way_to_the_first_rank_imports_neither_rich_nor_tensorflow(here: Path) -> None:
    (here / "launch.py").write_text("raise SystemExit('the wrong launch')\n")
    heavy = "rich|tensorflow|numpy|horovod|argparse|subprocess|mpi4py"
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['lmsrun', 'plan', '--json', '--topology', 'ac922.json', 'x.py']\n"
        f"try: runpy.run_path({str(SHIM)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print([name for name in {heavy!r}.split('|') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
