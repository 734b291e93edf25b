"""IBM's names on a stock TensorFlow: classes of both generations, settings, statistics."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python
from child_job import run_job

from lms.compat.parameters import parse_call
from lms.config import ConfigError, LMSConfig
from lms.device.ibm_counters import COUNTED, GETTERS, NOT_COUNTED
from lms.errors import LMSArgumentError, LMSError
from lms.swaps.threshold import Rule, rule_of, uses_first_generation
from lms.tf_names.settings import choose_allocator

ROOT = Path(__file__).resolve().parents[3]
PARITY = """num_allocs bytes_in_use peak_bytes_in_use largest_alloc_size bytes_limit bytes_reserved
peak_bytes_reserved bytes_reservable_limit bytes_inactive bytes_active peak_bytes_active bytes_reclaimed
current_bytes_reclaimed peak_bytes_reclaimed num_single_reclaims num_full_reclaims num_defragmentations
bytes_defragged""".split()


# --- the parameters ---------------------------------------------------------------------------------------


def test_generations_are_told_apart() -> None:
    first = parse_call(({"adam"},), {"lb": 3, "fuse_swapins": True}, {})
    assert (first.generation, first.config.policy, first.config.lb) == (1, "threshold", 3)
    assert parse_call((), {"optimizer_scopes": "adam"}, {}).config.optimizer_scopes == ("adam",)
    second = parse_call((), {"swapout_threshold": 5, "serialization": [1, "3:5"]}, {})
    assert (second.generation, second.config.swapout_threshold) == (2, 5)
    assert second.config.serialization == ("1", "3:5")
    assert parse_call((5,), {}, {}).config.swapout_threshold == 5
    bare = parse_call((), {}, {})
    assert (bare.generation, bare.config.policy, bare.config.margin) == (2, "auto", 0.1)


def test_the_jobs_variables_say_what_the_script_does_not() -> None:
    environ = {"LMS_BATCH_SIZE": "8", "LMS_POLICY": "all", "TF_LMS_SIMULATOR_MEM_RATIO": "0.75"}
    assert parse_call(({"adam"},), {}, environ).config.batch_size == 8
    second = parse_call((), {}, environ).config
    assert (second.policy, second.batch_size, second.margin) == ("auto", 8, 0.25)


FIRST_GIVEN: dict[str, tuple[Any, Any]] = {
    "optimizer_scopes": ({"adam", "sgd"}, ("adam", "sgd")),
    "starting_scope": ("block2", "block2"),
    "starting_op_names": ({"b", "a"}, ("a", "b")),
    "excl_scopes": ({"x"}, ("x",)),
    "incl_scopes": ({"y"}, ("y",)),
    "excl_types": ("Relu", ("Relu",)),
    "incl_types": (["Conv2D"], ("Conv2D",)),
    "lb": (3, 3),
    "ub": (40, 40),
    "n_tensors": (5, 5),
    "fuse_swapins": (True, True),
    "ctrld_strategy": ("direct_order", "direct_order"),
    "swap_branches": (True, True),
    "branch_threshold": (7, 7),
    "debug": (True, True),
}
"""Each parameter of the first generation: what a script gives, and what the engine is to get."""

SECOND_GIVEN: dict[str, tuple[Any, Any]] = {
    "swapout_threshold": (9, 9),
    "swapin_groupby": (0, 0),
    "swapin_ahead": (4, 4),
    "sync_mode": (3, 3),
    "serialization": ([1, "3:5"], ("1", "3:5")),
    "serialization_by_size": (2, 2.0),
    "debug": (True, True),
}


@pytest.mark.parametrize("name", FIRST_GIVEN)
def test_each_parameter_of_the_first_generation_arrives(name: str) -> None:
    given, wanted = FIRST_GIVEN[name]
    config = parse_call((), {"optimizer_scopes": "adam", name: given}, {}).config
    assert getattr(config, name) == wanted != getattr(LMSConfig(), name)


@pytest.mark.parametrize("name", SECOND_GIVEN)
def test_each_parameter_of_the_second_generation_arrives(name: str) -> None:
    given, wanted = SECOND_GIVEN[name]
    config = parse_call((), {name: given}, {}).config
    assert getattr(config, name) == wanted != getattr(LMSConfig(), name)
    assert config.policy == ("auto" if name == "debug" else "threshold")


def test_parameters_by_their_places() -> None:
    """In IBM's order, with the ones that are no fields of the engine's configuration between them."""
    graph = object()
    middle = ("start", {"op"}, {"xs"}, {"is"}, {"xt"}, {"it"}, 3, 20, 4, True, "direct_order", True, 2, True)
    first = parse_call(({"adam"}, graph, *middle, 1, "/cpu:0"), {}, {})
    assert first.graph is graph
    names = [name for name in FIRST_GIVEN if name != "optimizer_scopes"]
    wanted = ("start", ("op",), ("xs",), ("is",), ("xt",), ("it",), *middle[6:])
    assert tuple(getattr(first.config, name) for name in names) == wanted
    second = parse_call((3, 1, 2, 1, [7], 0.5, True, 1, "/cpu:0", "/gpu:0"), {}, {})
    assert tuple(getattr(second.config, name) for name in SECOND_GIVEN) == (3, 1, 2, 1, ("7",), 0.5, True)
    assert second.shown["gpu_device"].startswith("/gpu:0 (the first visible GPU")  # type: ignore[attr-defined]


def test_a_parameter_that_the_script_leaves_out_is_as_the_job_has_it() -> None:
    second = parse_call((), {"swapout_threshold": 7}, {"LMS_SWAPIN_AHEAD": "9", "LMS_SYNC_MODE": "2"})
    assert (second.config.swapout_threshold, second.config.swapin_ahead, second.config.sync_mode) == (7, 9, 2)
    assert (second.shown["swapin_ahead"], second.shown["swapin_groupby"]) == (9, -1)
    assert parse_call((), {}, {"LMS_SWAPOUT_THRESHOLD": "5"}).config.policy == "threshold"
    first = parse_call(({"adam"},), {"ub": 30}, {"LMS_LB": "9", "LMS_N_TENSORS": "2"})
    assert (first.config.lb, first.config.ub, first.config.n_tensors) == (9, 30, 2)
    assert (first.shown["lb"], first.shown["n_tensors"]) == (9, 2)
    assert parse_call((), {"lb": 2}, {"LMS_OPTIMIZER_SCOPES": "adam"}).config.optimizer_scopes == ("adam",)


def test_the_rules_of_the_other_generation_are_not_in_force() -> None:
    environ = {"LMS_LB": "3", "LMS_N_TENSORS": "0", "LMS_SWAPOUT_THRESHOLD": "4", "LMS_SERIALIZATION": "1"}
    second = parse_call((), {"swapin_ahead": 2}, environ).config
    assert not uses_first_generation(second)
    assert rule_of(second) == Rule(threshold=4, ahead=2)
    first = parse_call(({"adam"},), {}, environ).config
    assert (first.lb, first.n_tensors, first.swapout_threshold, first.serialization) == (3, 0, -1, ())


@pytest.mark.tensorflow
def test_scopes_that_the_keras_callback_leaves_out_are_as_the_job_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorflow")
    from lms.compat.classes import LMSKerasCallback

    assert LMSKerasCallback(lb=3).config.optimizer_scopes == ()
    monkeypatch.setenv("LMS_OPTIMIZER_SCOPES", "training,sgd")
    assert LMSKerasCallback(lb=3).config.optimizer_scopes == ("training", "sgd")
    assert LMSKerasCallback("adam").config.optimizer_scopes == ("adam",)


def test_filters_of_the_script_replace_the_jobs() -> None:
    environ = {"LMS_EXCL_SCOPES": "a,b", "LMS_EXCL_INPUT_BY_TYPES": "Relu"}
    first = parse_call(({"adam"},), {"excl_scopes": {"d", "c"}, "incl_types": "Conv2D"}, environ).config
    assert (first.excl_scopes, first.incl_types, first.starting_scope) == (("c", "d"), ("Conv2D",), None)
    assert parse_call(({"adam"},), {"excl_scopes": None}, environ).config.excl_scopes == ()
    assert parse_call(({"adam"},), {}, environ).config.excl_scopes == ("a", "b")
    second = parse_call((), {}, environ).config
    assert (second.excl_scopes, second.excl_input_by_types) == (("a", "b"), ("Relu",))


@pytest.mark.parametrize(
    ("args", "keywords", "error"),
    [
        ((), {"lb": 3}, "no optimizer scope is given"),
        ((set(),), {}, "no optimizer scope is given"),
        ((None,), {}, "no optimizer scope is given"),
        (
            ({"a"},),
            {"foo": 1},
            "^LMS.. of version 0.1: got an unexpected keyword argument 'foo'; it has opt",
        ),
        (
            (),
            {"foo": 1},
            "^LMS.. of version 2.0: got an unexpected keyword argument 'foo'; it has swapout",
        ),
        ((3,), {"swapout_threshold": 3}, "multiple values for argument 'swapout_threshold'"),
        (({"a"},), {"swapin_ahead": 2}, "unexpected keyword argument 'swapin_ahead'"),
        (({"a"},), {"lb": 5, "ub": 3}, "needed lb <= ub"),
        (({"a"},), {"cpu_device": "/gpu:1"}, "needed '/cpu:0'"),
        ((), {"swapout_threshold": 0}, "needed -1 .auto. or at least 1"),
        ((), {"swapin_ahead": 0}, "needed -1 .auto. or at least 1"),
        ((), {"sync_mode": 4}, "needed 0, 1, 2 or 3"),
    ],
)
def test_bad_parameters(args: Any, keywords: Any, error: str) -> None:
    with pytest.raises((LMSArgumentError, ConfigError, TypeError), match=error):
        parse_call(args, keywords, {})


def test_a_bad_memory_ratio() -> None:
    with pytest.raises(ValueError, match="TF_LMS_SIMULATOR_MEM_RATIO is '2'; needed a share"):
        parse_call((), {}, {"TF_LMS_SIMULATOR_MEM_RATIO": "2"})


# --- the settings -----------------------------------------------------------------------------------------


def test_defragmentation_chooses_the_allocator() -> None:
    environ: dict[str, str] = {}
    choose_allocator(True, environ, initialised=False)
    assert environ == {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}
    choose_allocator(True, environ, initialised=True)
    with pytest.raises(LMSError, match="has initialised its devices"):
        choose_allocator(False, environ, initialised=True)
    choose_allocator(False, environ, initialised=False)
    assert environ == {}
    with pytest.raises(LMSError, match="TF_GPU_ALLOCATOR is 'mine'"):
        choose_allocator(True, {"TF_GPU_ALLOCATOR": "mine"}, initialised=False)


def test_every_statistic_is_counted_or_explained() -> None:
    assert sorted([*COUNTED, *NOT_COUNTED]) == sorted(PARITY)
    host = {"get_gpu_host_bytes_in_use", "get_gpu_host_peak_bytes_in_use"}
    assert set(GETTERS) == {f"get_{name}" for name in PARITY} | host
    assert all(getter.__module__.startswith("lms") for getter in GETTERS.values())


ASSUMED = "[LMS][0] the graph leaves the batch size open; sizes are for 32 (LMS_BATCH_SIZE)"

# --- in TensorFlow ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions() -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    return run_job("compat_job.py", "sessions")


@pytest.mark.tensorflow
def test_sessions_give_the_same_bits(sessions: dict[str, Any]) -> None:
    assert len({sessions[name] for name in ("plain", "plain_ref", "hook", "hook_ref", "second")}) == 1
    assert len({sessions[name] for name in ("bias", "bias_hook", "bias_second", "bias_small")}) == 1
    assert sessions["alias"]
    assert sessions["store"] == 20 * 5


@pytest.mark.tensorflow
def test_lines_that_users_look_for(sessions: dict[str, Any]) -> None:
    assert sessions["hook_lines"][:3] == [
        "[LMS][0] Editing model for LMS",
        "[LMS][0] n_tensors: all tensors",
        "[LMS][0] lb: 3",
    ]
    (added,) = (line for line in sessions["hook_lines"] if line.endswith(" ops into the model"))
    assert int(added.removeprefix("[LMS][0] Added ").split()[0]) >= 10, "a copy out and one back for each"
    assert "[LMS][0] 5 tensors will be swapped out(in) to(from) the host" in sessions["hook_lines"]
    assert sessions["hook_lines"][-1].startswith("[LMS][0] Editing model for LMS, took: ")
    assert "[LMS][0] 2 tensors will be swapped out(in) to(from) the host" in sessions["hook_ref_lines"]
    assert (
        "[LMS][0] Added 8 operations to the model (4 swap-out operations (0.02 GiB) and "
        "4 swap-in operations (0.02 GiB))" in sessions["second_lines"]
    )
    assert sessions["off"] == [0, ["[LMS][0] LMS is disabled and will not modify the model."]]
    assert sessions["auto"][-1] == "[LMS][0] LMS is not necessary. Turned LMS off."


@pytest.mark.tensorflow
def test_a_hook_without_tensors_keeps_lms_off_for_its_session(sessions: dict[str, Any]) -> None:
    weights, lines, told, active, edited = sessions["kept off"]
    assert weights == sessions["plain"]
    assert (lines, told) == (["[LMS][0] LMS is disabled and will not modify the model."], [])
    assert active and edited == [0, 1], "with n_tensors=0, and then without any of IBM's classes"


@pytest.mark.tensorflow
def test_the_operations_that_a_line_counts_add_up(sessions: dict[str, Any]) -> None:
    added, (outs, ins), lines = sessions["views"]
    assert added > outs + ins > 0
    line = f"[LMS][0] Added {outs + ins} operations to the model ({outs} swap-out operations ("
    assert any(said.startswith(line) and f" and {ins} swap-in operations (" in said for said in lines)
    assert any(said.startswith(f"[LMS][0] Added {added - outs - ins} more operations: ") for said in lines)


@pytest.mark.tensorflow
def test_an_order_alone_is_told_as_such(sessions: dict[str, Any]) -> None:
    lines = sessions["without swaps"]
    assert any("No tensor is swapped; " in line and "control dependencies" in line for line in lines)
    assert not any("operations to the model" in line for line in lines)


@pytest.mark.tensorflow
def test_the_packages_were_called_otherwise_too(sessions: dict[str, Any]) -> None:
    *same, names = sessions["other packages"]
    assert all(same)
    assert {"LMS", "LMSHook", "LMSKerasCallback", "LMSSessionRunHook", "__version__"} <= set(names)
    assert sessions["rest of contrib"][0] == "ModuleNotFoundError"


def test_a_package_of_such_a_name_comes_before_ours(tmp_path: Path) -> None:
    (tmp_path / "tflms.py").write_text("OWNER = 'installed'\n")
    source = "import sys; from lms.compat import install; install(sys); import tflms; print(tflms.OWNER)"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "installed\n"


PLAIN_ALLOCATOR = """
import tensorflow as tf, lms.compat
from lms.callbacks import LMSStatsLogger
from lms.device.ibm_counters import NoStatisticError
lms.compat.install()
for name in ("num_allocs", "largest_alloc_size", "bytes_in_use"):
    try:
        print(getattr(tf.experimental, "get_" + name)(0))
    except NoStatisticError as error:
        print(error)
logger = LMSStatsLogger("log.csv")
logger.on_train_begin()
logger.on_train_batch_begin(0)
logger.on_train_batch_end(0)
print(open("log.csv").read().splitlines()[1].split(",")[4])
"""


@pytest.mark.tensorflow
def test_the_cpus_usual_allocator_counts_nothing(tmp_path: Path) -> None:
    """TensorFlow has it count allocations of 4 KiB and more alone."""
    pytest.importorskip("tensorflow")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TF_CPU_")}
    environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = warm_python.run(["-c", PLAIN_ALLOCATOR], environ, timeout_s=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    *texts, allocs = done.stdout.splitlines()
    assert all(": the allocator of CPU:0 does not count; needed a GPU, or TF_CPU" in text for text in texts)
    assert [text.partition(":")[0] for text in texts] == [
        "get_num_allocs",
        "get_largest_alloc_size",
        "get_bytes_in_use",
    ]
    assert allocs == ""


@pytest.mark.tensorflow
def test_each_line_is_written_once() -> None:
    """Also where a later call asks for every decision, which go to the same place."""
    pytest.importorskip("tensorflow")
    source = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import compat_job
from lms.compat.classes import LMS
compat_job.tf1.disable_eager_execution()
for debug in (False, True):
    with compat_job.tf.Graph().as_default():
        net = compat_job.build()
        LMS(swapout_threshold=3, swapin_ahead=1, debug=debug).run()
        compat_job.stepped(net)
"""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = warm_python.run(["-c", source], {**os.environ, "PYTHONPATH": path}, timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stderr.splitlines()
    assert lines.count("[LMS][0] Editing model for LMS") == 2
    assert len([line for line in lines if ": out after" in line]) > 0


@pytest.mark.tensorflow
def test_levels_are_counted_for_an_assumed_batch_where_it_is_open(sessions: dict[str, Any]) -> None:
    tensors, lines, _ = sessions["assumed"]
    assert tensors > 0 and ASSUMED in lines


@pytest.mark.tensorflow
def test_what_fits_is_not_guessed_where_the_batch_size_is_open(sessions: dict[str, Any]) -> None:
    tensors, lines, warned = sessions["open"]
    assert tensors == 0 and not any("LMS is not necessary" in line or "32" in line for line in lines)
    assert lines[-1].startswith("[LMS][0] whether LMS is necessary is not known: the sizes of ")
    assert any("are open" in text and "LMS_BATCH_SIZE" in text for text in warned)


@pytest.mark.tensorflow
def test_second_generations_properties(sessions: dict[str, Any]) -> None:
    assert sessions["properties"] == [64, True, None, False]
    assert sessions["filters"] == [["block0"]] + [[]] * 7


@pytest.mark.tensorflow
def test_run_leaves_the_graph_as_it_is_and_the_first_step_tells(sessions: dict[str, Any]) -> None:
    added, same, again, first, second = sessions["run"]
    assert (added, same) == ([0, 0], True)
    assert again == [
        "[LMS][0] This model has already been updated with LMS swap operations. LMS will not re-process it."
    ]
    assert "[LMS][0] 5 tensors will be swapped out(in) to(from) the host" in first
    assert second == []


@pytest.mark.tensorflow
def test_one_of_the_optimizers_scopes_is_enough(sessions: dict[str, Any]) -> None:
    tensors, lines = sessions["scopes"]
    assert tensors == 5
    assert "[LMS][0] No operations were found with optimizer scope sgd." in lines


@pytest.mark.tensorflow
def test_errors_of_sessions(sessions: dict[str, Any]) -> None:
    errors = sessions["errors"]
    assert {kind for kind, _ in errors.values()} == {"LMSArgumentError"}
    assert errors["no graph"][1].startswith("no graph to edit")
    assert errors["scope"][1].startswith("optimizer_scopes: 'momentum' matches nothing")
    assert errors["type"][1].startswith("excl_types: 'Konv' matches nothing")
    assert errors["start"][1].startswith("starting_op_names: 'z' matches nothing")
    assert errors["filter"][1].startswith("excl_input_by_scopes: 'nowhere' matches nothing")


@pytest.mark.tensorflow
def test_inference_alone(sessions: dict[str, Any]) -> None:
    error, added, lines = sessions["inference"]
    assert (error[0], added) == ("LMSArgumentError", 0)
    assert error[1].startswith("the graph has no gradients")
    assert lines[0].startswith("[LMS][0] LMS is not necessary")


@pytest.fixture(scope="module")
def keras_in_session() -> dict[str, Any]:
    pytest.importorskip("tf_keras")
    return run_job("compat_job.py", "keras in session", TF_USE_LEGACY_KERAS="1")


@pytest.mark.tensorflow
def test_keras_in_a_session_gives_the_same_bits(keras_in_session: dict[str, Any]) -> None:
    seen = keras_in_session
    assert seen["plain"] == seen["first"] == seen["loaded"] == seen["auto"]
    assert seen["plain generator"] == seen["second"]
    assert seen["plain normalised"] == seen["normalised"]


@pytest.mark.tensorflow
def test_keras_in_a_session_swaps(keras_in_session: dict[str, Any]) -> None:
    """Twice two steps: two epochs of two batches, whose size Keras tells, or what it feeds."""
    seen = keras_in_session
    assert (seen["first_moved"], seen["loaded_moved"]) == (5 * 4, 5 * 4)
    # What a normalisation reads, under a condition, is swapped, too.
    assert "[LMS][0] 10 tensors will be swapped out(in) to(from) the host" in seen["normalised_lines"]
    assert seen["auto_moved"] > 0 and seen["auto_moved"] % 4 == 0
    moved = "operations to the model (5 swap-out operations (0.00 GiB) and 5 swap-in operations (0.00 GiB))"
    assert any(moved in line for line in seen["second_lines"])
    names = ("first_lines", "loaded_lines", "auto_lines", "second_lines")
    assert not any("batch size open" in line for name in names for line in seen[name])


@pytest.mark.tensorflow
def test_enable_alone_hears_the_batch_size_of_keras_in_a_session(keras_in_session: dict[str, Any]) -> None:
    seen = keras_in_session
    assert seen["enabled"] == seen["plain"]
    assert seen["enabled_moved"] >= 5 * 4
    assert not any("LMS_BATCH_SIZE" in text for text in seen["enabled_warnings"])
