"""Facts about this process that need no import of TensorFlow."""

import sys


def tensorflow_is_initialised() -> bool:
    """Tell whether TensorFlow has made its devices; asking must not make them."""
    context = sys.modules.get("tensorflow.python.eager.context")
    current = getattr(context, "_context", None)
    return bool(getattr(current, "_initialized", False))


def has_peers() -> bool:
    """Tell whether this process is one of several Horovod ranks."""
    horovod = sys.modules.get("horovod.tensorflow")
    return horovod is not None and bool(horovod.is_initialized()) and horovod.size() > 1
