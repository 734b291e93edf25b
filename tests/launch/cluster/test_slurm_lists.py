"""Slurm's compressed lists of hosts and counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.hosts import (
    is_host_name,
)
from launch.cluster.slurm_lists import MAX_HOSTS, find_count, parse_counts, parse_hostlist
from launch.model.errors import LmsrunError, UsageError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", "login"),
        ("node[01-03,7]", "node01 node02 node03 node7"),
        ("a[1-2]b[3,07],login", "a1b3 a1b07 a2b3 a2b07 login"),
        ("r[0-1]-n[8-10].x", "r0-n8.x r0-n9.x r0-n10.x r1-n8.x r1-n9.x r1-n10.x"),
        ("n[098-101]", "n098 n099 n100 n101"),
    ],
)
def test_slurm_host_lists(text: str, names: str) -> None:
    assert parse_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "n[1-",
        "n1]",
        "n[[1]]",
        "n[]",
        "n[3-1]",
        "n[a-b]",
        "n[1-2",
        "n[0-999999999]",
        "n[0-9999][0-9999]",
        "n[1-3],$(id)",
        "n[1,,2]",
        f"n[0-{MAX_HOSTS}]",
        "n[1-99999999999999999999]",
    ],
)
def test_a_wrong_host_list_of_slurm(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hostlist(text)
    assert "\n" not in str(caught.value)


def test_slurm_counts() -> None:
    assert parse_counts("4(x2),3", 3, "X") == (4, 4, 3)
    for text in ("4", "4(x3)", "4(x2),3,1", "a", "4(x)", "", "4(x999999999)"):
        with pytest.raises(UsageError):
            parse_counts(text, 2, "X")


def test_slurms_count_of_one_host() -> None:
    assert [find_count("4(x2),3", place, "X") for place in range(3)] == [4, 4, 3]
    assert find_count("1," * 9 + "2(x999999999)", 10**8, "X") == 2, "nothing is written out"
    with pytest.raises(UsageError, match="X is '4', which counts 1 host; needed 3"):
        find_count("4", 2, "X")


@given(st.text(alphabet="n01[]-,x ", max_size=20))
def test_a_host_list_is_read_or_refused(text: str) -> None:
    try:
        names = parse_hostlist(text)
    except LmsrunError:
        return
    assert names and all(is_host_name(name) for name in names)
