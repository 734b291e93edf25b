"""Options: one declaration, four sources, and a clear line for every mistake."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.model.errors import UsageError
from launch.model.settings import parse_mebibytes, parse_size
from lms.config import LMSConfig, doubtful_variables
from lmsrun.help_text import render_commands, render_help, render_reference, render_settings
from lmsrun.options import OPTIONS
from lmsrun.sources.command_line import parse_argv, render_argv
from lmsrun.sources.request import Request, read_request


def read(argv: str, environ: dict[str, str] | None = None, folder: Path = Path("/nonexistent")) -> Request:
    return read_request(parse_argv("run", argv.split()), environ or {}, folder)


def test_the_stronger_source_wins(tmp_path: Path) -> None:
    (tmp_path / "lmsrun.toml").write_text(
        'numa = "off"\nhost-mem-reserve = 0.3\ngrace_period = 5\nstrict = true\n'
    )
    environ = {"LMSRUN_NUMA": "strict", "LMSRUN_HOST_MEM_RESERVE": "0.2", "LMSRUN_TOPOLOGY": ""}
    request = read("--host-mem-reserve 0.1 a.py", environ, tmp_path)
    chosen = request.options
    assert (chosen.numa, chosen.host_mem_reserve, chosen.grace_period, chosen.strict) == (
        "strict",
        0.1,
        5.0,
        True,
    )
    assert request.origins == {
        "numa": "LMSRUN_NUMA",
        "host_mem_reserve": "--host-mem-reserve",
        "grace_period": "lmsrun.toml: grace-period",
        "strict": "lmsrun.toml: strict",
    }


def test_pyproject_serves_where_there_is_no_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.lmsrun]\nforward = ["A=1", "B"]\ngpus = [0, 2]\n[tool.lmsrun.lms]\nlb = 2'
    )
    request = read("a.py", folder=tmp_path)
    assert request.options.forward == ("A=1", "B")
    assert request.options.gpus == "0,2"
    assert request.lms_table == {"lb": 2}
    for same in (
        "[tool]\nlmsrun = {strict = true}",
        '[ "tool" . "lmsrun" ]\nstrict = true',
        "tool.lmsrun.strict = true",
        "tool = {lmsrun = {strict = true}}",
    ):
        (tmp_path / "pyproject.toml").write_text(same)
        assert read("a.py", folder=tmp_path).options.strict
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    assert read("a.py", folder=tmp_path).origins == {}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_read_from_the_environment(name: str) -> None:
    declared = OPTIONS[name]
    tried = (declared.words[-1:] or ("1", "0", "16G", "a:1")) if name != "config" else ("",)
    text = next((text for text in tried if accepts(name, text)), "")
    request = read("a.py", {declared.env_name: text})
    assert request.origins == ({name: declared.env_name} if text else {})


def accepts(name: str, text: str) -> bool:
    try:
        OPTIONS[name].parse(text)
    except (ValueError, UsageError):
        return False
    return True


def test_everything_behind_the_program_is_its_own() -> None:
    request = read("-np 2 train.py -np 7 --bogus -- --json")
    assert request.program == ("train.py", "-np", "7", "--bogus", "--", "--json")
    assert read("-np 2 -- -odd-name --x").program == ("-odd-name", "--x")
    assert read("-np=2 --no-lms - x").program == ("-", "x")


def test_a_rendered_command_line_says_the_same() -> None:
    words = "-np 2 -x A=1 -x B --mpi-args=--oversubscribe --no-lms a.py -v"
    given = parse_argv("run", words.split())
    again = parse_argv("run", render_argv(given, frozenset()))
    assert (again.values, again.program) == (given.values, given.program)
    assert "num_proc" not in parse_argv("run", render_argv(given, frozenset({"num_proc"}))).values


def test_repeated_and_switched() -> None:
    request = read("-x A=1 -x B --no-lms --tag-output a.py")
    assert (request.options.forward, request.options.lms, request.options.tag_output) == (
        ("A=1", "B"),
        False,
        True,
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--host-mem-limt 3 a.py", "unknown option --host-mem-limt; did you mean --host-mem-limit?"),
        ("--lsm a.py", "unknown option --lsm; did you mean --lms?"),
        ("--host-mem 3 a.py", "did you mean --host-mem-limit or --host-mem-reserve?"),
        (
            "--lms-swapin-ahed 3 a.py",
            "unknown option --lms-swapin-ahed; it is a setting of LMS: set LMS_SWAPIN_AHEAD",
        ),
        (
            "--polcy all a.py",
            "did you mean the setting LMS_POLICY=... of LMS? `lmsrun --help` lists the options",
        ),
        ("--host a:2 a.py", "unknown option --host; did you mean --hosts or --hostfile?"),
        ("--lms-swap 1 a.py", "unknown option --lms-swap; `lmsrun --help` lists them all"),
        ("--quite-other a.py", "unknown option --quite-other; `lmsrun --help` lists them all"),
        ("--numa sideways a.py", "--numa is 'sideways'; needed one of auto, strict, off"),
        ("-np 0 a.py", "-np is '0'; needed auto or a whole number, at least 1"),
        ("-np two a.py", "-np is 'two'"),
        ("-np 9999999 a.py", "at least 1 and at most 1000000"),
        ("-np -3 a.py", "-np is '-3'"),
        ("-np", "-np needs a value: -np N|auto"),
        (
            "--output-dir --json a.py",
            "needs a value (DIR), but the option --json follows; if that is the value",
        ),
        ("--mpi-args --oversubscribe a.py", "write --mpi-args=--oversubscribe"),
        ("--config -h", "but the option -h follows"),
        ("-np 2 -np 3 a.py", "-np contradicts -np before it"),
        ("--lms --no-lms a.py", "--no-lms contradicts --lms before it"),
        ("--lms=yes a.py", "--lms takes no value"),
        ("--gpu-memory 16 a.py", "at least 1M"),
        ("--gpu-memory lots a.py", "a size such as 16G"),
        ("--gpus 0,,1 a.py", "a list such as 0,2"),
        ("--gpus none,1 a.py", "auto or none alone"),
        ("--host-mem-reserve 1 a.py", "a number from 0 and below 1"),
        ("--host-mem-reserve nan a.py", "a number from 0 and below 1"),
        ("--host-mem-multiplier 0 a.py", "a number above 0"),
        ("--numa off --mem-policy bind a.py", "--numa off contradicts --mem-policy bind"),
        ("--numa strict --mem-policy none a.py", "--numa strict contradicts --mem-policy none"),
        ("--save x a.py", "unknown option --save"),
        ("--lms-policy all a.py", "it is a setting of LMS: set LMS_POLICY=..., or write it in the file of"),
        ("--swapin-ahead=3 a.py", "it is a setting of LMS: set LMS_SWAPIN_AHEAD=..."),
        ("--lms_policy all a.py", "set LMS_POLICY=..."),
        ("--no-defrag a.py", "set LMS_DEFRAG=..."),
        ("--lms-store /tmp a.py", "set LMS_STORE=..."),
        ("-np 2 -dash.py", "unknown option -dash.py; if that is the program, write -- -dash.py"),
    ],
)
def test_mistakes_on_the_command_line(argv: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(argv)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"LMSRUN_HOST_MEM_LIMTI": "3"},
            "unknown variable LMSRUN_HOST_MEM_LIMTI; rename it to LMSRUN_HOST_MEM_LIMIT,",
        ),
        ({"LMSRUN_HOSTMEM": "3"}, "unknown variable LMSRUN_HOSTMEM; rename it to LMSRUN_HOST"),
        ({"LMSRUN_STRICT": "maybe"}, "LMSRUN_STRICT is 'maybe'; needed true or false"),
        (
            {"LMSRUN_NUMA": "off", "LMSRUN_MEM_POLICY": "bind"},
            "LMSRUN_NUMA off contradicts LMSRUN_MEM_POLICY bind",
        ),
        ({"LMSRUN_NP": "2"}, "unknown variable LMSRUN_NP; rename it to LMSRUN_NUM_PROC, or unset it"),
    ],
)
def test_mistakes_in_the_environment(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read("a.py", environ)
    assert said in str(caught.value)


def test_a_rank_may_start_us_again() -> None:
    """Where receipts travel as lines, a rank and its children know by variables which ones have been sent."""
    assert read("a.py", {"LMSRUN_SENT_INIT": "job 0", "LMSRUN_SENT_MOVED_7_1": "job 0"}).program == ("a.py",)


def test_what_kubernetes_says_of_a_service_is_no_mistake() -> None:
    """A Service named lmsrun-board puts these into every pod of its namespace."""
    service = "LMSRUN_BOARD"
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR")
    assert read("a.py", {f"{service}_{name}": "10.0.0.1" for name in names}).program == ("a.py",)


def test_what_modules_set_for_a_package_is_no_mistake() -> None:
    """Environment modules and Spack set these for whoever needs to know where a package is."""
    names = ("ROOT", "HOME", "DIR", "PREFIX", "VERSION", "BASE", "PATH", "BIN", "LIB", "INC", "INCLUDE")
    request = read("a.py", {f"LMSRUN_{name}": "/opt/lmsrun/1.0" for name in names})
    assert (request.warnings, request.origins) == ((), {})


def test_a_variable_that_is_like_no_option_is_told() -> None:
    assert read("a.py", {"LMSRUN_BOARD": "x", "LMSRUN_ADMIN_MAIL": "y"}).warnings == (
        "LMSRUN_ADMIN_MAIL is no option of lmsrun, and is not read",
        "LMSRUN_BOARD is no option of lmsrun, and is not read",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('nuam = "off"', "lmsrun.toml: unknown key 'nuam'; did you mean numa?"),
        ("np = 2", "lmsrun.toml: unknown key 'np'; did you mean num-proc?"),
        ("num-proc = 2\nnum_proc = 3", "lmsrun.toml: num-proc is there twice, as num-proc and as num_proc"),
        ("num-proc = 0", "lmsrun.toml: num-proc is '0'; needed auto or a whole number, at least 1"),
        ('output-dir = ""', "lmsrun.toml: output-dir is ''; needed DIR"),
        (
            'numa = "off"\nmem-policy = "bind"',
            "lmsrun.toml: numa off contradicts lmsrun.toml: mem-policy bind; give one of them",
        ),
        ("num-proc = 1.5", "lmsrun.toml: num-proc is '1.5'"),
        ('strict = "yes"', "lmsrun.toml: strict is 'yes'; needed true or false"),
        ("numa = {a = 1}", "lmsrun.toml: numa is a table; needed auto|strict|off"),
        (
            "gpus = [{a = 1}]",
            "lmsrun.toml: gpus is a list of more than texts and numbers; needed auto|none|LIST",
        ),
        ("walltime = 1979-05-27", "lmsrun.toml: walltime is a date or a time; needed HH:MM:SS"),
        (
            "[lmsrun]\nnp = 1",
            "unknown key 'lmsrun'; that is a table, and options stand in none; write them above",
        ),
        ("numa = ", "lmsrun.toml is not TOML"),
        ("numa = " + "[" * 5000, "lmsrun.toml is not TOML"),
        (
            "lms = true\n[lms]\nmargin = 0.2\n",
            "lms = ... and [lms] exclude each other",
        ),
        ('config = "x"', "lmsrun.toml: config stands in no file; give --config or LMSRUN_CONFIG instead"),
        (
            'print_script = "lsf"',
            "print_script stands in no file; give --print-script or LMSRUN_PRINT_SCRIPT",
        ),
        ('output-dir = "a\\u0000b"', "lmsrun.toml: output-dir holds a NUL character; needed DIR"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "lmsrun.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read("a.py", folder=tmp_path)
    assert said in str(caught.value)


def test_a_file_named_and_missing() -> None:
    with pytest.raises(UsageError, match="cannot read /nonexistent/a.toml: No such file"):
        read("--config /nonexistent/a.toml a.py")


def test_a_stronger_source_overrides_without_contradiction() -> None:
    assert read("--numa off a.py", {"LMSRUN_MEM_POLICY": "bind"}).options.numa == "off"


@pytest.mark.parametrize(
    ("text", "size"),
    [("16G", 16 << 30), ("16GiB", 16 << 30), ("16gb", 16 << 30), ("40000M", 40000 << 20), ("1.5G", 3 << 29)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "mib"), [("512", 512), (" 64G ", 64 << 10), ("1.5GiB", 1536), ("64m", 64)])
def test_a_host_memory_limit_may_have_a_unit(text: str, mib: int) -> None:
    assert parse_mebibytes(text) == mib


@pytest.mark.parametrize("text", ["0", "0G", "-1", "G", "much", "1" * 13])
def test_a_host_memory_limit_that_is_none_says_what_is_needed(text: str) -> None:
    with pytest.raises(ValueError, match="a number of MiB, at least 1, or a size such as 64G"):
        parse_mebibytes(text)


def test_help_names_every_option() -> None:
    text = render_help("run")
    for declared in OPTIONS.values():
        if "run" in declared.commands:
            assert declared.name in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_of_options_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/options.md", render_reference())


def test_the_page_of_commands_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/reference/commands.md", render_commands())


def test_the_page_of_settings_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/reference/settings.md", render_settings())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LMS_ENABELD", "LMS_ENABELD is no variable of Large Model Support; did you mean LMS_ENABLED?"),
        ("LMS_SWAP_AHEAD", "did you mean LMS_SWAPIN_AHEAD?"),
        ("LMS_COURSE_CATALOGUE_URL", "Large Model Support"),
    ],
)
def test_a_variable_that_lms_does_not_know_is_doubted(name: str, said: str) -> None:
    (warning,) = doubtful_variables({name, "PATH", "LMSRUN_NUMA"})
    assert said in warning


def test_what_lms_or_kubernetes_sets_is_not_doubted() -> None:
    config = LMSConfig(enabled=True, store_dir="/scratch", host_mem_limit_mb=3, serialization=("1",))
    known = {*config.to_env(), "LMS_CACHE", "LMS_SERVICE_HOST", "LMS_PORT_80_TCP"}
    assert doubtful_variables(known) == []
    assert "LMS_STORE" in known


@pytest.mark.parametrize("text", ["x\nrm -rf ~", "a b", "$(id)", "", "'"])
def test_names_for_batch_scripts_are_names(text: str, tmp_path: Path) -> None:
    for option in ("account", "partition", "walltime"):
        (tmp_path / "lmsrun.toml").write_text(f"{option} = {json.dumps(text)}\n")
        with pytest.raises(UsageError, match=option):
            read("a.py", folder=tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["lmsrun.toml", "pyproject.toml"])
def test_a_file_of_somebody_else_starts_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    head = "[tool.lmsrun]\n" if name == "pyproject.toml" else ""
    path.write_text(head + 'mpirun = "./mpirun"\n')
    assert read("a.py", folder=tmp_path).options.mpirun == "./mpirun"
    os.chown(path, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to user 65534 and says what to start or where \(mpirun\)"):
        read("a.py", folder=tmp_path)
    assert read(f"--config {path} a.py", folder=tmp_path).options.mpirun == "./mpirun"
    path.write_text(head + "num-proc = 2\n")
    assert read("a.py", folder=tmp_path).options.num_proc == 2


def test_the_gpus_that_fit_names_are_those_of_the_table() -> None:
    from lms.simulate.devices import GPUS

    assert f": {', '.join(GPUS)} (default " in OPTIONS["target"].help


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train.py -np 4", ("-np 4",)),
        ("train.py --num-proc=4 --epochs 3", ("--num-proc=4",)),
        ("train.py --no-avoid-busy --grace-period 4", ("--no-avoid-busy", "--grace-period 4")),
        ("-m pkg.train --launcher mpirun", ("--launcher mpirun",)),
        ("train.py -n 4 -x A", ()),  # one letter is any script's
        ("train.py --output-dir o --verbose --config c --json --dry-run", ()),  # so is output
        ("train.py --gpus 0 --hosts a,b --strict --python p", ()),  # and a single word with any value
        ("train.py -np", ()),
        ("train.py -np four --launcher pytorch --no-avoid-busy=1", ()),  # no value of ours
        ("train.py --np 4 --mem-polic bind", ()),
        ("train.py -- -np 4", ()),
        ("-- train.py -np 4", ()),
    ],
)
def test_options_behind_the_program_that_hardly_any_script_has_are_noticed(
    words: str, found: tuple[str, ...]
) -> None:
    parsed = parse_argv("run", ["--numa", "auto", *words.split()])
    assert parsed.behind == found
    assert parsed.values == {"numa": "auto"} and parsed.program == tuple(words.removeprefix("-- ").split())
