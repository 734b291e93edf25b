"""What the cases share: how one is declared, how a Keras model is fitted, and what of it is compared."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

BATCH, CLASSES, SEED = 8, 10, 7
TURNS = 4
"""Steps in one call, where a case takes several."""

Variables = Sequence[Any]
Train = Callable[[int], Variables]


@dataclass(frozen=True)
class Case:
    """One training, the same whenever it is run."""

    train: Train
    """Trains so many steps from the same start, and returns all weights and slots."""
    steps: int = 20
    devices: int = 1
    """Logical devices of the CPU, which a process has from its start."""
    ranks: int = 1
    """Horovod ranks, each a process."""
    keras: tuple[str, ...] = ("2", "3")
    """The Kerases that have what it uses; 2 is tf_keras too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``lms.enable`` is told beside the policy."""
    swaps: bool = True
    """Has tensors that LMS can swap under policy ``all``."""
    same_twice: bool = True
    """Gives the same bits in every run without LMS."""


def plain_config() -> Any:
    """TensorFlow's own settings but for Grappler's memory optimizer, which LMS switches off."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.memory_optimization = 1  # NO_MEM_OPT
    return config


def prepare(devices: int) -> None:
    """Have the process run with ``plain_config``, on so many logical devices; before any other call."""
    cpu, *_ = tf.config.list_physical_devices(
        "CPU"
    )  # now, or the changed config would choose the visible ones
    context.context()._config = plain_config()  # no public function sets this option
    context.context().function_call_options = None
    if devices > 1:
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(devices)]
        tf.config.set_logical_device_configuration(cpu, logical)


def which_keras() -> str:
    """``3``, or ``2`` for tf_keras and the Keras of TensorFlow 2.15."""
    return "3" if hasattr(tf.keras, "ops") else "2"


def numbers(*shape: int, seed: int = 0) -> Any:
    """Random numbers in float32, the same in every process."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype="float32")


def labels_of(count: int, classes: int = CLASSES) -> Any:
    """As many random labels."""
    return np.random.default_rng(count).integers(0, classes, count).astype("int32")


def words_of(count: int, length: int, vocabulary: int) -> Any:
    """Sentences of different length: the rest is 0."""
    random = np.random.default_rng([count, length])
    words = random.integers(1, vocabulary, (count, length))
    ends = random.integers(length // 2, length + 1, (count, 1))
    return np.where(np.arange(length) < ends, words, 0).astype("int32")


def dataset_of(inputs: Any, labels: Any, batch: int = BATCH) -> Any:
    """Batches of one size, in order."""
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(batch, drop_remainder=True)


def cross_entropy() -> Any:
    """The loss of models that end in logits."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def start_anew() -> None:
    """Have names, seeds and numbers of layers begin where they began before."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(SEED)


def fit(model: Any, optimizer: Any, inputs: Any, labels: Any, **options: Any) -> Variables:
    """Fit a model to the data, a batch a step; weights and slots."""
    model.compile(optimizer, cross_entropy(), **options)
    model.fit(dataset_of(inputs, labels), epochs=1, verbose=0, shuffle=False)
    return variables_of(model, model.optimizer)


def fitted(build: Callable[[], Any], rows: Callable[[int], Any], optimizer: Callable[[], Any]) -> Train:
    """Declare a training by ``fit`` of what ``build`` makes, on as many rows as it needs."""

    def train(steps: int) -> Variables:
        start_anew()
        return fit(build(), optimizer(), rows(steps * BATCH), labels_of(steps * BATCH))

    functools.update_wrapper(train, build)
    return train


def variables_of(*holders: Any) -> Variables:
    """All variables of models and optimizers."""
    return [variable for holder in holders for variable in holder.variables]


def apply(optimizer: Any, tape: Any, loss: Any, weights: Variables) -> None:
    """Take one step down the slope of the loss."""
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def values_of(variables: Variables) -> dict[str, Any]:
    """The values of variables by place and name; those of a mirrored one on every device."""
    found = {}
    for place, variable in enumerate(variables):
        name = f"{place} {getattr(variable, 'path', getattr(variable, 'name', ''))}"
        for part, one in enumerate(_copies(variable)):
            found[f"{name} {part}"] = np.ascontiguousarray(one.numpy() if hasattr(one, "numpy") else one)
    return found


def _copies(variable: Any) -> Iterable[Any]:
    held = getattr(variable, "_value", variable)  # Keras 3 keeps TensorFlow's variable in its own
    copies = getattr(held, "values", None)
    return copies if isinstance(copies, tuple) else (variable,)


def digest(values: dict[str, Any]) -> str:
    """One text for all bits."""
    return hashlib.sha256(b"".join(value.tobytes() for value in values.values())).hexdigest()
