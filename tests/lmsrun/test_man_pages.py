"""The man pages: as the declared options make them, without a fault for mandoc, and with every option."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmsrun.manual.man import SECTION, page_names, render_man
from lmsrun.manual.pages import SUBCOMMANDS, read_page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "man"
DATE = "November 22, 2026"


def mandoc(*words: str) -> str:
    if shutil.which("mandoc") is None:
        pytest.skip("no mandoc; CLUSTER_TOOLS=1 .venv/bin/python scripts/cluster_tools.py installs it")
    argv = ["mandoc", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False).stdout


def test_the_pages_are_as_the_options_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from man_pages import stale_pages

    assert list(stale_pages(FOLDER, DATE)) == [], "write them with `make man` and look at them"
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.{SECTION}" for name in page_names()}


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_line_that_apropos_shows_is_short(name: str) -> None:
    lines = render_man(f"lmsrun-{name}", DATE).splitlines()
    assert len(next(line for line in lines if line.startswith(".Nd "))) <= 110


def test_man_finds_the_pages_of_an_environment_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("man") is None:
        pytest.skip("no man")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from setup import link_manual

    (tmp_path / "bin").mkdir()
    link_manual(tmp_path)
    link_manual(tmp_path)  # as a set-up that is done again
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["man", "-w", "lmsrun-run"], env=environ, capture_output=True, text=True, check=False
    )
    assert Path(done.stdout.strip()).samefile(FOLDER / "lmsrun-run.1"), done.stderr


def test_mandoc_finds_nothing_in_them() -> None:
    found = mandoc("-T", "lint", *map(str, sorted(FOLDER.iterdir())))
    # Where they are not installed, no page finds another.
    assert [line for line in found.splitlines() if "referenced manual not found" not in line] == []


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_page_shows_every_option_and_example(name: str) -> None:
    text = mandoc("-T", "ascii", "-O", "width=200", str(FOLDER / f"lmsrun-{name}.{SECTION}"))
    shown = subprocess.run(["col", "-bx"], input=text, capture_output=True, text=True, check=True).stdout
    page = read_page(name)
    for flag in page.flags:
        assert all(f"{spelling}" in shown for spelling in flag.spellings)
        assert (
            f"{flag.spellings[-1]}{f' {flag.value.metavar}' if flag.value else ''}" in shown or flag.opposite
        )
    assert all(line in shown for line, _ in page.examples)
    assert all(line.strip() in shown for line in page.usage.splitlines())


def test_a_page_that_changes_gets_a_new_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from man_pages import stale_pages

    for name in page_names():
        (tmp_path / f"{name}.1").write_text(render_man(name, "May 1, 2026"))
    assert stale_pages(tmp_path, DATE) == {}
    path = tmp_path / "lmsrun-plan.1"
    path.write_text(path.read_text().replace("Nothing is started.", "It starts."))
    assert stale_pages(tmp_path, DATE) == {path: render_man("lmsrun-plan", DATE)}


def test_text_cannot_become_a_macro() -> None:
    from lmsrun.manual.man import _text

    assert list(_text(".toml files \\ of 'x'")) == ["\\&.toml files \\e of 'x'"]


def test_the_script_runs_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "man_pages.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
