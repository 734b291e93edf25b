"""The plug-in in real TensorFlow: what it hands over, when, and what it survives."""

from pathlib import Path

import pytest
from c_files import build
from plugin_child import Found, run_cases

pytestmark = pytest.mark.tensorflow

FORMS = ("compiled", "ctypes")
TOGETHER = "life,item,faults,iterations,nested,interrupt,shapes"
NOT_LOADED = "the plug-in is not loaded; needed load() before"
OVER = "the graph is no longer TensorFlow's to ask; needed: ask inside the editor"


@pytest.fixture(scope="module", params=FORMS)
def found(request: pytest.FixtureRequest) -> Found:
    return run_cases(TOGETHER, LMS_PLUGIN=request.param)


def test_it_is_loaded_once_and_edits_while_it_is_armed(found: Found) -> None:
    life = found.cases["life"]
    assert life["before"] == 1.0
    assert life["unloaded"] == [NOT_LOADED, NOT_LOADED]
    assert life["unknown"] == "no plug-in for TPU; needed one of CPU, GPU"
    assert len(life["form"]) == 4 and set(life["form"]) <= set(FORMS) and len(set(life["form"])) == 1
    assert life["idle"] == [1.0, 0]
    assert life["early"] == 0, "TensorFlow does not optimize a function anew"
    assert life["armed"] == [2.0, 1], "one call for a graph, in its last iteration, and the edit ran"
    assert life["forward"] == [0.0, 1], "a graph without gradients does not reach Python"
    assert life["gradient"] == [0.0, 2]
    assert life["disarmed"] == [1.0, 2]
    assert life["again"] == [2.0, 3]
    assert life["left"] == 1.0
    assert life["late"] == [OVER, OVER]
    assert life["devices"] == ["CPU"]
    assert life["count"] == "3 iterations of TensorFlow's optimizer; needed 1 or 2"


def test_the_editor_can_ask_for_shapes_and_names(found: Found) -> None:
    item = found.cases["item"]
    assert "fault" not in item, item
    assert item["MatMul"] == [[1, [16, 16]]] and item["fields"] == [1]
    assert item["Const"] == [[1, []]], "a scalar"
    assert item["AssignSubVariableOp"] == item["missing"] == item["none"] == []
    assert item["fetches"] and item["named"] and item["same"]
    assert set(item["fetches"]) <= set(item["preserved"])
    assert item["preserved"] == sorted(item["preserved"])


def test_no_editor_can_break_a_graph(found: Found) -> None:
    faults = found.cases["faults"]
    assert faults["told"] == [
        *("ValueError", "KeyboardInterrupt", "SystemExit", "MemoryError"),
        *["TypeError"] * 5,
        "ValueError",
    ]
    assert set(faults["steps"]) == {1.0}


def test_the_last_iteration_alone_reaches_the_editor(found: Found) -> None:
    counts = found.cases["iterations"]
    assert counts["silent"] == counts["two"] == [1, 0, 1]
    assert counts["one"] == [1, 1, 1]
    assert counts["other thread"] == [1, 0], "the number is each thread's own"


def test_graphs_of_the_editors_own_work_are_not_handed_to_it(found: Found) -> None:
    assert found.cases["nested"] == {"outer": [2.0, 2.0], "seen": [0.0, 0.0]}


def test_an_interrupt_of_the_editor_is_told(found: Found) -> None:
    assert found.cases["interrupt"] == {
        "told": ["KeyboardInterrupt", "TimeoutError"],
        "steps": [1.0, 1.0],
        "kept": True,
    }


def test_both_readers_of_shapes_tell_the_same(found: Found) -> None:
    shapes = found.cases["shapes"]
    assert shapes["same"] and shapes["nodes"] > 100 and shapes["many"] >= 4, shapes
    assert shapes["kinds"] == [True, True, True], "unknown ranks, scalars and open dimensions"


@pytest.mark.parametrize("form", FORMS)
def test_two_threads_train_at_once_and_a_third_has_loaded(form: str) -> None:
    threads = run_cases("threads", LMS_PLUGIN=form).only
    assert threads == {"steps": [[2.0] * 3] * 2, "own": True, "calls": [3, 3]}


@pytest.mark.parametrize("form", FORMS)
def test_a_forked_child_loads_it_itself(form: str) -> None:
    assert run_cases("fork", LMS_PLUGIN=form).only == {"child": 2.0, "parent": 2.0, "status": 0}


def test_the_reader_in_c_takes_and_refuses_what_protobuf_does() -> None:
    messages = run_cases("messages,speed", LMS_PLUGIN="compiled").cases
    assert messages["messages"] == {"good": 2000, "refused": True}
    speed = messages["speed"]
    assert speed["nodes"] > 2800 and speed["outputs_s"] < 0.03, speed  # 7 ms on two cores of a shared machine


@pytest.mark.parametrize("options", [(), ("constant_folding", "layout_optimizer")])
def test_an_idle_plugin_changes_no_graph_and_says_nothing(options: tuple[str, ...]) -> None:
    found = run_cases("quiet", *options, LMS_PLUGIN="compiled", TF_CPP_MIN_LOG_LEVEL="0")
    assert found.only["same"] and found.only["nodes"] > 8, found.only
    said = found.stderr.partition("-- loaded --\n")[2].splitlines()
    # TensorFlow itself says this, before it calls a plug-in for the first time: CreateOptimizers in
    # custom_graph_optimizer_registry.cc. At TF_CPP_MIN_LOG_LEVEL=1 it does not.
    assert [line for line in said if "Plugin optimizer for device_type CPU is enabled." not in line] == []
    assert len(said) == 1


def test_the_form_without_c_is_quiet_too() -> None:
    found = run_cases("quiet", LMS_PLUGIN="ctypes", TF_CPP_MIN_LOG_LEVEL="1")
    assert found.only["same"] and not found.stderr.partition("-- loaded --\n")[2]


@pytest.mark.parametrize("form", FORMS)
def test_python_may_end_while_an_editor_is_at_work(form: str) -> None:
    assert run_cases("leave", LMS_PLUGIN=form).only == {"entered": True}
    assert run_cases("armed_at_exit", LMS_PLUGIN=form).only == 2.0


def test_a_thread_that_python_does_not_know_may_call_until_the_end(tmp_path: Path) -> None:
    caller = build("late_caller.c", tmp_path / "late_caller.so")
    found = run_cases("late", str(caller), LMS_PLUGIN="compiled")
    assert found.only == {"entered": True}
    assert "late calls: from two threads" in found.stderr


def test_an_interrupt_that_waited_for_python_is_told(tmp_path: Path) -> None:
    """It comes at the first instruction of the callback, where nothing can catch it."""
    caller = build("late_caller.c", tmp_path / "late_caller.so")
    found = run_cases("pending_interrupt", str(caller), LMS_PLUGIN="compiled").only
    assert found == {"told": ["KeyboardInterrupt"], "edited": []}


def test_a_module_imported_a_second_time_uses_what_is_registered() -> None:
    assert run_cases("second_import", LMS_PLUGIN="compiled").only == {"form": "compiled", "step": 2.0}
    found = run_cases("second_import", LMS_PLUGIN="ctypes").only
    assert found["step"] == 1.0 and found["refused"].startswith("another import of lms serves CPU"), found
