"""Answers of hosts on their way home: whole in spite of what launchers do, and never more than an answer."""

import base64
import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import SPECS, machine

from launch.model.busy import GpuUse
from launch.preflight.occupancy import Occupancy
from launch.preflight.report import (
    MARK,
    MAX_ANSWER_BYTES,
    AnswerReader,
    build_answer,
    pack_answer,
    parse_answer,
    write_lines,
)

NONCE = "00c0ffee00c0ffee"
VERSIONS = {"Python": "3.11", "lmsrun": "0.1.0", "TensorFlow": "2.21.0", "Horovod": None}
BUSY = Occupancy(1.5, 1, 4, (GpuUse("0000:04:00.0", 3 << 30, 2),))


def answer_of(name: str = "dgx", **changes: object) -> dict[str, object]:
    model = machine(SPECS[name])
    return {**build_answer(model, VERSIONS, BUSY, ["n1", "n1.example.org"], True), **changes}


def read(stream: bytes, hosts: int = 2, chunk: int = 4096) -> AnswerReader:
    reader = AnswerReader(NONCE, hosts)
    for start in range(0, len(stream), chunk):
        reader.feed(stream[start : start + chunk])
    return reader


@pytest.mark.parametrize("name", sorted(SPECS))
def test_an_answer_comes_back_as_it_was(name: str) -> None:
    lines = write_lines(NONCE, "own", 1, pack_answer(answer_of(name)))
    report = parse_answer("b", read(lines).packed()[1])
    assert report.machine == machine(SPECS[name])
    assert (report.host, report.versions, report.occupancy) == ("b", VERSIONS, BUSY)
    assert (report.names, report.finds_itself, report.trouble) == (("n1", "n1.example.org"), True, None)
    assert max(map(len, lines.split(b"\n"))) < 1000, "srun carries no longer lines in one piece"


@settings(deadline=None, max_examples=30)  # A busy machine is no error.
@given(st.integers(1, 5000), st.randoms())
def test_lines_arrive_in_any_order_and_any_pieces_between_anything(chunk: int, chance: random.Random) -> None:
    contents = {rank: pack_answer(answer_of("ac922", salt=chance.random())) for rank in range(3)}
    lines = [
        b"0: " * chance.randint(0, 1) + b"no newline" * chance.randint(0, 1) + line + b"\n"
        for rank, content in contents.items()
        for line in write_lines(NONCE, "own", rank, content).splitlines()
    ]
    lines += [b"Welcome to this host\n", MARK + b"another own 0 0/1 AAAA\n", b"\xff\x00\n", MARK + b"\n"] * 3
    chance.shuffle(lines)
    assert read(b"".join(lines), 3, chunk).packed() == contents


@pytest.mark.parametrize(
    "line",
    [
        b"another0nonce000 own 0 0/1 AAAA",
        NONCE.encode() + b" own 7 0/1 AAAA",
        NONCE.encode() + b" own -1 0/1 AAAA",
        NONCE.encode() + b" own 0 1/1 AAAA",
        NONCE.encode() + b" own 0 0/9999 AAAA",
        NONCE.encode() + b" own 0 0/1 AAA",
        NONCE.encode() + b" own 0 0/1 AA;A",
        NONCE.encode() + b" pickle 0 0/1 AAAA",
        NONCE.encode() + b" own 0 0/0 ",
        NONCE.encode() + b" own 0 0/1 " + b"AAAA" * 1000,
    ],
)
def test_what_only_looks_like_an_answer_is_none(line: bytes) -> None:
    assert read(MARK + line + b"\n").packed() == {}


def test_ten_megabytes_of_noise_are_passed_over_and_not_kept() -> None:
    reader = AnswerReader(NONCE, 1)
    for _ in range(160):
        reader.feed(b"\x1elmsrun-host " * 5000)
    assert len(reader._rest) <= 1000
    reader.feed(b"\n" + write_lines(NONCE, "own", 0, b"x"))
    assert reader.packed() == {0: b"x"}


def test_what_mpi_brought_comes_first() -> None:
    own, gathered = write_lines(NONCE, "own", 0, b"own"), write_lines(NONCE, "gathered", 0, b"gathered")
    reader = read(own + write_lines(NONCE, "own", 1, b"other") + gathered)
    assert reader.packed() == {0: b"gathered", 1: b"other"}
    assert not reader.gathered, "only one of two"
    reader.feed(write_lines(NONCE, "gathered", 1, b"other"))
    assert reader.gathered


def test_a_host_says_why_it_has_no_mpi() -> None:
    reader = read(write_lines(NONCE, "no-mpi", 1, b"mpi4py is \x1b[31mbroken"))
    assert reader.without_mpi == ("mpi4py is ?[31mbroken",)
    assert reader.packed() == {}


def packed(text: str) -> bytes:
    return zlib.compress(text.encode())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cut off"),
        (b"no zlib", "damaged"),
        (zlib.compress(b"{}" * 5000)[:-9], "cut off"),
        (zlib.compress(b" " * (MAX_ANSWER_BYTES + 1)), "larger than 4 MiB"),
        (packed("["), "damaged"),
        (packed("[" * 100_000), "damaged"),
        (packed("[]"), "damaged"),
        (packed("{}"), "damaged"),
        (packed(json.dumps(answer_of(topology={"schema": "x"}))), "topology is damaged"),
        (packed(json.dumps(answer_of(versions=[]))), "damaged"),
        (packed(json.dumps(answer_of(load="high"))), "damaged"),
        (packed(json.dumps(answer_of(load=10**400))), "damaged"),
        (packed(json.dumps(answer_of(jobs=float("inf")))), "damaged"),
        (packed(json.dumps(answer_of(ranks=10**400))), "damaged"),
        (packed(json.dumps(answer_of(gpus=[[1]]))), "damaged"),
        (packed(json.dumps(answer_of(gpus=[["0000:04:00.0", 10**400, 1]]))), "damaged"),
        (packed(json.dumps(answer_of(names=None))), "damaged"),
        (packed(json.dumps({"trouble": "no CPU\n\x1b[2J" + "!" * 999})), "no CPU??[2J!!"),
    ],
)
def test_a_damaged_answer_is_a_trouble_of_one_short_line(content: bytes, said: str) -> None:
    report = parse_answer("b", content)
    assert report.machine is None and report.trouble is not None
    assert said in report.trouble and report.trouble.isprintable() and len(report.trouble) < 300


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_a_trouble(content: bytes) -> None:
    for data in (content, zlib.compress(content)):
        assert parse_answer("b", data).trouble
    read(MARK + NONCE.encode() + b" own 0 0/1 " + base64.b64encode(content) + b"\n")


def test_a_machine_of_more_memory_than_there_can_be_is_damaged() -> None:
    answer: Any = answer_of()
    answer["topology"]["numa_nodes"][0]["memory_bytes"] = 10**400
    report = parse_answer("b", packed(json.dumps(answer)))
    assert (
        report.trouble is not None
        and "its topology is damaged: numa_nodes[0]: memory_bytes is" in report.trouble
    )


def test_hostile_versions_and_names_do_not_reach_a_terminal() -> None:
    hostile = answer_of(versions={"lmsrun": "1\x1b[2J", "TensorFlow": "9" * 500}, names=["a\x1b[2J"])
    report = parse_answer("b", packed(json.dumps(hostile)))
    assert report.versions["lmsrun"] is None and len(report.versions["TensorFlow"] or "") == 40
    assert report.names == ("a?[2J",)
