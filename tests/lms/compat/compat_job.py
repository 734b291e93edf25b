"""What test_compat.py and test_callbacks.py look at: IBM's names in use, one process for many questions."""

import contextlib
import hashlib
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="true", TF_CPU_BFC_MEM_LIMIT_IN_MB="400")

import numpy as np
import tensorflow as tf

import lms.compat
from lms.enable import LMSWarning

LINES: list[str] = []


class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def said() -> list[str]:
    """The log lines since the last call."""
    lines = LINES[:]
    LINES.clear()
    return lines


def error_of(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


# --- sessions ---------------------------------------------------------------------------------------------

tf1 = tf.compat.v1


def build(
    ref_variables: bool = False, bias: bool = False, iterator: bool = False
) -> tuple[Any, Any, Any, Any]:
    """A small network as TensorFlow 1 programs built them, in the default graph.

    With ``bias`` each convolution has one, and the first reads a tensor that can be swapped. With
    ``iterator`` nothing is fed, and the size of the batches is open.
    """
    tf1.set_random_seed(1)
    if iterator:
        rows = tf.data.Dataset.from_tensors((tf.zeros([32, 32, 3]), 0)).repeat().batch(64)
        x, y = tf1.data.make_one_shot_iterator(rows).get_next()
    else:
        x, y = tf1.placeholder(tf.float32, [None, 32, 32, 3], "x"), tf1.placeholder(tf.int32, [None], "y")
    h = x * 2 if bias else x
    for i in range(5):
        with tf1.variable_scope(f"block{i}", use_resource=not ref_variables):
            start = tf1.glorot_uniform_initializer(seed=i)
            w = tf1.get_variable("w", [3, 3, h.shape[-1], 16], initializer=start)
            h = tf.nn.conv2d(h, w, 1, "SAME")
            if bias:
                h = tf.nn.bias_add(h, tf1.get_variable("b", [16], initializer=tf1.zeros_initializer()))
            h = tf.nn.relu(h)
    w = tf1.get_variable("out", [16, 10], initializer=tf1.glorot_uniform_initializer(seed=9))
    logits = tf.reduce_mean(h, [1, 2]) @ w
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y), tf.float32))
    with tf1.name_scope("adam_optimizer"):
        train = tf1.train.AdamOptimizer(1e-2).minimize(loss, tf1.train.get_or_create_global_step())
    return x, y, train, accuracy


def stepped(net: Any, rows: int = 64) -> None:
    """Run a first training step in a session: what was asked for is done then, and told."""
    x, y, train, _ = net
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(train, {x: np.zeros((rows, 32, 32, 3)), y: np.zeros(rows)})


def trained(net: Any, hooks: Any = ()) -> str:
    """Train twenty steps; a digest of the weights, equal only if every bit is."""
    x, y, train, accuracy = net
    rng = np.random.default_rng(0)
    feed = {x: rng.normal(size=(64, 32, 32, 3)).astype("float32"), y: rng.integers(0, 10, 64)}
    with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
        for _ in range(20):
            session.run(train, feed)
        session.run(accuracy, feed)
        values = session.run([*tf1.trainable_variables(), tf1.train.get_global_step()])
    return hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest()


def in_new_graph(use: Any) -> Any:
    with tf.Graph().as_default():
        return use()


def sessions() -> dict[str, Any]:
    tf1.disable_eager_execution()
    lms.compat.install()
    import tflms
    from tensorflow.contrib.lms import LMS as OldestLMS
    from tensorflow_large_model_support import LMS, LMSHook, LMSSessionRunHook

    from lms.ir.name_filters import SECOND_GENERATION

    found: dict[str, Any] = {"alias": LMSHook is LMSSessionRunHook}
    found["other packages"] = [tflms.LMS is LMS, OldestLMS is LMS, dir(tflms)]
    found["rest of contrib"] = error_of(lambda: __import__("tensorflow.contrib.slim"))
    found["plain"] = in_new_graph(lambda: trained(build()))
    found["plain_ref"] = in_new_graph(lambda: trained(build(ref_variables=True)))

    found["bias"] = in_new_graph(lambda: trained(build(bias=True)))
    found["bias_hook"] = in_new_graph(
        lambda: trained(build(bias=True), [LMSSessionRunHook("adam_optimizer")])
    )
    thresholds = {"swapout_threshold": 3, "swapin_ahead": 1, "swapin_groupby": 0}
    found["bias_second"] = in_new_graph(lambda: trained(build(bias=True), [LMS(**thresholds)]))
    os.environ["LMS_MIN_TENSOR_BYTES"] = "0"
    found["bias_small"] = in_new_graph(lambda: trained(build(bias=True), [LMS(**thresholds)]))
    del os.environ["LMS_MIN_TENSOR_BYTES"]
    said()

    found["hook"] = in_new_graph(lambda: trained(build(), [LMSSessionRunHook({"adam_optimizer"}, lb=3)]))
    found["hook_lines"] = said()
    found["store"] = lms.report().store.swap_outs
    found["hook_ref"] = in_new_graph(
        lambda: trained(build(ref_variables=True), [LMSSessionRunHook({"adam_optimizer"}, n_tensors=2)])
    )
    found["hook_ref_lines"] = said()

    def second() -> str:
        model = LMS(swapout_threshold=3, swapin_ahead=3, swapin_groupby=1, serialization=[1, "3:5"])
        model.batch_size = 64
        model.excl_output_by_scopes = {"block0"}
        found["properties"] = [
            model.batch_size,
            model.is_training,
            model.autotune_gpu_mem,
            model.autotune_plot,
        ]
        found["filters"] = [sorted(getattr(model, name)) for name in SECOND_GENERATION]
        return trained(build(), [model])

    found["second"] = in_new_graph(second)
    found["second_lines"] = said()

    def run_twice() -> list[Any]:
        net, graph = build(), tf1.get_default_graph()
        start, before = tf1.global_variables_initializer(), graph.as_graph_def()
        model = LMS({"adam_optimizer"}, graph=graph)
        added = [len(model.run())]
        said()
        added.append(len(model.run()))
        again = said()
        same = graph.as_graph_def() == before
        with tf1.Session() as session:
            session.run(start)
            session.run(net[2], {net[0]: np.zeros((64, 32, 32, 3)), net[1]: np.zeros(64)})
            first = said()
            session.run(net[2], {net[0]: np.zeros((64, 32, 32, 3)), net[1]: np.zeros(64)})
        return [added, same, again, first, said()]

    found["run"] = in_new_graph(run_twice)

    def off() -> list[Any]:
        build()
        said()
        return [len(LMS({"adam_optimizer"}, n_tensors=0).run(tf1.get_default_graph())), said()]

    found["off"] = in_new_graph(off)

    def kept_off() -> list[Any]:
        """By the script, where LMS is on for the job."""
        lms.disable()
        lms.enable(policy="all", batch_size=64)
        said()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = trained(build(), [LMSSessionRunHook({"adam_optimizer"}, n_tensors=0)])
        told = [str(one.message) for one in caught if one.category is LMSWarning]
        lines = said()

        def edited_after(run: Any) -> int:
            net = build()
            run()
            stepped(net)
            return len(lms.report().edited)

        off = LMS({"adam_optimizer"}, n_tensors=0)
        runs = [lambda: off.run(tf1.get_default_graph()), lambda: None]
        edited = [in_new_graph(lambda run=run: edited_after(run)) for run in runs]
        return [weights, lines, told, lms.state().active, edited]

    found["kept off"] = in_new_graph(kept_off)

    def views() -> list[Any]:
        """Sums of two gradients are reshaped: what comes back is viewed anew."""
        x, y = tf1.placeholder(tf.float32, [32, 32, 32, 3]), tf1.placeholder(tf.float32, [])
        h = x
        for i in range(6):
            start = tf1.glorot_uniform_initializer(seed=i)
            w = tf1.get_variable(f"v{i}", [3, 3, h.shape[-1], 16], initializer=start)
            h = tf.reshape(tf.nn.relu(tf.nn.conv2d(h, w, 1, "SAME")), [32, -1, 64 - 32 * (i % 2), 16])
        with tf1.name_scope("adam_optimizer"):
            train = tf1.train.AdamOptimizer(1e-2).minimize(tf.reduce_mean(h) * y)
        said()
        LMS(swapout_threshold=3, swapin_ahead=1, swapin_groupby=0).run()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(train, {x: np.zeros((32, 32, 32, 3)), y: 1.0})
        done = lms.report().edited[-1]
        return [done.added_ops, [done.tensors, done.swap_ins], said()]

    found["views"] = in_new_graph(views)

    def without_swaps() -> list[str]:
        net = build()
        said()
        model = LMS(swapout_threshold=3, serialization=["1:"])
        model.incl_output_by_types = {"Mean"}
        model.run()
        stepped(net)
        return said()

    found["without swaps"] = in_new_graph(without_swaps)

    def auto() -> list[str]:
        net = build()
        said()
        LMS().run()
        stepped(net, rows=4)
        return said()

    found["auto"] = in_new_graph(auto)

    def open_batch(*args: Any, **keywords: Any) -> list[Any]:
        """With batches of which nobody tells the size."""
        _, _, train, _ = build(iterator=True)
        said()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            LMS(*args, **keywords).run(tf1.get_default_graph())
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                session.run(train)
        texts = [str(warning.message) for warning in caught]
        return [lms.report().graphs[-1].tensors, said(), texts]

    found["open"] = in_new_graph(open_batch)

    found["assumed"] = in_new_graph(lambda: open_batch({"adam_optimizer"}, lb=3))

    def errors() -> dict[str, Any]:
        build()
        graph = tf1.get_default_graph()
        filtered = LMS(swapout_threshold=3)
        filtered.excl_input_by_scopes = {"nowhere"}
        return {
            "filter": error_of(filtered.run),
            "no scope": error_of(LMS, lb=3),
            "no graph": error_of(LMS({"adam_optimizer"}).run),
            "scope": error_of(LMS({"sgd", "momentum"}).run, graph),
            "type": error_of(LMS({"adam_optimizer"}, excl_types={"Konv"}).run, graph),
            "start": error_of(LMS({"adam_optimizer"}, starting_op_names={"z"}).run, graph),
        }

    found["errors"] = in_new_graph(errors)

    def scopes() -> list[Any]:
        net = build()
        said()
        LMS({"adam_optim", "sgd"}).run(tf1.get_default_graph())
        stepped(net)
        return [lms.report().edited[-1].tensors, said()]

    found["scopes"] = in_new_graph(scopes)

    def inference() -> list[Any]:
        tf.nn.relu(tf1.placeholder(tf.float32, [8, 4]))
        said()
        model = LMS()
        without = error_of(model.run)
        model.is_training = False
        return [without, len(model.run()), said()]

    found["inference"] = in_new_graph(inference)
    return found


# --- Keras in a session -----------------------------------------------------------------------------------


def keras_in_session() -> dict[str, Any]:
    """Keras as scripts of the first two generations used it: without eager execution."""
    tf1.disable_v2_behavior()
    lms.compat.install()
    from tensorflow_large_model_support import LMS, LMSKerasCallback

    backend, layers = tf1.keras.backend, tf.keras.layers
    rng = np.random.default_rng(0)
    images, labels = rng.random((32, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, 32)

    def batches() -> Any:
        while True:
            yield images[:16], labels[:16]

    def weights(
        *callbacks: Any, generator: bool = False, loaded: bool = False, normalised: bool = False
    ) -> str:
        backend.clear_session()
        starts = [tf1.glorot_uniform_initializer(seed=seed) for seed in range(5)]
        blocks = []
        for number, start in enumerate(starts):
            blocks += [layers.Conv2D(16, 3, padding="same", kernel_initializer=start, name=f"conv{number}")]
            # Each asks whether it trains, and Keras makes a condition of that.
            blocks += [layers.BatchNormalization()] * normalised + [layers.ReLU()]
        last = layers.Dense(10, kernel_initializer=tf1.glorot_uniform_initializer(seed=9))
        model = tf.keras.Sequential(
            [tf.keras.Input((32, 32, 3)), *blocks, layers.GlobalAveragePooling2D(), last]
        )
        model.compile("rmsprop", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if loaded:
            model.set_weights(model.get_weights())
        if generator:
            model.fit_generator(batches(), steps_per_epoch=4, callbacks=list(callbacks), verbose=0)
        else:
            given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
            model.fit(images, labels, callbacks=list(callbacks), **given)
        values = b"".join(value.tobytes() for value in model.get_weights())
        model.evaluate(images, labels, callbacks=list(callbacks), verbose=0)
        return hashlib.sha256(values).hexdigest()

    found: dict[str, Any] = {"plain": weights(), "plain generator": weights(generator=True)}
    found["first"] = weights(LMSKerasCallback({"training/RMSprop/gradients", "RMSprop/gradients"}, lb=3))
    found["first_lines"], found["first_moved"] = said(), lms.report().store.swap_outs
    found["loaded"] = weights(LMSKerasCallback(), loaded=True)
    found["loaded_lines"], found["loaded_moved"] = said(), lms.report().store.swap_outs
    given = {"swapout_threshold": 3, "swapin_ahead": 1, "swapin_groupby": 0}
    found["second"] = weights(LMS(**given), generator=True)
    found["second_lines"] = said()
    found["plain normalised"] = weights(normalised=True)
    found["normalised"] = weights(LMSKerasCallback(), normalised=True)
    found["normalised_lines"] = said()
    auto = LMS()
    auto.autotune_gpu_mem = 0.004
    found["auto"] = weights(auto)
    found["auto_lines"], found["auto_moved"] = said(), lms.report().store.swap_outs
    lms.disable()
    lms.enable(policy="all")
    found["enabled"] = weights()
    found["enabled_moved"], found["enabled_warnings"] = lms.report().store.swap_outs, lms.report().warnings
    return found


# --- Keras ------------------------------------------------------------------------------------------------


def keras(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"installed": list(lms.compat.install()), "again": list(lms.compat.install())}
    from tensorflow_large_model_support import LMS, LMSKerasCallback

    from lms.callbacks import LMSStatsAverage, LMSStatsLogger
    from lms.device.ibm_counters import GETTERS

    experimental = tf.config.experimental
    found["before"] = [experimental.get_lms_enabled(), experimental.get_lms_defrag_enabled()]
    experimental.set_lms_defrag_enabled(True)
    found["allocator"] = [os.environ["TF_GPU_ALLOCATOR"], experimental.get_lms_defrag_enabled()]
    experimental.set_lms_defrag_enabled(False)
    found["allocator after"] = os.environ.get("TF_GPU_ALLOCATOR")
    layers = tf.keras.layers

    def model() -> Any:
        tf.keras.utils.set_random_seed(1)
        convolutions = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(5)]
        made = tf.keras.Sequential([*convolutions, layers.GlobalAveragePooling2D(), layers.Dense(10)])
        made.build((None, 32, 32, 3))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile("adam", loss)
        return made

    rng = np.random.default_rng(0)
    images, labels = rng.random((64, 32, 32, 3), dtype=np.float32), rng.integers(0, 10, 64)
    stats = [
        LMSStatsLogger(folder / "log.csv", log_dir=folder / "board"),
        LMSStatsAverage(folder / "average.csv", 32, batch_size=16),
        LMSStatsAverage(folder / "whole.csv", 32, batch_size=16, start_batch=0),
    ]
    fit = {"batch_size": 16, "verbose": 0, "validation_data": (images[:16], labels[:16])}
    within: set[bool] = set()
    look = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: within.add(experimental.get_lms_enabled())
    )
    first = [LMSKerasCallback(lb=3, n_tensors=4), *stats, look]
    model().fit(images, labels, epochs=2, callbacks=first, **fit)
    found["within"] = list(within)
    found["first_lines"] = said()
    found["report"] = [lms.report().edited[-1].tensors, lms.report().edited[-1].bytes_out]
    found["log"] = (folder / "log.csv").read_text().splitlines()
    found["average"] = (folder / "average.csv").read_text().splitlines()
    found["whole"] = (folder / "whole.csv").read_text().splitlines()
    found["board"] = board(folder / "board")
    found["values"] = {
        name: error_of(getattr(tf.experimental, name), 0) or getattr(tf.experimental, name)(0)
        for name in GETTERS
    }
    found["other gpu"] = error_of(tf.experimental.get_bytes_in_use, 3)
    found["other node"] = error_of(tf.experimental.get_gpu_host_bytes_in_use, 8)
    found["behind"] = experimental.get_lms_enabled()
    found["late defrag"] = error_of(experimental.set_lms_defrag_enabled, True)

    second = LMS()
    second.autotune_gpu_mem = 0.005
    second.autotune_plot = str(folder / "plot.svg")
    short = LMSStatsAverage(folder / "none.csv", 32, start_batch=9)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model().fit(images, labels, callbacks=[second, short], **fit)
    found["second_lines"] = said()
    found["plot"] = (folder / "plot.svg").exists()
    found["short"] = [printed.getvalue(), (folder / "none.csv").exists()]
    model().fit(images, labels, callbacks=[LMS()], **fit)
    found["real size again"] = said()
    lms.disable()
    lms.enable(policy="all")
    model().fit(images, labels, callbacks=[LMSKerasCallback(n_tensors=0)], **fit)
    found["kept off"] = [said(), len(lms.report().edited), [one.why for one in lms.report().graphs]]
    model().fit(images, labels, **fit)
    found["back"] = len(lms.report().edited)
    for name, asked in {
        "idle": {"policy": "all", "n_tensors": 0, "sync_mode": 3},
        "none asked": {"policy": "threshold", "n_tensors": 0},
    }.items():
        lms.disable()
        lms.enable(**asked)
        model().fit(images, labels, **fit)
        found[name] = [len(lms.report().edited), lms.report().warnings, lms.report().graphs[-1].why]
    experimental.set_lms_enabled(False)
    found["after"] = [experimental.get_lms_enabled(), lms.state() is None]
    return found


def board(folder: Path) -> dict[str, list[float]]:
    (path,) = folder.iterdir()
    series: dict[str, list[float]] = {}
    for record in tf.data.TFRecordDataset(str(path)):
        for value in tf1.Event.FromString(record.numpy()).summary.value:
            series.setdefault(value.tag, []).append(value.simple_value)
    return series


if __name__ == "__main__":
    logger = logging.getLogger("lms.compat")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    jobs = {"sessions": sessions, "keras in session": keras_in_session}
    print(json.dumps(jobs[sys.argv[1]]() if sys.argv[1] in jobs else keras(Path(sys.argv[1]))))
