"""The ladder of binding: every step down, what it says, and what strictness makes of it."""

from dataclasses import replace

import machines
import pytest

from launch.model.errors import PlanError
from launch.model.settings import PlanSettings
from launch.plan_host.binding import Binding, BindingTools, bind_ranks, choose_ladder
from launch.plan_host.host_memory import plan_host_memory
from launch.plan_host.placement import place_ranks
from launch.plan_host.planner import HostRequest, plan_host

REFUSED = "set_mempolicy: Operation not permitted"
NO_POLICY = BindingTools(policies=frozenset(), why=REFUSED)
NO_NUMACTL = BindingTools(numactl=False, cpus=False)
NOTHING = BindingTools(False, False, False, frozenset())


def bind(
    tools: BindingTools, name: str = "ac922", **options: object
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    machine, chosen = machines.machine(name), PlanSettings(**options)  # type: ignore[arg-type]
    placed = place_ranks(machine, machine.gpus, 1)
    memory = plan_host_memory(machine, placed.ranks, chosen)
    bindings, warnings = bind_ranks(choose_ladder(chosen, tools), chosen, placed.ranks, memory.ranks)
    return [binding.argv for binding in bindings], warnings


def test_the_top_of_the_ladder() -> None:
    assert bind(BindingTools()) == ([("numactl", "--physcpubind=0-63", "--membind=0")], ())


def test_preferred_where_bind_is_refused() -> None:
    argv, warnings = bind(BindingTools(policies=frozenset({"preferred"}), why=REFUSED))
    assert argv == [("numactl", "--physcpubind=0-63", "--preferred=0")]
    assert warnings == (
        f"memory is preferred instead of bound: {REFUSED}; in a container try --cap-add SYS_NICE",
    )


def test_cpus_only_where_every_policy_is_refused() -> None:
    argv, warnings = bind(NO_POLICY)
    assert argv == [("numactl", "--physcpubind=0-63")]
    assert REFUSED in warnings[0]
    assert "--cap-add SYS_NICE" in warnings[0]


def test_nothing_where_nothing_binds() -> None:
    argv, warnings = bind(NOTHING)
    assert argv == [()]
    assert warnings == ("ranks are not bound: neither numactl nor libnuma is here; install numactl",)


def test_libnuma_where_numactl_is_missing() -> None:
    ladder = choose_ladder(PlanSettings(), NO_NUMACTL)
    assert (ladder.method, ladder.policies[0], ladder.warnings) == ("libnuma", "bind", ())
    assert Binding("libnuma", frozenset({1}), "bind", frozenset({0})).argv == ()


def test_off_is_silent() -> None:
    assert bind(BindingTools(), numa="off") == ([()], ())


def test_a_policy_of_none_binds_cpus() -> None:
    assert bind(BindingTools(), mem_policy="none") == ([("numactl", "--physcpubind=0-63")], ())


def test_preferred_on_request() -> None:
    assert bind(BindingTools(), mem_policy="preferred")[0] == [
        ("numactl", "--physcpubind=0-63", "--preferred=0")
    ]


def test_a_limit_that_does_not_fit_is_preferred_not_bound() -> None:
    argv, warnings = bind(BindingTools(), host_mem_limit_mb=10**6)
    assert argv == [("numactl", "--physcpubind=0-63", "--preferred=0")]
    assert "may not fit there, and a bound rank would be killed" in warnings[0]
    assert bind(BindingTools(), host_mem_limit_mb=10**6, mem_policy="bind")[0][0][-1] == "--membind=0"


def test_several_nodes_prefer_many() -> None:
    machine = machines.with_gpu_memory(machines.machine("dgx"), 40 << 30)
    chosen = PlanSettings(mem_policy="preferred")
    placed = place_ranks(machine, machine.gpus, 8)
    memory = plan_host_memory(machine, placed.ranks, chosen)
    many, _ = bind_ranks(choose_ladder(chosen, BindingTools()), chosen, placed.ranks, memory.ranks)
    one, _ = bind_ranks(
        choose_ladder(chosen, BindingTools(policies=frozenset({"preferred"}))),
        chosen,
        placed.ranks,
        memory.ranks,
    )
    assert (many[0].argv[-1], one[0].argv[-1]) == ("--preferred-many=0-3", "--preferred=3")


@pytest.mark.parametrize(
    ("tools", "options", "said"),
    [
        (NOTHING, {"numa": "strict"}, "--numa strict: ranks are not bound"),
        (NO_POLICY, {"numa": "strict"}, f"CPUs only: {REFUSED}"),
        (NO_POLICY, {"mem_policy": "bind"}, f"--mem-policy bind is refused here ({REFUSED})"),
        (
            NO_NUMACTL,
            {"bind_method": "numactl"},
            "--bind-method numactl does not work here (numactl is not in PATH; install it)",
        ),
        (
            BindingTools(libnuma=False),
            {"bind_method": "libnuma"},
            "(libnuma.so.1 cannot be loaded; install libnuma1); try --bind-method numactl",
        ),
        (replace(NO_NUMACTL, libnuma=False), {"bind_method": "libnuma"}, "try --numa off"),
        (
            BindingTools(),
            {"numa": "strict", "host_mem_limit_mb": 10**6},
            "--numa strict: rank 0: memory of node 0 is preferred",
        ),
    ],
)
def test_what_cannot_be_had_is_an_error(tools: BindingTools, options: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        bind(tools, **options)
    assert said in str(caught.value)


def test_an_unbindable_rank_fails_strict() -> None:
    with pytest.raises(PlanError, match="--numa strict: rank 0: it is not bound"):
        bind(BindingTools(), name="unknown-node", numa="strict")


@pytest.mark.parametrize(
    ("narrow", "said"),
    [
        (
            {"allowed_cpus": "0-63"},
            "rank 2: found CPUs of node 0, needed some of node 8 of its GPU",
        ),
        ({"allowed_mems": "0"}, "rank 2: found memory of node 0, needed that of node 8"),
    ],
)
def test_strict_refuses_another_node(narrow: dict[str, str], said: str) -> None:
    machine = machines.machine(replace(machines.SPECS["ac922"], **narrow))  # type: ignore[arg-type]
    request = HostRequest(("t.py",), 4, 4, settings=PlanSettings(numa="strict"))
    with pytest.raises(PlanError) as caught:
        plan_host(machine, request)
    assert str(caught.value) == f"--numa strict: {said} (a wider cpuset may have it); try --numa auto"
    assert len(plan_host(machine, replace(request, settings=PlanSettings())).ranks) == 4


def test_strict_keeps_memory_on_one_node_where_the_limit_would_widen_it() -> None:
    machine = machines.with_gpu_memory(machines.machine("dgx"), 40 << 30)
    request = HostRequest(("t.py",), 8, 8, settings=PlanSettings(numa="strict"))
    ranks = plan_host(machine, request).ranks
    assert all((rank.mem_policy, rank.mem_nodes) == ("bind", {rank.numa_node}) for rank in ranks)
