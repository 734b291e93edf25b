"""What `pip install .` brings: launcher and planner, without TensorFlow, and every file they need."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

import lms

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
PACKAGES = ("lmsrun", "launch", "lms")
IBMS = "tensorflow_large_model_support"
PLUGIN = "lms/optimizer/_plugin.abi3.so"
COMPILED = {PLUGIN, "lms/native/_arena.abi3.so", "lms/native/_cache.abi3.so"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **environ: str) -> Path:
    """The wheel of a copy of the sources, so that no build folder is left in the checkout."""
    return wheel_of(copy_sources(folder), folder, **environ)


def copy_sources(folder: Path) -> Path:
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs" / "man", source / "docs" / "man")
    return source


def wheel_of(source: Path, folder: Path, **environ: str) -> Path:
    out = folder / "out"
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)], **environ)
    (built,) = out.glob("*.whl")
    return built


def run(argv: list[str], cwd: Path | None = None, **more: str) -> str:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LMSRUN_"))
    }
    environ |= more
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_version_stands_in_one_place(wheel: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", lms.__version__)
    assert wheel.name.split("-")[1] == lms.__version__
    for path in (ROOT / "pyproject.toml", ROOT / "lms" / "__init__.py", ROOT / "lmsrun" / "__init__.py"):
        assert f'"{lms.__version__}"' not in path.read_text(encoding="utf-8")


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in {".py", ".c", ".cc", ".h"} and "__pycache__" not in path.parts
    }
    assert wanted <= held, sorted(wanted - held)
    ours = f"{wheel.name.split('-')[0]}-{lms.__version__}"
    assert {name.split("/")[0] for name in held} <= {*PACKAGES, IBMS, f"{ours}.dist-info", f"{ours}.data"}
    pages = {f"{ours}.data/data/share/man/man1/{path.name}" for path in (ROOT / "docs" / "man").iterdir()}
    assert pages and {name for name in held if name.startswith(f"{ours}.data/")} == pages


def test_what_is_compiled_is_in_the_wheel_for_every_python(wheel: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    assert COMPILED <= {*zipfile.ZipFile(wheel).namelist()}
    assert "-cp310-abi3-" in wheel.name


def test_without_a_compiler_the_sdist_gives_a_wheel_without_it(wheel: Path, tmp_path: Path) -> None:
    build = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    source = copy_sources(tmp_path)
    (source / "tests").mkdir()
    (source / "tests" / "test_alone.py").touch()  # setuptools takes such files by itself
    name = run([sys.executable, "-c", build], cwd=source).splitlines()[-1]
    assert name == f"lmsrun-{lms.__version__}.tar.gz"
    assert not [one for one in tarfile.open(source / name).getnames() if "/tests" in one]
    held = set(zipfile.ZipFile(wheel_of(source / name, tmp_path, CC="/no/compiler")).namelist())
    whole = {one for one in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in one}
    assert whole - held == COMPILED & whole


@pytest.mark.tensorflow
def test_the_plugin_of_the_wheel_edits_a_graph(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)  # noqa: S202 - a zip file of ours
    job = ROOT / "tests" / "lms" / "optimizer" / "plugin_job.py"
    environ = {"PYTHONPATH": str(tmp_path), "LMS_PLUGIN": "prebuilt", "TF_CPP_MIN_LOG_LEVEL": "2"}
    found = json.loads(run([sys.executable, str(job), "life"], **environ).splitlines()[-1])
    assert found["life"]["form"] == ["prebuilt"] * 4
    assert found["life"]["armed"] == [2.0, 1]


def test_a_clean_environment_can_plan_without_tensorflow(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")])
    python = tmp_path / "venv" / "bin" / "python"
    run([*PIP, "--python", str(python), "install", str(wheel)])
    before = time.monotonic()
    checked = subprocess.run(
        [tmp_path / "venv" / "bin" / "lmsrun", "check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode in (0, 1) and "Horovod" in checked.stdout, checked.stderr
    assert time.monotonic() - before < 10
    shutil.copy(ROOT / "examples" / "ac922.json", tmp_path)
    (tmp_path / "train.py").write_text("")
    lmsrun = str(tmp_path / "venv" / "bin" / "lmsrun")
    plan = json.loads(
        run([lmsrun, "plan", "--json", "-np", "6", "--topology", "ac922.json", "train.py"], tmp_path)
    )
    assert [rank["mem_nodes"] for rank in plan["ranks"]] == ["0", "0", "0", "8", "8", "8"]
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    assert "rank 0" in run([lmsrun, "run", "-np", "1", "--receipt-timeout", "5", "train.py"], tmp_path)
    run([str(python), "-c", "import importlib.util as i; assert not i.find_spec('tensorflow')"])


@pytest.mark.parametrize("tool", [("uvx", "--from"), ("pipx", "run", "--spec")], ids=lambda tool: tool[0])
def test_a_tool_runs_it_without_an_environment(wheel: Path, tmp_path: Path, tool: tuple[str, ...]) -> None:
    folders = {"UV_CACHE_DIR": str(tmp_path / "uv"), "PIPX_HOME": str(tmp_path / "pipx")}
    command = [str(Path(sys.executable).with_name(tool[0])), *tool[1:], str(wheel), "lmsrun", "--version"]
    assert run(command, tmp_path, **folders).strip() == f"lmsrun {lms.__version__}"


def test_python_that_is_promised_can_read_the_code() -> None:
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    vermin = [str(Path(sys.executable).with_name("vermin")), "--quiet", "--no-tips", "--violations"]
    bootstrap = ROOT / "lms" / "bootstrap" / "sitecustomize.py"
    others = [str(path) for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path != bootstrap]
    run([*vermin, "--target=3.10-", *others])
    run([*vermin, "--target=3.6-", str(bootstrap)])
