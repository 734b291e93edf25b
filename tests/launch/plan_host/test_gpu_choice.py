"""Which GPUs a job gets, and what keeps exactly these visible."""

import re
from dataclasses import replace

import machines
import pytest

from launch.model.errors import PlanError
from launch.model.settings import PlanSettings
from launch.plan_host.gpu_choice import choose_gpus
from launch.plan_host.planner import HostRequest, plan_host
from launch.plan_host.rank_env import build_shared_env

_KNOWN = machines.machine("ac922")
MACHINE = replace(
    _KNOWN, gpus=tuple(replace(gpu, uuid=f"GPU-{gpu.index}0000000-1111") for gpu in _KNOWN.gpus)
)


def chosen(wanted: str, environ: dict[str, str] | None = None) -> tuple[list[int], dict[str, str]]:
    choice = choose_gpus(MACHINE, wanted, environ or {})
    return [gpu.index for gpu in choice.gpus], dict(choice.env)


def test_all_need_no_variable() -> None:
    assert chosen("auto") == ([0, 1, 2, 3], {})


def test_a_list_is_taken_in_pci_order_and_made_visible_by_uuid() -> None:
    indexes, env = chosen("3,1")
    assert indexes == [1, 3]
    assert env == {"CUDA_VISIBLE_DEVICES": "GPU-10000000-1111,GPU-30000000-1111"}


def test_one_gpu_without_uuid_makes_indexes_of_all() -> None:
    unknown = replace(MACHINE.gpus[0], uuid=None)
    choice = choose_gpus(replace(MACHINE, gpus=(unknown, *MACHINE.gpus[1:])), "auto", {})
    assert build_shared_env(PlanSettings(), choice)["LMSRUN_GPUS"] == "0,1,2,3"


@pytest.mark.parametrize("token", ["2", "GPU-2", "0035:03:00.0", "00000035:03:00.0"])
def test_one_gpu_has_many_names(token: str) -> None:
    assert chosen(token)[0] == [2]


def test_none_hides_them_all() -> None:
    assert chosen("none") == ([], {"CUDA_VISIBLE_DEVICES": "-1"})


def test_the_callers_hidden_gpus_stay_hidden() -> None:
    assert chosen("auto", {"CUDA_VISIBLE_DEVICES": "3,2"})[0] == [2, 3]


@pytest.mark.parametrize(("text", "seen"), [("0,9,1", [0]), ("", []), ("-1", []), ("1,1,2", [1])])
def test_cudas_own_reading_of_odd_lists(text: str, seen: list[int]) -> None:
    assert chosen("auto", {"CUDA_VISIBLE_DEVICES": text})[0] == seen


@pytest.mark.parametrize(
    ("text", "wrong"), [("0,9,1", "9"), ("1,1,2", "1"), ("0,1", ""), ("0,", ""), ("3, x", "x")]
)
def test_a_list_that_ends_early_is_said(text: str, wrong: str) -> None:
    variable = {"CUDA_VISIBLE_DEVICES": text}
    said = f"CUDA_VISIBLE_DEVICES={text!r}: {wrong!r} names no further GPU, and ends the list there"
    assert choose_gpus(MACHINE, "auto", variable).warnings == ((said,) if wrong else ())
    with pytest.raises(PlanError, match=r"4 ranks do not fit on localhost with . GPUs?") as caught:
        plan_host(MACHINE, HostRequest(("t.py",), 4, 4, environ=variable))
    assert (said in str(caught.value)) is bool(wrong)


def test_hiding_every_gpu_is_said() -> None:
    warnings = choose_gpus(MACHINE, "auto", {"CUDA_VISIBLE_DEVICES": ""}).warnings
    assert "hides every GPU" in warnings[0]


def test_a_mig_device_is_its_gpu_under_another_name() -> None:
    token = "MIG-GPU-20000000-1111/1/0"
    choice = choose_gpus(MACHINE, token, {})
    assert (choice.gpus[0].numa_node, choice.gpus[0].uuid, choice.gpus[0].memory_bytes) == (8, token, None)
    assert choice.env == (("CUDA_VISIBLE_DEVICES", token),)


@pytest.mark.parametrize(
    ("wanted", "environ", "said"),
    [
        ("7", {}, "'7', which is not here; this machine has 0 (0004:04:00.0)"),
        ("all", {}, "'all', which is not here; this machine has 0 (0004:04:00.0)"),
        ("GPU-", {}, "not here"),
        ("0,0", {}, "GPU 0 twice"),
        ("0", {"CUDA_VISIBLE_DEVICES": "1"}, "which CUDA_VISIBLE_DEVICES hides; it leaves 1 ("),
        ("0", {"CUDA_VISIBLE_DEVICES": ""}, "which CUDA_VISIBLE_DEVICES hides; it leaves no GPU"),
    ],
)
def test_errors_say_what_is_there_what_was_needed_and_what_to_try(
    wanted: str, environ: dict[str, str], said: str
) -> None:
    with pytest.raises(PlanError) as caught:
        choose_gpus(MACHINE, wanted, environ)
    found, needed, tried = re.split("; needed |; try ", str(caught.value))
    assert said in found
    assert needed
    assert tried
    assert "\n" not in str(caught.value)


def test_what_to_try_after_an_error_is_taken() -> None:
    with pytest.raises(PlanError, match="try auto for all of them"):
        choose_gpus(MACHINE, "all", {})
    assert chosen("auto")[0] == [0, 1, 2, 3]
    with pytest.raises(PlanError, match=r"has no GPU; needed auto or none; try auto for ranks on CPUs$"):
        choose_gpus(replace(MACHINE, gpus=()), "all", {})
    assert choose_gpus(replace(MACHINE, gpus=()), "auto", {}).gpus == ()
    with pytest.raises(PlanError, match="try to unset CUDA_VISIBLE_DEVICES$"):
        choose_gpus(MACHINE, "0", {"CUDA_VISIBLE_DEVICES": ""})
    assert chosen("0") == ([0], {"CUDA_VISIBLE_DEVICES": "GPU-00000000-1111"})


def test_the_variable_that_hides_an_amd_gpu_is_named() -> None:
    amd = replace(MACHINE, gpus=tuple(replace(gpu, vendor="amd", uuid=None) for gpu in MACHINE.gpus))
    with pytest.raises(PlanError, match="which CUDA_VISIBLE_DEVICES hides"):
        choose_gpus(amd, "0", {"CUDA_VISIBLE_DEVICES": "1"})


def test_the_variable_below_hip_that_hides_all_gpus_is_named() -> None:
    amd = replace(MACHINE, gpus=tuple(replace(gpu, vendor="amd", uuid=None) for gpu in MACHINE.gpus))
    with pytest.raises(
        PlanError, match=r"^--gpus is '0', and ROCR_VISIBLE_DEVICES='' hides every GPU; unset "
    ):
        choose_gpus(amd, "0", {"ROCR_VISIBLE_DEVICES": ""})


def test_amd_has_its_own_variable() -> None:
    amd = replace(MACHINE, gpus=tuple(replace(gpu, vendor="amd", uuid=None) for gpu in MACHINE.gpus))
    both = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}
    assert choose_gpus(amd, "1", both).env == (("HIP_VISIBLE_DEVICES", "1"),)
    assert choose_gpus(amd, "auto", {"CUDA_VISIBLE_DEVICES": "1"}).env == (("HIP_VISIBLE_DEVICES", "1"),)


@pytest.mark.parametrize(
    ("environ", "addresses", "env"),
    [
        ({"ROCR_VISIBLE_DEVICES": "3,2"}, ["3", "2"], {}),
        ({"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "1"}, ["2"], {"HIP_VISIBLE_DEVICES": "1"}),
        ({"ROCR_VISIBLE_DEVICES": ""}, [], {}),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["1"], {"HIP_VISIBLE_DEVICES": "1"}),
    ],
)
def test_hip_counts_what_rocr_has_left(
    environ: dict[str, str], addresses: list[str], env: dict[str, str]
) -> None:
    amd = tuple(replace(gpu, vendor="amd", uuid=None) for gpu in _KNOWN.gpus)
    choice = choose_gpus(replace(_KNOWN, gpus=amd), "auto", environ)
    assert [gpu.pci_bus_id for gpu in choice.gpus] == [amd[int(place)].pci_bus_id for place in addresses]
    assert [gpu.index for gpu in choice.gpus] == ([1] if env else list(range(len(addresses))))
    assert {**environ, **dict(choice.env)} == {**environ, **env}
    assert [warning for warning in choice.warnings if "hides every GPU" in warning] == list(choice.warnings)
    assert bool(choice.warnings) == (not addresses)
