"""``lmsrun top``, ``--live`` and ``--metrics``: what they show, how wide, what it costs, when they end."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import LMSRUN, JobStarter, wait_until
from prometheus_client.parser import text_string_to_metric_families

from launch.monitor.sample import JobSample, RankSample
from lmsrun.cli import main
from lmsrun.commands.top import Metrics, _log
from lmsrun.options import LaunchOptions
from lmsrun.render.live import render_block, render_screen, show_bytes
from lmsrun.render.prometheus import render_metrics, write_metrics
from lmsrun.watching import _draws

FULL = RankSample(
    3,
    "node-with-a-long-name",
    cpu_percent=1612.4,
    gpu_percent=99.6,
    memory_bytes=int(15.26 * 2**30),
    planned_bytes=int(15.9 * 2**30),
    limit_bytes=16 << 30,
    bytes_out=7 << 40,
    bytes_in=6 << 40,
    swap_bytes_s=2.4e10,
    steps=123456,
    step_s=0.4321,
    drift="2 threads on CPUs 8-11",
    last_line="Epoch 3/10: " + "loss 0.5 " * 20,
)
JOBS = [
    JobSample(4711, "/home/me/train.py --epochs 3", (FULL, RankSample(0, "a", drift=""))),
    JobSample(9, '"we ird/na\\\\me.py"', (RankSample(1, "b", steps=0),)),
]
SLEEPER = "import time; print('asleep', flush=True); time.sleep(600)"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def test_a_block_has_eighty_columns_and_no_control_codes() -> None:
    text = render_block(JOBS, 0.0)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines) and text.replace("\n", "").isprintable()
    assert "job 4711, 2 ranks: /home/me/train.py --epochs 3" in lines[0]
    assert lines[1] == "rank  GPU   CPU memory/plan swapped/s    step  steps binding  last line"
    assert lines[2] == "   3 100% 1612% 15.3G/15.9G     22.4G  432 ms 123456 MOVED    Epoch 3/10: loss ~"
    assert lines[3] == "   0    -     -           -         -       -      - kept"
    assert lines[4] == "rank 3 is not where it was put: 2 threads on CPUs 8-11"
    assert re.fullmatch(r"[-0-9]+ [:0-9]+  no running job of this user on this host", render_block([], 0.0))
    ended = render_block([JobSample(7, "a.py", (replace(FULL, drift=None, has_ended=True),))], 0.0)
    assert ended.splitlines()[2].split()[3:8] == ["15.3G/15.9G", "-", "-", "123456", "ended"]


def test_a_table_fits_into_eighty_columns() -> None:
    from rich.console import Console

    console = Console(width=80, file=open(os.devnull, "w"), record=True)
    console.print(render_screen(JOBS))
    shown = console.export_text()
    assert all(len(line) <= 80 for line in shown.splitlines())
    for part in ("rank", "15.3G/15.9G", "123456", "MOVED", "kept", "2 threads on CPUs 8-11", "Epoch 3"):
        assert part in shown, shown


@pytest.mark.parametrize("width", [20, 30, 40, 60, 79])
def test_a_narrow_terminal_gets_fewer_columns_and_each_whole(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_screen(JOBS, width))
    shown = console.export_text()
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    heads = next(line for line in shown.splitlines() if line.startswith("rank")).replace("last line", "")
    whole = {"rank", "GPU", "CPU", "memory/plan", "swapped/s", "step", "steps", "binding"}
    assert set(heads.split()) <= whole and {"rank", "memory/plan"} <= set(heads.split())


@pytest.mark.parametrize("height", [11, 24, 50])
def test_a_low_terminal_counts_the_ranks_that_it_has_no_room_for(height: int) -> None:
    from rich.console import Console

    jobs = [
        JobSample(5, "a.py", (*(RankSample(rank, "a") for rank in range(30)), replace(FULL, rank=30))),
        JobSample(6, "b.py", (RankSample(0, "b"), RankSample(1, "b"))),
    ]
    console = Console(width=80, height=height, file=io.StringIO(), record=True)
    console.print(render_screen(jobs, 80, height))
    lines = console.export_text().splitlines()
    assert len(lines) == min(height, 38)
    assert [line for line in lines if line.startswith("job")] == [
        "job 5, 31 ranks: a.py",
        "job 6, 2 ranks: b.py",
    ]
    assert "rank 30 is not where it was put: 2 threads on CPUs 8-11" in lines
    shown = sum(bool(re.match(r" *[0-9]+ ", line)) for line in lines if " ranks more" not in line)
    said = [f"{33 - shown} ranks more; `lmsrun top --once` shows all"] if shown < 33 else []
    assert [line for line in lines if "more" in line] == said and shown >= 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999, "999"), (1000, "1.0K"), (1 << 20, "1.0M"), (17.1 * 2**20, "17.1M"), (3 << 40, "3.0T")],
)
def test_bytes_are_short(value: float, shown: str) -> None:
    assert show_bytes(value) == shown


def test_metrics_are_what_prometheus_reads(tmp_path: Path) -> None:
    path = tmp_path / "lmsrun.prom"
    write_metrics(path, JOBS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["lmsrun.prom"]
    assert path.stat().st_mode & 0o777 == 0o644
    families = {family.name: family for family in text_string_to_metric_families(path.read_text())}
    assert families["lmsrun_jobs"].samples[0].value == 2
    steps = families["lmsrun_rank_steps"]
    assert steps.type == "counter"
    assert {tuple(sorted(sample.labels.items())): sample.value for sample in steps.samples} == {
        (("host", FULL.host), ("job", "4711"), ("program", "train"), ("rank", "3")): 123456,
        (("host", "b"), ("job", "9"), ("program", "na-me"), ("rank", "1")): 0,
    }
    kept = families["lmsrun_rank_binding_kept"].samples
    assert [sample.value for sample in kept] == [0, 1]
    assert families["lmsrun_rank_gpu_ratio"].samples[0].value == pytest.approx(0.996)
    assert render_metrics([]).splitlines()[-1] == "lmsrun_jobs 0"


@pytest.mark.parametrize(
    ("title", "label"),
    [
        ("-m pkg.train --lr 1", "train"),
        ("'/home/a b/train.py' x", "train"),
        ("'open", "unknown"),
        ("bash -c 'a title that was cut", "bash"),
        ("-m", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_label_is_the_program_s_own_name(title: str, label: str) -> None:
    assert f'program="{label}"' in render_metrics([JobSample(1, title, (FULL,))])


def test_no_table_is_drawn_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert not _draws(LaunchOptions(live=True))


def test_no_table_is_drawn_where_a_terminal_can_only_print(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(ours, "rb"), open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        for kind, draws in (("xterm", True), ("dumb", False)):
            monkeypatch.setenv("TERM", kind)
            assert _draws(LaunchOptions(live=True)) is draws


def test_metrics_that_cannot_be_emptied_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named as the user did."""
    monkeypatch.chdir(tmp_path)
    Metrics("gone/m.prom").end()
    assert capsys.readouterr().err.startswith("lmsrun: cannot write gone/m.prom: ")
    (tmp_path / "file").touch()
    Metrics("file/m.prom").end()
    assert capsys.readouterr().err.startswith("lmsrun: cannot write file/m.prom: ")


def test_metrics_that_cannot_be_written_are_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folder" / "m.prom"
    metrics = Metrics(str(file))
    for is_there in (False, False, True, False):
        file.parent.mkdir() if is_there else shutil.rmtree(file.parent, ignore_errors=True)
        metrics.keep([])
    metrics.end()
    said = f"lmsrun: cannot write {file}: No such file or directory\n"
    assert capsys.readouterr().err == said * 2
    file.parent.mkdir()
    monkeypatch.setattr("time.sleep", lambda _: shutil.rmtree(file.parent))
    assert main(["top", "--once", "-q", "--metrics", str(file)], {"TMPDIR": str(tmp_path)}) == 1
    assert capsys.readouterr().err == said


def test_metrics_follow_no_link_and_leave_no_draft(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "metrics"
    victim.write_text("kept")
    folder.mkdir()
    (folder / f".a.prom.{os.getpid()}").symlink_to(victim)
    write_metrics(folder / "a.prom", JOBS)
    assert victim.read_text() == "kept"
    (folder / "b.prom").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_metrics(folder / "b.prom", JOBS)
    assert {path.name for path in folder.iterdir()} == {"a.prom", "b.prom", f".a.prom.{os.getpid()}"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["top", "x"], "lmsrun: top: found 'x'; needed nothing, or the PID of a lmsrun"),
        (["top", "-q"], "-q has top print nothing; needed --metrics FILE"),
        (["top", "1", "2"], "found '1 2'; needed nothing, or the PID"),
        (["top", "1"], "process 1 is no running lmsrun of this user"),
        (["top", "9" * 5000], "9'; needed nothing, or the PID of a lmsrun"),
        (["top", "--period", "0"], "--period is '0'; needed a number from 0.5"),
        (["top", "--metrics", "no/such.prom"], "--metrics no/such.prom: there is no folder no"),
        (
            ["run", "-np", "1", "--metrics", "no/such.prom", "true"],
            "--metrics no/such.prom: there is no folder no",
        ),
    ],
)
def test_mistakes_cost_one_line(
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 2)  # tests in the background may be children of process 1
    assert main(argv, {"PATH": "/bin:/usr/bin", "TMPDIR": str(tmp_path)}) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def top(folder: Path, *words: str) -> str:
    environ = {**os.environ, "TMPDIR": str(folder)}
    argv = [*LMSRUN, "top", "--period", "0.5", *words]
    done = subprocess.run(
        argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_log_says_once_that_there_is_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    with _log(LaunchOptions()) as show:
        for jobs in ([], [], JOBS, [], []):
            show(jobs)
    told = capsys.readouterr().out
    assert told.count("no running job") == 2 and told.count("job 4711") == 1


@pytest.mark.ranks
def test_top_shows_a_job_and_ends_with_it(start: JobStarter, tmp_path: Path) -> None:
    job = start("python3", "-c", SLEEPER, options=("--output-dir", "out", "--receipt-timeout", "0"))
    wait_until(lambda: len(list(tmp_path.glob("lmsrun-*/rank-*.start.json"))) == 2, "the ranks run", 60)
    wait_until(lambda: top(tmp_path, "--once", str(job.process.pid)).count("asleep") == 2, "their lines", 60)
    block = top(tmp_path, "--once", "--metrics", "m.prom")
    assert f"job {job.process.pid}, 2 ranks: python3 -c" in block
    assert len(re.findall(r"^ +[01] +- +0% .*kept +asleep$", block, re.M)) == 2, block
    assert 'rank="1"' in (tmp_path / "m.prom").read_text()
    argv = [*LMSRUN, "top", "--period", "0.5", str(job.process.pid)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None and "job" in follower.stdout.readline()
        job.signal(signal.SIGTERM)
        assert job.finish() == 143
        assert follower.wait(300) == 0
    job.assert_nothing_left()


@pytest.mark.ranks
def test_top_finds_a_job_whose_temporary_folder_is_another(start: JobStarter, tmp_path: Path) -> None:
    """Batch systems give each job one of its own."""
    (tmp_path / "job").mkdir()
    (tmp_path / "here").mkdir()
    job = start("python3", "-c", SLEEPER, np=1, environ={"TMPDIR": str(tmp_path / "job")})
    wait_until(lambda: len(list(tmp_path.glob("job/lmsrun-*/rank-*.start.json"))) == 1, "the rank runs", 60)
    for folder in (tmp_path / "here", tmp_path / "here" / ".." / "job"):
        assert top(folder, "--once").count(f"job {job.process.pid}, 1 rank: python3") == 1
    other_board = top(tmp_path / "here", "--once", "--jobs-dir", str(tmp_path / "here"))
    assert f"job {job.process.pid}," not in other_board, "only its note says where it is"
    job.signal(signal.SIGTERM)
    assert job.finish() == 143


@pytest.mark.ranks
def test_a_file_that_the_run_does_not_read_does_not_hide_its_table(start: JobStarter, tmp_path: Path) -> None:
    (tmp_path / "lmsrun.toml").write_text("nonsense = 1")
    (tmp_path / "other.toml").write_text("")
    told = ("--config", "other.toml", "--metrics", "m.prom", "--period", "0.5")
    job = start("python3", "-c", SLEEPER, np=1, options=told)
    metrics = tmp_path / "m.prom"
    wait_until(lambda: metrics.exists() and 'rank="0"' in metrics.read_text(), "metrics", 60)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert b"nonsense" not in job.stderr


@pytest.mark.ranks
def test_metrics_are_kept_while_a_job_runs_and_say_its_end(start: JobStarter, tmp_path: Path) -> None:
    job = start("python3", "-c", SLEEPER, options=("--metrics", "m.prom", "--period", "0.5"))
    metrics = tmp_path / "m.prom"
    wait_until(lambda: metrics.exists() and 'rank="1"' in metrics.read_text(), "metrics of both ranks", 60)
    job.signal(signal.SIGTERM)
    assert job.finish() == 143
    assert metrics.read_text().splitlines()[-1] == "lmsrun_jobs 0"
    assert b"job " not in job.stderr
    job.assert_nothing_left()


@pytest.mark.ranks
def test_a_job_that_ends_at_once_leaves_its_metrics_too(start: JobStarter, tmp_path: Path) -> None:
    """It has ended before whoever looks at it has started."""
    job = start("true", np=1, options=("--numa", "off", "--no-lms", "--metrics", "m.prom"))
    assert job.finish() == 0, job.stderr
    assert "lmsrun_jobs 0" in (tmp_path / "m.prom").read_text()


def test_live_in_a_log_is_blocks_beside_the_output(start: JobStarter, tmp_path: Path) -> None:
    program = (
        "import os, pathlib, time; print('said', flush=True)\n"
        "while not pathlib.Path('stop').exists(): time.sleep(0.01)"
    )
    job = start("python3", "-c", program, options=("--live", "--period", "0.5"))
    assert job.process.stderr is not None
    seen = b""
    while b"2 ranks: python3 -c" not in seen or b"\n   1 " not in seen:
        seen += os.read(job.process.stderr.fileno(), 4096)
    (tmp_path / "stop").touch()
    assert job.finish() == 0
    assert job.stdout.count(b"said") == 2
    assert b"\x1b" not in seen + job.stderr


def start_live(
    folder: Path, ours: int, theirs: int, program: str, *options: str
) -> "subprocess.Popen[bytes]":
    """Start a job that a terminal watches, and wait until its table is drawn there."""
    command = [*LMSRUN, "-np", "1", "--live", "--period", "0.5", "--output-dir", "out", *options]
    job = subprocess.Popen(
        [*command, "python3", "-c", program],
        env={**os.environ, "TMPDIR": str(folder), "TERM": "xterm"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    seen = b""
    while b"last line" not in seen:
        seen += os.read(ours, 65536)
    return job


@pytest.mark.ranks
def test_a_terminal_that_is_closed_does_not_cost_the_exit_code(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    program = "import pathlib, time\nwhile not pathlib.Path('stop').exists(): time.sleep(0.01)"
    job = start_live(tmp_path, ours, theirs, program)
    os.close(theirs)
    os.close(ours)
    (tmp_path / "stop").touch()
    assert job.wait(60) == 0
    receipts = json.loads((tmp_path / "out" / "latest" / "receipts.json").read_text())
    assert receipts["exit_code"] == 0


@pytest.mark.ranks
def test_a_terminal_that_takes_nothing_does_not_keep_a_job_that_was_told_to_end(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    job = start_live(tmp_path, ours, theirs, SLEEPER, "--metrics", "m.prom")
    os.write(ours, b"\x13")  # ^S
    time.sleep(1)
    job.terminate()
    try:
        assert job.wait(30) == 143
    finally:
        os.close(ours)
        os.close(theirs)
    assert "lmsrun: ended by SIGTERM" in (tmp_path / "out" / "latest" / "console.log").read_text()
    assert (tmp_path / "m.prom").read_text().splitlines()[-1] == "lmsrun_jobs 0"


@pytest.mark.ranks
def test_live_takes_a_terminal_and_gives_it_back(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [*LMSRUN, "-np", "2", "--oversubscribe", "--live", "--period", "0.5"]
    refused = subprocess.run(
        [*command, "true"], env=environ, cwd=tmp_path, stderr=theirs, stdin=subprocess.DEVNULL, check=False
    )
    assert refused.returncode == 2
    program = (
        "import pathlib, sys, time; print('word', flush=True); print('woe', file=sys.stderr)\n"
        "while not pathlib.Path('stop').exists(): time.sleep(0.01)\n"
        "sys.exit(5)"
    )
    job = subprocess.Popen(
        [*command, "--output-dir", "out", "python3", "-c", program],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # nobody holds the other end any more
            break
        said = [path.read_text() for path in (tmp_path / "out").glob("latest/rank-*.stdout")]
        if b"last line" in seen and said == ["word\n"] * 2:
            (tmp_path / "stop").touch()
    os.close(ours)
    assert job.wait() == 5
    shown = seen.decode()
    assert "needed a folder for that: --output-dir DIR" in shown.partition("output goes to")[0]
    table = shown.partition("output goes to")[2]
    assert "\x1b[" in table and "last line" in table
    words = table[table.rindex("lmsrun: where the ranks run") :]
    assert re.search(r"\r?\n0 +localhost .* yes\r?\n1 +localhost .* yes\r?\n", words), "the whole table"
    assert re.search(r"lmsrun: the last lines of rank [01]:\r?\n +woe", words)
    assert re.search(r"lmsrun: rank [01] on localhost \(no GPU\) exited with code 5", words)
    assert "[0] word" not in table
    assert "[0] word" in (tmp_path / "out" / "latest" / "console.log").read_text()


@pytest.mark.ranks
def test_looking_costs_one_percent_of_a_core_at_most(start: JobStarter, tmp_path: Path) -> None:
    start("python3", "-c", SLEEPER, np=4, options=("--numa", "off"))
    wait_until(lambda: len(list(tmp_path.glob("lmsrun-*/rank-*.start.json"))) == 4, "the ranks run", 60)
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [*LMSRUN, "top", "--period", "0.5"]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None

        def seconds() -> float:
            fields = Path(f"/proc/{follower.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        def read_blocks(count: int) -> None:
            for _ in range(6 * count):
                assert follower.stdout is not None and follower.stdout.readline()

        read_blocks(2)
        began, used = time.monotonic(), seconds()
        read_blocks(6)
        # The clock of the kernel has steps of 10 ms.
        assert seconds() - used <= 0.01 * (time.monotonic() - began) + 0.02
        follower.send_signal(signal.SIGINT)
        assert follower.wait(300) == 0
