"""What an elastic job tells of its ranks: data from outside, shown in one line each."""

import json
from pathlib import Path

from launch.cluster.job import Command
from launch.model.plan import LaunchPlan, RankPlan
from launch.receipts.elastic_moves import describe_move, read_moves, to_object
from launch.receipts.file import format_lines, write_receipt
from launch.receipts.lines import MAX_MOVES, ReceiptSieve
from launch.supervise.children import ForeignLauncher
from launch.supervise.job import JobFiles, JobOptions
from launch.supervise.receipt_watch import ReceiptWatch

WAS = {"rank": 2, "size": 4, "local_rank": 1, "local_size": 2}
MOVED = {
    "rank": 1,
    "size": 3,
    "local_rank": 1,
    "local_size": 3,
    "was": WAS,
    "host": "b",
    "pid": 7,
    "cpus": "2-3",
    "mem_policy": "bind",
    "mem_nodes": "0",
    "verified": True,
    "reasons": [],
    "notes": ["its pages were moved"],
}


def test_a_move_arrives_as_a_file_or_as_a_line_and_is_told_once(tmp_path: Path) -> None:
    write_receipt(tmp_path, 1, "moved.7.1", MOVED)
    sieve = ReceiptSieve("job", tmp_path)
    lines = format_lines("job", 3, "moved.8.0", {"rank": 3, "host": "b", "pid": 8})
    lines += format_lines("job", 3, "moved.8.0/../x", {"rank": 3}) + format_lines("job", 3, "moved.-1.0", {})
    assert sieve.feed(lines).count(b"\n") == 2, "what is no stage stays output"
    (first, moved), (second, joined) = read_moves(tmp_path, set())
    assert moved is not None and joined is not None
    assert describe_move(moved) == (
        "rank 1 on b, number 1 of 3 there is bound anew (it was rank 2, number 1 of 2 there): "
        "CPUs 2-3, memory bind 0, verified (its pages were moved)"
    )
    assert describe_move(joined) == (
        "rank 3 on b joined: CPUs unknown, memory unknown, not verified: nothing was bound"
    )
    assert moved.is_elsewhere and json.loads(json.dumps(to_object(moved)))["was_rank"] == 2
    assert read_moves(tmp_path, {first, second}) == []


def test_a_hostile_move_drives_no_terminal(tmp_path: Path) -> None:
    write_receipt(tmp_path, 1, "moved.7.1", {**MOVED, "host": "\x1b[2J", "notes": ["\x1b]0;x"], "was": 3})
    write_receipt(tmp_path, 1, "moved.7.2", {**MOVED, "rank": "1"})
    (_, move), (damaged, nothing) = read_moves(tmp_path, set())
    assert (damaged, nothing) == ("rank-1.moved.7.2.json", None), "known, so that it is not read again"
    assert move is not None
    assert "\x1b" not in describe_move(move)
    assert move.was_local is None


def test_a_joining_rank_may_have_the_process_number_of_a_first_one_elsewhere(tmp_path: Path) -> None:
    first = RankPlan(0, 0, "a", None, None, frozenset(), "none", frozenset(), None, {}, ("true",))
    plan = LaunchPlan(1, "horovodrun", (first,), ())
    options = JobOptions()
    children = ForeignLauncher(plan, options, Command(("horovodrun",), elastic=True))
    watch = ReceiptWatch(plan, options, children, JobFiles("job", tmp_path, {}, None, (0, 0)), 0.0)
    for rank, host in enumerate("ab"):
        start = {"rank": rank, "host": host, "pid": 7}
        write_receipt(tmp_path, rank, "moved.7.0", start)
        if host == "a":
            write_receipt(tmp_path, rank, "start", start)
    watch.look({})
    (told,) = watch.look_for_moves()
    assert told.startswith("rank 1 on b joined: ")
    assert watch.look_for_moves() == []


def test_a_rank_cannot_fill_the_folder_with_moves(tmp_path: Path) -> None:
    sieve = ReceiptSieve("job", tmp_path)
    for number in range(MAX_MOVES + 5):
        sieve.feed(format_lines("job", 0, f"moved.1.{number}", {}))
    assert sieve.feed(format_lines("job", 0, "init", {"rank": 0})) == b""
    assert len(list(tmp_path.iterdir())) == MAX_MOVES + 1, "what is no move still arrives"
