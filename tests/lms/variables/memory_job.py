"""What lies on the device before a step, as planned and as counted; prints JSON.

python memory_job.py shared|raced|trained|objects
"""

import json
import os
import sys
import types
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.variables import memory  # noqa: E402
from lms.variables.memory import address_of, give_own_memory  # noqa: E402

KIB = 1 << 10
SIZE, LAYERS = 256, 10


def in_use() -> int:
    """Bytes that the device's allocator has handed out."""
    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


def shared() -> dict[str, Any]:
    """Four variables of 64 KiB begin as one tensor; two of them are changed."""
    start = tf.random.stateless_normal((128, 128), (1, 2))
    changed, frozen = ([tf.Variable(start) for _ in range(2)] for _ in range(2))

    inputs = [variable.handle for variable in (*changed, *frozen)]
    grown = [grown_kib(inputs), grown_kib(inputs)]
    found: dict[str, Any] = {"grown": grown[0], "again": grown[1]}
    found["same"] = all(bool(tf.reduce_all(one == start)) for one in (*changed, *frozen))
    held = [read(changed[1]) for _ in range(2)]
    found["reads share"] = address_of(held[0]) == address_of(held[1])
    return found


def objects() -> dict[str, Any]:
    """A text, many texts, and a list of tensors."""
    things = (
        tf.constant("a"),
        tf.fill([5000], "b"),
        tf.raw_ops.EmptyTensorList(element_shape=[1], max_num_elements=1, element_dtype=tf.float32),
    )
    return {"addresses": [address_of(one) for one in things], "of numbers": bool(address_of(tf.zeros(9)))}


def grown_kib(inputs: list[Any]) -> int:
    """What the device holds more of when the first two variables have been given memory of their own."""
    before = in_use()
    give_own_memory(inputs, {0, 1}, lambda handle, nbytes: True)
    return (in_use() - before) // KIB


def read(variable: Any) -> Any:
    """Its value, in its own buffer unless reads make copies."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def raced() -> dict[str, Any]:
    """A step in another thread adds 1 to all of a variable whenever LMS is between two ops of its own."""
    shared_start = tf.zeros((128, 128))
    changed = tf.Variable(shared_start)
    added: list[str] = []

    def interrupted(name: str) -> Any:
        def run(**arguments: Any) -> Any:
            result = getattr(tf.raw_ops, name)(**arguments)
            changed.assign_add(tf.ones_like(changed))
            added.append(name)
            return result

        return run

    between = types.SimpleNamespace(**{name: interrupted(name) for name in dir(tf.raw_ops) if name[0] != "_"})
    memory.tf = types.SimpleNamespace(**{**vars(tf), "raw_ops": between})  # type: ignore[attr-defined]
    memory._copied_bytes(changed.handle)
    return {"interruptions": len(added), "lost": len(added) - float(tf.reduce_max(changed))}


def trained() -> dict[str, Any]:
    """A step with an optimizer whose momenta begin as one zero, and a loss with zeros for every output."""
    lms.enable(policy="all")
    layers = [tf.keras.layers.Dense(SIZE, activation="tanh") for _ in range(LAYERS)]
    model = tf.keras.Sequential([tf.keras.Input((SIZE,), batch_size=1024), *layers])
    optimizer = tf.keras.optimizers.Adam(1e-4)
    batch = tf.random.stateless_normal((1024, SIZE), (3, 4))
    labels = tf.cast(batch > 0, tf.float32)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            logits = model(batch)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    for _ in range(2):
        step()
    graph = lms.report().edited[-1]
    return {"planned": graph.base_bytes, "counted": in_use()}


CASES = {"shared": shared, "raced": raced, "trained": trained, "objects": objects}
print(json.dumps(CASES[sys.argv[1]]()))
