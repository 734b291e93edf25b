"""What of TensorFlow's graph optimizer must be off while LMS plans memory."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

ARITHMETIC, LAYOUT = "arithmetic_optimization", "layout_optimizer"

XLA_FLAGS, AUTO_JIT = "TF_XLA_FLAGS", re.compile(r"--?tf_xla_auto_jit=(\S+)")
"""The variable, and the flag in it that has TensorFlow form clusters whatever ``set_jit`` says."""
AUTO_JIT_OFF = ("0", "-1")


class OptimizerSettings:
    """Changes the optimizer's options, and puts them back.

    The memory optimizer swaps and accumulates on its own estimate of the peak, which knows nothing of the
    plan: it turns sums into chains of updates whose first buffer is allocated long before the plan has room
    for it.
    """

    def __init__(self, arithmetic: bool | None) -> None:
        self._arithmetic = arithmetic
        self._arithmetic_before: bool | None = None
        """None: the program has not set it."""
        self._config_before: Any = None
        self._must_turn = False

    @property
    def layout(self) -> bool | None:
        """Whether the layout optimizer must be on, or off: the user says so, or an earlier step needs it."""
        asked = tf.config.optimizer.get_experimental_options().get(LAYOUT)
        return True if asked is None and self._must_turn else asked

    def set_layout(self, *, on: bool) -> None:
        """Have the layout optimizer on or off; on for good, and as the user says where the user does."""
        config = context.context()._config
        if config is None:  # nothing was applied: a session has options of its own
            return
        self._must_turn = self._must_turn or on
        toggles = rewriter_config_pb2.RewriterConfig
        rewrite = config.graph_options.rewrite_options
        rewrite.layout_optimizer = toggles.ON if self._must_turn else toggles.OFF
        _have_config_read()

    def apply(self) -> None:
        """Set the options for everything that runs from now on."""
        tf.config.list_physical_devices()  # now, or the changed config would choose the visible ones
        self._config_before = context.context()._config
        context.context()._config = as_planned(self._config_before)
        if self._arithmetic is not None:
            self._arithmetic_before = _set_by_program().get(ARITHMETIC)
            _set_by_program()[ARITHMETIC] = self._arithmetic
        _have_config_read()

    def restore(self) -> None:
        """Put back what was there before; what the program itself has set since stays."""
        context.context()._config = self._config_before
        options = _set_by_program()
        if self._arithmetic is not None and options.get(ARITHMETIC) == self._arithmetic:
            del options[ARITHMETIC]
            if self._arithmetic_before is not None:
                options[ARITHMETIC] = self._arithmetic_before
        _have_config_read()


def _set_by_program() -> dict[str, Any]:
    """The options that were set, without TensorFlow's own; its functions can set one, but not unset it."""
    options: dict[str, Any] = context.context()._optimizer_experimental_options
    return options


def _have_config_read() -> None:
    """Have TensorFlow read its configuration anew before this thread's next function."""
    context.context().function_call_options = None


def merges_equal_ops() -> bool:
    """Whether functions are run with equal ops merged into one, which belongs to the arithmetic rewrites."""
    options = tf.config.optimizer.get_experimental_options()
    return bool(options.get(ARITHMETIC, True)) and not options.get("disable_meta_optimizer", False)


def folds_constants_alone() -> bool:
    """Whether functions are run with constants folded and without the arithmetic rewrites."""
    options = tf.config.optimizer.get_experimental_options()
    folds = options.get("constant_folding", True) and not options.get("disable_meta_optimizer", False)
    return bool(folds) and not options.get(ARITHMETIC, True)


def as_planned(config: Any) -> Any:
    """A copy of a session's or the eager context's configuration, without what would undo a plan."""
    changed = config_pb2.ConfigProto()
    if config is not None:
        changed.CopyFrom(config)
    rewrite = changed.graph_options.rewrite_options
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    return changed


def doubtful_options(environ: Mapping[str, str]) -> Iterator[str]:
    """What of TensorFlow's own options works against a plan, and the remedy."""
    merges = "XLA auto-clustering is on ({}): it may merge swaps away; {}"
    if tf.config.optimizer.get_jit():
        yield merges.format("set_jit", "switch it off with tf.config.optimizer.set_jit(False)")
    for flag in AUTO_JIT.finditer(environ.get(XLA_FLAGS, "")):
        if flag[1] not in AUTO_JIT_OFF:
            yield merges.format(XLA_FLAGS, f"take {flag[0]} out of that variable")
    if tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"):
        yield (
            "auto_mixed_precision is on: it turns tensors of half precision into float32 before they are "
            "swapped, twice the bytes; use tf.keras.mixed_precision in its place"
        )
