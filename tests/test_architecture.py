"""The import rules of docs/architecture.md, read from the source."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TENSORFLOW = {"tensorflow", "keras", "tf_keras", "horovod"}
SOURCES = sorted(path for room in ("lmsrun", "launch", "lms") for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether importing the file imports it at once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.dump(outer.test))
        for inner in ast.walk(outer)
    }
    for statement in ast.walk(tree):
        at_once = id(statement) not in late
        if isinstance(statement, ast.Import):
            yield from ((alias.name, at_once) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path}: a relative import"
            yield str(statement.module), at_once
            yield from ((f"{statement.module}.{alias.name}", at_once) for alias in statement.names)


def room(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    mine = path.relative_to(ROOT).parts[0]
    for module, at_once in imports(path):
        if mine == "lms":
            assert room(module) not in {"launch", "lmsrun"}, module
        if mine == "launch":
            assert room(module) != "lmsrun", module
            assert room(module) not in TENSORFLOW - {"horovod"}, module
            assert not (at_once and room(module) == "horovod"), module
            assert room(module) != "lms" or module.startswith("lms.config") or module == "lms", module
        if mine == "lmsrun":
            assert not (at_once and room(module) in {*TENSORFLOW, "rich", "numpy"}), module


GROUND = {"config", "errors", "process_state", "user_files"}
"""Modules of ``lms`` that any of its folders may import; they need no TensorFlow."""

LMS = {
    "ir": set(),
    "schedule": {"ir"},
    "simulate": {"ir", "native"},
    "swaps": {"ir", "schedule", "simulate"},
    "planner": {"ir", "schedule", "simulate", "swaps"},
    "forecast": {"ir", "planner", "schedule", "simulate", "swaps"},
    "native": set(),
    "page": set(),
    "profiling": {"ir", "native"},
    "optimizer": {"native"},
    "transports": {"native"},
    "variables": {"ir", "native", "transports"},
    "device": {"ir", "native", "simulate", "transports", "variables"},
    "reader": {"device", "ir", "optimizer"},
    "specialiser": {"ir", "optimizer", "reader"},
    "rewriter": {
        *("device", "ir", "optimizer", "planner", "reader", "schedule", "transports", "variables"),
    },
    "report": {
        *("device", "ir", "page", "planner", "rewriter", "schedule", "simulate", "swaps", "transports"),
    },
    "intercept": {"device", "ir", "optimizer", "reader", "specialiser", "variables"},
    "estimates": {"device", "forecast", "simulate"},
    "passes": {
        *("device", "intercept", "ir", "optimizer", "planner", "profiling", "reader", "report", "rewriter"),
        *("simulate", "specialiser", "swaps", "transports", "variables"),
    },
    "process": {
        *("device", "intercept", "ir", "optimizer", "passes", "planner", "profiling", "reader", "report"),
        *("rewriter", "swaps", "transports", "variables"),
    },
    "calls": {
        *("device", "intercept", "ir", "optimizer", "passes", "planner", "process", "reader", "report"),
        *("rewriter", "swaps", "transports"),
    },
    "engine": {
        *("calls", "device", "estimates", "forecast", "intercept", "ir", "optimizer", "passes", "planner"),
        *("process", "profiling", "reader", "report", "rewriter", "swaps", "transports", "variables"),
    },
    "tf_names": {"device"},
    "compat": {"callbacks", "enable", "engine", "intercept", "ir", "report", "tf_names"},
    "bootstrap": set(),
}

LAUNCH = {
    "model": set(),
    "system": {"model"},
    "channel": {"model", "system"},
    "ending": {"model", "system"},
    "discover": {"model"},
    "receipts": {"model"},
    "monitor": {"discover", "model", "receipts", "system"},
    "plan_host": {"model"},
    "installed": {"model", "plan_host", "system"},
    "cluster": {"model", "plan_host", "system"},
    "backends": {"cluster", "installed", "model", "plan_host", "system"},
    "supervise": {
        *("channel", "cluster", "discover", "ending", "installed", "model", "receipts", "system"),
    },
    "rank": {
        *("channel", "cluster", "discover", "installed", "model", "plan_host", "receipts"),
        *("supervise", "system"),
    },
    "preflight": {"discover", "installed", "model", "plan_host", "rank", "receipts", "system"},
}

LMSRUN = {
    "commands": {
        *("check", "cluster_run", "command_steps", "file_checks", "help_text", "options", "place"),
        *("preflight", "draw", "manual", "neighbours", "render", "report", "resolve"),
        *("sources", "watching", "wheels"),
    },
    "report": {"command_steps", "draw", "render", "resolve"},
    "draw": {"render"},
    "manual": {"help_text", "options"},
    "render": set(),
    "sources": {"options"},
    "wheels": set(),
}

HOUSE = {"lms": LMS, "launch": LAUNCH, "lmsrun": LMSRUN}
"""The folders of each package, each with those that it may import: one way, so without a circle."""

WITHOUT_TENSORFLOW = {"lms/ir", "lms/schedule", "lms/simulate", "lms/swaps", "lms/planner", "lms/forecast"}
WITHOUT_MACHINE = {"launch/model", "launch/plan_host"}
MACHINE = {"os", "subprocess", "socket", "ctypes", "psutil", "time", "random", "shutil", "signal"}
MOST_MODULES = 12


@pytest.mark.parametrize("path", [f"{package}/{folder}" for package in HOUSE for folder in HOUSE[package]])
def test_each_folder_imports_what_stands_below_it(path: str) -> None:
    package, _, folder = path.partition("/")
    names = {entry.stem for entry in (ROOT / package).iterdir()}
    below = {folder} | HOUSE[package][folder] | (GROUND if package == "lms" else set())
    for module in sorted((ROOT / path).rglob("*.py")):
        found = [name.split(".") for name, _ in imports(module)]
        mine = {parts[1] for parts in found if parts[0] == package and len(parts) > 1}
        assert not mine & names - below, f"{module}: {mine & names - below}"
        others = {parts[0] for parts in found}
        if path in WITHOUT_TENSORFLOW:
            assert not others & {*TENSORFLOW, "numpy"}, module
        if path in WITHOUT_MACHINE:
            assert not others & MACHINE, module


@pytest.mark.parametrize("package", HOUSE)
def test_the_table_holds_every_folder_and_no_circle(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders == set(HOUSE[package])
    TopologicalSorter(HOUSE[package]).prepare()


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=str)
def test_no_folder_is_a_corridor(folder: Path) -> None:
    held = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert len(held) <= MOST_MODULES, f"{folder} holds {len(held)} modules"


def test_the_launcher_needs_little_beyond_the_standard_library() -> None:
    allowed = {
        "lmsrun",
        "launch",
        "lms",
        "rich",
        "pynvml",
        "horovod",
        "numa",
        "psutil",
        "tomllib",
        "tomli",
        "mpi4py",
        "cairosvg",
    }
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in {"lmsrun", "launch"}:
            others = {room(module) for module, _ in imports(path)} - allowed - set(sys.stdlib_module_names)
            assert not others, f"{path}: {others}"


def test_no_shell_lines() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert "shell=True" not in text, path
        assert "os.system(" not in text, path


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    # pytest imports a test file by that name alone.
    assert [name for name, times in names.items() if times > 1] == []


VERB_FIRST = ("lms",)
"""The packages whose functions are described by a verb. Ruff's D401 knows verbs and not these words."""

NO_VERBS = {"The", "A", "An", "What", "Whether", "Who", "Where", "When", "How", "Which", "See"}


def not_begun_with_a_verb(source: str) -> list[str]:
    """Return the names of the functions whose docstrings begin with one of ``NO_VERBS``; no properties."""
    return [
        statement.name
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not any("property" in ast.unparse(one) for one in statement.decorator_list)
        and (ast.get_docstring(statement) or "verb").split()[0].rstrip(".,:;") in NO_VERBS
    ]


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in VERB_FIRST
        and (names := not_begun_with_a_verb(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_docstring_without_a_verb_is_found() -> None:
    source = """
class Shape:
    @property
    def rank(self): "The number of dimensions."
    def size(self): "The number of elements."
    def is_open(self): "Tell whether a dimension is open."
    async def read(self): "See: the class."
    def bare(self): pass
"""
    assert not_begun_with_a_verb(source) == ["size", "read"]
