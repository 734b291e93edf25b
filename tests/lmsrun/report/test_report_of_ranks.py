"""Two real ranks under a memory limit, and the page that is made of what they leave."""

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from html_pages import assert_harmless
from jobs import ROOT, JobStarter

PROGRAM = Path(__file__).with_name("two_ranks.py")
LIMITED = {
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "48",
    "HOROVOD_FUSION_THRESHOLD": "65536",
}
pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    pytest.importorskip("horovod")
    starter = JobStarter(tmp_path)
    yield starter
    starter.close()


def test_a_job_leaves_a_page_of_what_it_did(start: JobStarter, tmp_path: Path) -> None:
    page, own = tmp_path / "page.html", tmp_path / "own.html"
    options = ("--output-dir", tmp_path / "out", "--report", page)
    job = start(PROGRAM, own, options=options, environ=LIMITED)
    assert job.finish(180) == 0, job.stderr.decode()
    folder = tmp_path / "out" / "latest"
    names = {path.name for path in folder.iterdir()}
    assert {"job.json", "receipts.json", "rank-0.lms.json", "rank-1.lms.json"} <= names
    report = json.loads((folder / "rank-1.lms.json").read_text())
    assert report["rank"] == 1 and report["step_count"] == 4
    assert {row[4] for row in report["step"]["tensors"]} >= {"kept", "swapped"}
    assert all(peak is not None for _, _, peak in report["steps"])
    written = page.read_text()
    assert_harmless(written)
    for said in (
        "two_ranks, 2 ranks",
        "of 48.0 MiB",
        "The job ended well. All 2 ranks verified where they were planned.",
        "rank 0, CPUs ",
        "float32 4096x256",
        "out after ",
        "you are here",
        "is the slowest",
        "--report",
    ):
        assert said in written, said
    assert_harmless(own.read_text())
    assert "float32 4096x256" in own.read_text()
    job.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_job_is_set_up_leaves_no_record_of_it(
    start: JobStarter, number: signal.Signals
) -> None:
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv.pop(1)); number = int(sys.argv.pop(1))\n"
        "from launch.supervise import supervisor; from lmsrun import cli\n"
        "signal.signal(number, signal.SIG_DFL)\n"
        "supervisor.run_job = lambda *_: os.kill(os.getpid(), number)\n"
        "sys.exit(cli.main(sys.argv[1:], os.environ))"
    )
    command = (sys.executable, "-c", script, str(ROOT), str(int(number)), "run")
    job = start("true", np=1, options=("--report", "page.html"), command=command)
    assert job.finish() == 128 + number
    job.assert_nothing_left()


def test_a_report_needs_no_kept_output_and_tells_of_a_failure(start: JobStarter, tmp_path: Path) -> None:
    program = tmp_path / "fail.py"
    program.write_text("import sys\nsys.exit(3)\n")
    job = start(program, options=("--report", "page.html"))
    assert job.finish() == 3
    assert b"lmsrun: wrote page.html" in job.stderr
    written = (tmp_path / "page.html").read_text()
    cause = r"The job failed with code 3: rank [01] on localhost \(no GPU\) exited with code 3"
    assert re.search(cause, written) and "Report of fail, 2 ranks" in written
    assert "no rank left a report" in written
    assert not list(tmp_path.glob("lmsrun-report-*"))
    job.assert_nothing_left()
