"""``TF_CONFIG``: who the workers are, for ranks on one host and on several."""

import json

import pytest

from launch.model.errors import UsageError
from launch.model.tf_cluster import build_tf_env, format_hosts, name_workers, read_hosts


def test_each_rank_has_a_port_of_its_own_on_its_host() -> None:
    workers = name_workers([("a", 2), ("fe80::1", 1)], 2000)
    assert workers == ("a:2000", "a:2001", "[fe80::1]:2000")
    told = json.loads(build_tf_env(workers, 2)["TF_CONFIG"])
    assert told == {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": 2}}


def test_ports_that_do_not_reach_are_refused() -> None:
    assert name_workers([("a", 2)], 65534)[-1] == "a:65535"
    with pytest.raises(UsageError, match="needed a --tf-port of at most 65534"):
        name_workers([("a", 2)], 65535)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ([("localhost", 2)], "localhost=2"),
        ([("localhost", 1), ("b", 1)], "me=1,b=1"),
        ([("fe80::1", 2), ("b", 1)], "fe80::1=2,b=1"),
    ],
)
def test_hosts_survive_the_way_to_the_ranks(shares: list[tuple[str, int]], text: str) -> None:
    assert format_hosts(shares, "me") == text
    world = sum(ranks for _, ranks in shares)
    assert [ranks for _, ranks in read_hosts({"LMSRUN_TF_HOSTS": text}, 1, world)] == [
        ranks for _, ranks in shares
    ]


def test_a_job_of_one_host_needs_no_list() -> None:
    assert read_hosts({}, 3, 3) == (("localhost", 3),)


@pytest.mark.parametrize("text", ["", "a=2", "a=3,b=x", "=4", "a,b", "a=-1,b=5"])
def test_a_list_that_is_not_the_jobs_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="LMSRUN_TF_HOSTS"):
        read_hosts({"LMSRUN_TF_HOSTS": text}, 2, 4)
