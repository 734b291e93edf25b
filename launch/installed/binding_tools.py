"""What binds on this host, found by running it: the effect in front of ``launch.plan_host.binding``."""

import os
from collections.abc import Callable, Sequence

from launch.model.idset import format_ids
from launch.model.plan import MemPolicy
from launch.model.settings import PlanSettings
from launch.model.topology import Machine
from launch.plan_host.binding import LADDER, BindingTools
from launch.plan_host.host_memory import dram_nodes
from launch.system.program_path import find_program

Runner = Callable[[Sequence[str]], str | None]
"""Runs an argv; None on success, else its last line of stderr."""


def assume_tools(machine: Machine) -> BindingTools:
    """Assume the tools of another machine: numactl is there, and so is what its limits do not deny."""
    if machine.limits.set_mempolicy is False:
        return BindingTools(policies=frozenset(), why="this machine refuses memory policies (set_mempolicy)")
    return BindingTools()


def choose_tools(machine: Machine, settings: PlanSettings, path: str | None = None) -> BindingTools:
    """Choose the tools of this machine, as far as a plan with these settings asks for them.

    Args:
        machine: This machine.
        settings: Where nothing is to be bound nothing is probed.
        path: Where to look for numactl; None: ``PATH``.
    """
    if settings.numa == "off":
        return assume_tools(machine)
    return read_tools(machine, path, ask_libnuma=settings.bind_method == "libnuma")


def read_tools(
    machine: Machine, path: str | None = None, run: Runner | None = None, ask_libnuma: bool = False
) -> BindingTools:
    """Probe this machine with the argv that ranks get, best policy first, until one is granted.

    Args:
        machine: This machine, for the CPUs and nodes to probe with.
        path: Where to look for numactl; None: ``PATH``.
        run: Runs a probe.
        ask_libnuma: Look for libnuma even where numactl works, because it was asked for by name.
    """
    numactl = find_program("numactl", path)
    if numactl is None:
        return _without_numactl(machine)
    probe, run = [numactl, f"--physcpubind={format_ids(machine.allowed.cpus)}"], run or run_probe
    policies, why = _read_policies([node.id for node in dram_nodes(machine)], probe, run)
    refusal = None if policies else run([*probe, "true"])
    libnuma = not (refusal or ask_libnuma) or _has_libnuma()
    return BindingTools(True, libnuma, refusal is None, policies, refusal or why)


def _read_policies(
    nodes: Sequence[int], probe: Sequence[str], run: Runner
) -> tuple[frozenset[MemPolicy], str]:
    """Find the policies that are granted, and the first refusal."""
    options: dict[MemPolicy, str] = {
        "bind": f"--membind={format_ids(nodes)}",
        "preferred-many": f"--preferred-many={format_ids(nodes)}",
        "preferred": f"--preferred={nodes[0]}" if nodes else "",
    }
    why = ""
    for policy in LADDER if nodes else ():
        refusal = run([*probe, options[policy], "true"])
        if refusal is None:
            return frozenset(_granted_with(policy, nodes, probe, run)), why
        why = why or refusal
    return frozenset(), why


def _granted_with(
    policy: MemPolicy, nodes: Sequence[int], probe: Sequence[str], run: Runner
) -> tuple[MemPolicy, ...]:
    """Where bind is granted so is preferred; preferred-many is younger, and matters only with more nodes."""
    if policy != "bind":
        return (policy,)
    if len(nodes) > 1 and run([*probe, f"--preferred-many={format_ids(nodes)}", "true"]) is None:
        return LADDER
    return ("bind", "preferred")


def run_probe(argv: Sequence[str]) -> str | None:
    """Run one probe; None when it succeeded, else the last line that it wrote to stderr before any usage.

    Spawned by hand: importing ``subprocess`` takes longer than the probe itself.
    """
    reader, writer = os.pipe()
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)]
    environ = {name: text for name, text in os.environ.items() if name}
    try:
        child = os.posix_spawn(
            argv[0], list(argv), environ, file_actions=[*quiet, (os.POSIX_SPAWN_DUP2, writer, 2)]
        )
    except OSError as error:
        os.close(reader)
        return f"{os.path.basename(argv[0])}: {error.strerror}"
    finally:
        os.close(writer)
    with open(reader, "rb") as stderr:
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # A numactl that cannot parse its words says so first, and its whole usage after that.
    usage = next((place for place, line in enumerate(lines) if line.startswith("usage:")), len(lines))
    said = [line for line in lines[:usage] if line.strip()] or lines
    return None if code == 0 else (said[-1] if said else f"numactl exits with {code}")


def _without_numactl(machine: Machine) -> BindingTools:
    if not _has_libnuma():
        why = "neither numactl nor libnuma is here; install numactl"
        return BindingTools(False, False, False, frozenset(), why)
    if machine.limits.set_mempolicy is False:
        return BindingTools(False, True, False, frozenset(), "the kernel refuses set_mempolicy")
    return BindingTools(False, True, False)


def _has_libnuma() -> bool:
    import ctypes  # Only a host without numactl pays for it.

    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True
