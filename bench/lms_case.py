"""One case of a benchmark of Large Model Support, in a process of its own: a model trains a few steps.

    python bench/lms_case.py '{"zoo": "small", "model": "resnet50", "units": 8, "policy": "all"}'

Prints one line of JSON at the end. A *paced* case prints one line a step and waits after it for a line on its
standard input, so that two cases can take turns; it ends when its input does.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from cuda_ballast import leave_free  # noqa: E402
from models import ZOOS, Model  # noqa: E402
from peers_models import PEERS, PEERS_BY_HAND  # noqa: E402

ZOOS |= {"peers": PEERS, "peers-by-hand": PEERS_BY_HAND}
MIB = 1 << 20
CPU, GPU = "CPU:0", "GPU:0"
COPY_REPEATS = 5
MANAGED_LIMITS = 8
"""The size of TensorFlow's pool of unified memory, in limits; the host has to hold what the GPU does not."""


@dataclass(frozen=True)
class Case:
    """What one process does."""

    zoo: str
    model: str
    units: int = 1
    policy: str = "off"
    limit_mb: int = 512
    device: str = CPU
    steps: int = 3
    paced: bool = False
    trace_steps: int = 0
    """Steps to take once more under TensorFlow's profiler."""
    copy_mb: int = 0
    """Instead of training, time copies of so many MiB."""
    recompute: str = "auto"
    state: str = "device"
    """Where variables and the optimizer's state lie between steps."""
    optimizer: str = "sgd"
    peer: str = ""
    """Another way to save memory: ``RematScope`` or ``Grappler``."""
    compiled: bool = False
    """Whether XLA compiles the step (``jit_compile``); with LMS, in segments between its swaps."""
    maps_pages: bool = False
    """Whether the driver puts the GPU's buffers together from free pages (``cuda_malloc_async``)."""
    managed: bool = False
    """Whether the driver moves pages of the GPU's buffers to the host and back (unified memory). The limit is
    then what a ballast leaves free of the card."""
    deterministic: bool = False
    """Whether TensorFlow runs only ops that give the same bits each time."""


def main(argv: list[str]) -> int:
    """Run the case that ``argv`` holds as JSON."""
    case = Case(**json.loads(argv[0]))
    found = measure_copies(case) if case.copy_mb else train(case)
    print(json.dumps(found), flush=True)
    return 0


def train(case: Case) -> dict[str, Any]:
    """Train and say what happened."""
    import numpy as np
    import tensorflow as tf

    _limit_gpu(tf, case)
    if case.deterministic:
        tf.config.experimental.enable_op_determinism()
    if case.policy != "off":
        import lms

        lms.enable(
            policy=case.policy,
            recompute=case.recompute,
            optimizer_state=case.state,
            variables=case.state,
            xla="auto" if case.compiled else "off",
        )
    else:
        _claim_pool(tf, case)
    tf.keras.utils.set_random_seed(1)
    entry = ZOOS[case.zoo][case.model]
    if case.peer == "Grappler":
        _recompute_in_grappler()
    with tf.keras.RematScope(mode="full") if case.peer == "RematScope" else nullcontext():
        model = _compiled(tf.keras, entry, entry.input_shape(case.units), case)
    random = np.random.RandomState(0)
    with tf.device(CPU):  # what every step copies to the device need not lie there all the time as well
        images = tf.constant(random.rand(*entry.input_shape(case.units)).astype("f"))
        labels = tf.constant(random.randint(0, 4, (images.shape[0], *model.output_shape[1:-1])))
    steps = 1_000_000 if case.paced else case.steps
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    clock = _clock(tf, case)
    tf.config.experimental.reset_memory_stats(case.device)
    model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    seen = {
        **dataclasses.asdict(case),
        "tensorflow": tf.__version__,
        "keras": version("tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras"),
        "steps_s": clock.steps_s,
        "peak_bytes": tf.config.experimental.get_memory_info(case.device)["peak"],
        "digest": sha256(b"".join(value.tobytes() for value in model.get_weights())).hexdigest(),
    }
    if case.policy != "off":
        seen |= _planned(lms.report(), len(clock.steps_s))
    if case.trace_steps:
        seen["trace"] = _traced(tf, case, lambda: _fit(model, data, case.trace_steps))
    return seen


def _fit(model: Any, data: Any, steps: int) -> None:
    model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)


def _limit_gpu(tf: Any, case: Case) -> None:
    """Limit a GPU's memory; the limit of the CPU device is in the environment."""
    if case.device == GPU:
        if case.managed:
            leave_free(case.limit_mb * MIB)
            _set_options(lambda found: setattr(found.gpu_options.experimental, "use_unified_memory", True))
        gpu, *_ = tf.config.list_physical_devices("GPU")
        limit_mb = MANAGED_LIMITS * case.limit_mb if case.managed else case.limit_mb
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mb)
        tf.config.set_logical_device_configuration(gpu, [limit])
        tf.config.set_visible_devices(gpu, "GPU")


def _claim_pool(tf: Any, case: Case) -> None:
    """Make the CPU's allocator take its pool in one piece, as Large Model Support does."""
    if case.device == CPU:
        tf.zeros((int(case.limit_mb * MIB * 0.92) // 4,))


def _recompute_in_grappler() -> None:
    """Switch on all of TensorFlow's own memory optimizer, for which there is no public option."""
    from tensorflow.core.protobuf import rewriter_config_pb2

    def with_memory_optimizer(found: Any) -> None:
        rewrite = found.graph_options.rewrite_options
        rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.HEURISTICS
        rewrite.memory_optimizer_target_node_name_scope = "gradient_tape/"

    _set_options(with_memory_optimizer)


def _set_options(change: Callable[[Any], None]) -> None:
    """Change the ``ConfigProto`` of TensorFlow's context, where it has no public option for that."""
    from tensorflow.python.eager.context import Context

    config = Context.config.fget

    def changed(context: Any) -> Any:
        found = config(context)
        change(found)
        return found

    Context.config = property(changed)


def _compiled(keras: Any, entry: Model, shape: tuple[int, ...], case: Case) -> Any:
    model = entry.build(keras, shape[1:])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(case.optimizer, loss, jit_compile=case.compiled)
    return model


def _clock(tf: Any, case: Case) -> Any:
    class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps_s: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            tf.test.experimental.sync_devices()
            self.steps_s.append(time.perf_counter() - self.started)
            if case.device == GPU and len(self.steps_s) == 1:
                # cuDNN has tried its algorithms, some with much scratch memory
                tf.config.experimental.reset_memory_stats(GPU)
            if case.paced:
                print(json.dumps({"step_s": self.steps_s[-1]}), flush=True)
                self.model.stop_training = not sys.stdin.readline()

    return Clock()


def _planned(report: Any, steps: int) -> dict[str, Any]:
    last = report.graphs[-1]
    return {
        "edited": last.edited,
        "why": last.why,
        "ops": last.ops,
        "planned_peak_bytes": last.planned_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "peak_before_bytes": last.peak_before_bytes,
        "base_bytes": last.base_bytes,
        "bytes_out": last.bytes_out,
        "bytes_in": last.bytes_in,
        "counted_bytes_out": report.store.bytes_out // steps,
        "counted_bytes_in": report.store.bytes_in // steps,
        "copy_s": (report.store.seconds_out + report.store.seconds_in) / steps,
        "tensors": last.tensors,
        "edit_s": last.edit_s,
        "recomputed_bytes": last.recomputed.nbytes if last.recomputed else 0,
        "recomputed_ops": last.recomputed.ops if last.recomputed else 0,
        "retries": report.retries,
        "notes": list(last.notes),
        "segments": last.segments,
        **_simulated(),
    }


def _simulated() -> dict[str, Any]:
    """Return what the timed simulator says of the planned step, and the speeds that it counts with."""
    from lms.engine.installation import engine
    from lms.simulate.step_time import clock

    made = [*engine().books.collector.planned.values()]
    if len(made) != 1:  # nothing was planned, or for several devices
        return {}
    (one,) = made
    costs, seconds = one.costs, one.costs.op_seconds(one.graph)
    return {
        "simulated_s": clock(one.plan.order, one.plan.swaps, costs, seconds).now_s,
        "compute_s": sum(seconds),
        "rates": [costs.flops_per_s, costs.device_bytes_per_s, costs.out_bytes_per_s, costs.in_bytes_per_s],
    }


def _traced(tf: Any, case: Case, steps: Any) -> dict[str, Any] | None:
    """Run under TensorFlow's profiler; what copied and what computed when, as far as the trace tells.

    Nothing where there is a GPU and the trace does not show it: the profiler may lack the rights.
    """
    from lms_trace import overlap_of, read_space

    with tempfile.TemporaryDirectory(prefix="lmsrun-trace-") as directory:
        tf.profiler.experimental.start(directory)
        try:
            steps()
            tf.test.experimental.sync_devices()
        finally:
            tf.profiler.experimental.stop()
        found = overlap_of(read_space(directory))
    if case.device == GPU and found.source != "GPU":
        return None
    return dataclasses.asdict(found) | {"share": found.share, "steps": case.trace_steps}


def copied(write: Any, tensor: Any, device: str, name: str) -> Any:
    """Copy ``tensor`` by an op of the current graph, as a transport writes it; return the op's output."""
    import tensorflow as tf
    from tensorflow.core.framework import node_def_pb2

    node = node_def_pb2.NodeDef()
    write(node, "x", tensor.dtype.as_datatype_enum, device or f"/{CPU}")
    graph = tf.compat.v1.get_default_graph()
    with tf.device(node.device):
        made = graph._create_op_internal(node.op, [tensor], [tensor.dtype], name=name, attrs=dict(node.attr))
    made._set_attr("_grappler_do_not_remove", tf.compat.v1.AttrValue(b=True))
    made.outputs[0].set_shape(tensor.shape)
    return made.outputs[0]


def measure_copies(case: Case) -> dict[str, Any]:
    """Bytes a second that the transport of this device moves: out, in, and both at once."""
    import tensorflow as tf

    _limit_gpu(tf, case)
    from lms.config import LMSConfig
    from lms.transports.choose import choose_transport

    transport = choose_transport(LMSConfig(), case.device.partition(":")[0], os.environ)

    def out(tensor: Any, name: str) -> Any:
        return copied(transport.write_swap_out, tensor, tensor.device, name)

    def back(held: Any, like: Any, name: str) -> Any:
        return copied(transport.write_swap_in, held, like.device, name)

    def last(tensor: Any, device: str) -> Any:
        # An op on the GPU that reads what lies on the host would have all of it copied back.
        with tf.device(device):
            return tf.reshape(tensor, [-1])[-1]

    with tf.device(case.device):
        one, two = (tf.random.normal((case.copy_mb * MIB // 4,)) for _ in range(2))

    @tf.function
    def outward() -> Any:
        with tf.device(case.device):
            value = tf.identity(one)
        return last(out(value, "out"), CPU)

    @tf.function
    def there_and_back() -> Any:
        with tf.device(case.device):
            value = tf.identity(one)
        return last(back(out(value, "out"), value, "in"), case.device)

    @tf.function
    def crossing() -> Any:
        with tf.device(case.device):
            value, other = tf.identity(one), tf.identity(two)
        first = out(value, "out")
        with tf.control_dependencies([first]):
            second = out(other, "out_too")
        return last(back(first, value, "in"), case.device) + last(second, CPU)

    out_s, round_s, crossing_s = (_best_seconds(tf, f) for f in (outward, there_and_back, crossing))
    nbytes = case.copy_mb * MIB
    return {
        **dataclasses.asdict(case),
        "transport": transport.name,
        "out_bytes_per_s": nbytes / out_s,
        "in_bytes_per_s": _rate(nbytes, round_s - out_s),
        "both_bytes_per_s": _rate(2 * nbytes, crossing_s - out_s),
    }


def _rate(nbytes: int, seconds: float) -> float | None:
    """Bytes a second; unknown where a difference of two times came out as nothing."""
    return nbytes / seconds if seconds > 0 else None


def _best_seconds(tf: Any, function: Any) -> float:
    def seconds() -> float:
        started = time.perf_counter()
        float(function())
        tf.test.experimental.sync_devices()
        return time.perf_counter() - started

    seconds()  # traces
    return min(seconds() for _ in range(COPY_REPEATS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
