"""``lmsrun report``: what stands on the page of a job, also of one whose folder is damaged."""

import html
import json
import os
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import machines
import pytest
from html_pages import HOSTILE, assert_harmless, hostile, read
from run_folders import LMS_REPORT, rank_entry, receipt_of, write_folder, write_receipts

from launch.model.errors import UsageError
from launch.receipts.running_note import write_running_note
from lms.page.panels import verdict_of
from lms.page.small_charts import draw_policies, draw_steps
from lmsrun.cli import main
from lmsrun.report.page import MOST_BYTES, render_report
from lmsrun.report.record import read_record
from lmsrun.report.recording import _write_page

BEFORE = "peak without changes"


def page_of(folder: Path) -> str:
    return render_report(read_record(folder))


def test_every_panel_is_there(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path / "job"))
    reader = read(page)
    sections = [attrs["id"] for tag, attrs in reader.started if tag == "section"]
    own = [f"r0-{name}" for name in ("step", "peak", "pool", "steps", "policies")]
    assert sections == ["machine", "ranks", *own, "configuration"]
    for said in (
        "Report of train, 2 ranks",
        "Fits: 373.0 MiB of 420.0 MiB",
        "The job ended well. All 2 ranks verified where they were planned.",
        "rank 0 ✓",
        "Rank 1 is the slowest: 1.00 times the fastest.",
        "Drawn is rank 1. 1 other rank planned alike.",
        "lmsrun -np 2 train.py --data &#x27;a b&#x27;",
        "a warning of the plan",
        "3.11.2",
    ):
        assert said in page, said
    assert_harmless(page)


def test_each_figure_says_what_it_is(tmp_path: Path) -> None:
    page = page_of(write_folder(tmp_path / "job"))
    assert page.count('<dd class="means">') == page.count("<dt>") == 6
    assert "Peaks here are the bytes of the tensors" in page
    step = {**LMS_REPORT["step"], "host_variables_bytes": 64 << 20}
    facts = verdict_of({**LMS_REPORT, "step": step})[2]
    assert "its variables on the host already: 64.0 MiB" in dict((one[0], one[2]) for one in facts)[BEFORE]


def test_labels_of_policies_close_together_stay_in_the_drawing() -> None:
    points = [[f"policy {at}", 20 << 20, 1.0 - at / 1000, at == 0] for at in range(9)]
    points.append(["far", 100 << 20, 0.5, False])
    svg = draw_policies({"policies": {"points": points}}, "key")
    rows = sorted(float(y) for y in re.findall(r'<text x="[^"]*" y="([^"]*)"[^>]*>(?:policy|you)', svg))
    assert len(rows) == 9 and rows[0] >= 14
    assert all(later - earlier >= 12 for earlier, later in zip(rows, rows[1:], strict=False))


def test_the_steps_on_the_axis_are_whole_and_named_once() -> None:
    svg = draw_steps({"steps": [[at, 0.1, 1 << 20] for at in range(4)]}, "key")
    assert re.findall(r">step (\d+)<", svg) == ["0", "1", "2", "3"]


def test_what_is_not_as_planned_stands_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machine=machines.machine("single"))
    entries = [rank_entry(rank, "node0", "0-7") for rank in range(2)]
    receipts = [receipt_of(entries[0]), receipt_of(entries[1], verified=False, cpus="0-3")]
    write_receipts(folder, receipts, exit_code=3, exit_codes={"0": 0, "1": 3})
    page = page_of(folder)
    assert 'class="verdict bad"' in page
    said = "<p>The job failed with code 3.</p><p>1 of 2 ranks verified where they were planned.</p>"
    assert said in page
    assert "✗ no: bound elsewhere" in page
    assert "Rank 1 is not as planned: bound elsewhere." in page


def test_the_verdict_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job")
    path = folder / "rank-0.lms.json"  # the other one is slower, and is drawn
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured_peak_bytes": 400 << 20}))
    page = page_of(folder)
    assert "Drawn is rank 1." in page and "Fits: 400.0 MiB of 420.0 MiB" in page


def test_the_command_can_be_typed_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job")
    path = folder / "receipts.json"
    command = ["/opt/lib/lmsrun/__main__.py", "run", "-np", "2", "train.py"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"command": command}))
    assert "<pre>lmsrun run -np 2 train.py" in page_of(folder)


def test_a_page_of_thousands_of_ranks_stays_small(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job")
    path = folder / "receipts.json"
    told = json.loads(path.read_text())
    told["ranks"] = [{**told["ranks"][0], "rank": rank} for rank in range(4096)]
    path.write_text(json.dumps(told))
    for report in folder.glob("rank-*.lms.json"):
        report.unlink()
    page = page_of(folder)
    assert len(page.encode()) < MOST_BYTES and "4096 ranks" in page.replace(",", "")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job")
    (folder / "job.json").unlink()
    (folder / "rank-1.lms.json").unlink()
    page = page_of(folder)
    assert "There is no job.json: plan and machine are unknown." in page
    assert "1 of 2 ranks left no report." in page
    for path in folder.glob("*.lms.json"):
        path.unlink()
    page = page_of(folder)
    assert "What Large Model Support did is unknown: no rank left a report." in page
    write_receipts(folder, [replace(receipt_of(rank_entry(0, "node0", "0")), lms="off")])
    assert "Large Model Support planned nothing here: off." in page_of(folder)
    write_receipts(folder, [], exit_code=None)
    assert "How the job ended is unknown." in page_of(folder)


def test_a_failed_job_names_its_cause_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machine=machines.machine("single"))
    receipts = [receipt_of(rank_entry(rank, "node0", "0-7")) for rank in range(2)]
    line = "rank 1 on node0 (no GPU) was killed by SIGKILL (signal 9)"
    cause = {"line": line, "rank": 1, "last_lines": ["step 7", "Traceback <b>here</b>"]}
    write_receipts(folder, receipts, exit_code=137, exit_codes={"0": 143, "1": 137}, cause=cause)
    page = page_of(folder)
    assert f'role="status"><p>The job failed with code 137: {line}.</p>' in page
    assert "The last lines of rank 1" in page and "step 7\nTraceback &lt;b&gt;here&lt;/b&gt;</pre>" in page
    assert "137 <strong>failed first</strong>" in page
    assert_harmless(page)


def test_a_lack_of_device_memory_is_told_with_a_remedy(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", 1, machine=machines.machine("single"))
    receipt = receipt_of(rank_entry(0, "node0", "0-7"))
    cause = {"line": "rank 0", "rank": 0, "last_lines": ["OOM when allocating tensor", "\t [[{{node a}}]]"]}
    write_receipts(folder, [replace(receipt, lms="off")], exit_code=1, cause=cause)
    page = page_of(folder)
    assert "The device ran out of memory; Large Model Support is off, try it with --lms.</p>" in page
    assert "     [[{{node a}}]]</pre>" in page and "The rank verified where it was planned." in page
    write_receipts(folder, [receipt], exit_code=1, cause=cause)
    assert "ran out of memory with Large Model Support on; try a smaller batch" in page_of(folder)
    of_the_host = "ResourceExhaustedError: LMS store: no room for 4 MiB"
    write_receipts(folder, [receipt], exit_code=1, cause={**cause, "last_lines": [of_the_host]})
    assert "The device ran out" not in page_of(folder)


def test_a_job_that_a_signal_ended_is_told_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", 1)
    receipt = receipt_of(rank_entry(0, "node0", "0-7"))
    write_receipts(folder, [receipt], cause={"line": "ended by SIGTERM", "rank": None, "last_lines": []})
    page = page_of(folder)
    assert "The job was ended by SIGTERM, and its ranks left with 0." in page
    assert "ended well" not in page


def test_a_job_that_has_not_ended_says_whether_it_runs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out" / "job", machine=machines.machine("single"))
    receipts = [receipt_of(rank_entry(rank, "node0", "0-7")) for rank in range(2)]
    write_receipts(folder, receipts, ended=None, exit_code=None, exit_codes=None)
    for path in folder.glob("*.lms.json"):
        path.unlink()
    assert "it still runs on node0, or lmsrun was killed there" in page_of(folder)
    private = tmp_path / "lmsrun-abc"
    private.mkdir(mode=0o700)
    (tmp_path / "out" / "latest").symlink_to("job")
    write_running_note(private, "train.py", tmp_path / "out" / "latest", (), os.getpid())
    page = render_report(read_record(folder, [tmp_path]))
    assert "The job still runs. All 2 ranks verified" in page and "is not known yet" in page
    assert page.count(">it runs</td>") == 2 and ">unknown</td>" not in page
    (folder / "receipts.json").unlink()
    page = render_report(read_record(folder, [tmp_path]))
    assert (
        "The job still runs." in page and "The ranks have not all started: there is no receipts.json." in page
    )


def test_a_damaged_file_is_not_told_as_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machine=machines.machine("single"))
    (folder / "receipts.json").write_text('{"schema": "lmsrun.rec')
    page = page_of(folder)
    assert "Receipts.json cannot be read (it is damaged: no JSON): what the ranks found is unknown." in page
    assert "Whether the ranks run where they were planned is unknown." in page
    (folder / "job.json").unlink()
    with pytest.raises(UsageError, match=r"receipts.json cannot be read .* and there is no job.json; needed"):
        read_record(folder)


def test_the_last_attempt_is_shown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job")
    again = folder / "restart-2"
    again.mkdir()
    write_receipts(again, [receipt_of(rank_entry(0, "node0", "0"))], exit_code=9)
    page = page_of(folder)
    assert "Shown is restart-2, the last attempt." in page and "failed with code 9" in page


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "x"}', "null", '{"schema": "lmsrun.job-plan/1"}', "9" * 5000]
)
@pytest.mark.parametrize("name", ["job.json", "rank-0.lms.json", "receipts.json"])
def test_damaged_files_are_no_error(tmp_path: Path, name: str, text: str) -> None:
    folder = write_folder(tmp_path / "job", machine=machines.machine("single"))
    (folder / name).write_text(text)
    assert_harmless(page_of(folder))


@pytest.mark.parametrize(
    ("text", "said"), [('{"schema": "x"}', "found schema 'x'; needed"), ("{}", "found no schema; needed")]
)
def test_a_file_of_another_program_says_so(tmp_path: Path, text: str, said: str) -> None:
    folder = write_folder(tmp_path / "job")
    (folder / "job.json").write_text(text)
    assert said in html.unescape(page_of(folder))


@pytest.mark.parametrize("text", ["{", '{"schema": "x"}', "{}"])
def test_a_folder_that_tells_nothing_of_a_job_is_one_line(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("job.json", "receipts.json"):
        (folder / name).write_text(text)
    with pytest.raises(UsageError, match="needed the folder of a job"):
        page_of(folder)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job")
    (folder / "job.json").unlink()
    os.mkfifo(folder / "job.json")
    assert "Job.json cannot be read" in page_of(folder)


def test_a_value_of_another_type_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "job")
    receipts = json.loads((folder / "receipts.json").read_text())
    receipts["ranks"][0]["cpus"] = 5
    (folder / "receipts.json").write_text(json.dumps(receipts))
    assert main(["report", str(folder)], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds values that no job of lmsrun writes (AttributeError" in line
    assert main(["report", "--out", str(folder / "receipts.json"), str(folder)], {}) == 2
    assert "is a file of that job; needed another one" in capsys.readouterr().err
    assert json.loads((folder / "receipts.json").read_text()) == receipts


def test_hostile_files_do_no_harm(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", machine=machines.machine("single"))
    for path in folder.iterdir():
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**hostile(content), "schema": content["schema"]}))
    page = page_of(folder)
    assert_harmless(page)
    job = json.loads((write_folder(tmp_path / "two") / "job.json").read_text())
    for entry in job["plan"]["ranks"]:
        entry["host"] = HOSTILE
    job["machines"] = [{**one, "hosts": [HOSTILE]} for one in job["machines"]]
    job["machines"][0]["topology"] |= {"source": HOSTILE, "warnings": [HOSTILE]}
    (tmp_path / "two" / "job.json").write_text(json.dumps({**job, "name": HOSTILE}))
    assert_harmless(page_of(tmp_path / "two"))


def large_report() -> dict[str, object]:
    """The report of a step of thousands of tensors, as large as one becomes."""
    step = dict(LMS_REPORT["step"])
    trip = "out after model/block_{0}/Conv2D, back after gradients/block_{0}/Grad"
    shape, nbytes = "float32 32x56x56x64", 1 << 24
    names = [
        [f"model/block_{at}/operation_{at}:0", "Conv2D", shape, nbytes, "swapped", trip.format(at)]
        for at in range(1000)
    ]
    copies = [[at, at * 1e-3, at * 1e-3 + 5e-4] for at in range(200)]
    stays = [[at, at * 1e-3, at * 1e-3 + 0.1] for at in range(64)]
    curve = [[at * 1e-3, (at % 17) << 24] for at in range(240)]
    side = {**step["after"], "stays": stays, "out": copies, "in": copies, "rest": curve, "seconds": 0.3}
    pool = {**step["pool"], "chunks": [[at << 20, 1 << 20, at] for at in range(200)], "size": 1 << 30}
    changed = {"after": side, "before": side, "tensors": names, "pool": pool}
    return {**LMS_REPORT, "step": {**step, **changed, "at_peak": {"tensors": list(range(120))}}}


def test_sixty_four_ranks_of_large_steps_take_a_second_and_a_megabyte(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "job", 64)
    report = large_report()
    for rank in range(64):
        own = {**report, "rank": rank, "planned_peak_bytes": rank << 20}
        own["step"] = {**report["step"], "ops": 9000 + rank}  # type: ignore[dict-item]
        (folder / f"rank-{rank}.lms.json").write_text(json.dumps(own))
    began_s = time.process_time()
    page = page_of(folder)
    assert time.process_time() - began_s < 4  # 0.8 s on an idle machine
    assert len(page.encode()) <= MOST_BYTES
    assert "have other plans and are not drawn" in page and "4 more hosts are not drawn" in page
    assert "64 ranks verified" in page


def test_the_command_writes_into_the_folder_or_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "job")
    assert main(["report", "job"], {}) == 0
    assert main(["report", "job", "-o", "a.html"], {}) == 0
    assert main(["report", "--out=b.html", "job"], {}) == 0
    assert main(["report", "job", "-o", "-"], {}) == 2
    wrote = "".join(f"lmsrun: wrote {name}\n" for name in ("job/report.html", "a.html", "b.html"))
    assert capsys.readouterr().err == f"{wrote}lmsrun: --out - is no file; needed the name of one\n"
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "needed one run folder, such as out/latest; found none"),
        ("''", "needed one run folder, such as out/latest; found ''"),
        ("a b", "needed one run folder, such as out/latest; found 'a b'"),
        ("none", "none is no folder; needed the folder of a job"),
        (".", ".: there is no receipts.json and there is no job.json; needed the folder of a job"),
        ("job -o none/a.html", "cannot write none/a.html: No such file or directory"),
        ("--np 2 job", "unknown option --np"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "job")
    assert main(["report", *shlex.split(words)], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a link away")
def test_a_link_that_another_user_has_put_there_leads_the_page_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious, page = tmp_path / "precious", tmp_path / "job" / "report.html"
    precious.write_text("precious")
    write_folder(tmp_path / "job")
    page.symlink_to(precious)
    os.chown(page, 12345, 12345, follow_symlinks=False)
    assert main(["report", str(tmp_path / "job")], {}) == 2
    assert capsys.readouterr().err == (
        f"lmsrun: {page} is a link of another user, who may lead it anywhere; "
        "remove it, or choose another file by --out\n"
    )
    assert precious.read_text() == "precious"
    os.chown(page, 0, 0, follow_symlinks=False)
    assert main(["report", str(tmp_path / "job")], {}) == 0
    assert page.is_symlink() and precious.read_text().startswith("<!"), "a link of one's own is followed"


def test_a_hard_link_in_a_run_folder_leads_the_page_nowhere(tmp_path: Path) -> None:
    write_folder(tmp_path / "job")
    page, other = tmp_path / "job" / "report.html", tmp_path / "other"
    page.write_text("before")
    os.link(page, other)
    assert main(["report", str(tmp_path / "job")], {}) == 0
    assert page.read_text().startswith("<!") and other.read_text() == "before"


def test_help_may_follow_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "job", "-h"], {}) == 0
    assert "lmsrun report [--out FILE] RUN-FOLDER" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_refused_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("open('ran', 'w')")
    assert main(["-np", "1", "--report", "none/a.html", "t.py"], {}) == 2
    assert "--report none/a.html: there is no folder none" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_broken_page_does_not_cost_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("lmsrun.report.recording.write_report", fail)
    _write_page(tmp_path, str(tmp_path / "page.html"))
    assert "lmsrun: no report: ZeroDivisionError: float division by zero" in capsys.readouterr().err
