"""Use Horovod correctly under Keras 3 as well as tf-keras.

Horovod 0.28 overrides what Keras 2 calls; Keras 3 calls ``optimizer.apply`` instead, so Horovod's own
optimizer averages nothing there and its callbacks stumble over Keras 3's variables. Here every collective has
a name of ours: Horovod matches tensors of different ranks by name, and those that Keras and TensorFlow invent
depend on what else a rank has built before.
"""

import importlib
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lms.errors import LMSError

_serial = itertools.count()
"""Numbers what needs names of its own, in the order of its making, which is the same on every rank."""


class OutOfSyncError(LMSError):
    """Ranks that should hold the same weights do not; the text names the first variable that differs."""


def horovod() -> Any:
    """Return Horovod's TensorFlow module, initialised.

    Raises:
        LMSError: If Horovod is not installed, or ``hvd.init()`` has not been called.
    """
    try:
        hvd = importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise LMSError(f"Horovod is needed and cannot be imported: {error}; try 'lmsrun check'") from error
    if not hvd.is_initialized():
        raise LMSError("Horovod is not initialised; call horovod.tensorflow.init() first, once in every rank")
    return hvd


# --- the optimizer ----------------------------------------------------------------------------------------


def DistributedOptimizer(  # noqa: N802 - Horovod's name, so that a script changes one import
    optimizer: Any, *, op: Any = None, compression: Any = None, sparse_as_dense: bool = False
) -> Any:
    """Let an optimizer average the gradients over all ranks before it applies them.

    An optimizer of Keras 3 or tf-keras is changed in place and keeps its class name, state and configuration:
    a model saved with it loads without Horovod. Those of ``tf.compat.v1.train`` get Horovod's own wrapper.

    Under mixed precision wrap the loss scaling, ``DistributedOptimizer(LossScaleOptimizer(Adam()))``: the
    other way round a rank whose gradients overflow would skip the exchange that its peers wait in.

    Args:
        optimizer: What to distribute.
        op: Horovod's reduction; ``hvd.Average`` if None.
        compression: Such as ``hvd.Compression.fp16``; none if None.
        sparse_as_dense: Exchange sparse gradients (of embeddings) as dense tensors.

    Raises:
        LMSError: If Horovod is missing or not initialised, or the optimizer is distributed already.
    """
    hvd = horovod()
    op = hvd.Average if op is None else op
    compression = hvd.Compression.none if compression is None else compression
    options = {"op": op, "compression": compression, "sparse_as_dense": sparse_as_dense}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return hvd.DistributedOptimizer(optimizer, **options)
    plain = type(optimizer)
    if getattr(plain, "lms_distributed", False) or plain.__module__.startswith("horovod."):
        raise LMSError(f"this {plain.__name__} is distributed already; wrap an optimizer once")
    if not hasattr(plain, "apply_gradients"):
        raise LMSError(f"{plain.__name__} has no apply_gradients; needed an optimizer of Keras or TensorFlow")
    overriding = (
        _averaging_apply(plain, options) if _is_keras_3(optimizer) else _averaging_apply_2(plain, options)
    )
    # Under its public name the optimizer is saved: tf-keras looks for it in the class itself.
    names = {name: value for name, value in vars(plain).items() if name.startswith("_keras_api_names")}
    told = {"__module__": plain.__module__, "__doc__": plain.__doc__, **names}
    body = {**told, "lms_distributed": True, **overriding}
    # Keras's own __setattr__ would track the class as if it were state.
    object.__setattr__(optimizer, "__class__", type(plain.__name__, (plain,), body))
    return optimizer


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    *,
    op: Any,
    compression: Any,
    sparse_as_dense: bool = False,
) -> list[Any]:
    """Combine each gradient over all ranks under its name; None stays None, IndexedSlices are gathered."""
    hvd = horovod()
    if hvd.size() == 1:
        return list(gradients)
    reduced: list[Any] = []
    for gradient, name in zip(gradients, names, strict=True):
        if gradient is None:
            reduced.append(None)
        elif isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
            reduced.append(_gather_slices(hvd, gradient, name, op))
        else:
            dense = tf.convert_to_tensor(gradient)
            reduced.append(
                hvd.allreduce(dense, op=op, compression=compression, name=name, ignore_name_scope=True)
            )
    return reduced


def _gather_slices(hvd: Any, slices: tf.IndexedSlices, name: str, op: Any) -> tf.IndexedSlices:
    """Add up sparse gradients by concatenation: repeated indices add when they are applied."""
    if op not in (hvd.Average, hvd.Sum):
        raise LMSError("a sparse gradient can only be averaged or summed; try sparse_as_dense=True")
    values = hvd.allgather(slices.values, name=f"{name}.values", ignore_name_scope=True)
    indices = hvd.allgather(slices.indices, name=f"{name}.indices", ignore_name_scope=True)
    if op == hvd.Average:
        values = values / tf.cast(hvd.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _is_keras_3(optimizer: Any) -> bool:
    return hasattr(optimizer, "stateless_apply") and hasattr(optimizer, "apply")


def _averaging_apply(plain: type, options: dict[str, Any]) -> dict[str, Any]:
    """Override the method that Keras 3 gives gradients to, in ``fit`` and in ``apply_gradients``."""
    reduce = _reducer(options)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return plain.apply(self, reduce(grads), trainable_variables)  # type: ignore[attr-defined]

    return {"apply": apply}


def _averaging_apply_2(plain: type, options: dict[str, Any]) -> dict[str, Any]:
    """Override the method that tf-keras gives gradients to, in its older optimizers too."""
    reduce = _reducer(options)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        pairs = list(zip(reduce(grads), variables, strict=True))
        return plain.apply_gradients(self, pairs, *args, **kwargs)  # type: ignore[attr-defined]

    return {"apply_gradients": apply_gradients}


def _reducer(options: dict[str, Any]) -> Callable[[Iterable[Any]], list[Any]]:
    # hvd.elastic.run knows the death of a peer by this word in the name of the operation that failed; any
    # other name it takes for the end of the training.
    prefix = f"HorovodAllreduce.lms.gradient.{next(_serial)}"

    def reduce(gradients: Iterable[Any]) -> list[Any]:
        listed = list(gradients)
        return reduce_gradients(listed, [f"{prefix}.{index}" for index in range(len(listed))], **options)

    return reduce


# --- callbacks --------------------------------------------------------------------------------------------


class _Callback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback for either Keras: tf-keras asks for more methods than Keras 3 has."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class BroadcastVariables(_Callback):
    """Gives every rank the root's weights and optimizer state, before the first step if they exist by then.

    A model that is built by its first batch is made equal right after that batch.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._done = False

    def set_model(self, model: Any) -> None:
        """Refuse a model that cannot work, and switch off XLA, which cannot compile Horovod's ops."""
        super().set_model(model)
        inner = getattr(getattr(model, "optimizer", None), "inner_optimizer", None)
        if getattr(type(inner), "lms_distributed", False):
            raise LMSError(
                "Keras wrapped the distributed optimizer in a LossScaleOptimizer, which skips the exchange "
                "on an overflow; use DistributedOptimizer(LossScaleOptimizer(...)) instead"
            )
        if _is_keras_3(getattr(model, "optimizer", None)) and getattr(model, "jit_compile", False) is True:
            sys.stderr.write("lms: jit_compile is switched off: XLA cannot compile Horovod's exchange\n")
            model.jit_compile = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast a built model before its first step."""
        if not self._done and getattr(self.model, "built", False):
            _build_optimizer(self.model)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast the variables that the first step has built."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_variables([*self.model.weights, *_optimizer_variables(self.model)], self.root_rank)
        self._done = True


class MetricAverage(_Callback):
    """Averages the metrics of an epoch over the ranks; put it before callbacks that decide by them."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace each number in ``logs`` by its mean over the ranks."""
        hvd = horovod()
        keys = sorted(key for key, value in (logs or {}).items() if np.ndim(value) == 0)
        if not keys or hvd.size() == 1:
            return
        mine = np.array([float(logs[key]) for key in keys])
        check_in_agreement("metrics", keys)
        mean = hvd.allreduce(tf.constant(mine), op=hvd.Average, name="lms.metrics").numpy()
        logs.update(zip(keys, map(float, mean), strict=True))


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Give every rank the root's values of these variables (TensorFlow's, or either Keras's)."""
    hvd = horovod()
    plain = [tf_variable(variable) for variable in variables]
    if hvd.size() == 1 or not plain:
        return
    check_in_agreement("variables", [f"{tuple(variable.shape)} {variable.dtype.name}" for variable in plain])
    serial = next(_serial)

    def exchange() -> None:
        for index, variable in enumerate(plain):
            name = f"HorovodBroadcast.lms.broadcast.{serial}.{index}"
            variable.assign(hvd.broadcast(variable, root_rank, name=name, ignore_name_scope=True))

    tf.function(exchange, autograph=False)()  # one graph: Horovod sees all of them at once and fuses them


def _build_optimizer(model: Any) -> None:
    """Create the optimizer's slots now, where Keras would create them in the first step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and hasattr(optimizer, "build") and not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)


def _optimizer_variables(model: Any) -> list[Any]:
    try:
        variables = getattr(getattr(model, "optimizer", None), "variables", ())
    except TypeError:  # Horovod's own wrapper calls Keras 3's list of variables
        return []
    return list(variables() if callable(variables) else variables)


def tf_variable(variable: Any) -> Any:
    """Return TensorFlow's variable behind a Keras 3 variable; tf-keras's are TensorFlow's own."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


# --- the check --------------------------------------------------------------------------------------------


def check_in_sync(model_or_variables: Any, *, non_trainable: bool = False) -> None:
    """Compare checksums of the weights over all ranks; every rank must call it.

    Args:
        model_or_variables: Variables, or a model: then its trainable weights and its optimizer's state.
        non_trainable: Compare the model's other weights too. BatchNormalization's moving averages are such:
            each rank keeps those of its own data, so they differ by design.

    Raises:
        OutOfSyncError: On every rank, naming the first variable that differs and the ranks that do.
        LMSError: If Horovod is missing or not initialised.
    """
    hvd = horovod()
    named = _named_variables(model_or_variables, non_trainable)
    if not named or hvd.size() == 1:
        return
    check_in_agreement("variables", [str(tuple(value.shape)) for _, value in named])
    mine = np.array([[zlib.crc32(np.ascontiguousarray(value).tobytes()) for _, value in named]], np.int64)
    every = hvd.allgather(tf.constant(mine), name="lms.check.sums").numpy()
    unequal = (every != every[0]).any(axis=0)
    if unequal.any():
        first = int(unequal.argmax())
        ranks = ", ".join(str(rank) for rank in np.flatnonzero(every[:, first] != every[0, first]))
        raise OutOfSyncError(
            f"{named[first][0]} differs: rank {ranks} against rank 0 ({int(unequal.sum())} of {len(named)} "
            "variables differ); use lms.hvd.DistributedOptimizer and lms.hvd.BroadcastVariables in every rank"
        )


def check_in_agreement(what: str, described: Sequence[str]) -> None:
    """Check that all ranks are about to exchange the same things: a mismatch would hang or mix them up.

    Raises:
        OutOfSyncError: On every rank, if their descriptions differ.
    """
    hvd = horovod()
    mine = np.array([[len(described), zlib.crc32("\n".join(described).encode())]], np.int64)
    every = hvd.allgather(tf.constant(mine), name=f"lms.check.{what}").numpy()
    if (every != every[0]).any():
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(every[:, 0]))
        raise OutOfSyncError(f"the ranks hold different {what} ({counts}); all must build the same model")


def _named_variables(model_or_variables: Any, non_trainable: bool) -> list[tuple[str, Any]]:
    if hasattr(model_or_variables, "trainable_variables"):
        model = model_or_variables
        weights = model.weights if non_trainable else model.trainable_variables
        variables = [*weights, *_optimizer_variables(model)]
    else:
        variables = list(model_or_variables)
    return [
        (getattr(variable, "path", variable.name), tf_variable(variable).numpy()) for variable in variables
    ]
