"""The worker bootstrap in real child interpreters, against a strict stand-in for IBM's TensorFlow."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.receipts.file import MAX_LINE_BYTES, PART_CHARS
from launch.receipts.lines import ReceiptSieve
from lms.bootstrap import sitecustomize as bootstrap

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "lms" / "bootstrap"
IBM = ROOT / "tests" / "fakes" / "ibm"
HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8"}


class Rank:
    """Runs programs as rank 3 (local rank 1) of a job and reads its receipts."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "program"
        self.receipts = folder / "receipts"
        self.home.mkdir()
        self.receipts.mkdir()
        expected = {"rank": 3, "local_rank": 1}
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, [BOOTSTRAP, IBM])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LMSRUN_JOB_ID": "job",
            "LMSRUN_RECEIPT_DIR": str(self.receipts),
            "LMSRUN_EXPECT": json.dumps(expected),
        }

    def run(self, source: str, *front: str, **environ: str) -> subprocess.CompletedProcess[str]:
        script = self.home / "train.py"
        script.write_text(source)
        argv = [*front, sys.executable, str(script)]
        return subprocess.run(
            argv, env={**self.environ, **environ}, cwd=self.home, capture_output=True, text=True, timeout=300
        )

    def ok(self, source: str, *front: str, **environ: str) -> str:
        done = self.run(source, *front, **environ)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    def receipt(self, stage: str) -> dict[str, Any]:
        assert [path.name for path in self.receipts.glob("*.tmp")] == []
        content: dict[str, Any] = json.loads((self.receipts / f"rank-3.{stage}.json").read_text())
        return content


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


# --- one file for every Python ----------------------------------------------------------------------------


def test_it_runs_on_python_3_6() -> None:
    """IBM's builds live on 3.6 and 3.7; vermin knows syntax and standard library of each version."""
    start = [sys.executable, "-c", "import vermin; vermin.main()"]
    options = ["-t=3.6-", "--no-tips", "--violations", str(BOOTSTRAP / "sitecustomize.py")]
    done = subprocess.run([*start, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("minor", [6, 7])
def test_it_does_its_work_on_a_real_old_python(rank: Rank, minor: int) -> None:
    old = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"), shutil.which(f"python3.{minor}")]
    python = next((str(path) for path in old if path), None)
    if python is None:
        pytest.skip(f"no Python 3.{minor} here")
    has_wrapt = subprocess.run([python, "-c", "import wrapt"], capture_output=True).returncode == 0
    source = "import tensorflow as tf, horovod.tensorflow as hvd; hvd.init(); print(tf.context.lms_enabled)"
    script = rank.home / "train.py"
    script.write_text(source)
    environ = {**rank.environ, **HOROVOD, "LMS_ENABLED": "1", "LMSRUN_VERBOSE": "1"}
    done = subprocess.run([python, str(script)], env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{has_wrapt}\n"), done.stderr
    if not has_wrapt:
        assert done.stderr.count("No module named 'wrapt'") == 2
        pytest.skip(f"Python 3.{minor} starts well, but has no wrapt to go on with")
    assert rank.receipt("framework")["lms"]["mode"] == "native"
    assert rank.receipt("init")["hvd_size"] == 8


def test_a_start_imports_nothing_more(rank: Rank) -> None:
    source = "import sys; print(*sorted(sys.modules))"
    with_us = set(rank.ok(source).split())
    without = set(rank.ok(source, PYTHONPATH=str(IBM)).split())
    assert with_us - without == {"_lmsrun_bootstrap", "sitecustomize"} - without


def test_outside_a_rank_it_does_nothing(rank: Rank) -> None:
    source = "import sys, tensorflow as tf; print('_lmsrun_bootstrap' in sys.modules, tf.context.lms_enabled)"
    assert rank.ok(source, LMSRUN_JOB_ID="", LMSRUN_EXPECT="", LMS_ENABLED="") == "False False\n"
    assert list(rank.receipts.iterdir()) == []


# --- the user's own sitecustomize -------------------------------------------------------------------------

WHO = """
import sys
print(getattr(sys.modules.get("sitecustomize"), "OWNER", None))
print(*sys.path)
"""


@pytest.mark.parametrize("again", ["", str(BOOTSTRAP), str(BOOTSTRAP / ".." / "bootstrap")])
def test_the_users_own_sitecustomize_runs_in_our_place(rank: Rank, again: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("OWNER = 'user'\nprint('hello from', __name__)\n")
    path = os.pathsep.join(filter(None, [str(BOOTSTRAP), again, str(own), str(IBM)]))
    greeting, owner, search = rank.ok(WHO, PYTHONPATH=path).splitlines()
    assert (greeting, owner) == ("hello from sitecustomize", "user")
    assert "bootstrap" not in search


def test_without_one_of_the_users(rank: Rank) -> None:
    assert rank.ok(WHO).splitlines()[0] == "None"


def test_a_broken_one_is_reported_as_ever_and_stops_nothing(rank: Rank, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import no_such_module\n")
    with_us = rank.run("import tensorflow", PYTHONPATH=os.pathsep.join(map(str, [BOOTSTRAP, own, IBM])))
    without = rank.run("import tensorflow", PYTHONPATH=os.pathsep.join(map(str, [own, IBM])))
    assert with_us.returncode == without.returncode == 0
    assert with_us.stderr == without.stderr != ""
    assert rank.receipt("framework")["tensorflow"] == "2.1.0"


# --- native LMS -------------------------------------------------------------------------------------------

SESSIONS = """
import json, tensorflow as tf
own = tf.ConfigProto(log_device_placement=True)
for session in (tf.Session(), tf.Session("", None, own), tf.Session(config=own)):
    options = session._config.gpu_options.experimental
    print(options.lms_enabled, options.lms_defrag_enabled, session._config.log_device_placement)
print(own.gpu_options.experimental.lms_enabled, tf.context.lms_enabled, tf.context.lms_defrag_enabled)
tf.constant(1.0)
"""


@pytest.mark.parametrize("mode", ["auto", "native"])
def test_ibms_tensorflow_gets_its_own_lms(rank: Rank, mode: str) -> None:
    lines = rank.ok(SESSIONS, LMS_ENABLED="1", LMS_MODE=mode).splitlines()
    assert lines == ["True False False", "True False True", "True False True", "False True False"]
    receipt = rank.receipt("framework")
    assert receipt["lms"] == {
        "requested": mode,
        "active": True,
        "mode": "native",
        "why": "TensorFlow's own large model support is on",
    }
    assert (receipt["rank"], receipt["tensorflow"], receipt["visible_gpus"]) == (3, "2.1.0", [])


def test_a_scripts_own_call_finds_native_lms_on(rank: Rank) -> None:
    source = """
import tensorflow as tf
from tensorflow.python.client.session import BaseSession
tf.constant(1.0)
before = BaseSession.__init__
import lms
print(lms.enable().mode, BaseSession.__init__ is before)
"""
    path = os.pathsep.join(map(str, [BOOTSTRAP, ROOT, IBM]))
    assert rank.ok(source, LMS_ENABLED="1", PYTHONPATH=path) == "native True\n"


def test_defragmentation_on_request(rank: Rank) -> None:
    lines = rank.ok(SESSIONS, LMS_ENABLED="true", LMS_DEFRAG="1").splitlines()
    assert lines == ["True True False", "True True True", "True True True", "False True True"]


@pytest.mark.parametrize(
    ("environ", "requested", "why"),
    [
        ({"LMS_ENABLED": "0"}, "off", "not asked for"),
        ({"LMS_ENABLED": "1", "LMS_MODE": "off"}, "off", "not asked for"),
        (
            {"LMS_ENABLED": "1", "LMS_MODE": "grap"},
            "grap",
            "LMS_MODE is 'grap'; needed auto, native, graph or off",
        ),
    ],
)
def test_off_is_off(rank: Rank, environ: dict[str, str], requested: str, why: str) -> None:
    assert rank.ok(SESSIONS.replace("session._config", "tf.ConfigProto()"), **environ).endswith(
        "False False False\n"
    )
    assert rank.receipt("framework")["lms"] == {
        "requested": requested,
        "active": False,
        "mode": "off",
        "why": why,
    }


def test_stock_tensorflow_has_no_native_mode(rank: Rank) -> None:
    rank.ok("import tensorflow", LMS_ENABLED="1", LMS_MODE="native", FAKE_STOCK="1")
    lms = rank.receipt("framework")["lms"]
    assert not lms["active"]
    assert "has no tf.config.experimental.set_lms_enabled" in lms["why"]


def test_an_old_python_says_what_graph_mode_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stock:
        class config:  # noqa: N801
            experimental = None

    monkeypatch.setattr(bootstrap, "_OLDEST_FOR_GRAPH", (99, 0))
    lms = bootstrap.switch_lms_on(Stock, {"LMS_ENABLED": "1"})
    assert not lms["active"]
    assert "mode graph needs Python" in lms["why"]


# --- whose lms --------------------------------------------------------------------------------------------


def test_another_lms_of_the_program_comes_first(rank: Rank) -> None:
    (rank.home / "lms.py").write_text("OWNER = 'the program'\n")
    assert (
        rank.ok("import tensorflow, lms; print(lms.OWNER)", LMS_ENABLED="1", FAKE_STOCK="1")
        == "the program\n"
    )
    lms = rank.receipt("framework")["lms"]
    assert not lms["active"]
    assert (
        lms["why"]
        == f"the program has its own module named lms ({rank.home / 'lms.py'}); rename it to use LMS"
    )


def test_a_script_of_ibms_finds_its_names_where_the_job_forbids_lms(rank: Rank) -> None:
    source = """
import importlib.util
import tensorflow as tf
tf.config.experimental.set_lms_enabled(True)
print(tf.config.experimental.get_lms_enabled())
print(importlib.util.find_spec("tensorflow_large_model_support") is not None)
"""
    assert rank.ok(source, LMS_ENABLED="0", FAKE_STOCK="1") == "False\nTrue\n"
    lms = rank.receipt("framework")["lms"]
    assert (lms["requested"], lms["active"], lms["why"]) == ("off", False, "not asked for")


def test_another_lms_of_the_program_is_left_alone_where_lms_is_off(rank: Rank) -> None:
    (rank.home / "lms.py").write_text("OWNER = 'the program'\n")
    source = "import tensorflow, lms; print(lms.OWNER)"
    assert rank.ok(source, LMS_ENABLED="0", FAKE_STOCK="1") == "the program\n"
    assert rank.receipt("framework")["lms"]["why"] == "not asked for"


def test_a_folder_of_data_is_no_module(rank: Rank) -> None:
    (rank.home / "lms").mkdir()
    (rank.home / "lms" / "scans.csv").write_text("1,2\n")
    source = "import tensorflow, sys; print(sys.modules['lms'].__file__)"
    assert rank.ok(source, LMS_ENABLED="1", LMS_MODE="native", FAKE_STOCK="1").strip() == str(
        ROOT / "lms/__init__.py"
    )


# --- the rank's GPU ---------------------------------------------------------------------------------------

GPUS = "import tensorflow as tf; print([gpu.name[-1] for gpu in tf.context.visible], len(tf.context.growing))"


@pytest.mark.parametrize(
    ("gpus", "tokens", "visible"),
    [("4", "0,1,2,3", "['1'] 1"), ("4", "0,2", "['2'] 1"), ("4", "", "[] 0"), ("0", "0,1", "[] 0")],
)
def test_a_rank_sees_its_own_gpu(rank: Rank, gpus: str, tokens: str, visible: str) -> None:
    assert rank.ok(GPUS, FAKE_GPUS=gpus, LMSRUN_GPUS=tokens).strip() == visible


@pytest.mark.parametrize(
    ("tokens", "ranks", "growing"),
    [("0,1", "2", 0), ("0,1,2", "2", 0), ("0,1", "4", 1), ("1,1", "2", 1), ("0,1", "", 1), ("MIG-b", "2", 0)],
)
def test_planned_memory_of_a_rank_with_a_gpu_of_its_own_is_one_region(
    rank: Rank, tokens: str, ranks: str, growing: int
) -> None:
    own = {
        "FAKE_GPUS": "1" if tokens.startswith("MIG") else "4",
        "LMSRUN_GPUS": tokens,
        "LOCAL_WORLD_SIZE": ranks,
    }
    assert rank.ok(GPUS, LMS_ENABLED="1", FAKE_STOCK="1", **own).split()[-1] == str(growing)
    assert rank.ok(GPUS, LMS_ENABLED="1", **own).split()[-1] == "1", "IBM's own LMS plans nothing"
    assert rank.ok(GPUS, LMS_ENABLED="0", **own).split()[-1] == "1", "a job without LMS takes what it needs"


def test_the_receipt_names_the_visible_gpu(rank: Rank) -> None:
    rank.ok(GPUS, FAKE_GPUS="2", LMSRUN_GPUS="0,1", LMS_ENABLED="1")
    assert rank.receipt("framework")["visible_gpus"] == ["/physical_device:GPU:1"]


@pytest.mark.parametrize(
    ("count", "tokens", "visible", "local", "position"),
    [
        (4, None, None, 1, None),
        (1, "0,1,2,3", "2", 2, 0),
        (1, "GPU-a,GPU-b", "GPU-b", 1, 0),
        (2, "GPU-a,GPU-b", None, 1, 1),
        (3, "GPU-b,GPU-a", "GPU-a,GPU-c,GPU-b", 0, 2),
        (2, "4,6", "4,6", 1, 1),
        (2, "MIG-x,MIG-y", "MIG-y,MIG-x", 0, 1),
        (2, "0,1", None, 3, 1),
        (4, "7,9", None, 1, None),
        (4, "0,1,2,3", None, None, None),
        (4, " ", None, 0, -1),
    ],
)
def test_choose_gpu(count: int, tokens: str, visible: str, local: int, position: "int | None") -> None:
    chosen, why = bootstrap.choose_gpu(count, tokens, visible, local)
    assert chosen == position
    assert bool(why) == (position is None and tokens is not None)


# --- receipts ---------------------------------------------------------------------------------------------


def test_the_first_process_of_a_rank_writes(rank: Rank) -> None:
    source = """
import os, subprocess, sys
print(os.getpid(), flush=True)
import tensorflow
if not os.fork():
    tensorflow.__version__ = "forked"
    del sys.modules["tensorflow"]
    import tensorflow
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", "import tensorflow"], check=True)
"""
    pid = int(rank.ok(source))
    assert rank.receipt("framework")["pid"] == pid


def test_receipts_go_by_line_where_no_folder_leads_to_the_launcher(rank: Rank) -> None:
    """Once for each stage: a child that imports TensorFlow too has nothing to tell of its rank."""
    source = "import subprocess, sys, tensorflow; subprocess.run([sys.executable, '-c', 'import tensorflow'])"
    done = rank.run(source, LMSRUN_RECEIPT_DIR="", LMSRUN_RECEIPT_LINES="1")
    (line,) = done.stderr[:-1].split("\n")
    *front, content = line.split(" ", 5)
    assert front == ["\x1elmsrun-receipt", "job", "3", "framework", "0/1"]
    assert json.loads(content)["tensorflow"] == "2.1.0"


def test_a_long_receipt_goes_in_lines_that_every_launcher_keeps_whole(rank: Rank, tmp_path: Path) -> None:
    source = """
import os, sys
bootstrap = sys.modules["_lmsrun_bootstrap"]
bootstrap.write_receipt("init", {"reasons": ["x" * 3000]}, os.environ)
"""
    done = rank.run(source, LMSRUN_RECEIPT_DIR="", LMSRUN_RECEIPT_LINES="1")
    lines = done.stderr.encode().splitlines(keepends=True)
    assert len(lines) == 5 and max(map(len, lines)) <= MAX_LINE_BYTES
    assert bootstrap._PART_CHARS == PART_CHARS
    sieve = ReceiptSieve("job", tmp_path)
    assert [sieve.feed(line) for line in lines] == [b""] * 5
    content = json.loads((tmp_path / "rank-3.init.json").read_text())
    assert content["reasons"] == ["x" * 3000]


def test_the_folder_of_another_host_gets_nothing_and_the_terminal_no_more_than_the_launcher_takes(
    rank: Rank, tmp_path: Path
) -> None:
    """A launcher that hands on its whole environment names its own folder to ranks of other hosts, too."""
    source = "import horovod.tensorflow as hvd; hvd.init()"
    ways = {"LMSRUN_RECEIPT_DIR": str(tmp_path / "elsewhere"), "LMSRUN_RECEIPT_LINES": "1"}
    done = rank.run(source, **ways, **HOROVOD)
    assert done.returncode == 0
    passed = ReceiptSieve("job", None).feed(done.stderr.encode())
    assert done.stderr.count("\x1elmsrun-receipt") == 1 and passed == b""


def test_without_a_place_for_receipts_a_program_runs_on(rank: Rank) -> None:
    shutil.rmtree(rank.receipts)
    assert rank.ok("import tensorflow; print('on')") == "on\n"
    loud = rank.run("import tensorflow", LMSRUN_VERBOSE="1")
    assert loud.returncode == 0
    assert loud.stderr.count("\n") == 1
    assert "could not be written" in loud.stderr


# --- after hvd.init() -------------------------------------------------------------------------------------

INIT = """
import os
import horovod.tensorflow as hvd
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
hvd.init()
"""


def test_init_leaves_what_the_kernel_says(rank: Rank) -> None:
    rank.ok(INIT, **HOROVOD)
    receipt = rank.receipt("init")
    assert (receipt["hvd_rank"], receipt["hvd_size"], receipt["rank"]) == (3, 8, 3)
    assert receipt["cpus"] == str(min(os.sched_getaffinity(0)))
    assert set(receipt) >= {"pid", "mem_policy", "mem_nodes"}


def test_init_reads_a_memory_policy_back(rank: Rank) -> None:
    node = sorted(path.name[4:] for path in Path("/sys/devices/system/node").glob("node[0-9]*"))[:1]
    bound = ["numactl", f"--membind={''.join(node)}"]
    if shutil.which("numactl") is None or subprocess.run([*bound, "true"], capture_output=True).returncode:
        pytest.skip("numactl is missing, or this container forbids set_mempolicy (try --cap-add SYS_NICE)")
    rank.ok(INIT, *bound, **HOROVOD)
    receipt = rank.receipt("init")
    assert (receipt["mem_policy"], receipt["mem_nodes"]) == ("bind", node[0])


def test_a_failing_init_fails_as_ever(rank: Rank) -> None:
    failed = rank.run(INIT, **HOROVOD, FAKE_INIT_FAILS="1")
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: Horovod initialization failed.\n")
    assert list(rank.receipts.iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "text"), [(set(), ""), ({0}, "0"), ({0, 1, 2, 8, 250, 251}, "0-2,8,250-251")]
)
def test_format_ids(ids: set[int], text: str) -> None:
    assert bootstrap.format_ids(ids) == text
