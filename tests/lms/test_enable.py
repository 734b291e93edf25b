"""The door to LMS: at most once, with a reason for everything that is not done."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lms
from lms.enable import LMSWarning

ROOT = Path(__file__).resolve().parents[2]
IBM = ROOT / "tests" / "fakes" / "ibm"

ENGINE = """
import json, sys, types, warnings
import tensorflow as tf
calls = []
hook = types.ModuleType("lms.engine.installation")
hook.install = lambda config: calls.append(["install", config.policy])
hook.uninstall = lambda: calls.append(["uninstall"])
hook.report = lambda: "a report"
worked = []
hook.has_worked = lambda: bool(worked)
hook.pause, hook.resume = (lambda name=name: calls.append([name]) for name in ("pause", "resume"))
sys.modules["lms.engine.installation"] = hook
import lms
def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except lms.LMSError as error:
        return str(error)
"""


def run(source: str, **environ: str) -> Any:
    """Run ``source`` with stand-ins for TensorFlow and the engine; returns the ``answer`` it leaves."""
    path = os.pathsep.join(map(str, [ROOT, IBM]))
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", ENGINE + source + "\nprint(json.dumps(answer))"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_graph_mode_on_stock_tensorflow() -> None:
    answer = run(
        "first = lms.enable(policy='all')\n"
        "answer = [first.active, first.mode, True, lms.state() is first, calls, lms.report()]",
        FAKE_STOCK="1",
    )
    assert answer == [True, "graph", True, True, [["install", "all"]], "a report"]


def test_at_rest_nothing_is_on_and_the_report_stays() -> None:
    """Who asks for the same goes on with it, and anybody else begins anew."""
    source = """
from lms.enable import rest
def shown():
    return [lms.state().active, lms.report(), calls[1:]]
lms.enable(policy="all")
rest()
answer = [shown()]
lms.enable(policy="all")
answer.append(shown())
rest()
answer.append([lms.enable().config.policy, calls[3:]])
"""
    resting, again, other = run(source, FAKE_STOCK="1")
    assert resting == [False, "a report", [["pause"]]]
    assert again == [True, "a report", [["pause"], ["resume"]]]
    assert other == ["auto", [["pause"], ["uninstall"], ["install", "auto"]]]


def test_native_mode_where_it_is_there() -> None:
    answer = run("answer = [lms.enable().mode, tf.context.lms_enabled, calls]")
    assert answer == ["native", True, []]


def test_graph_mode_can_be_chosen_on_ibms_tensorflow() -> None:
    assert run("answer = [lms.enable(mode='graph').mode, tf.context.lms_enabled]") == ["graph", False]


def test_a_failure_before_the_engine_leaves_nothing_installed() -> None:
    source = """
import lms.compat
real, lms.compat.install = lms.compat.install, lambda tensorflow: missing
try:
    lms.enable(policy="all")
except NameError:
    lms.compat.install = real
answer = [calls, lms.state() is None, lms.enable(policy="all").active]
"""
    assert run(source, FAKE_STOCK="1") == [[["install", "all"]], True, True]


def test_two_threads_may_import_and_enable_at_once() -> None:
    source = """
import threading
held, asked = threading.Event(), threading.Event()
def importing(name, plain=__import__("importlib").import_module):
    if name == "tensorflow" and threading.current_thread().name == "late":
        asked.set()
        held.wait(10)  # as long as the other thread, which holds the import, has not enabled
    return plain(name)
lms.enable.__globals__["importlib"].import_module = importing
late = threading.Thread(target=lms.enable, name="late", daemon=True)
late.start()
asked.wait(10)
first = threading.Thread(target=lms.enable, name="first", daemon=True)
first.start()
first.join(5)
answer = [first.is_alive(), held.set(), late.join(10), lms.state().active]
"""
    assert run(source, FAKE_STOCK="1") == [False, None, None, True]


def test_once_only() -> None:
    answer = run(
        "again = lms.enable(policy='all') is lms.enable(policy='all')\n"
        "answer = [again, refused(lms.enable, policy='threshold'), lms.enable().config.policy]",
        FAKE_STOCK="1",
    )
    assert answer[0] is True
    assert answer[1].startswith(
        "LMS is already on with another configuration (policy: 'all', now 'threshold'); "
    )
    assert answer[1].endswith("call lms.disable() first")
    assert answer[2] == "all"


def test_a_call_replaces_the_environments_before_the_first_step() -> None:
    source = "lms.enable(); {}\nanswer = [refused(lms.enable, policy='all'), calls]"
    answer = run(source.format("pass"), FAKE_STOCK="1", LMS_ENABLED="1")
    assert answer == [None, [["install", "auto"], ["uninstall"], ["install", "all"]]]
    text, _ = run(source.format("worked.append('a step')"), FAKE_STOCK="1", LMS_ENABLED="1")
    assert text.endswith("call lms.disable() first, or enable it before the first step")


def test_in_a_rank_a_call_may_come_before_the_import_of_tensorflow() -> None:
    """The import that the call causes enables the job's configuration, inside the call."""
    source = """
import sys, types
calls = []
hook = types.ModuleType("lms.engine.installation")
hook.install = lambda config: calls.append(["install", config.policy])
hook.uninstall = lambda: calls.append(["uninstall"])
hook.has_worked = lambda: False
sys.modules["lms.engine.installation"] = hook
import lms
print(lms.enable(policy="all").config.policy, calls)
"""
    path = os.pathsep.join(map(str, [ROOT / "lms" / "bootstrap", ROOT, IBM]))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "LMS_ENABLED": "1", "FAKE_STOCK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "all [['install', 'auto'], ['uninstall'], ['install', 'all']]\n", done.stderr


def test_native_mode_again_after_the_first_tensor() -> None:
    answer = run("lms.enable(); tf.constant(1.0)\nanswer = lms.enable().mode", LMS_ENABLED="1")
    assert answer == "native"


def test_disable_and_enable_again() -> None:
    answer = run(
        "lms.enable(policy='all'); lms.disable(); lms.disable()\n"
        "answer = [lms.state(), lms.enable(policy='threshold').config.policy, calls]",
        FAKE_STOCK="1",
    )
    assert answer == [None, "threshold", [["install", "all"], ["uninstall"], ["install", "threshold"]]]


def test_the_job_can_forbid_it() -> None:
    answer = run(
        "state = lms.enable(policy='all')\nanswer = [state.active, state.mode, state.why, calls]",
        LMS_ENABLED="0",
    )
    assert answer == [False, "off", "LMS_ENABLED switches it off", []]


DRAWN = """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    lms.plot(sys.argv[0] + "no_folder/x.png")
answer = [str(one.message) for one in said]
"""


def test_mode_off() -> None:
    assert run("answer = lms.enable(mode='off').why") == "mode is off"


@pytest.mark.parametrize(
    ("source", "environ", "why"),
    [
        ("", {"LMS_ENABLED": "0"}, "off: LMS_ENABLED switches it off"),
        ("lms.enable(policy='all')", {"LMS_ENABLED": "0"}, "off: LMS_ENABLED switches it off"),
        ("", {"LMS_ENABLED": "0", "LMS_LB": "x"}, "off: LMS_ENABLED switches it off"),
        ("lms.enable(mode='off')", {}, "off: mode is off"),
        ("lms.enable()", {}, "native: TensorFlow's own large model support is on"),
        (
            "lms.enable(mode='graph'); lms.disable()",
            {},
            "off: lms.enable() was not called, or lms.disable() was",
        ),
    ],
)
def test_a_script_that_draws_runs_where_nothing_is_planned(
    source: str, environ: dict[str, str], why: str
) -> None:
    assert run(source + DRAWN, **environ) == [f"lms.plot() draws nothing: LMS is {why}"]


@pytest.mark.tensorflow
def test_a_script_that_reports_runs_without_lms(tmp_path: Path) -> None:
    """Under ``lmsrun --no-lms``, with the real TensorFlow: the peak is there to compare with."""
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf\nimport lms\n"
        "kept = tf.ones((1 << 20,))\nlms.plot('memory.png')\nprint(lms.report())\n"
        "report = lms.report()\n"
        "print(report.edited, report.planned_peak_bytes, report.measured_peak_bytes >> 20)\n"
    )
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64"}
    command = [sys.executable, str(ROOT / "lmsrun" / "__main__.py"), "-np", "1", "--no-lms", str(script)]
    done = subprocess.run(
        command, env={**os.environ, **limit}, capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    title, mode, device, measured, values = (" ".join(line.split()) for line in done.stdout.splitlines())
    assert (title, mode) == ("Large Model Support", "mode off: LMS_ENABLED switches it off")
    assert (device, measured[:17]) == ("device CPU:0, limit 64.0 MiB", "measured peak 4.0")
    assert values == "() None 4"
    assert "lms.plot() draws nothing: LMS is off: LMS_ENABLED switches it off" in done.stderr
    assert list(tmp_path.iterdir()) == [script]


DOUBTED = """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    lms.enable()
answer = [str(one.message) for one in said if one.category.__name__ == "LMSWarning"]
"""


def test_a_misspelt_variable_is_told_once_a_job() -> None:
    hint = "LMS_POLCY is no variable of Large Model Support; did you mean LMS_POLICY?"
    assert run(DOUBTED, FAKE_STOCK="1", LMS_POLCY="all") == [hint]
    assert run(DOUBTED, FAKE_STOCK="1", LMS_POLICY="all", LMS_CACHE="/x") == []
    assert run(DOUBTED, FAKE_STOCK="1", LMS_POLCY="all", LMSRUN_JOB_ID="1") == [], "lmsrun has told it"


def test_native_mode_too_late() -> None:
    answer = run("tf.constant(1.0)\nanswer = refused(lms.enable)")
    assert answer.endswith(
        "before GPUs have been initialized; call lms.enable() right after 'import tensorflow'"
    )


def test_native_mode_on_stock() -> None:
    answer = run("answer = refused(lms.enable, mode='native')", FAKE_STOCK="1")
    assert answer.endswith("mode native needs IBM's build; try mode auto or graph")


def test_the_host_limit_is_set_unless_it_is() -> None:
    source = """
import os
from lms.enable import HOST_LIMIT_NAMES
lms.enable(host_mem_limit_mb=64)
answer = [os.environ[name] for name in HOST_LIMIT_NAMES]
"""
    assert run(source, FAKE_STOCK="1", TF_CUDA_HOST_MEM_LIMIT_IN_MB="9") == ["64", "9"]


def test_a_misspelt_override() -> None:
    with pytest.raises(lms.ConfigError, match="did you mean policy"):
        lms.enable(polcy="all")
    misspelt: dict[str, Any] = {"polcy": "all"}
    with pytest.raises(lms.ConfigError, match=r"^LMSConfig has no 'polcy'; did you mean policy\?$"):
        lms.LMSConfig(**misspelt)
    with pytest.raises(lms.ConfigError, match=r"^lms.enable\('auto'\); needed an LMSConfig, or fields"):
        lms.enable("auto")  # type: ignore[arg-type]
    with pytest.raises(lms.ConfigError, match=r"^LMSConfig has no 'zzz'$"):
        dataclasses.replace(lms.LMSConfig(), zzz=1)  # type: ignore[call-arg]
    assert list(inspect.signature(lms.LMSConfig).parameters)[:3] == ["enabled", "mode", "policy"]


@pytest.mark.tensorflow
def test_real_tensorflow_late_and_early() -> None:
    """In a rank, with the real engine: before the first tensor and behind it."""
    source = """
import warnings
import tensorflow as tf
import lms
print(lms.state().config.policy)
with warnings.catch_warnings(record=True) as early:
    warnings.simplefilter("always")
    print(lms.enable(policy="all").mode, len(early))
lms.disable()
@tf.function
def traced():
    lms.enable(policy="all")
try:
    traced()
except lms.LMSError as error:
    print(str(error)[:60])
tf.constant(1.0)
with warnings.catch_warnings(record=True) as late:
    warnings.simplefilter("always")
    print(lms.enable(policy="all").mode, len(late))
lms.disable()
lms.enable()
variable = tf.Variable(tf.ones((64, 64)))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    print(lms.enable(policy="threshold").config.policy, "after a variable, before a step")
@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = variable
        for _ in range(12):
            loss = tf.tanh(loss @ variable)
    return tape.gradient(loss, variable)
step()
print(len(lms.report().graphs), callable(lms.enable), callable(lms.report))
try:
    lms.enable(policy="all")
except lms.LMSError as error:
    print(error)
"""
    path = os.pathsep.join(map(str, [ROOT / "lms" / "bootstrap", ROOT]))
    environ = {**os.environ, "PYTHONPATH": path, "LMS_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environ, capture_output=True, text=True, timeout=600
    )
    *lines, refusal = done.stdout.splitlines()
    threshold = "threshold after a variable, before a step"
    traced = "lms.enable() was called in a function that TensorFlow is tracing; needed"[:60]
    assert lines == ["auto", "graph 0", traced, "graph 0", threshold, "1 True True"], done.stderr[-2000:]
    assert refusal.startswith("LMS is already on with another configuration (policy: 'threshold', now 'all')")


def test_the_warning_is_a_category_of_its_own() -> None:
    assert issubclass(LMSWarning, UserWarning)
