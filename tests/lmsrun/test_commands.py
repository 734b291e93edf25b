"""The table of subcommands: each has its file, and what is not for lmsrun itself has its help."""

from pathlib import Path

import pytest

from lmsrun import commands
from lmsrun.cli import main
from lmsrun.help_text import render_help
from lmsrun.options import COMMANDS, FOR_LMSRUN, load_command

SHARED = {"__init__", "common", "neighbours"}


def test_every_file_is_a_subcommand_and_the_other_way_round() -> None:
    files = {path.stem for path in Path(str(commands.__file__)).parent.rglob("*.py")} - SHARED
    assert {
        module.rpartition(".")[2] for module in COMMANDS.values() if module.startswith("lmsrun.")
    } == files
    assert all(callable(load_command(name).main) for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in FOR_LMSRUN])
def test_every_subcommand_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"], {}) == 0
    said = capsys.readouterr().out
    assert said == render_help(name) + "\n"
    assert said.startswith("usage: lmsrun") and name in said.splitlines()[0]


@pytest.mark.parametrize("name", FOR_LMSRUN)
def test_what_is_for_lmsrun_itself_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "x"], {}) == 2
    assert f"lmsrun: {name} is what " in capsys.readouterr().err
