"""What is wrong where: every trouble in one table, and what a person should know beside it."""

from dataclasses import replace

import pytest
from machines import SPECS, machine

from launch.model.busy import GpuUse
from launch.model.errors import PlanError
from launch.plan_host.gpu_choice import choose_gpus
from launch.preflight.occupancy import Occupancy
from launch.preflight.report import HostReport
from launch.preflight.verdict import Demand, Verdict, describe_machine, judge_hosts, render_table

VERSIONS: dict[str, str | None] = {
    "Python": "3.11",
    "lmsrun": "0.1.0",
    "TensorFlow": "2.21.0",
    "Horovod": "0.28.1",
}
DGX, SINGLE = machine(SPECS["dgx"]), machine(SPECS["single"])
A = HostReport("a", DGX, VERSIONS, Occupancy(load=0.1), ("a",), True)
B = replace(A, host="b", names=("b",))
DEMAND = Demand(lambda model: choose_gpus(model, "auto", {}).gpus, {"a": 8, "b": 8})


def verdict(*reports: HostReport, demand: Demand = DEMAND) -> Verdict:
    return judge_hosts(reports, VERSIONS, "this host", demand)


def test_alike_idle_hosts_have_nothing_to_say() -> None:
    assert verdict(A, B) == Verdict((), ())
    assert render_table(()) == []


def test_one_table_of_what_is_wrong_where() -> None:
    cannot = HostReport("login-7", trouble="ssh: connect to host login-7 port 22: Connection refused")
    old = replace(B, versions={**VERSIONS, "TensorFlow": "2.15.1", "Horovod": None})
    found = verdict(A, cannot, old, replace(old, host="c"))
    assert render_table(found.troubles) == [
        "login-7  ssh: connect to host login-7 port 22: Connection refused",
        "b, c     TensorFlow 2.15.1; this host has TensorFlow 2.21.0",
        "b, c     no Horovod; this host has Horovod 0.28.1",
    ]


def test_a_table_of_a_thousand_hosts_stays_a_table() -> None:
    silent = [HostReport(f"n{number}", trouble="no answer in 20 s") for number in range(1000)]
    assert render_table(verdict(*silent).troubles) == ["n0, n1, n2, n3 and 996 more  no answer in 20 s"]


@pytest.mark.parametrize(
    ("change", "troubles", "warnings"),
    [
        ({}, ["9 ranks for 8 GPUs; give it fewer, or --oversubscribe"], []),
        ({"oversubscribe": True}, [], []),
        ({"in_allocation": True}, [], ["a: 9 ranks for 8 GPUs"]),
        ({"ranks": {"a": 8}}, [], []),
        ({"ranks": {}}, [], []),
    ],
)
def test_free_slots(change: dict[str, object], troubles: list[str], warnings: list[str]) -> None:
    demand = replace(DEMAND, **{"ranks": {"a": 9}, **change})  # type: ignore[arg-type]
    found = verdict(A, demand=demand)
    assert [text for _, text in found.troubles] == troubles
    assert list(found.warnings) == warnings


def test_without_gpus_the_cores_that_may_be_used_are_slots() -> None:
    cores = len(SINGLE.cores)
    crowded = replace(DEMAND, ranks={"a": cores + 1})
    ((_, text),) = verdict(replace(A, machine=SINGLE), demand=crowded).troubles
    assert text.startswith(f"{cores + 1} ranks for {cores} usable core")


def test_a_gpu_that_is_named_has_to_be_there() -> None:
    named = replace(DEMAND, gpus_of=lambda model: choose_gpus(model, "7", {}).gpus, ranks={"a": 1, "b": 1})
    found = verdict(A, replace(B, machine=machine(SPECS["ac922"])), demand=named)
    assert [host for host, _ in found.troubles] == ["b"]
    with pytest.raises(PlanError):
        named.gpus_of(machine(SPECS["ac922"]))


def test_who_is_there_already_is_said_and_not_refused() -> None:
    busy = GpuUse(DGX.gpus[0].pci_bus_id, 3 << 30, 1)
    hidden = GpuUse(DGX.gpus[7].pci_bus_id, 20 << 30, 0)
    found = verdict(
        replace(A, occupancy=Occupancy(0.0, gpus=(busy, hidden))),
        replace(B, occupancy=Occupancy(99.0, jobs=1, ranks=8)),
        demand=replace(DEMAND, ranks={"a": 1, "b": 1}),
    )
    assert found == Verdict(
        (),
        (
            f"a: GPU {busy.pci_bus_id} is in use: 3.0 GiB of its memory, by 1 process",
            "b: lmsrun already runs there: 1 job with 8 ranks",
        ),
    ), "GPU 7 is none that the one rank would take"
    (other,) = verdict(replace(A, occupancy=Occupancy(float(len(DGX.cores))))).warnings
    assert other.startswith("a: something else runs there: a load of ")


def test_a_batch_system_that_gave_more_gpus_than_there_are() -> None:
    demand = replace(DEMAND, allotted_gpus={"a": 8, "b": 4}, ranks={"a": 1, "b": 1})
    found = verdict(A, replace(B, machine=SINGLE), demand=demand)
    assert "b: 4 GPUs allotted, but 0 can be seen there" in found.warnings
    assert not any(text.startswith("a:") for text in found.warnings)


@pytest.mark.parametrize(("finds", "needed", "wrong"), [(False, True, 1), (False, False, 0), (None, True, 0)])
def test_gloo_needs_a_name_that_leads_somewhere(finds: bool | None, needed: bool, wrong: int) -> None:
    found = verdict(replace(A, finds_itself=finds), demand=replace(DEMAND, needs_own_name=needed))
    assert len(found.troubles) == wrong
    assert all("/etc/hosts" in text for _, text in found.troubles)


def test_mixed_hosts_are_legal_and_said() -> None:
    small = replace(B, machine=SINGLE)
    found = verdict(A, small, replace(A, host="c"), demand=replace(DEMAND, ranks={}))
    assert found.troubles == ()
    kinds = f"a, c: {describe_machine(DGX)}; b: {describe_machine(SINGLE)}"
    assert found.warnings == (f"hosts differ, and each is planned as it is ({kinds})",)
    assert describe_machine(DGX) == "128 cores, 8 NUMA nodes, 1000 GiB, 8 x NVIDIA A100-SXM4-40GB"
