"""The completion of bash, zsh and fish, in the real shells: what is typed, a tab, and what becomes of it."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmsrun.cli import main
from lmsrun.manual.completion import SHELLS, render_completion
from lmsrun.manual.pages import SUBCOMMANDS, read_page

RC = """
PS1='READY> '; PS2=''
{before}
source {script}
lmsrun() {{ printf 'GOT%s' ''; printf ' <%s>' "$@"; printf ' END\\n'; }}
"""
ZSH_BEFORE = "autoload -Uz compinit; compinit -u -D; unsetopt beep prompt_cr prompt_sp"
TAB, KILL_LINE = b"\t", b"\x15"

CASES = [
    ("topo", ["topo"]),
    ("plan --nu", ["plan", "--num"]),
    ("plan --num-", ["plan", "--num-proc"]),
    ("--host-mem-l", ["--host-mem-limit"]),
    ("--no-over", ["--no-oversubscribe"]),
    ("--numa st", ["--numa", "strict"]),
    ("--launcher=horo", ["--launcher=horovodrun"]),
    ("-np 2 --place sp", ["-np", "2", "--place", "spread"]),
    ("topo --topology mach", ["topo", "--topology", "machine.json"]),
    ("-np 2 tra", ["-np", "2", "train.py"]),
    ("plan -np 2 -- tra", ["plan", "-np", "2", "--", "train.py"]),
    ("-np 2 train.py --nu", ["-np", "2", "train.py", "--nu"]),
    ("-m pkg --nu", ["-m", "pkg", "--nu"]),
    ("--output-dir fol", ["--output-dir", "folder"]),
    ("-x LMSRUN_COMPLETION_T", ["-x", "LMSRUN_COMPLETION_TEST"]),
    ("help build", ["help", "build-horovod"]),
    ("completion fi", ["completion", "fish"]),
    ("ddlrun --acc", ["ddlrun", "--accelerators"]),
    ("-np 2 ddlrun --acc", ["-np", "2", "ddlrun", "--accelerators"]),
    ("fit --target GH", ["fit", "--target", "GH200"]),
    ("fit --target he", ["fit", "--target", "here"]),
    ("fit tra", ["fit", "train.py"]),
    ("fit -m pkg --ta", ["fit", "-m", "pkg", "--ta"]),
    ("report fol", ["report", "folder"]),
    ("top fol", ["top", "fol"]),
    ("build-horovod --ch", ["build-horovod", "--check"]),
]
"""What is typed, and the words it becomes: as far as all that begins so is the same."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work" / "folder").mkdir(parents=True)
    for name in ("machine.json", "train.py"):
        (tmp_path / "work" / name).touch()
    for shell in SHELLS:
        (tmp_path / f"completion.{shell}").write_text(render_completion(shell))
    return tmp_path


def needs(shell: str) -> str:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}; CLUSTER_TOOLS=1 .venv/bin/python scripts/cluster_tools.py installs it")
    return program


class Typist:
    """A shell on a terminal of its own."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "ZDOTDIR": str(folder),
            "TERM": "dumb",
            "LC_ALL": "C",
            "LMSRUN_COMPLETION_TEST": "1",
        }
        self._ours, theirs = pty.openpty()
        self._child = subprocess.Popen(
            argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            cwd=folder / "work",
            start_new_session=True,
        )
        os.close(theirs)
        self.wait_for(r"READY> ")

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern is there; its group, if it has one."""
        seen, until = "", time.monotonic() + 60
        while not (found := re.search(pattern, seen)):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {seen!r}"
            seen += os.read(self._ours, 65536).decode(errors="replace")
        return found.group(found.re.groups)

    def complete(self, line: str) -> list[str]:
        """The words that the shell runs, after a tab."""
        os.write(self._ours, f"lmsrun {line}".encode() + TAB)
        os.write(self._ours, b"\r")
        words = self.wait_for(r"GOT((?: <[^>]*>)*) END(?s:.)*READY> ")
        # zsh takes the slash behind a folder away again.
        return re.findall(r"<([^>]*?)/?>", words)

    def say(self, line: str) -> str:
        """What the shell writes when it is to complete a line twice, which is then taken away."""
        os.write(self._ours, f"lmsrun {line}".encode() + 2 * TAB + KILL_LINE + b"echo gone\r")
        return self.wait_for(r"((?s:.*))gone\r\n(?s:.*)READY> ")

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        os.close(self._ours)


@pytest.fixture
def bash(folder: Path) -> Iterator[Typist]:
    (folder / "rc").write_text(RC.format(before="", script=folder / "completion.bash"))
    typist = Typist([needs("bash"), "--noprofile", "--rcfile", str(folder / "rc"), "-i"], folder)
    yield typist
    typist.close()


def test_bash_completes_whatever_splits_words_there(folder: Path) -> None:
    (folder / "rc").write_text(RC.format(before="IFS=:", script=folder / "completion.bash"))
    typist = Typist([needs("bash"), "--noprofile", "--rcfile", str(folder / "rc"), "-i"], folder)
    try:
        assert typist.complete("--numa st") == ["--numa", "strict"]
    finally:
        typist.close()


@pytest.fixture
def zsh(folder: Path) -> Iterator[Typist]:
    (folder / ".zshrc").write_text(RC.format(before=ZSH_BEFORE, script=folder / "completion.zsh"))
    typist = Typist([needs("zsh"), "-d", "-i"], folder)
    yield typist
    typist.close()


def test_bash_completes(bash: Typist) -> None:
    assert [(line, bash.complete(line)) for line, _ in CASES] == CASES


def test_zsh_completes(zsh: Typist) -> None:
    assert [(line, zsh.complete(line)) for line, _ in CASES] == CASES


IMPOSSIBLE = (
    "",
    "zzz",
    "--zzz",
    "--numa zz",
    "--numa=zz",
    "help zz",
    "top ",
    "-np ",
    "fit --target x,",
    '"un',
)
COMPLAINT = re.compile(r"(?i)error|traceback|not found|unbound|usage|bad |lmsrun:")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_cannot_be_completed_is_answered_with_silence(
    shell: str, request: pytest.FixtureRequest
) -> None:
    typist: Typist = request.getfixturevalue(shell)
    for line in IMPOSSIBLE:
        said = typist.say(line)
        assert not COMPLAINT.search(said), (line, said)


def fish_offers(folder: Path, lines: list[str]) -> list[list[str]]:
    """What fish offers for each line, without the descriptions."""
    asked = "; ".join(f"echo == ; complete -C 'lmsrun {line}'" for line in lines)
    done = subprocess.run(
        [needs("fish"), "--no-config", "-c", f"source {folder}/completion.fish; {asked}"],
        cwd=folder / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LMSRUN_COMPLETION_TEST": "1",
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not done.stderr
    blocks = done.stdout.split("==\n")[1:]
    return [[line.partition("\t")[0].rstrip("/") for line in block.splitlines()] for block in blocks]


def test_fish_completes(folder: Path) -> None:
    wanted = [(line, words[-1]) for line, words in CASES if words[-1] != "--num"]
    wanted = [(line, word) for line, word in wanted if not line.endswith(word)]
    offers = fish_offers(folder, [line for line, _ in wanted])
    assert [(line, offered) for (line, _), offered in zip(wanted, offers, strict=True)] == [
        (line, [word]) for line, word in wanted
    ]


def test_fish_offers_all_that_begins_so_and_no_options_of_the_program(folder: Path) -> None:
    several, none = fish_offers(folder, ["plan --num", "-np 2 train.py --nu"])
    assert (sorted(several), none) == (["--num-proc", "--numa"], [])


@pytest.mark.parametrize("shell", SHELLS)
def test_every_subcommand_and_option_is_in_every_script(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell], {}) == 0
    script = capsys.readouterr().out
    for name in SUBCOMMANDS:
        assert re.search(rf"\b{name}\b", script)
        for flag in read_page(name).flags:
            for spelling in (*flag.spellings, *filter(None, [flag.opposite])):
                sign = spelling.lstrip("-") if shell == "fish" else spelling
                assert re.search(rf"(?<![\w-]){re.escape(sign)}(?![\w-])", script), spelling


def test_shellcheck_finds_nothing_in_the_script_of_bash(folder: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("no shellcheck for this machine among the Python packages")
    done = subprocess.run(
        [str(program), "-s", "bash", str(folder / "completion.bash")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("argv", "found"),
    [([], "nothing"), (["no such shell"], "'no such shell'"), (["zs"], "'zs'; did you mean zsh?")],
)
def test_a_shell_that_is_not_known(argv: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *argv], {}) == 2
    said = capsys.readouterr().err
    assert said == f"lmsrun: completion: found {found}; needed one of bash, zsh, fish\n"
