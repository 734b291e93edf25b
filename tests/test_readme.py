"""What README.md and docs/ show: commands work, samples are real, options exist, links lead somewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXACT = ("plan", "--version")
"""Commands of lmsrun whose sample output does not depend on the machine."""


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def sessions(page: Path) -> list[tuple[str, list[str]]]:
    """(command, lines shown after it) of every ``$`` line of a page's console blocks."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LMSRUN_", "MAKE"))}
    environ["COLUMNS"] = "100"
    return subprocess.run(
        argv,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def appear_in_order(shown: list[str], real: list[str]) -> str | None:
    """The first line of the sample that the output lacks; ``...`` stands for any lines."""
    position = 0
    for line in (line for line in shown if line.strip() and line != "..."):
        try:
            position = real.index(line, position) + 1
        except ValueError:
            return line
    return None


@pytest.mark.parametrize(
    ("command", "shown"), sessions(README), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_command_of_the_readme_works_and_prints_what_is_shown(command: str, shown: list[str]) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        # The tests run inside `make test`, and `make demo` has a test of its own: here only that they exist.
        assert shutil.which("make"), "make is missing, which the README needs"
        assert run(["make", "-n", *arguments]).returncode == 0
        return
    assert program == "lmsrun"
    done = run([sys.executable, "-m", "lmsrun", *arguments])
    assert done.returncode == 0, done.stderr
    if arguments[0] in EXACT and shown:
        assert appear_in_order(shown, done.stdout.splitlines()) is None


def test_ci_calls_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in [command for command, _ in sessions(README)]
    assert "make test" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_option_that_the_pages_name_exists() -> None:
    known = "".join(
        run([sys.executable, "-m", "lmsrun", *words, "--help"]).stdout for words in ([], ["topo"], ["check"])
    )
    known = known.replace("--[no-]", "--") + known.replace("--[no-]", "--no-")
    names = set(re.findall(r"(?<![\w-])--[a-z-]+", known))
    for page in (README, ROOT / "docs" / "usage.md", ROOT / "docs" / "troubleshooting.md"):
        text = re.sub(r"```text.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        quoted = " ".join(re.findall(r"`([^`]+)`", text) + blocks(page, "sh"))
        for line in re.findall(r"[^\n]+", quoted):
            mentioned = set(re.findall(r"(?<![\w-])--[a-z-]+[a-z]", line)) - {
                "--epochs",
                "--cap-add",
                "--mca",
                "--ntasks-per-node",
            }
            assert mentioned <= names, f"{page.name} names {sorted(mentioned - names)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
