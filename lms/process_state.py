"""What is known of this process without an import of TensorFlow."""

import sys


def tensorflow_is_initialised() -> bool:
    """Whether TensorFlow has made its devices; asking must not make them."""
    context = sys.modules.get("tensorflow.python.eager.context")
    current = getattr(context, "_context", None)
    return bool(getattr(current, "_initialized", False))


def has_peers() -> bool:
    """Whether this process is one of several Horovod ranks."""
    horovod = sys.modules.get("horovod.tensorflow")
    return horovod is not None and bool(horovod.is_initialized()) and horovod.size() > 1
