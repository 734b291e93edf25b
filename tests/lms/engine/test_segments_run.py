"""A step that is to be compiled by XLA runs in segments between swaps."""

from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow
MIB = 1 << 20
ACTIVATION = 1024 * 256 * 4
"""Bytes of each tensor that the job's layers make."""


def job(
    way: str, policy: str = "all", budget: str = "-", case: str = "-", limit_mib: int = 900
) -> dict[str, Any]:
    return run_job("segments_job.py", way, policy, budget, case, str(limit_mib))


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    pytest.importorskip("tensorflow")
    return {way: job(way) for way in ("without", "off", "auto")}


def test_segments_run_between_swaps(seen: dict[str, dict[str, Any]]) -> None:
    made = seen["auto"]
    assert made["segments"] > 2 and made["executed"] == made["swapped"] > 2
    assert seen["off"]["segments"] == 0
    assert "segments of" in made["text"] and made["first_run"][0] > 0


def test_what_a_segment_reads_is_freed_at_once(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["auto"]["flags"] == "--tf_xla_enable_lazy_compilation=false"
    assert seen["off"]["flags"] == ""


def test_segments_need_little_more_memory_than_no_xla(seen: dict[str, dict[str, Any]]) -> None:
    own = {way: seen[way]["planned"] - seen[way]["resident"] for way in ("off", "auto")}
    assert own["auto"] <= 2 * own["off"], "the latter counts on copies that free their buffers at once"
    assert seen["auto"]["peak"] <= 1.15 * seen["auto"]["planned"]
    assert seen["auto"]["peak"] < 0.8 * seen["without"]["peak"]


def test_results_agree_with_the_step_compiled_whole(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["auto"]["losses"] == pytest.approx(seen["without"]["losses"], rel=1e-5)


def test_the_bits_are_the_same_from_run_to_run(seen: dict[str, dict[str, Any]]) -> None:
    again = job("auto")
    assert (again["losses"], again["bits"]) == (seen["auto"]["losses"], seen["auto"]["bits"])


def test_a_step_that_fits_is_compiled_whole(seen: dict[str, dict[str, Any]]) -> None:
    made = job("auto", "auto")
    assert made["whole"] and not made["segments"] and not made["swapped"] and not made["warnings"]
    assert (made["losses"], made["bits"]) == (seen["without"]["losses"], seen["without"]["bits"])
    assert made["peak"] <= 1.15 * made["planned"]
    assert "it fits; XLA compiles it whole; the first run, with compiling, took" in made["text"]


def test_a_step_that_nearly_fills_the_device_runs_in_segments() -> None:
    made = job("auto", "budget", "40")  # 25 are planned
    assert made["segments"] and not made["whole"] and not made["swapped"]


def test_biases_norms_and_metrics_cut_no_segment() -> None:
    made = job("auto", "budget", "60", "one segment")
    assert made["segments"] == 1 and not made["whole"] and not made["swapped"]


def test_a_step_that_took_more_than_it_may_runs_in_segments_from_then_on() -> None:
    made = job("auto", "budget", "18", "hopeful")
    assert made["whole"] and made["segments"] and made["executed"] == made["swapped"] > 0
    assert [text for text in made["warnings"] if "train runs in segments from now on" in text]


def test_larger_batches_that_do_not_fit_run_in_segments() -> None:
    made = job("auto", "budget", "72", "growing")
    assert made["whole"] and made["segments"] and made["swapped"]


def test_a_function_that_only_looks_ahead_stays_compiled() -> None:
    made = job("auto", "all", case="evaluates")
    assert made["segments"] and [name.split("_")[3] for name in made["copies"]] == ["train"]


def test_a_step_with_an_argument_that_it_does_not_read_is_compiled_whole(
    seen: dict[str, dict[str, Any]],
) -> None:
    made = job("auto", "auto", case="unread argument")
    assert made["whole"] and not made["segments"]
    assert (made["losses"], made["bits"]) == (seen["without"]["losses"], seen["without"]["bits"])


def test_a_step_in_a_loop_is_compiled_whole(seen: dict[str, dict[str, Any]]) -> None:
    """Stop the planned graph without an edge into the loop, where no op can wait for one outside."""
    made = job("auto", "auto", case="in a loop")
    assert made["whole"] and not made["segments"]
    assert (made["losses"], made["bits"]) == (seen["without"]["losses"], seen["without"]["bits"])


@pytest.mark.parametrize("case", ["traced first", "traced last"])
def test_a_step_and_its_trace_are_both_compiled_whole(case: str, seen: dict[str, dict[str, Any]]) -> None:
    made = job("auto", "auto", case=case)
    assert made["whole"] and not made["warnings"]
    assert (made["losses"], made["bits"]) == (seen["without"]["losses"], seen["without"]["bits"])


def test_asynchronous_eager_execution_runs_without_xla(seen: dict[str, dict[str, Any]]) -> None:
    made = job("auto", "auto", case="asynchronous")
    assert made["losses"] == pytest.approx(seen["without"]["losses"], rel=1e-5) and not made["copies"]
    assert [
        text for text in made["warnings"] if "XLA is off for train: eager execution is asynchronous" in text
    ]


def test_what_xla_cannot_compile_runs_in_segments() -> None:
    made = job("auto", "auto", case="calls_numpy")
    assert made["segments"] and not made["whole"]


def test_a_budget_holds_with_segments() -> None:
    made = job("auto", "budget", "16")
    assert made["segments"] and made["swapped"]
    slack = 1.1  # the device has 900 MiB, so chunks are up to twice as large as what lies in them
    assert made["peak"] - made["resident"] <= 16 * MIB * slack


def test_a_tight_limit_holds_with_segments() -> None:
    limit_mib = 18  # the step takes 28 without a plan
    made = job("auto", "auto", limit_mib=limit_mib)
    assert made["segments"] and made["swapped"]
    assert made["peak"] <= limit_mib * MIB


def test_each_caller_of_a_compiled_function_runs_segments() -> None:
    assert job("auto", "all", case="callers")["steps"] == 2


def test_what_cannot_be_combined_is_one_line_and_runs_without_xla() -> None:
    made = job("auto", "threshold")
    assert made["segments"] == 0
    assert [text for text in made["warnings"] if "xla='auto' does not work with policy='threshold'" in text]


def test_segments_with_repeated_ops_alone_need_no_swaps() -> None:
    tight, ample = (job("auto", "auto", budget, "only") for budget in ("16", "-"))
    assert tight["segments"] and tight["recomputed"] and not tight["swapped"]
    assert ample["whole"] and not ample["warnings"] and not ample["recomputed"]


@pytest.mark.parametrize("budget_mib", [16, 8])
def test_segments_hold_ops_that_are_repeated(seen: dict[str, dict[str, Any]], budget_mib: int) -> None:
    made, again = (job("auto", "budget", str(budget_mib), "slow link") for _ in range(2))
    assert made["segments"] and made["recomputed"] and made["executed"] == made["swapped"] > 0
    assert not made["warnings"]
    assert made["losses"] == pytest.approx(seen["without"]["losses"], rel=1e-5)
    assert (made["losses"], made["bits"]) == (again["losses"], again["bits"])
    assert made["planned"] - made["resident"] <= 1.1 * budget_mib * MIB
    assert made["peak"] <= made["planned"] + ACTIVATION, "a busy machine's thread may free one late"


def test_a_step_that_is_faster_without_xla_runs_so() -> None:
    made = job("auto", "budget", "16", "slow calls")
    assert made["segments"] == 0 and made["recomputed"] and not made["whole"]
    (text,) = (text for text in made["warnings"] if "runs without XLA" in text)
    assert "no plan in which XLA compiles some of its ops fits, or is as fast" in text


def test_sums_of_several_terms_stay_in_order_beside_segments() -> None:
    made, again = job("auto", case="sums"), job("auto", case="sums")
    assert made["segments"] and made["executed"] == made["swapped"] > 0 and not made["warnings"]
    assert made["losses"] == pytest.approx(job("without", case="sums")["losses"], rel=1e-5)
    assert (made["losses"], made["bits"]) == (again["losses"], again["bits"])
