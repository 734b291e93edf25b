"""Recipes, metadata and the bill of materials: read by the real tools where there are any, else strictly."""

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import lms
from lms.errors import REQUIREMENTS, pip_install
from lmsrun.wheels import build_horovod

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT: dict[str, Any] = TOML.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
"""What lmsrun needs at run time, each with its lowest version."""
SPACK_DIRECTIVES = {"license", "version", "variant", "depends_on"}


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that builds wheels, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("build_wheels")


def test_conda_recipe() -> None:
    build = pytest.importorskip("rattler_build", reason="no py-rattler-build: pip install '.[packages]'")
    recipe = build.Stage0Recipe.from_file(RECIPES / "conda" / "recipe.yaml")
    for python, more in (("3.10", ["tomli"]), ("3.12", [])):
        variants = build.VariantConfig.from_yaml(f"python:\n  - '{python}.*'\n")
        (rendered,) = recipe.render(variants)
        told = rendered.recipe.to_dict()
        assert told["package"] == {"name": PROJECT["name"], "version": lms.__version__}
        run = dict(line.split(" >=") for line in told["requirements"]["run"])
        assert run.pop("python") == PROJECT["requires-python"].removeprefix(">=")
        assert run == {name: low for name, low in NEEDED.items() if name != "tomli" or more}


def test_spack_package() -> None:
    """Only known directives, with literal arguments; the versions and dependencies of pyproject.toml."""
    path = RECIPES / "spack" / "spack_repo" / "lmsrun" / "packages" / "py_lmsrun" / "package.py"
    (package,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert package.name == "PyLmsrun"
    told: list[tuple[str, list[Any], dict[str, Any]]] = []
    for node in package.body[1:]:
        assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        call = node.value
        assert isinstance(call.func, ast.Name) and call.func.id in SPACK_DIRECTIVES
        more = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        told.append((call.func.id, [ast.literal_eval(argument) for argument in call.args], more))
    assert [args for name, args, _ in told if name == "version"] == [[lms.__version__]]
    assert [args for name, args, _ in told if name == "license"] == [[PROJECT["license"]]]
    needs = {
        args[0].partition("@")[0]: args[0].partition("@")[2] for name, args, _ in told if name == "depends_on"
    }
    for name, low in NEEDED.items():
        assert needs["py-" + name.removeprefix("py-")] == f"{low}:"
    assert needs["python"] == PROJECT["requires-python"].removeprefix(">=") + ":"


@pytest.mark.parametrize("extra", REQUIREMENTS)
def test_remedies_name_what_an_extra_brings(extra: str) -> None:
    """In whole: no index may have lmsrun, so that ``pip install 'lmsrun[...]'`` would find nothing."""
    words = shlex.split(pip_install(extra))
    assert words == ["pip", "install", *PROJECT["optional-dependencies"][extra]]


def test_no_text_of_the_program_asks_an_index_for_lmsrun() -> None:
    files = [
        path for room in ("lmsrun", "launch", "lms", "docs") for path in (ROOT / room).rglob("*.[pm][yd]")
    ]
    assert len(files) > 200
    found = [path for path in files if re.search(r"pip install '?lmsrun\b", path.read_text(encoding="utf-8"))]
    assert found == []
    assert pip_install("tensorflow") == build_horovod.INSTALL_TENSORFLOW


def test_apptainer_definition() -> None:
    header, *sections = re.split(r"^%", (RECIPES / "apptainer.def").read_text(), flags=re.MULTILINE)
    keys = dict(line.split(": ", 1) for line in header.splitlines() if line and not line.startswith("#"))
    assert keys.keys() == {"Bootstrap", "From"}
    bodies = dict(section.split("\n", 1) for section in sections)
    assert set(bodies) == {"files", "post", "environment", "runscript", "test"}
    for name in bodies.keys() - {"files"}:
        subprocess.run(["sh", "-n"], input=bodies[name], text=True, check=True)
    (extras,) = re.findall(r"\[([\w,]+)\]", bodies["post"])
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_citation() -> None:
    yaml = pytest.importorskip("yaml", reason="no PyYAML: pip install '.[docs]'")
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= told.keys()
    assert told["cff-version"] == "1.2.0" and told["type"] == "software"
    assert all(author.keys() == {"name"} for author in told["authors"])
    assert (told["version"], told["license"]) == (lms.__version__, PROJECT["license"])


def test_devcontainer() -> None:
    told = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert told.keys() <= {"name", "build", "containerEnv", "capAdd", "postCreateCommand", "customizations"}
    dockerfile = ROOT / ".devcontainer" / told["build"]["dockerfile"]
    setup = (ROOT / "scripts" / "setup.py").read_text()
    for package in re.findall(r'^    \("([\w+-]+)", "', setup, re.MULTILINE):
        assert f" {package} " in dockerfile.read_text()
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint:
        done = subprocess.run([hadolint, str(dockerfile)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_devcontainer_tool_reads_it(tmp_path: Path) -> None:
    tool = shutil.which("devcontainer")
    if tool is None:
        pytest.skip("no devcontainer: npm install -g @devcontainers/cli")
    docker = tmp_path / "docker"  # There is no container to look at; anything else is refused.
    docker.write_text('#!/bin/sh\ncase $1 in inspect|ps) echo "[]";; *) exit 1;; esac\n')
    docker.chmod(0o755)
    argv = [tool, "read-configuration", "--workspace-folder", str(ROOT), "--docker-path", str(docker)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["configuration"]
    assert told["build"] == {"dockerfile": "Dockerfile"} and told["postCreateCommand"] == ["make", "setup"]


def test_sbom(tmp_path: Path) -> None:
    validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="no cyclonedx: pip install '.[packages]'"
    )
    schema = importlib.import_module("cyclonedx.schema")
    out = tmp_path / "sbom.json"
    argv = [sys.executable, str(ROOT / "scripts" / "sbom.py"), str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    text = out.read_text(encoding="utf-8")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"components"', '"componentz"')) is not None
    told = json.loads(text)
    assert told["metadata"]["component"]["version"] == lms.__version__
    names = {component["name"] for component in told["components"]}
    assert NEEDED.keys() - {"tomli"} <= names and "pygments" in names  # rich needs Pygments
    assert all(component.get("licenses") for component in told["components"])


@pytest.mark.parametrize(("arch", "machine"), [("x86_64", 62), ("aarch64", 183), ("ppc64le", 21)])
def test_wheel_of_an_architecture(wheels: Any, arch: str, machine: int, tmp_path: Path) -> None:
    """Its plug-in is of that machine (ELF's e_machine), and exports what TensorFlow looks for."""
    wheel = wheels.build_wheel(arch, tmp_path)
    if wheel is None:
        pytest.skip(f"no {wheels.COMPILERS[arch]}")
    tag = re.fullmatch(rf"lmsrun-{lms.__version__}-cp310-abi3-manylinux_2_(\d+)_{arch}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(wheels.PLUGIN)
        loops = archive.read(wheels.COMPILED[1])
        (told,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"manylinux_2_{tag and tag[1]}_{arch}" in archive.read(told).decode()
        pages = {Path(name).name for name in archive.namelist() if "/data/share/man/man1/" in name}
    assert pages == {path.name for path in (ROOT / "docs" / "man").iterdir()}
    assert library[:5] == b"\x7fELF\x02" and int.from_bytes(library[18:20], "little") == machine
    assert b"\0TF_InitGraph\0" in library
    assert loops[18:20] == library[18:20] and b"\0lms_arena_play\0" in loops
    assert wheel.stat().st_size < 1 << 20


def test_the_source_archive_holds_the_man_pages(wheels: Any, tmp_path: Path) -> None:
    made = wheels.build("build_sdist", wheels.copy_sources(tmp_path), tmp_path)
    with tarfile.open(made) as archive:
        pages = {Path(name).name for name in archive.getnames() if "/docs/man/" in name}
    assert pages == {path.name for path in (ROOT / "docs" / "man").iterdir()}


def test_the_tag_of_a_wheel_follows_from_its_library(wheels: Any) -> None:
    assert wheels.needed_glibc(b"GLIBC_2.2.5\0GLIBC_2.4\0") == 17
    assert wheels.needed_glibc(b"GLIBC_2.17\0GLIBC_2.34\0GLIBC_2.4") == 34


def test_every_extra_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert all(f"`{extra}`" in page for extra in PROJECT["optional-dependencies"])
