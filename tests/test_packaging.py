"""What `pip install .` brings: launcher and planner, without TensorFlow, and every file they need."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import lms
import lmsrun

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
PACKAGES = ("lmsrun", "launch", "lms")
IBMS = "tensorflow_large_model_support"
PLUGIN = "lms/optimizer/_plugin.abi3.so"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **environ: str) -> Path:
    """The wheel of a copy of the sources, so that no build folder is left in the checkout."""
    source, out = folder / "source", folder / "out"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
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


def test_every_package_tells_the_version_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project]")[2]
    (version,) = re.findall(r'^version = "(.+)"$', project, re.MULTILINE)
    assert (lms.__version__, lmsrun.__version__) == (version, version)


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in {".py", ".c", ".cc", ".h"} and "__pycache__" not in path.parts
    }
    assert wanted <= held, sorted(wanted - held)
    assert {name.split("/")[0] for name in held} <= {
        *PACKAGES,
        IBMS,
        f"{wheel.name.split('-')[0]}-0.1.0.dist-info",
    }


def test_the_plugin_is_in_the_wheel_for_every_python(wheel: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    assert PLUGIN in zipfile.ZipFile(wheel).namelist()
    assert "-cp310-abi3-" in wheel.name


def test_without_a_compiler_there_is_a_wheel_without_the_plugin(tmp_path: Path) -> None:
    held = zipfile.ZipFile(build_wheel(tmp_path, CC="/no/compiler")).namelist()
    assert PLUGIN not in held and "lms/optimizer/plugin.c" in held


@pytest.mark.tensorflow
def test_the_plugin_of_the_wheel_edits_a_graph(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    job = ROOT / "tests" / "lms" / "optimizer" / "plugin_job.py"
    environ = {"PYTHONPATH": str(tmp_path), "LMS_PLUGIN": "prebuilt", "TF_CPP_MIN_LOG_LEVEL": "2"}
    found = json.loads(run([sys.executable, str(job), "life"], **environ).splitlines()[-1])
    assert found["life"]["form"] == ["prebuilt"] * 4
    assert found["life"]["armed"] == [2.0, 1]


def test_a_clean_environment_can_plan_without_tensorflow(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")])
    python = tmp_path / "venv" / "bin" / "python"
    run([*PIP, "--python", str(python), "install", str(wheel)])
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


def test_python_that_is_promised_can_read_the_code() -> None:
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    vermin = [str(Path(sys.executable).with_name("vermin")), "--quiet", "--no-tips", "--violations"]
    bootstrap = ROOT / "lms" / "bootstrap" / "sitecustomize.py"
    others = [str(path) for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path != bootstrap]
    run([*vermin, "--target=3.10-", *others])
    run([*vermin, "--target=3.6-", str(bootstrap)])
