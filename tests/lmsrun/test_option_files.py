"""Options of the site, of the user and of the folder: which wins, who is told, what may start a program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import LMSRUN

from launch.model.errors import UsageError
from lmsrun.cli import main
from lmsrun.options import OPTIONS
from lmsrun.sources import files
from lmsrun.sources.command_line import parse_argv
from lmsrun.sources.files import read_file
from lmsrun.sources.request import Request, read_request
from lmsrun.sources.tables import parse_table


class Places:
    """A site's file, a user's and a folder's."""

    def __init__(self, base: Path) -> None:
        self.site, self.home, self.folder = base / "etc.toml", base / "home", base / "work"
        self.user = self.home / ".config" / "lmsrun.toml"
        self.user.parent.mkdir(parents=True)
        self.folder.mkdir()
        self.own = self.folder / "lmsrun.toml"

    def read(self, argv: str = "a.py", **environ: str) -> Request:
        return read_request(parse_argv("run", argv.split()), {"HOME": str(self.home), **environ}, self.folder)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    found = Places(tmp_path)
    monkeypatch.setattr(files, "SITE_FILE", found.site)
    return found


def test_the_nearest_source_wins_option_by_option(places: Places) -> None:
    places.site.write_text('numa = "off"\nnum-proc = 8\nmin-np = 1\n[lms]\npolicy = "all"\nmargin = 0.1\n')
    places.user.write_text('num-proc = 4\ngrace-period = 3\n[lms]\npolicy = "auto"\n')
    places.own.write_text("num-proc = 2\n")
    request = places.read("--min-np 3 a.py", LMSRUN_GRACE_PERIOD="5")
    options = request.options
    assert (options.numa, options.num_proc, options.min_np, options.grace_period) == ("off", 2, 3, 5.0)
    assert request.lms_table == {"policy": "auto", "margin": 0.1}
    assert request.origins["numa"] == f"{places.site}: numa"
    assert request.origins["num_proc"] == "lmsrun.toml: num-proc"
    assert request.from_files == {"numa", "num_proc"}
    assert places.read("--config /dev/null a.py").options.num_proc == 4, "--config stands in for the folder's"


def test_a_link_to_nothing_is_no_missing_file(places: Places) -> None:
    places.own.symlink_to("/mnt/gone/lmsrun.toml")
    with pytest.raises(UsageError, match=r"lmsrun.toml is a link to /mnt/gone/lmsrun.toml, which is not"):
        places.read()


def put(path: Path, kind: str) -> None:
    """Put what is no file there."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "a link to itself" else "/dev/zero")


@pytest.mark.parametrize("name", ["lmsrun.toml", "pyproject.toml"])
@pytest.mark.parametrize("kind", ["a folder", "a named pipe", "a device", "a link to itself"])
def test_what_is_no_file_is_no_missing_one(places: Places, kind: str, name: str) -> None:
    path = places.folder / name
    put(path, kind)
    if (kind, name) == ("a link to itself", "pyproject.toml"):
        assert places.read().options.num_proc is None, "as one to nothing"
        return
    with pytest.raises(UsageError) as caught:
        places.read()
    assert str(caught.value) == f"{path} is {kind}; needed a TOML file: remove it, or put one in its place"
    assert places.read("--config /dev/null a.py").options.num_proc is None


def test_a_link_to_nothing_at_all_hides_a_file(places: Places) -> None:
    (places.folder / "lmsrun.toml").symlink_to(os.devnull)
    assert places.read().options.num_proc is None


@pytest.mark.parametrize("is_site", [True, False])
def test_a_folder_in_place_of_the_users_or_the_sites_file_is_said(places: Places, is_site: bool) -> None:
    path = places.site if is_site else places.user
    path.mkdir()
    with pytest.raises(UsageError, match="is a folder; needed a TOML file"):
        places.read()


def test_a_pyproject_that_is_a_link_to_nothing_is_nobody_s_matter(places: Places) -> None:
    (places.folder / "pyproject.toml").symlink_to("/mnt/gone/pyproject.toml")
    assert places.read().options.num_proc is None


def test_a_path_in_a_file_may_begin_with_the_home(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(places.home))
    places.own.write_text('output-dir = "~/runs"\nmpirun = "~/bin/mpirun"\nforward = "A=~/x"\n')
    options = places.read().options
    assert (options.output_dir, options.mpirun) == (f"{places.home}/runs", f"{places.home}/bin/mpirun")
    assert options.forward == ("A=~/x",), "which is no path"


def test_a_path_for_lms_in_a_file_may_begin_with_the_home(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(places.home))
    places.own.write_text('[lms]\nstats_file = "~/a.csv"\ntensorboard = "b/~"\nexcl_scopes = ["~/x"]\n')
    found = places.read().lms_table
    expected = {"stats_file": f"{places.home}/a.csv", "tensorboard": "b/~", "excl_scopes": ["~/x"]}
    assert found == expected, "which of them is a path"


def test_the_users_folder_may_be_elsewhere(places: Places, tmp_path: Path) -> None:
    places.user.write_text("num-proc = 4\n")
    (tmp_path / "xdg").mkdir()
    (tmp_path / "xdg" / "lmsrun.toml").write_text("num-proc = 5\n")
    assert places.read(XDG_CONFIG_HOME=str(tmp_path / "xdg")).options.num_proc == 5
    assert places.read(XDG_CONFIG_HOME="xdg").options.num_proc == 4, "a relative path is to be ignored"
    assert places.read(HOME="").options.num_proc is None


def test_a_mistake_names_its_file(places: Places) -> None:
    places.user.write_text("num-porc = 4\n")
    with pytest.raises(UsageError, match=f"{places.user}: unknown key 'num-porc'; did you mean num-proc"):
        places.read()
    places.user.write_text("num-proc = 4\n")
    places.site.write_text("[[[")
    with pytest.raises(UsageError, match=f"{places.site} is not TOML"):
        places.read()


@pytest.mark.parametrize("part", ["a", "a-b", '"a b"', r'"\""', "'\"'"])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "[[{}]]", "a = {{{} = 1}}", "tool.lmsrun = {{{}=1}}"])
def test_a_key_of_very_many_parts_is_not_parsed(places: Places, line: str, part: str) -> None:
    places.own.write_text("\n" + line.format(" .".join([part] * 33)))
    with pytest.raises(UsageError, match="toml has a key of more than 32 parts in line 2; needed fewer"):
        places.read()
    places.own.write_text(line.format(".".join([part] * 32)))
    with pytest.raises(UsageError, match="lmsrun.toml: "):  # parsed, and no option
        places.read()


def test_dots_in_comments_and_values_are_no_key(places: Places) -> None:
    many = ".".join("1" * 40)
    places.own.write_text(f'# {many}\nnum_proc = 2 # {many}\noutput_dir = "{many}"\n')
    assert places.read().options.num_proc == 2


def test_a_file_that_is_no_options_is_not_parsed(places: Places) -> None:
    places.own.write_text(f"#{' ' * (1 << 20)}\n")
    with pytest.raises(UsageError, match=r"lmsrun.toml is larger than 1 MiB; needed a small TOML file"):
        places.read()
    places.own.unlink()
    (places.folder / "pyproject.toml").write_text("\n" * (2 << 20))
    assert places.read().options.num_proc is None, "which has no table of ours"


@pytest.mark.parametrize("place", ["site", "user", "own"])
def test_a_file_that_others_can_write_starts_no_program(places: Places, place: str) -> None:
    path: Path = getattr(places, place)
    path.write_text('mpirun = "./mpirun"\n')
    path.chmod(0o644)
    assert places.read().options.mpirun == "./mpirun"
    path.chmod(0o646)
    with pytest.raises(
        UsageError, match=r"can be written by others and says what to start or where \(mpirun\)"
    ):
        places.read()
    if os.geteuid() == 0:
        os.chown(path, -1, 65534)
        path.chmod(0o664)
        with pytest.raises(UsageError, match=rf"look at it, then chmod go-w {path}"):
            places.read()
        os.chown(path, 65534, -1)
        remedy = "or go to another folder" if place == "own" else "have it belong to you or root"
        with pytest.raises(UsageError, match=f"belongs to user 65534.*{remedy}"):
            places.read()
        os.chown(path, 0, 0)
    if place == "own":
        assert places.read(f"--config {path} a.py").options.mpirun == "./mpirun"
    path.write_text('num-proc = 3\nnuma = "off"\ntimestamps = true\n[lms]\npolicy = "all"\nmargin = 0.2\n')
    assert places.read().options.num_proc == 3, "what names nothing may come from there"


@pytest.mark.parametrize(
    "field", [name for name, one in OPTIONS.items() if one.in_file and not one.is_switch]
)
def test_no_text_of_a_stranger_is_taken(places: Places, field: str) -> None:
    """Whatever options there are: what such a file may give is a number, or one of the words declared."""
    option = OPTIONS[field]
    for value in ("1", "00:10:00", "16G", "/tmp/x"):
        try:
            parsed = parse_table({option.name: value}, "here")[field]
        except UsageError:
            continue
        places.own.write_text(f'{option.name} = "{value}"\n')
        places.own.chmod(0o646)
        if isinstance(parsed, (int, float)):
            assert getattr(places.read().options, field) == parsed
        else:
            with pytest.raises(UsageError, match=rf"says what to start or where \({option.name}\)"):
                places.read()


@pytest.mark.parametrize("key", ["store_dir", "stats_file"])
def test_no_path_of_a_stranger_reaches_lms(places: Places, key: str) -> None:
    places.own.write_text(f'[lms]\nmargin = 0.2\n{key} = "/home/me/.bashrc"\n')
    assert places.read().lms_table["margin"] == 0.2
    places.own.chmod(0o646)
    with pytest.raises(UsageError, match=rf"start or where \(lms.{key}\)"):
        places.read()


def test_plan_and_check_say_who_gave_a_value(
    places: Places, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places.folder)
    places.site.write_text("num-proc = 1\n")
    assert main(["plan", "a.py"], {"HOME": str(places.home)}) == 0
    said = f"num-proc = 1 (from {places.site}: num-proc)"
    assert f"lmsrun: {said}\n" in capsys.readouterr().err
    main(["check"], {"HOME": str(places.home)})
    assert said in capsys.readouterr().out
    places.site.write_text("num-porc = 1\n")
    assert main(["check"], {"HOME": str(places.home)}) == 1
    assert "unknown key 'num-porc'" in capsys.readouterr().out


def test_a_file_is_judged_as_it_was_when_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "lmsrun.toml"
    path.write_text('mpirun = "./mpirun"\n')
    path.chmod(0o646)
    read = read_file(path, path.name)
    path.unlink()
    path.write_text("")
    with pytest.raises(UsageError, match="can be written by others"):
        read.refuse_others_texts(["mpirun"])


SHOWN = ("MESSAGE", "LMS_ENABLED", "LMS_MARGIN", "LMSRUN_NUMA", "LMSRUN_RANK_OUTPUT", "OTHER")


def show_rank(folder: Path, **environ: str) -> tuple[dict[str, str], str]:
    """Start the only rank of another launcher; returns some of its variables, and what lmsrun said."""
    show = f"import json, os; print(json.dumps({{n: os.environ[n] for n in {SHOWN} if n in os.environ}}))"
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [*LMSRUN, "worker", "--", sys.executable, "-c", show],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **rank, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}, done.stderr


def test_a_rank_of_another_launcher_reads_the_files(tmp_path: Path) -> None:
    (tmp_path / "lmsrun.toml").write_text(
        'numa = "off"\noutput-dir = "out"\nforward = ["MESSAGE=a b", "OTHER"]\n[lms]\nmargin = 0.25\n'
    )
    shown, said = show_rank(tmp_path, LMS_ENABLED="1")
    assert shown == {"MESSAGE": "a b", "LMS_ENABLED": "1", "LMS_MARGIN": "0.25", "LMSRUN_NUMA": "off"}
    assert "lmsrun.toml: forward OTHER: OTHER is not set here" in said
    # The environment is stronger, and what lmsrun itself has started has been told all of it already.
    shown, _ = show_rank(tmp_path, LMSRUN_NUMA="auto", LMS_MARGIN="0.5", LMSRUN_FORWARD="MESSAGE=c")
    assert (shown["LMSRUN_NUMA"], shown["LMS_MARGIN"], shown["MESSAGE"]) == ("auto", "0.5", "c")
    shown, _ = show_rank(tmp_path, LMSRUN_JOB_ID="job")
    assert shown == {"LMS_ENABLED": "1"}


def test_a_rank_of_another_launcher_reads_the_file_that_a_variable_names(tmp_path: Path) -> None:
    (tmp_path / "lmsrun.toml").write_text('numa = "off"\n')
    (tmp_path / "other.toml").write_text("lms = false\n")
    assert show_rank(tmp_path, LMSRUN_CONFIG="other.toml")[0] == {"LMS_ENABLED": "0"}
    _, said = show_rank(tmp_path, LMSRUN_CONFIG="gone.toml")
    assert said.startswith("lmsrun: cannot read gone.toml") and said.count("\n") == 1


def test_a_list_keeps_its_words_where_an_option_takes_several() -> None:
    table = {"mpi-args": ["--mca", "btl", "self,tcp", "a b"], "gpus": [0, 2], "hosts": ["a:4", "b:4"]}
    assert parse_table(table, "x.toml") == {
        "mpi_args": "--mca btl self,tcp 'a b'",
        "gpus": "0,2",
        "hosts": "a:4,b:4",
    }


@pytest.mark.parametrize("name", ["output-dir", "python", "num-proc", "numa"])
def test_a_list_is_no_single_value(name: str) -> None:
    with pytest.raises(UsageError, match=f"^x.toml: {name} is a list; needed one value, "):
        parse_table({name: ["a", "b"]}, "x.toml")


@pytest.mark.parametrize("value", [r'store_dir = "a\u0000b"', r'excl_types = ["Relu", "a\u0000"]'])
def test_a_nul_character_for_lms_is_one_line(
    places: Places, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places.own.write_text(f"[lms]\n{value}\n")
    monkeypatch.chdir(places.folder)
    assert main(["plan", "-np", "1", "--gpus", "none", "true"], {"PATH": os.environ["PATH"]}) == 2
    err = capsys.readouterr().err
    assert f"{value.split(maxsplit=1)[0]} holds a NUL character" in err and err.count("\n") == 1
