"""Files and programs that options name: what is missing is said in one line, before anything is started."""

import json
import os
from pathlib import Path

import pytest

from lmsrun.cli import main
from lmsrun.file_checks import check_program

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program that leaves a trace, and files that are not what an option needs."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    (tmp_path / "plain").write_text("#!/bin/sh\necho localhost:1\n")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    (tmp_path / "old" / "receipts.json").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    for name in ("horovodrun", "mpirun"):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
        tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--host-discovery-script ./gone", "--host-discovery-script ./gone is not there; needed an exec"),
        ("--host-discovery-script ./plain", "--host-discovery-script ./plain cannot be executed; needed"),
        ("--host-discovery-script hosts.sh", "hosts.sh is not in PATH; try ./hosts.sh"),
        ("--host-discovery-script ./old", "./old is not there"),
        ("--mpirun ./gone", "--mpirun ./gone is not there, or cannot be executed; check its path"),
        ("--mpirun ./gone -H a:1,b:1", "--mpirun ./gone is not there"),
        ("--mpirun mpirun.gone --launcher mpirun", "--mpirun mpirun.gone is not there"),
        ("--timeline gone/t.json --launcher horovodrun", "--timeline gone/t.json: there is no folder gone"),
        ("--timeline old --launcher horovodrun", "--timeline old is a folder; needed the name of a file"),
        ("--rankfile-out gone/ranks --launcher mpirun", "--rankfile-out gone/ranks: there is no folder gone"),
        ("--metrics pipe", "--metrics pipe is a device or a pipe; needed the name of a file"),
        ("--report pipe", "--report pipe is a device or a pipe"),
        ("--output-dir old", "old/receipts.json is a folder, and the receipts are to be written there"),
        ("--output-dir old --launcher mpirun", "old/receipts.json is a folder"),
        ("--output-dir plain", "the output folder plain is no folder"),
        ("--output-dir plain/out", "plain; choose another --output-dir"),
        (f"--output-dir {'a' * 300}", "aaa: File name too long; choose another --output-dir"),
    ],
)
def test_what_an_option_names_is_looked_at_first(here: Path, capsys: Capture, argv: str, said: str) -> None:
    environ = {"PATH": f"{here / 'bin'}:{os.defpath}", "LMSRUN_JOBS_DIR": os.environ["LMSRUN_JOBS_DIR"]}
    assert main(["run", "-np", "1", *argv.split(), "train.py"], environ) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
    assert not (here / "started").exists()


def test_a_program_that_ranks_could_read_only_once_is_refused(here: Path, capsys: Capture) -> None:
    os.mkfifo(here / "script.py")
    assert main(["run", "-np", "1", "script.py"], {}) == 2
    said = "lmsrun: program 'script.py' is a pipe or a device; needed a file, which every rank can read"
    assert capsys.readouterr().err.startswith(said)


def test_a_timeline_of_another_host_is_left_to_it(here: Path) -> None:
    # Over Gloo the host would first be handed its environment.
    words = ("--no-host-probe", "-H", "far:1", "--launcher", "horovodrun", "--controller", "mpi")
    words += ("--timeline", "/scratch.far/t")
    environ = {**os.environ, "PATH": f"{here / 'bin'}:{os.defpath}"}
    assert main(["run", *words, "train.py"], environ) == 0
    assert (here / "started").exists()


def test_hosts_that_a_script_names_later_are_others(here: Path, capfd: Capture) -> None:
    """They take more ranks than this host, and get no secret of it."""
    (here / "bin" / "horovodrun").write_text(f"#!/bin/sh\nenv > '{here}/environ'\necho \"$@\"\n")
    environ = {**os.environ, "PATH": f"{here / 'bin'}:{os.defpath}", "SITE_TOKEN": "x", "GIVEN_TOKEN": "y"}
    argv = ["run", "-np", "900", "-x", "GIVEN_TOKEN", "--host-discovery-script", "./hosts.sh", "train.py"]
    assert main(argv, {**environ, "CUDA_VISIBLE_DEVICES": "0"}) == 0
    out, err = capfd.readouterr()
    assert out.startswith("-np 900 --host-discovery-script ./hosts.sh --gloo ")
    assert "the hosts are those that --host-discovery-script will name" in err
    names = {line.partition("=")[0] for line in (here / "environ").read_text().splitlines()}
    assert {"SITE_TOKEN", "GIVEN_TOKEN", "CUDA_VISIBLE_DEVICES"} & names == {"GIVEN_TOKEN"}


def test_the_option_is_named_as_it_was_written(here: Path, capsys: Capture) -> None:
    assert main(["-np", "1", "train.py"], {"LMSRUN_MPIRUN": "./gone"}) == 2
    (here / "lmsrun.toml").write_text('host-discovery-script = "./gone"\n')
    assert main(["-np", "1", "train.py"], {}) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("lmsrun: LMSRUN_MPIRUN ./gone is not there")
    assert second.startswith("lmsrun: lmsrun.toml: host-discovery-script ./gone is not there")


def test_an_mpirun_that_the_launcher_does_not_need_is_not_looked_for(here: Path) -> None:
    """A project's file may name the cluster's."""
    (here / "lmsrun.toml").write_text('mpirun = "/opt/site/bin/mpirun"\n')
    assert main(["plan", "--launcher", "local", "-np", "1", "train.py"], {}) == 0


def test_a_plan_is_for_machines_that_have_what_it_names(here: Path, capsys: Capture) -> None:
    elsewhere = "--launcher mpirun --mpirun /opt/site/bin/mpirun -H a:1,b:1 --output-dir /proc/none"
    assert main(["plan", "--json", *elsewhere.split(), "train.py"], {"PATH": "/nowhere"}) == 0
    assert json.loads(capsys.readouterr().out)["commands"][0][0] == "/opt/site/bin/mpirun"


def test_a_script_that_is_there_is_taken_whatever_its_name(here: Path, capsys: Capture) -> None:
    (here / "hosts.sh").rename(here / "the hosts; $(id).sh")
    script = "./the hosts; $(id).sh"
    argv = ["plan", "--json", "-np", "1", "--host-discovery-script", script, "train.py"]
    assert main(argv, {"PATH": str(here / "bin")}) == 0
    command = json.loads(capsys.readouterr().out)["commands"][0]
    # Horovod has a shell run the text.
    assert command[command.index("--host-discovery-script") + 1] == f"'{script}'"


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ("topo --svg a.png", "needed --png a.png, or a name that ends in .svg"),
        ("topo --png a.b.SVG", "needed --svg a.b.SVG, or a name that ends in .png"),
        ("plan -np 1 --svg a.PNG job.py", "needed --png a.PNG, or a name that ends in .svg"),
        ("fit --png a.svg job.py", "needed --svg a.svg, or a name that ends in .png"),
    ],
)
def test_a_drawing_is_not_written_under_the_name_of_another_format(
    here: Path, capsys: Capture, argv: str, remedy: str
) -> None:
    (here / "job.py").touch()
    before = sorted(here.iterdir())
    assert main(argv.split(), {"PATH": os.defpath}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(remedy)
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    "argv", ["topo --svg a --png ./a", "topo --png a --save a", "plan -np 1 --svg p --png p job.py"]
)
def test_two_options_for_one_file_write_neither(here: Path, capsys: Capture, argv: str) -> None:
    (here / "job.py").touch()
    assert main(argv.split(), {"PATH": os.defpath}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "name the same file" in line and "needed a file for each" in line
    assert not (here / "a").exists() and not (here / "p").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("plan -np 1 --svg job.py job.py", "what the program is given"),
        ("-np 1 --metrics ./job.py job.py", "what the program is given"),
        ("-np 1 --report data.csv job.py data.csv", "what the program is given"),
        ("fit --svg job.py job.py", "what the program is given"),
        ("plan --config c.toml --png c.toml true", "what --config reads"),
        ("plan -np 1 --svg pipe job.py", "is a device or a pipe"),
        ("topo --save pipe", "is a device or a pipe"),
        ("topo --svg -", "--svg - is no file; needed the name of one"),
    ],
)
def test_nothing_that_is_read_is_written_over(here: Path, capsys: Capture, argv: str, said: str) -> None:
    for name in ("job.py", "data.csv", "c.toml"):
        (here / name).touch()
    assert main(argv.split(), {"PATH": os.defpath}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not any((here / name).read_text() for name in ("job.py", "data.csv", "c.toml"))


def test_a_plan_for_this_host_says_that_its_program_is_not_there(here: Path, capsys: Capture) -> None:
    assert main(["plan", "-np", "1", "jop.py"], {"PATH": os.defpath}) == 0
    assert "lmsrun run would start nothing: program 'jop.py' is not there" in capsys.readouterr().out
    (here / "jop.py").touch()
    assert main(["plan", "-np", "1", "jop.py"], {"PATH": os.defpath}) == 0
    assert "start nothing" not in capsys.readouterr().out


def test_a_plan_for_this_host_says_that_a_folder_for_lms_is_not_there(here: Path, capsys: Capture) -> None:
    (here / "job.py").touch()
    assert main(["plan", "-np", "1", "job.py"], {"PATH": os.defpath, "LMS_STORE": "/gone/x"}) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "lmsrun run would start nothing: LMS: cannot make files in '/gone/x'" in said


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("pkg.nomod", "there is no module nomod in pkg"),
        ("pkg.trian", "there is no module trian in pkg; did you mean train?"),
        ("pkg.deep.none.at.all", "there is no module none in pkg.deep"),
        ("json.nomod", "there is no module nomod in json"),
    ],
)
def test_a_module_that_its_package_lacks_is_said(here: Path, capsys: Capture, module: str, said: str) -> None:
    make_package(here)
    assert main(["-np", "1", "-m", module], dict(os.environ)) == 2
    assert capsys.readouterr().err == f"lmsrun: -m {module}: {said}\n"
    assert not (here / "started").exists(), "the package was not imported"


@pytest.mark.parametrize(
    "module", ["pkg", "pkg.train", "pkg.deep.er", "os.path", "moved.elsewhere", "json.tool"]
)
def test_a_module_that_may_be_there_is_left_to_python(here: Path, module: str) -> None:
    make_package(here)
    check_program(["-m", module], False, os.environ)


def make_package(folder: Path) -> None:
    """Make a package with modules, one without an ``__init__.py`` in it, and one that looks elsewhere."""
    for name in ("pkg/__init__.py", "pkg/train.py", "pkg/deep/er.py", "moved/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "pkg" / "__init__.py").write_text("open('started', 'w').close()\n")
    (folder / "moved" / "__init__.py").write_text("__path__.append('/opt/site')\n")
