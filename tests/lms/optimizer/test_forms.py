"""Which form of the plug-in is taken: built with the package, compiled at first use, or ctypes alone."""

import shutil
import subprocess
from pathlib import Path

import pytest
from c_files import build, compiler, environments
from plugin_child import ROOT, run_cases

from lms.native.build import build_library
from lms.optimizer.c_api import Buffer, Configs, Optimizer, Params, mapped_files, struct_size
from lms.optimizer.compiled_form import SOURCE
from lms.optimizer.plugin import FORMS, PluginError, prebuilt_plugin, wanted_forms

HERE = Path(__file__).resolve().parent


def test_forms_are_tried_in_this_order() -> None:
    assert wanted_forms({}) == wanted_forms({"LMS_PLUGIN": ""}) == ("prebuilt", "compiled", "ctypes") == FORMS
    assert wanted_forms({"LMS_PLUGIN": "ctypes"}) == ["ctypes"]
    with pytest.raises(
        PluginError, match="LMS_PLUGIN='gcc'; needed one of prebuilt, compiled, ctypes, or nothing"
    ):
        wanted_forms({"LMS_PLUGIN": "gcc"})


def test_a_prebuilt_file_is_found_beside_the_source(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="without a C compiler"):
        prebuilt_plugin(tmp_path / "plugin.c")
    (tmp_path / "_plugin.abi3.so").touch()
    assert prebuilt_plugin(tmp_path / "plugin.c") == tmp_path / "_plugin.abi3.so"


def test_c_is_compiled_by_any_compiler_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        calls.append(argv)
        Path(argv[argv.index("-o") + 1]).write_bytes(b"library")
        return subprocess.CompletedProcess(argv, 0, "", "")

    fake = tmp_path / "bin" / "g++"
    fake.parent.mkdir()
    fake.touch(0o755)
    monkeypatch.setenv("PATH", str(fake.parent))
    library = build_library(SOURCE, "", (), (), tmp_path, run)
    assert library.name == "plugin.so" and library.parent.name.startswith("any-")
    (argv,) = calls
    assert (
        argv[0] == str(fake)
        and argv[argv.index("-x") + 1] == "c"
        and argv.index("-x") < argv.index(str(SOURCE))
    )


def test_mapped_files_are_read_with_spaces_and_after_removal(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"7f00-7f10 r-xp 00000000 08:01 42    /opt/my libs/one.so\n"
        b"7f10-7f20 rw-p 00001000 08:01 42    /opt/my libs/one.so\n"
        b"7f20-7f30 r-xp 00000000 08:01 43    /tmp/two.so (deleted)\n"
        b"7f30-7f40 rw-p 00000000 00:00 0 \n"
        b"7ffc-7ffd rw-p 00000000 00:00 0     [stack]\n"
        b"7ffe-7fff r-xp 00000000 08:01 44    /tmp/\xff.so\n"
    )
    assert mapped_files(maps) == ["/opt/my libs/one.so", "/tmp/two.so", "/tmp/\udcff.so"]


@pytest.mark.parametrize("headers", environments(), ids=str)
def test_structures_are_those_of_tensorflows_headers(headers: Path, tmp_path: Path) -> None:
    program = tmp_path / "sizes"
    argv = [compiler(), f"-I{headers}", f"-I{SOURCE.parent}", str(HERE / "sizes.c"), "-o", str(program)]
    built = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=True)
    expected = [*map(struct_size, (Configs, Optimizer, Params, Buffer))]
    for structure, last in ((Configs, "toggles"), (Params, "device_type"), (Params, "optimizer")):
        expected.append(getattr(structure, last).offset)
    assert [int(word) for word in run.stdout.split()] == expected


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The place of a prebuilt plug-in in a copy of ``lms``."""
    shutil.copytree(ROOT / "lms", tmp_path / "lms", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return tmp_path / "lms" / "optimizer" / "_plugin.abi3.so"


@pytest.mark.tensorflow
def test_a_form_that_cannot_be_gives_way_to_the_next(copied: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.c"
    other.write_text(SOURCE.read_text().replace("{ return 1; }", "{ return 999; }"))
    environ = {"LMS_CACHE": str(tmp_path / "cache"), "home": tmp_path}
    found = run_cases("forms", str(copied), str(build(str(other), tmp_path / "other.so")), **environ).only
    refused = "the plug-in for TensorFlow cannot be loaded; "
    assert found.pop("missing").startswith(f"{refused}prebuilt: no file beside plugin.c")
    assert found.pop("refused").startswith(f"{refused}compiled: no C compiler found (cc, gcc, clang, g++); ")
    assert found.pop("other version").startswith(
        f"{refused}prebuilt: {copied} has version 999; needed 1. Try"
    )
    assert found.pop("bad name").startswith("LMS_PLUGIN='gcc'; needed one of")
    assert found == {"compiled": "compiled", "broken": "compiled", "no compiler": "ctypes"}


@pytest.mark.tensorflow
def test_what_was_built_with_the_package_comes_first(copied: Path, tmp_path: Path) -> None:
    build(str(SOURCE), copied)
    life = run_cases("life", home=tmp_path).only
    assert life["form"] == ["prebuilt"] * 4 and life["armed"] == [2.0, 1]


@pytest.mark.tensorflow
def test_a_tensorflow_without_the_functions_is_refused() -> None:
    line, found = run_cases("alone").only
    assert (
        line.startswith("TF_NewStatus is in none of the 0 loaded libraries of TensorFlow; needed")
        and found is None
    )
