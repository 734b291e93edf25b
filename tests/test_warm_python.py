"""Programs that are forked from one that has imported TensorFlow run as if started anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from jobs import wait_until

pytestmark = pytest.mark.tensorflow

SHOW = """
import atexit, json, os, sys
forked = "tensorflow" in sys.modules
atexit.register(lambda: print("the end"))
policy = os.environ.get("LMS_POLICY")
print(json.dumps([forked, "lms" in sys.modules, __name__, sys.argv[1:], policy, os.getcwd()]))
print(json.dumps(sorted(set(sys.path) & {"", "/nowhere"})))
print("said", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """An environment that has a template."""
    pytest.importorskip("tensorflow")
    wanted = {**os.environ, "PYTHONPATH": "/nowhere", "TF_CPP_MIN_LOG_LEVEL": "3"}
    warm_python.run(["-c", ""], wanted, timeout_s=120)
    return wanted


def test_a_program_has_its_own_arguments_environment_folder_and_exit_code(
    environ: dict[str, str], tmp_path: Path
) -> None:
    asked = {**environ, "LMS_POLICY": "all"}
    done = warm_python.run(["-c", SHOW, "a", "b c"], asked, timeout_s=120, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        f'[true, false, "__main__", ["a", "b c"], "all", "{tmp_path}"]',
        '["", "/nowhere"]',
        "the end",
    ]
    assert (done.returncode, done.stderr) == (7, "said\n")


def test_a_script_has_its_folder_first_and_its_source(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    script = tmp_path / "script.py"
    script.write_text("import inspect, beside\ndef f(): return beside.NAME\nprint(f(), inspect.getsource(f))")
    done = warm_python.run([str(script)], environ, timeout_s=120)
    assert done.stdout.split() == ["beside", "def", "f():", "return", "beside.NAME"], done.stderr


def test_failures_are_told_as_those_of_a_process(environ: dict[str, str]) -> None:
    raised = warm_python.run(["-c", "raise ValueError('so')"], environ, timeout_s=120)
    assert raised.returncode == 1
    assert raised.stderr.splitlines()[-1] == "ValueError: so"
    killed = warm_python.run(["-c", "import os; os.kill(os.getpid(), 9)"], environ, timeout_s=120)
    assert killed.returncode == -9


def test_a_program_that_takes_too_long_is_killed(environ: dict[str, str]) -> None:
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired) as told:
        warm_python.run(["-c", source], environ, timeout_s=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.value.stdout), 0)


def test_the_environment_that_tensorflow_reads_at_import_has_a_template_of_its_own(
    environ: dict[str, str],
) -> None:
    pytest.importorskip("tf_keras")
    legacy = {**environ, "TF_USE_LEGACY_KERAS": "1"}
    source = "import tensorflow as tf; print(tf.keras.Model.__module__.split('.')[0])"
    done = [warm_python.run(["-c", source], one, timeout_s=120) for one in (legacy, legacy, environ)]
    assert [one.stdout for one in done] == ["tf_keras\n", "tf_keras\n", "keras\n"]


def test_a_template_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('a broken install')")
    wanted = {**os.environ, "PYTHONPATH": str(tmp_path)}
    warm_python.run(["-c", ""], wanted, timeout_s=120)
    for _ in range(2):  # at once, and once it has surely ended
        with pytest.raises(RuntimeError, match="a broken install"):
            warm_python.run(["-c", ""], wanted, timeout_s=120)


def test_templates_end_with_their_process(environ: dict[str, str]) -> None:
    """Two programs start a template; none is left when the process that asked is gone."""
    source = """
import os, warm_python
environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
for _ in range(2):
    done = warm_python.run(["-c", "import os; print(os.getppid())"], environ, timeout_s=120)
(template,) = warm_python._templates.values()
print(template.process.pid, flush=True)
os._exit(0)
"""
    path = {**environ, "PYTHONPATH": str(Path(__file__).parent)}
    argv = [sys.executable, "-c", source]
    done = subprocess.run(argv, env=path, stdout=subprocess.PIPE, text=True, check=True)
    command_line = Path(f"/proc/{int(done.stdout)}/cmdline")

    def is_gone() -> bool:
        """Tell whether it has ended; a process that nobody has waited for yet has no command line."""
        try:
            return not command_line.read_bytes()
        except OSError:
            return True

    wait_until(is_gone, "the template is gone", 30)
