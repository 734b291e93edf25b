"""Where swapped bytes go: the compiled store, its file, its limits, and the fallback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from lms.errors import BuildError, LMSError, PlaceError
from lms.native import build
from lms.native.build import cache_root, library_key

ROOT = Path(__file__).resolve().parents[3]

MOVES = """
import os, sys
import tensorflow as tf

def moved(write, tensor, device="/device:CPU:0"):
    graph_def = tf.compat.v1.GraphDef()
    node = graph_def.node.add(name="moved")
    write(node, "from", tensor.dtype.as_datatype_enum, device)
    (made,) = tf.import_graph_def(graph_def, {"from": tensor}, ["moved:0"], name="")
    made.set_shape(tensor.shape)
    return made

def out(transport, value):
    return tf.function(lambda value: moved(transport.write_swap_out, value))(value)

def back(transport, held):
    return tf.function(lambda held: moved(transport.write_swap_in, held))(held)

"""

STORE_CHILD = (
    MOVES
    + """
from lms.config import LMSConfig
from lms.transports.choose import choose_transport

directory = sys.argv[1]
value = tf.random.normal((1000, 1000))
host = choose_transport(LMSConfig(), "CPU", os.environ)
assert (host.name, host.note) == ("host", None)
for kind in (tf.float32, tf.bfloat16, tf.bool, tf.int64):
    typed = tf.cast(value, kind)
    assert bool(tf.reduce_all(back(host, out(host, typed)) == typed)), kind
empty = tf.zeros((0, 4))
assert back(host, out(host, empty)).shape == (0, 4)
stats = host.stats()
assert stats.bytes_in_use == 0 and stats.swap_outs == 5 and stats.bytes_out == stats.bytes_in, stats

file = choose_transport(LMSConfig(store_dir=directory), "CPU", os.environ)
assert file.name == "file"
held = [out(file, value) for _ in range(3)]
assert file.stats().file_bytes >= 3 * 4_000_000 - 4_100_000, file.stats()
assert os.listdir(directory) == [], "the file has no name"
assert any(directory in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
           if os.path.islink(f"/proc/self/fd/{fd}"))
in_file = file.stats().file_bytes
memory = choose_transport(LMSConfig(), "CPU", os.environ)  # the file's blocks are still in use
fresh = [out(memory, value) for _ in range(3)]
assert memory.stats().file_bytes == in_file, "without a directory nothing more goes to the file"
assert all(bool(tf.reduce_all(back(file, one) == value)) for one in held)
del held
assert memory.stats().file_bytes == 0, "the last block takes the file with it"
assert not any(directory in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{fd}"))

small = choose_transport(LMSConfig(host_mem_limit_mb=8), "CPU", os.environ)
try:
    small.require_room(9 << 20)
except Exception as error:
    assert "host_mem_limit_mb" in str(error) and "9 MiB" in str(error), error
else:
    raise AssertionError("9 MiB fit into 8")
assert (small.stats().swap_outs, small.stats().bytes_out) == (0, 0), "counted from its own start"
both = choose_transport(LMSConfig(host_mem_limit_mb=8, store_dir=directory), "CPU", os.environ)
both.require_room(100 << 20)
print("good")
"""
)


@pytest.mark.tensorflow
def test_store_moves_bytes_to_memory_and_to_a_nameless_file(tmp_path: Path) -> None:
    done = _python(["-c", STORE_CHILD, str(tmp_path)])
    assert done.stdout.strip().endswith("good"), done.stderr[-2000:]


BESIDE_CHILD = (
    MOVES
    + """
from lms.config import LMSConfig
from lms.transports.choose import choose_transport

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
store = choose_transport(LMSConfig(store_dir=sys.argv[1]), "GPU", os.environ)
assert store.name == "file", store.name
THERE = "/job:localhost/replica:0/task:0/device:CPU:1"

@tf.function
def through_the_store(x):
    with tf.device(THERE):
        made = 2 * x
    returned = moved(store.write_swap_in, moved(store.write_swap_out, made, THERE), THERE)
    with tf.device(THERE):
        return returned + 1

value = tf.random.normal((1000, 1000))
assert bool(tf.reduce_all(through_the_store(value) == 2 * value + 1))
graph = through_the_store.get_concrete_function(value).graph
placed = {op.type: op.device[-5:] for op in graph.get_operations() if "Mul" in op.type or "Lms" in op.type}
assert placed == {"Mul": "CPU:1", "LmsSwapOut": "CPU:0", "LmsSwapIn": "CPU:0"}, placed
stats = store.stats()
assert stats.bytes_out == stats.bytes_in == 4_000_000, stats
print("good")
"""
)


@pytest.mark.tensorflow
def test_a_store_on_disk_works_from_another_device_as_well(tmp_path: Path) -> None:
    """Another CPU device has the place of a GPU: what lies there goes to the host first."""
    done = _python(["-c", BESIDE_CHILD, str(tmp_path)])
    assert done.stdout.strip().endswith("good"), done.stderr[-2000:]


NUMPY_CHILD = (
    MOVES
    + """
from lms.config import LMSConfig
from lms.transports.choose import choose_transport

transport = choose_transport(LMSConfig(), "CPU", os.environ)
assert transport.name == "numpy" and "no C++ compiler" in transport.note, transport.note
swap_out, swap_in = transport.write_swap_out, transport.write_swap_in

@tf.function
def twice(x):
    held = moved(swap_out, x)
    return moved(swap_in, held) + moved(swap_in, held)

value = tf.random.normal((100, 100))
assert bool(tf.reduce_all(twice(value) == value + value))
stats = transport.stats()
assert (stats.peak_bytes, stats.swap_outs, stats.swap_ins) == (40_000, 1, 2), stats

for kind in (tf.bfloat16, tf.bool, tf.int64):
    typed = tf.cast(value, kind)
    returned = back(transport, out(transport, typed))
    assert returned.dtype == kind and bool(tf.reduce_all(returned == typed)), kind

@tf.function
def fails(x):
    held = moved(swap_out, x)
    with tf.control_dependencies([held]):
        tf.debugging.assert_less(x, -9.0)
    return moved(swap_in, held)

@tf.function
def nobody_reads(x):
    return tf.size(moved(swap_out, x))

for _ in range(5):
    try:
        fails(value)
    except tf.errors.InvalidArgumentError:
        pass
    nobody_reads(value)
assert transport.stats().bytes_in_use <= 80_000, transport.stats()
print("good")
"""
)


PAGES_CHILD = (
    MOVES
    + """
from pathlib import Path
from lms.transports.host import HostTransport

PAGE = 65536
file = HostTransport(os.environ, Path(sys.argv[1]), 0, PAGE)
values = [tf.random.normal((count,)) for count in (1, 16_384, 16_385, 100_000)]
held = [out(file, value) for value in values]
assert file.stats().file_bytes == (1 + 1 + 2 + 7) * PAGE, file.stats()
maps = [line.split() for line in open("/proc/self/maps") if sys.argv[1] in line]
assert maps and all(int(offset, 16) % PAGE == 0 for _, _, offset, *_ in maps), maps
assert all(bool(tf.reduce_all(back(file, one) == value)) for one, value in zip(held, values))
print("good")
"""
)


@pytest.mark.tensorflow
def test_pages_of_64_kib_as_on_ppc64le(tmp_path: Path) -> None:
    done = _python(["-c", PAGES_CHILD, str(tmp_path)])
    assert done.stdout.strip().endswith("good"), done.stderr[-2000:]


@pytest.mark.tensorflow
def test_without_a_compiler_numpy_takes_over_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = _python(["-c", NUMPY_CHILD], PATH=str(tmp_path / "bin"), LMS_CACHE=str(tmp_path / "cache"))
    assert done.stdout.strip().endswith("good"), done.stderr[-2000:]


BROKEN_CHILD = """
import os
import tensorflow as tf
from pathlib import Path
from lms.config import LMSConfig
from lms.native import library
from lms.transports.choose import choose_transport

broken = Path(os.environ["LMS_CACHE"]) / "host_store.so"
broken.write_bytes(b"")
library.build_library = lambda *_: broken
transport = choose_transport(LMSConfig(), "CPU", os.environ)
assert transport.name == "numpy" and "cannot be loaded" in transport.note, transport.note
assert "\\n" not in transport.note
print("good")
"""


@pytest.mark.tensorflow
def test_a_library_that_cannot_be_loaded_is_no_end_of_training(tmp_path: Path) -> None:
    done = _python(["-c", BROKEN_CHILD], LMS_CACHE=str(tmp_path))
    assert done.stdout.strip().endswith("good"), done.stderr[-2000:]


def test_a_user_without_a_home_is_told_about_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(BuildError, match="LMS_CACHE"):
        cache_root({})


def test_cache_is_keyed_by_version_flags_and_source() -> None:
    flags = ["-I/one", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    key = library_key("2.21.0", flags, b"source")
    assert key.startswith("tf2.21.0-")
    assert key == library_key("2.21.0", ["-I/two", "-D_GLIBCXX_USE_CXX11_ABI=1"], b"source")
    others = [
        library_key("2.15.1", flags, b"source"),
        library_key("2.21.0", ["-D_GLIBCXX_USE_CXX11_ABI=0"], b"source"),
        library_key("2.21.0", flags, b"other"),
    ]
    assert len({key, *others}) == 4


def test_cache_root_follows_the_environment() -> None:
    assert cache_root({"LMS_CACHE": "/c"}) == Path("/c")
    assert cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/lmsrun/ops")
    assert cache_root({"HOME": "/h"}) == Path("/h/.cache/lmsrun/ops")


def test_build_compiles_once_and_leaves_no_partial_file(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def compiler(argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        calls.append(argv)
        Path(argv[argv.index("-o") + 1]).write_bytes(b"library")
        return subprocess.CompletedProcess(argv, 0, "", "")

    first = build.build_library(build.HOST_STORE, "1", ["-DX"], ["-lx"], tmp_path, compiler)
    assert build.build_library(build.HOST_STORE, "1", ["-DX"], ["-lx"], tmp_path, compiler) == first
    assert len(calls) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == ["host_store.so", "lock"]


KILLED_BUILD = """
import subprocess, sys
from pathlib import Path
from lms.native import build

def slow(argv, **options):
    print(argv[argv.index("-o") + 1], flush=True)
    late = ["sh", "-c", "sleep 2; echo late > $1", "sh", argv[argv.index("-o") + 1]]
    return subprocess.run(late, **options)

build.build_library(build.HOST_STORE, "1", [], [], Path(sys.argv[1]), slow)
"""


def test_a_killed_build_is_waited_for_and_cleaned_up_behind(tmp_path: Path) -> None:
    """The compiler outlives its rank, writes its file, and only then the next rank builds."""
    argv = [sys.executable, "-c", KILLED_BUILD, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        unfinished = Path(rank.stdout.readline().strip())
        rank.kill()
    seen: list[str] = []

    def compiler(argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        output = Path(argv[argv.index("-o") + 1])
        seen.extend(path.name for path in output.parent.iterdir())
        output.write_bytes(b"library")
        return subprocess.CompletedProcess(argv, 0, "", "")

    library = build.build_library(build.HOST_STORE, "1", [], [], tmp_path, compiler)
    assert unfinished.parent == library.parent and unfinished.name not in seen
    assert sorted(path.name for path in library.parent.iterdir()) == ["host_store.so", "lock"]


RANK = """
import os, sys
from lms.native.build import HOST_STORE, build_library
from pathlib import Path

def compiler(argv, **_):
    import subprocess, time
    time.sleep(0.5)
    Path(argv[argv.index("-o") + 1]).write_bytes(b"library")
    print("compiled", flush=True)
    return subprocess.CompletedProcess(argv, 0, "", "")

build_library(HOST_STORE, "1", [], [], Path(sys.argv[1]), compiler)
"""


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(rank.communicate(timeout=600)[0] for rank in ranks) == ["", "", "", "compiled\n"]
    assert [rank.returncode for rank in ranks] == [0] * 4


def test_a_failed_build_says_the_compilers_first_error(tmp_path: Path) -> None:
    def compiler(argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(argv, 1, "", "note: hello\nx.cc:1: error: no such header\nmore")

    with pytest.raises(BuildError, match="x.cc:1: error: no such header"):
        build.build_library(build.HOST_STORE, "1", [], [], tmp_path, compiler)
    assert not list(tmp_path.glob("*/*.part"))


def test_a_library_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    def compiler(argv: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        Path(argv[argv.index("-o") + 1]).write_bytes(b"library")
        return subprocess.CompletedProcess(argv, 0, "", "")

    library = build.build_library(build.HOST_STORE, "1", [], [], tmp_path, compiler)
    library.chmod(0o777)
    with pytest.raises(BuildError, match="can be changed by other users"):
        build.build_library(build.HOST_STORE, "1", [], [], tmp_path, compiler)


@pytest.mark.tensorflow
def test_transports_that_cannot_work_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    from lms.config import LMSConfig
    from lms.transports.choose import choose_transport

    with pytest.raises(LMSError, match="no GPU is visible"):
        choose_transport(LMSConfig(transport="device"), "CPU", os.environ)
    with pytest.raises(LMSError, match="without store_dir"):
        choose_transport(LMSConfig(transport="file"), "CPU", os.environ)
    with pytest.raises(PlaceError, match="there is no folder .*gone'; needed in store_dir"):
        choose_transport(LMSConfig(store_dir=str(tmp_path / "gone")), "CPU", os.environ)


def _python(arguments: list[str], **environ: str) -> "subprocess.CompletedProcess[str]":
    wanted = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    return warm_python.run(arguments, wanted, timeout_s=300)


@pytest.mark.tensorflow
def test_each_way_of_a_gpus_copies_is_an_op_on_the_gpu() -> None:
    pytest.importorskip("tensorflow")
    from tensorflow.core.framework import node_def_pb2

    from lms.transports.device import TO_DEVICE, TO_HOST, DeviceTransport

    transport, gpu = DeviceTransport({}), "/job:worker/replica:0/task:0/device:GPU:1"
    there, back = node_def_pb2.NodeDef(), node_def_pb2.NodeDef()
    transport.write_swap_out(there, "made", 1, gpu)
    transport.write_swap_in(back, "held", 1, gpu)
    assert (there.op, there.device, list(there.input), there.attr["T"].type) == (TO_HOST, gpu, ["made"], 1)
    assert (back.op, back.device, list(back.input), back.attr["T"].type) == (TO_DEVICE, gpu, ["held"], 1)


def test_the_host_beside_a_device_is_that_of_its_machine() -> None:
    pytest.importorskip("tensorflow")
    from lms.transports.base import host_beside

    beside = "/job:worker/replica:0/task:3/device:CPU:0"
    assert host_beside("/job:worker/replica:0/task:3/device:GPU:1") == beside
    assert host_beside(beside) == beside
