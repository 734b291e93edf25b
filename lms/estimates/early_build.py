"""Build a Keras model's optimizer before its step is traced.

Keras 3 builds it while it traces its first step. Each of the optimizer's variables takes tens of milliseconds
there, and TensorFlow traces a function again whose first trace has made variables: of a large network that is
most of the time until the first step. The step is the same.
"""

from typing import Any

import wrapt

TRAINER = "keras.src.backend.tensorflow.trainer"
MAKER = "TensorFlowTrainer.make_train_function"


def build_optimizer(model: Any) -> None:
    """Build the optimizer of a model whose variables are there; leave all others to Keras."""
    optimizer = getattr(model, "optimizer", None)
    is_ready = getattr(model, "built", False) and getattr(model, "_distribute_strategy", None) is None
    if is_ready and optimizer is not None and not getattr(optimizer, "built", True):
        optimizer.build(model.trainable_variables)


def build_early() -> None:
    """Have Keras 3 build each optimizer when it makes the function that trains."""

    def build(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        build_optimizer(instance)
        return wrapped(*args, **kwargs)

    def watch(imported: Any) -> None:
        wrapt.wrap_function_wrapper(imported, MAKER, build)

    wrapt.register_post_import_hook(watch, TRAINER)
