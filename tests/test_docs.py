"""The documentation as a site: its commands parse and run, it builds without warnings, needs no network."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launch.model.errors import UsageError
from lms.config import LMSConfig, doubtful_variables
from lmsrun.cli import main
from lmsrun.options import COMMANDS
from lmsrun.sources.command_line import parse_argv
from lmsrun.sources.tables import parse_table
from lmsrun.sources.variables import check_variables

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
NOT_RUN = re.compile(r'title="Not run by the tests: [^"]+"')
FENCE = re.compile(r"^( *)```(sh|console)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
QUERIES = ("plan", "topo", "check", "version", "help")
"""Subcommands that start nothing and write nothing (`--save` aside)."""
OTHERS = ("make", "pip", "python", "pytest", ".", "export", "unset", ".venv/bin/python")


def shell_lines() -> Iterator[tuple[str, bool, str]]:
    """Page, whether the tests may run it, and command line of every shell block."""
    for page in PAGES:
        for _, kind, title, body in FENCE.findall(page.read_text(encoding="utf-8")):
            for line in body.replace("\\\n", " ").splitlines():
                command = line.strip()
                if kind == "console":
                    command = command[2:] if command.startswith("$ ") else ""
                if command and not command.startswith("#"):
                    yield page.relative_to(ROOT).as_posix(), not NOT_RUN.search(title), command


LINES = list(dict.fromkeys(shell_lines()))


def split(command: str) -> tuple[Mapping[str, str], list[str]]:
    """Variables in front of a command, and its words."""
    words = shlex.split(command, comments=True)
    given: dict[str, str] = {}
    while words and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    return given, words


def planned(words: list[str]) -> list[str]:
    """The words of a run as those of a plan, which starts nothing."""
    if words[0] == "run" or words[0] in QUERIES:
        words = words[1:]
    return ["plan", "--oversubscribe", *words]


@pytest.mark.parametrize(
    ("page", "runs", "command"), LINES, ids=[f"{page}: {command[:60]}" for page, _, command in LINES]
)
def test_a_command_of_the_docs_is_right(
    page: str,
    runs: bool,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given, words = split(command)
    assert not check_variables(given) and not doubtful_variables(given)
    LMSConfig.from_env(given)
    while "lmsrun" in words[1:] and words[0] != "make":
        words = words[words.index("lmsrun", 1) :]  # a launcher of the user's own in front
    if words[0] != "lmsrun":
        assert not runs or words[0] in OTHERS, f"{page}: mark the block, or teach the test to run {words[0]}"
        if runs:
            check_other(words)
        return
    arguments = words[1:]
    name = arguments[0] if arguments and arguments[0] in COMMANDS else "run"
    if name in ("run", "plan", "topo", "check", "fit"):
        assert not parse_argv("run" if name == "plan" else name, arguments[arguments[:1] == [name] :]).wish
    if not runs or name in ("worker", "ddlrun", "fit") or "ddlrun" in arguments:
        return
    if name == "run":
        arguments = planned(arguments)
    elif name == "build-horovod":
        arguments = ["help", name]
    elif "--save" in arguments:
        return
    monkeypatch.chdir(ROOT)
    code = main(arguments, {"PATH": os.environ["PATH"], **given})
    assert code == 0 or (name == "check" and code == 1), capsys.readouterr().err


def check_other(words: list[str]) -> None:
    """Check what is no command of lmsrun: that what it names exists."""
    program, *arguments = words
    if program == "make":
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, env=environ, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        extras = TOML.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for found in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            assert set(found.split(",")) <= extras.keys()
    elif arguments[:2] == ["-m", "pytest"]:
        assert (ROOT / arguments[2]).exists()
    elif program == "python" and arguments[0] != "-c":
        script = ROOT / arguments[0]
        text = script.read_text(encoding="utf-8") if arguments[0] != "train.py" else ""
        for flag in (word for word in arguments if word.startswith("--")):
            assert f'"{flag}"' in text, f"{arguments[0]} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_toml_and_json_of_the_docs_are_right(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for kind, body in re.findall(r"^```(python|toml|json)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if kind == "python":
            for node in ast.walk(ast.parse(body)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lms"):
                    module = ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py")
                    source = module.read_text(encoding="utf-8")
                    for name in node.names:
                        assert re.search(rf"^(class|def) {name.name}\b", source, re.MULTILINE), name.name
        elif kind == "toml":
            parse_table(TOML.loads(body), page.name)
        else:
            json.loads(body)


def test_a_wrong_option_of_the_docs_would_be_found() -> None:
    with pytest.raises(UsageError):
        parse_argv("run", ["--no-such-option", "train.py"])


def test_blocks_that_are_not_run_say_what_they_need() -> None:
    for page in PAGES:
        for _, _, title, _ in FENCE.findall(page.read_text(encoding="utf-8")):
            assert not title or NOT_RUN.search(title), f"{page.name}: {title}"


class Sources(HTMLParser):
    """Collects what a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take sources, style sheets, icons and pre-connections; links that a reader follows are fine."""
        given = dict(attrs)
        names = ("src", "srcset", "data", "poster") + (("href",) if tag in ("link", "use", "image") else ())
        self.found += [value for name in names if (value := given.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    if not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings_handlers"))):
        pytest.skip("no mkdocs-material and mkdocstrings: pip install '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return out


def test_the_site_has_every_page(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file()
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("lms.enable.enable", "lms.hvd.DistributedOptimizer", "lms.elastic.ElasticState"):
        assert f'id="{name}"' in api
    assert "Capuchin" in (site / "search" / "search_index.js").read_text(encoding="utf-8")


def test_the_site_requests_nothing_from_a_network(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # only a server shows that one
    for page in pages:
        sources = Sources()
        sources.feed(page.read_text(encoding="utf-8"))
        assert not [found for found in sources.found if "//" in found.partition("?")[0][:8]], page.name
        for found in sources.found:
            if not found.startswith("data:"):
                assert (page.parent / re.split(r"[?#]", found)[0]).exists(), f"{page.name}: {found}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", text), sheet.name
    assert len(pages) > 20


def test_search_works_in_a_page_opened_as_a_file(site: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium")
    argv = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"),
        f"{(site / 'index.html').as_uri()}?q=seccomp",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    assert re.search(r'<a href="[^"]*containers\.html[^"]*" class="md-search-result__link"', done.stdout)
