"""What binds on a host, as its tools answer."""

from dataclasses import replace
from pathlib import Path

import machines

from launch.installed.binding_tools import assume_tools, choose_tools, read_tools, run_probe
from launch.model.settings import PlanSettings
from launch.model.topology import Limits
from launch.plan_host.binding import BindingTools

REFUSED = "set_mempolicy: Operation not permitted"


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
