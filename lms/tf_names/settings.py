"""The four settings of IBM's TensorFlow 2.1 and 2.2, as ``tf.config.experimental`` had them."""

import os
from collections.abc import Callable, MutableMapping
from typing import Any

from lms.config import ALLOCATOR, ASYNC_ALLOCATOR
from lms.errors import LMSError


def set_lms_enabled(enabled: bool) -> None:
    """Switch Large Model Support on (as the ``LMS_*`` variables say, by default policy auto) or off.

    Raises:
        LMSError: If it cannot be switched any more.
    """
    import lms

    if enabled:
        lms.enable()
    else:
        lms.disable()


def get_lms_enabled() -> bool:
    """Tell whether Large Model Support is at work in this process."""
    import lms

    state = lms.state()
    return state is not None and state.active


def set_lms_defrag_enabled(enabled: bool) -> None:
    """Choose the allocator that keeps GPU memory from fragmenting: ``TF_GPU_ALLOCATOR=cuda_malloc_async``.

    IBM's allocator moved tensors together; in a stock TensorFlow the driver's pool does the like by mapping
    pages.

    Raises:
        LMSError: If TensorFlow has made its devices already, or the user has chosen another allocator.
    """
    from lms.process_state import tensorflow_is_initialised

    choose_allocator(enabled, os.environ, initialised=tensorflow_is_initialised())


def choose_allocator(enabled: bool, environ: MutableMapping[str, str], *, initialised: bool) -> None:
    """Set the variable that TensorFlow reads, as :func:`set_lms_defrag_enabled` asks.

    Raises:
        LMSError: If it is too late, or the user has chosen another allocator.
    """
    chosen = environ.get(ALLOCATOR, "")
    if enabled == (chosen == ASYNC_ALLOCATOR):
        return
    if initialised:
        raise LMSError(
            "TensorFlow has initialised its devices, so their allocator is chosen; needed before that: "
            f"call set_lms_defrag_enabled({enabled}) right after 'import tensorflow', or set "
            f"{ALLOCATOR}={ASYNC_ALLOCATOR if enabled else ''} for the job"
        )
    if not enabled:
        del environ[ALLOCATOR]
    elif chosen:
        raise LMSError(
            f"{ALLOCATOR} is {chosen!r}; defragmentation needs {ASYNC_ALLOCATOR!r}: unset the variable first"
        )
    else:
        environ[ALLOCATOR] = ASYNC_ALLOCATOR


def get_lms_defrag_enabled() -> bool:
    """Tell whether the allocator that does not fragment is chosen."""
    return os.environ.get(ALLOCATOR) == ASYNC_ALLOCATOR


SETTINGS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (set_lms_enabled, get_lms_enabled, set_lms_defrag_enabled, get_lms_defrag_enabled)
}
"""Name to function, for ``tf.config.experimental``."""
