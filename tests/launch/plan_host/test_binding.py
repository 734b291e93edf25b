"""The ladder of binding: every step down, what it says, and what strictness makes of it."""

from dataclasses import replace
from pathlib import Path

import machines
import pytest

from launch.installed.binding_tools import assume_tools, choose_tools, read_tools, run_probe
from launch.model.errors import PlanError
from launch.model.settings import PlanSettings
from launch.model.topology import Limits
from launch.plan_host.binding import Binding, BindingTools, bind_ranks, choose_ladder
from launch.plan_host.host_memory import plan_host_memory
from launch.plan_host.placement import place_ranks

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


def fake_numactl(folder: Path, refused: str) -> str:
    """A stand-in that refuses some options in numactl's own way; real refusals need a seccomp profile."""
    tool = folder / "numactl"
    tool.write_text(
        "#!/bin/sh\n"
        f'for word; do case "$word" in {refused}) echo "{REFUSED}" >&2; exit 1;; esac; done\nexit 0\n'
    )
    tool.chmod(0o755)
    return str(folder)


def test_probing_a_free_machine(tmp_path: Path) -> None:
    tools = read_tools(machines.machine("ac922"), fake_numactl(tmp_path, "--nothing"))
    assert (tools.numactl, tools.cpus, sorted(tools.policies)) == (
        True,
        True,
        ["bind", "preferred", "preferred-many"],
    )


def test_probing_under_dockers_seccomp(tmp_path: Path) -> None:
    tools = read_tools(machines.machine("ac922"), fake_numactl(tmp_path, "--membind*|--preferred*"))
    assert (tools.cpus, tools.policies, tools.why) == (True, frozenset(), REFUSED)


def test_probing_where_only_one_node_can_be_preferred(tmp_path: Path) -> None:
    tools = read_tools(machines.machine("ac922"), fake_numactl(tmp_path, "--membind*|--preferred-many*"))
    assert tools.policies == {"preferred"}


def test_probing_where_even_cpus_are_refused(tmp_path: Path) -> None:
    tools = read_tools(machines.machine("ac922"), fake_numactl(tmp_path, "--physcpubind*"))
    assert (tools.cpus, tools.policies) == (False, frozenset())


def test_probing_without_numactl(tmp_path: Path) -> None:
    tools = read_tools(machines.machine("ac922"), str(tmp_path))
    assert tools.numactl is False
    assert tools.libnuma or "install numactl" in tools.why


def test_nothing_is_probed_where_nothing_is_bound_and_libnuma_where_it_is_named(tmp_path: Path) -> None:
    machine, path = machines.machine("ac922"), fake_numactl(tmp_path, "--membind*")
    assert choose_tools(machine, PlanSettings(), path).policies != BindingTools().policies
    assert choose_tools(machine, PlanSettings(numa="off"), path) == BindingTools()
    named = choose_tools(machine, PlanSettings(bind_method="libnuma"), path)
    assert named == read_tools(machine, path, ask_libnuma=True)


def test_a_probe_that_cannot_start() -> None:
    said = "libnuma: Warning: node argument 7 is out of range"
    usage = f"echo '{said}\n\nusage: numactl\n<length> can have g' >&2; exit 1"
    assert run_probe(["/bin/sh", "-c", usage]) == said
    assert run_probe(["/nonexistent/numactl"]) == "numactl: No such file or directory"


def test_another_machines_limits_are_believed() -> None:
    denied = replace(machines.machine("ac922"), limits=Limits(set_mempolicy=False))
    assert assume_tools(denied).policies == frozenset()
    assert assume_tools(machines.machine("ac922")) == BindingTools()
