"""Hosts: every syntax, every way to get it wrong, and the dealing of ranks to slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.hosts import (
    Host,
    HostShare,
    is_host_name,
    is_name_of,
    parse_hostfile,
    parse_hosts,
    parse_nodefile,
    refuse_aliases,
    restrict_hosts,
    share_ranks,
)
from launch.model.errors import PlanError, UsageError

HOSTILE = (
    "a b",
    "a;id",
    "$(id)",
    "`id`",
    "-oProxyCommand=id",
    "--version",
    "a'b",
    'a"b',
    "a\nb",
    "a|b",
    "a&b",
    "../a",
    "a/b",
    "a*",
    "a@b",
    "ä",
    "",
    ".",
    "a:b",
    "fe80::1%$(id)",
    "a" * 300,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4", (Host("a", 4), Host("b", 4))),
        (" a , b:2 ", (Host("a"), Host("b", 2))),
        ("node-1.example.org:1", (Host("node-1.example.org", 1),)),
        ("10.0.0.1:8", (Host("10.0.0.1", 8),)),
        ("::1", (Host("::1"),)),
        ("fe80::1", (Host("fe80::1"),)),
        ("[fe80::1]:2,[fe80::2]", (Host("fe80::1", 2), Host("fe80::2"))),
        ("FE80:0::0001", (Host("fe80::1"),)),
        ("fe80::1%eth0", (Host("fe80::1%eth0"),)),
    ],
)
def test_hosts_of_the_command_line(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("name", "own", "same"),
    [
        ("localhost", "a", True),
        ("LocalHost.", "a", True),
        ("localhost.localdomain", "a", True),
        ("127.0.0.1", "a", True),
        ("127.0.1.1", "a", True),
        ("::1", "a", True),
        ("10.0.0.1", "a", False),
        ("a", "a", True),
        ("A.", "a", True),
        ("a.example.org", "a", True),
        ("a", "a.example.org", True),
        ("a.example.org", "a.example.org.", True),
        ("a.example.net", "a.example.org", False),
        ("b", "a", False),
        ("b", "", False),
    ],
)
def test_names_of_this_host(name: str, own: str, same: bool) -> None:
    assert is_name_of(name, own) is same


@pytest.mark.parametrize(
    "text", ["localhost:2,127.0.0.1:2", "a:1,b:1,localhost:1", "a,a.example.org", "::1,A."]
)
def test_this_host_under_two_names_is_one_line(text: str) -> None:
    with pytest.raises(
        UsageError, match="^--hosts names this host twice, as '.*' and '.*'; give it once"
    ) as caught:
        refuse_aliases(parse_hosts(text), "a", "--hosts")
    assert "\n" not in str(caught.value)


def test_other_hosts_may_be_called_alike() -> None:
    refuse_aliases(parse_hosts("a.example.org,a.example.net,localhosts,b"), "a.example.org", "--hosts")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        (" , ", "names no host"),
        ("a,,b", "'' is not a host name"),
        ("a:0", "zero slots"),
        ("a:-1", "'-1' slots"),
        ("a:x", "'x' slots"),
        ("a:", "'' slots"),
        ("a:99999999999999999999", "at most"),
        ("a,b,A", "twice"),
        ("::1,0:0::1", "twice"),
        ("root@a", "~/.ssh/config"),
    ],
)
def test_a_wrong_host_list_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_hosts(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_name_passes(name: str) -> None:
    assert not is_host_name(name)
    with pytest.raises(UsageError) as caught:
        parse_hostfile(f"{name} slots=2\n" if "\n" not in name and name else "", "hosts.txt")
    assert "\n" not in str(caught.value)


def test_hostfiles_of_every_syntax() -> None:
    text = """
    # the cluster
    a slots=4            # Open MPI, Horovod
    b slots = 2 max_slots =8  # blanks are nothing to Open MPI's parser
    c:3                  # MPICH, Intel MPI
    d
    [fe80::2]:2
    ::1 slots=1
    """
    assert parse_hostfile(text, "hosts.txt") == (
        Host("a", 4),
        Host("b", 2),
        Host("c", 3),
        Host("d"),
        Host("fe80::2", 2),
        Host("::1", 1),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# only this\n", "names no host"),
        ("a slots=4\nb slot\n", "line 2: cannot read 'slot'"),
        ("a 4\n", "line 1: cannot read '4'"),
        ("a slots =\nb\n", "line 1: host 'a' has '' slots"),
        ("a:2 slots=3\n", "its slots twice"),
        ("a slots=0\n", "zero slots"),
        ("a slots=2\n\na slots=2\n", "host 'a' twice"),
        ("a speed=3\n", "cannot read 'speed=3'"),
    ],
)
def test_a_wrong_hostfile_names_file_and_line(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_hostfile(text, "hosts.txt")
    assert str(caught.value).startswith("hosts.txt")


def test_a_nodefile_counts_lines() -> None:
    assert parse_nodefile("a\na\n\nb\na\n", "nodes") == (Host("a", 3), Host("b", 1))
    with pytest.raises(UsageError, match="names no host"):
        parse_nodefile("\n", "nodes")


def test_wanted_hosts_must_be_known() -> None:
    known = (Host("a", 4), Host("b"))
    assert restrict_hosts((Host("B", 2), Host("a")), known, "Slurm job 7") == (Host("b", 2), Host("a", 4))
    with pytest.raises(UsageError, match=r"host 'c' is not in Slurm job 7; it has a, b"):
        restrict_hosts((Host("c"),), known, "Slurm job 7")
    with pytest.raises(UsageError, match="given 5 slots; Slurm job 7 has 4"):
        restrict_hosts((Host("a", 5),), known, "Slurm job 7")


def test_ranks_fill_hosts_in_order() -> None:
    hosts = (Host("a", 4), Host("b", 2))
    assert share_ranks(hosts, None) == (HostShare("a", 0, 4), HostShare("b", 4, 2))
    assert share_ranks(hosts, 3) == (HostShare("a", 0, 3),)
    assert share_ranks(hosts, 5) == (HostShare("a", 0, 4), HostShare("b", 4, 1))
    with pytest.raises(PlanError, match="7 ranks do not fit on 2 hosts with 6 slots; try -np 6"):
        share_ranks(hosts, 7)
    assert share_ranks(hosts, 9, oversubscribe=True) == (HostShare("a", 0, 6), HostShare("b", 6, 3))


@given(
    slots=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    ranks=st.integers(1, 80),
    oversubscribe=st.booleans(),
)
def test_every_rank_is_dealt_once(slots: list[int], ranks: int, oversubscribe: bool) -> None:
    hosts = tuple(Host(f"h{position}", count) for position, count in enumerate(slots))
    if ranks > sum(slots) and not oversubscribe:
        with pytest.raises(PlanError):
            share_ranks(hosts, ranks, oversubscribe)
        return
    shares = share_ranks(hosts, ranks, oversubscribe)
    dealt = [rank for share in shares for rank in range(share.first_rank, share.first_rank + share.ranks)]
    assert dealt == list(range(ranks))
    if ranks <= sum(slots):
        assert all(
            share.ranks <= dict(zip((h.name for h in hosts), slots, strict=True))[share.host]
            for share in shares
        )
