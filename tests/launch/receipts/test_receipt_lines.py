"""Receipts that travel as lines of stderr: taken out whole, whatever the chunks, and never trusted."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.receipts.file import MARK, MAX_LINE_BYTES, format_lines
from launch.receipts.judge import read_first_failure, read_receipts
from launch.receipts.lines import ReceiptSieve

JOB = "0123456789abcdef"


def sift(folder: Path, *chunks: bytes) -> bytes:
    sieve = ReceiptSieve(JOB, folder)
    return b"".join(map(sieve.feed, chunks)) + sieve.finish()


@pytest.mark.parametrize("tag", [b"", b"[1,0]<stderr>:", b"[0] ", b"0: ", b"[0]<stderr>:"])
def test_a_receipt_is_taken_out_with_its_tag(tmp_path: Path, tag: bytes) -> None:
    line = tag + format_lines(JOB, 3, "start", {"rank": 3, "cpus": "0-3"})
    assert sift(tmp_path, b"before\n" + line + b"after\n") == b"before\nafter\n"
    assert read_receipts(tmp_path, [3])[3]["start"] == {"rank": 3, "cpus": "0-3"}


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(1, 200), max_size=6))
def test_chunks_do_not_matter(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    folder = tmp_path_factory.mktemp("receipts")
    stream = (
        b"one\r50%\r"
        + format_lines(JOB, 0, "init", {"rank": 0})
        + b"\x1etwo\n"
        + format_lines(JOB, 1, "init", {})
    )
    chunks, rest = [], stream
    for cut in cuts:
        chunks.append(rest[:cut])
        rest = rest[cut:]
    assert sift(folder, *chunks, rest) == b"one\r50%\r\x1etwo\n"
    assert set(read_receipts(folder, [0, 1])[1]) == {"init"}


@pytest.mark.parametrize(
    "line",
    [
        format_lines("ffffffffffffffff", 0, "start", {}),
        MARK + f"{JOB} 0 ../../x 0/1 {{}}\n".encode(),
        MARK + f"{JOB} -1 start 0/1 {{}}\n".encode(),
        MARK + f"{JOB} 999999999999 start 0/1 {{}}\n".encode(),
        MARK + f"{JOB} 0 start 0/1\n".encode(),
        MARK + f"{JOB} 0 start -1/1 {{}}\n".encode(),
        MARK + f"{JOB} 0 start {{}} {{}}\n".encode(),
        MARK + b"\n",
        MARK + f"{JOB} 0 start 0/1 ".encode() + b"x" * MAX_LINE_BYTES + b"\n",
        MARK + b"no end of line",
    ],
)
def test_what_is_no_receipt_of_this_job_is_output(tmp_path: Path, line: bytes) -> None:
    assert sift(tmp_path, b"a\n", line) == b"a\n" + line
    assert not list(tmp_path.iterdir())


def test_long_receipts_of_several_ranks_arrive_in_mixed_parts(tmp_path: Path) -> None:
    texts = ["".join(map(str, range(rank, 900))) for rank in (0, 1)]
    lines = [format_lines(JOB, rank, "start", {"text": texts[rank]}).splitlines(True) for rank in (0, 1)]
    assert len(lines[0]) == len(lines[1]) == 5
    stream = b"".join(first + b"output\n" + b"[1] " + second for first, second in zip(*lines, strict=True))
    assert sift(tmp_path, stream) == b"output\n" * 5
    found = read_receipts(tmp_path, [0, 1])
    assert [found[rank]["start"]["text"] for rank in (0, 1)] == texts


@pytest.mark.parametrize("place", ["1/1", "0/0", "0/999999", "7/3", "0/2"])
def test_parts_that_never_become_a_receipt_are_dropped(tmp_path: Path, place: str) -> None:
    line = MARK + f"{JOB} 0 start {place} {{}}\n".encode()
    assert sift(tmp_path, line * 3) == b""
    assert not list(tmp_path.iterdir())


def test_the_first_of_a_rank_and_stage_wins(tmp_path: Path) -> None:
    first, second = (format_lines(JOB, 0, "start", {"n": number}) for number in (1, 2))
    assert sift(tmp_path, first, second) == b""
    assert read_receipts(tmp_path, [0])[0]["start"] == {"n": 1}


def test_the_first_failure_is_the_one_that_arrived_first(tmp_path: Path) -> None:
    assert read_first_failure(tmp_path) is None
    for rank, code, how in ((5, 7, "exited with code 7"), (1, 143, "was killed by SIGTERM (signal 15)")):
        content = {"rank": rank, "host": "h\x1b[31m", "code": code, "how": how}
        assert sift(tmp_path, format_lines(JOB, rank, "end", content)) == b""
    (tmp_path / "rank-0.end.json").write_text(json.dumps({"rank": 0, "code": 999}))
    failure = read_first_failure(tmp_path)
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.how) == (5, 7, "exited with code 7")
    assert failure.host == "h?[31m"
