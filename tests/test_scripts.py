"""Set-up and the Horovod build, as far as they need no compiler: what they decide and what they say."""

import io
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def horovod_script() -> ModuleType:
    from lmsrun.wheels import build_horovod

    return build_horovod


def test_horovods_recipe_runs_by_path_where_lmsrun_is_not_installed(tmp_path: Path) -> None:
    """Images copy the file alone, before anything else."""
    recipe = SCRIPTS.parent / "lmsrun" / "wheels" / "build_horovod.py"
    shutil.copy(recipe, tmp_path)
    argv = [sys.executable, "-I", str(tmp_path / recipe.name), "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "tensorflow: " in done.stdout and done.stderr == ""


@pytest.mark.parametrize("argv", [["--jobs", "0"], ["--jobs"], ["--cores", "3"]])
def test_mistakes_of_build_horovod_cost_one_line(
    horovod_script: ModuleType, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        horovod_script.main(argv, {})
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("lmsrun build-horovod: ") and said.count("\n") == 1


def test_the_build_sees_the_environment_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmsrun.commands.build_horovod import main

    compiler = tmp_path / "cxx-of-the-test"
    compiler.touch(mode=0o755)
    environ = {"PATH": str(tmp_path), "CXX": compiler.name}
    assert main(["--check"], environ) == 1
    said = capsys.readouterr().out
    assert f"cxx: {compiler}\nmake: not found\ncmake: not found\nmpi: not found\n" in said
    cmake = tmp_path / "cmake"
    cmake.write_text("#!/bin/sh\necho cmake version 3.25.1\n")
    cmake.chmod(0o755)
    main(["--check"], environ)
    assert "\ncmake: 3.25\n" in capsys.readouterr().out


def test_the_time_is_told_before_horovod_is_built(
    horovod_script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(tools: object, work: Path, log: Path, jobs: int, environ: object) -> Path:
        assert "building with 4 compilers at a time takes about " in capsys.readouterr().out
        raise horovod_script.BuildError("stop here")

    monkeypatch.setattr(horovod_script, "build_wheel", build)
    with pytest.raises(horovod_script.BuildError, match="stop here"):
        horovod_script.obtain_wheel(toolchain(horovod_script), tmp_path, 4, {})


@pytest.mark.parametrize(
    ("jobs", "cpus", "load", "said"),
    [
        (2, 2, 0.0, "about 3 min on idle CPUs"),
        (4, 4, 0.0, "about 2 min on idle CPUs"),
        (8, 2, 0.0, "about 3 min on idle CPUs"),  # more compilers than CPUs are no faster
        (2, 16, 3.0, "about 3 min on idle CPUs"),  # there is room beside the load
        (2, 2, 6.04, "about 11 min at the load of 6.0 (3 min on idle CPUs)"),
    ],
)
def test_the_time_that_is_told_heeds_the_load(
    horovod_script: ModuleType, jobs: int, cpus: int, load: float, said: str
) -> None:
    assert horovod_script.describe_time(jobs, horovod_script.Host(cpus, load)) == said


@pytest.fixture
def setup_script(scripts: None) -> Iterator[ModuleType]:
    import setup

    yield setup
    del sys.modules["setup"]


def toolchain(script: ModuleType, **change: object) -> Any:
    usual: dict[str, object] = {"tensorflow": "2.21.0", "cxx": "/usr/bin/g++", "make": "/usr/bin/make"}
    return script.Toolchain(**usual | {"cmake": (3, 25), "mpi": "openmpi-4.1.4", "nccl": None} | change)


def test_the_guard_is_switched_off_and_nothing_else(horovod_script: ModuleType) -> None:
    source = (
        f"#include <memory>\n{horovod_script.XLA_GUARD}\nbody\n#endif // TENSORFLOW_VERSION >= 2006000000\n"
    )
    patched = horovod_script.patch_source(source).splitlines()
    assert patched[1].startswith("#if 0")
    assert [patched[0], *patched[2:]] == [source.splitlines()[0], *source.splitlines()[2:]]


@pytest.mark.parametrize("copies", [0, 2])
def test_another_source_is_refused(horovod_script: ModuleType, copies: int) -> None:
    with pytest.raises(horovod_script.BuildError, match=f"{copies} times; needed exactly once"):
        horovod_script.patch_source(f"{horovod_script.XLA_GUARD}\n" * copies)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/\n", "openmpi-4.1.4"),
        ("mpirun (Open MPI) 5.0.3\n", "openmpi-5.0.3"),
        ("mpirun (IBM Spectrum MPI) 10.4.0.3\n", "spectrum-10.4.0.3"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "mpich-4.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\n", "intelmpi-2021.11"),
        ("", "mpi"),
    ],
)
def test_the_mpi_is_part_of_the_key(horovod_script: ModuleType, text: str, name: str) -> None:
    assert horovod_script.parse_mpi(text) == name


def test_keys_differ_where_a_wheel_would_not_fit(horovod_script: ModuleType) -> None:
    variants: list[dict[str, object]] = [
        {},
        {"tensorflow": "2.15.1"},
        {"mpi": None},
        {"mpi": "mpich-4.0.2"},
        {"nccl": "21803"},
    ]
    keys = {toolchain(horovod_script, **change).cache_key() for change in variants}
    assert len(keys) == len(variants)
    assert all("/" not in key and " " not in key for key in keys)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tensorflow": None}, "TensorFlow"),
        ({"cxx": None}, "a C++17 compiler (g++)"),
        ({"make": None}, "make"),
        ({"cmake": None}, "CMake"),
        ({"cmake": (3, 5)}, "CMake >= 3.13 (found 3.5)"),
    ],
)
def test_what_is_missing_is_said_before_the_build(
    horovod_script: ModuleType, tmp_path: Path, change: dict[str, object], what: str
) -> None:
    with pytest.raises(horovod_script.BuildError) as raised:
        horovod_script.obtain_wheel(toolchain(horovod_script, **change), tmp_path, jobs=1, environ={})
    assert str(raised.value).startswith(f"needed {what}, not found. Try: ")


def test_a_cached_wheel_needs_no_compiler(horovod_script: ModuleType, tmp_path: Path) -> None:
    tools = toolchain(horovod_script, cxx=None, cmake=None)
    wheel = tmp_path / tools.cache_key() / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.parent.mkdir()
    wheel.touch()
    assert horovod_script.obtain_wheel(tools, tmp_path, jobs=1, environ={}) == wheel


def test_without_mpi_or_nccl_the_build_says_so_to_horovod(horovod_script: ModuleType) -> None:
    plain = toolchain(horovod_script, mpi=None).environment(2)
    assert plain["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in plain
    assert "HOROVOD_GPU_OPERATIONS" not in plain
    assert toolchain(horovod_script, nccl="21803").environment(2)["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_nccl_headers_are_found_where_horovod_looks(horovod_script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "nccl.h").write_text("#define NCCL_VERSION_CODE 21803\n")
    assert horovod_script.read_nccl({"HOROVOD_NCCL_HOME": str(tmp_path)}) == "21803"


def archive(path: Path, name: str) -> Path:
    with tarfile.open(path, "w:gz") as bundle:
        member = tarfile.TarInfo(name)
        member.size = 3
        bundle.addfile(member, io.BytesIO(b"bad"))
    return path


def test_a_tampered_source_release_is_refused(horovod_script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(horovod_script.BuildError, match="SHA-256"):
        horovod_script.unpack(
            archive(tmp_path / "horovod-0.28.1.tar.gz", "horovod-0.28.1/setup.py"), tmp_path
        )


def test_a_failing_command_shows_its_errors_and_its_log(horovod_script: ModuleType, tmp_path: Path) -> None:
    code = "import sys; print('fine'); print('x.cc:1: error: no such thing'); sys.exit(3)"
    seen: list[str] = []
    with pytest.raises(horovod_script.BuildError, match="ended with 3.*log\n  x.cc:1: error: no such thing$"):
        horovod_script.run_logged([sys.executable, "-c", code], {}, tmp_path / "log", seen.append)
    assert seen[0] == "fine\n"


def test_progress_without_a_terminal_is_a_line_every_tenth(
    horovod_script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with horovod_script.progress("compiling", stream_is_tty=False) as advance:
        for percent in range(0, 101):
            advance(percent)
    assert len(capsys.readouterr().out.splitlines()) == 11


def test_tensorflow_versions_become_requirements(setup_script: ModuleType) -> None:
    wanted = setup_script.tensorflow_requirements
    assert wanted("2.21", False) == ["tensorflow==2.21.*", "tf-keras==2.21.*"]
    assert wanted("2.15.1", True) == ["tensorflow[and-cuda]==2.15.1", "tf-keras==2.15.*"]


def test_without_root_the_exact_packages_are_asked_for(
    setup_script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [("numactl", "numactl", False), ("g++", "g++", True)]
    with pytest.raises(setup_script.SetupError, match=r"ask for: sudo apt-get install numactl g\+\+"):
        setup_script.install_packages(missing, tmp_path / "log", may_install=False)
    setup_script.install_packages(missing[:1], tmp_path / "log", may_install=False)
    assert "going on without" in capsys.readouterr().out


def test_the_stamp_changes_with_what_it_stands_for(setup_script: ModuleType, tmp_path: Path) -> None:
    first = setup_script.fingerprint(tmp_path, ["tensorflow==2.21.*"])
    assert first == setup_script.fingerprint(tmp_path, ["tensorflow==2.21.*"])
    assert first != setup_script.fingerprint(tmp_path, ["tensorflow==2.15.*"])
    assert first != setup_script.fingerprint(tmp_path / "other", ["tensorflow==2.21.*"])


@pytest.mark.parametrize(
    ("name", "value", "is_another"),
    [
        ("version", "3.99.99 (main, Jan  1 2099, 00:00:00) [GCC 99.1.0]", False),
        ("implementation", SimpleNamespace(cache_tag="cpython-399"), True),
    ],
)
def test_the_stamp_outlives_an_upgrade_of_the_same_python(
    setup_script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
    is_another: bool,
) -> None:
    first = setup_script.fingerprint(tmp_path, [])
    monkeypatch.setattr(sys, name, value)
    assert (setup_script.fingerprint(tmp_path, []) != first) is is_another


def test_modules_are_hidden_from_the_processes_of_tests_only(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    setup_script.add_hiding(tmp_path)
    look = (
        f"import site; site.addsitedir({str(site)!r})\ntry: import wave\nexcept ImportError: print('hidden')"
    )
    for hidden, said in (("wave chunk", "hidden\n"), ("", ""), (None, "")):
        monkeypatch.setenv("TESTS_HIDE_MODULES", hidden or "")
        if hidden is None:
            monkeypatch.delenv("TESTS_HIDE_MODULES")
        assert subprocess.check_output([sys.executable, "-c", look], text=True, timeout=300) == said


def test_a_stamped_environment_is_ready_at_once(tmp_path: Path) -> None:
    """A copy of the project with a stamped environment: nothing is started, nothing is downloaded."""
    copy = tmp_path / "copy"
    (copy / "scripts").mkdir(parents=True)
    for name in ("setup.py", "build_horovod.py"):
        (copy / "scripts" / name).write_bytes((SCRIPTS / name).read_bytes())
    (copy / "lmsrun" / "wheels").mkdir(parents=True)
    for name in ("__init__.py", "wheels/__init__.py", "wheels/build_horovod.py"):
        (copy / "lmsrun" / name).write_bytes((SCRIPTS.parent / "lmsrun" / name).read_bytes())
    (copy / "pyproject.toml").write_text("")
    for name in ("native/arena.c", "native/cache.c", "optimizer/plugin.c"):
        (copy / "lms" / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / "lms" / name).write_text("")
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "python").symlink_to(sys.executable)
    stamp = "import setup; v = setup.ROOT / '.venv'; r = setup.tensorflow_requirements('2.21', False); "
    stamp += "(v / setup.STAMP).write_text(setup.fingerprint(v, r))"
    subprocess.run([sys.executable, "-c", stamp], cwd=copy / "scripts", check=True, timeout=300)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "scripts/setup.py"],
        cwd=copy,
        env={},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert time.monotonic() - started < 5  # 0.2 s; the bound only tells it from a set-up


@pytest.fixture
def image_script(scripts: None) -> ModuleType:
    import container_image

    return container_image


def test_a_base_comes_from_where_apt_gets_its_packages(image_script: ModuleType) -> None:
    lines = (
        "http://deb.example/debian/ stable main\n"
        "http://deb.example/debian/ stable universe\n"
        "http://other.example/debian/ stable contrib\n"
        "http://deb.example/debian/ stable-updates main\n"
    )
    source = image_script.parse_source(lines, "stable")
    assert source == image_script.Source("http://deb.example/debian/", "stable", ("main", "universe"))
    with pytest.raises(image_script.BuildError, match="apt has no source of oldstable"):
        image_script.parse_source(lines, "oldstable")


def test_a_password_in_apts_source_goes_nowhere(image_script: ModuleType) -> None:
    with pytest.raises(image_script.BuildError, match="holds a password") as caught:
        image_script.parse_source("https://me:hush@deb.example/debian stable main", "stable")
    assert "hush" not in str(caught.value)


def test_the_build_s_pip_gets_indexes_and_no_paths_of_this_machine(image_script: ModuleType) -> None:
    listed = (
        ":env:.index-url='https://me:hush@pypi.example/simple'\n"
        ":env:.no-cache-dir='1'\n"
        "global.cert='/home/me/ca.pem'\n"
        "global.extra-index-url='file:///opt/simple https://extra.example/simple'\n"
        "global.find-links='/opt/wheels'\n"
        "global.index-url='https://unused.example/simple'\n"
    )
    assert image_script.pip_configuration(listed) == (
        "[global]\n"
        "cert = /etc/ssl/certs/ca-certificates.crt\n"
        "extra-index-url = https://extra.example/simple\n"
        "index-url = https://me:hush@pypi.example/simple\n"
    )


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(("cpus", "gib", "number"), [(1, 2, 1), (2, 6, 1), (2, 8, 2), (2, 24, 3), (8, 64, 9)])
def test_tests_run_in_as_many_processes_as_the_machine_has_room_for(cpus: int, gib: int, number: int) -> None:
    from run_tests import processes

    assert processes(cpus, gib << 30) == number


def test_tests_that_are_named_run_alone(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert 0\n")
    argv = [sys.executable, str(SCRIPTS / "run_tests.py"), str(tmp_path), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "1 failed" in done.stdout
