"""Set the options of TensorFlow's graph optimizer with which a planned step runs.

They are given to each call of a function and to each session, and nothing else is changed: once LMS is off,
functions run as they did before, with the graph that TensorFlow keeps for its own options.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

XLA_FLAGS, AUTO_JIT = "TF_XLA_FLAGS", re.compile(r"--?tf_xla_auto_jit=(\S+)")
"""The variable, and the flag in it that has TensorFlow form clusters whatever ``set_jit`` says."""
AUTO_JIT_OFF = ("0", "-1")

TIMEOUT_MS = 3_600_000
"""For all passes of TensorFlow's optimizer and the plan. The options are a part of the key under which
TensorFlow keeps an optimized function, so another timeout has it optimize that function again, without a new
trace."""


_numbers = itertools.count()


class OptimizerOptions:
    """Makes the options of planned calls, each once.

    No two of these make the same: what was planned under one is planned anew under another.

    The memory optimizer swaps and accumulates on its own estimate of the peak, which knows nothing of the
    plan: it turns sums into chains of updates whose first buffer is allocated long before the plan has room
    for it. So it is off.

    Args:
        arithmetic: Whether the arithmetic rewrites are on; ``None``: as the program has them.
        fuses: Whether TensorFlow fuses ops of steps that XLA was to compile.
    """

    def __init__(self, arithmetic: bool | None, *, fuses: bool = True) -> None:
        self._arithmetic, self._fuses = arithmetic, fuses
        self._number: dict[int, int] = {}
        """By generation of a plan what no other has in the process."""
        self._made: dict[tuple[bytes, str, int, bool], tuple[Any, int]] = {}

    def planned(self, options: Any, generation: int, *, is_copy: bool = False) -> tuple[Any, int]:
        """Return the options for a call with ``options`` that runs the plan ``generation``.

        Where XLA may compile segments of the step TensorFlow fuses no ops itself: XLA has no kernels for
        what it makes of them.

        Returns:
            The options, and how often TensorFlow's optimizer goes over a graph with them.
        """
        in_segments = is_copy and not self._fuses
        key = options.config_proto_serialized, options.executor_type, generation, in_segments
        made = self._made.get(key)
        if made is None:
            config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
            wanted = self.as_planned(config, generation)
            if in_segments:
                wanted.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF
            planned = context.FunctionCallOptions(executor_type=options.executor_type, config_proto=wanted)
            made = self._made[key] = planned, iterations_of(config)
        return made

    def as_planned(self, config: Any, generation: int = 0) -> Any:
        """Copy a configuration (or an empty one) and set the options that a plan needs."""
        changed = config_pb2.ConfigProto()
        if config is not None:
            changed.CopyFrom(config)
        rewrite = changed.graph_options.rewrite_options
        rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
        number = self._number.get(generation)
        if number is None:
            number = self._number.setdefault(generation, next(_numbers))
        rewrite.meta_optimizer_timeout_ms = TIMEOUT_MS + number
        if self._arithmetic is not None:
            rewrite.arithmetic_optimization = type(rewrite).ON if self._arithmetic else type(rewrite).OFF
        return changed


def iterations_of(config: Any) -> int:
    """Return how often TensorFlow's optimizer goes over a graph with this configuration."""
    rewrite = config.graph_options.rewrite_options
    return 1 if rewrite.meta_optimizer_iterations == type(rewrite).ONE else 2


def doubtful_options(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning with its remedy for each of TensorFlow's options that works against a plan."""
    merges = "XLA auto-clustering is on ({}): it may merge swaps away; {}"
    if tf.config.optimizer.get_jit():
        yield merges.format("set_jit", "switch it off with tf.config.optimizer.set_jit(False)")
    for flag in AUTO_JIT.finditer(environ.get(XLA_FLAGS, "")):
        if flag[1] not in AUTO_JIT_OFF:
            yield merges.format(XLA_FLAGS, f"take {flag[0]} out of that variable")
    options = tf.config.optimizer.get_experimental_options()
    if options.get("auto_mixed_precision"):
        yield (
            "auto_mixed_precision is on: it turns tensors of half precision into float32 before they are "
            "swapped, twice the bytes; use tf.keras.mixed_precision in its place"
        )
    if options.get("disable_meta_optimizer"):
        yield (
            "disable_meta_optimizer is set: TensorFlow optimizes no graph, and LMS plans none; take it "
            "out of tf.config.optimizer.set_experimental_options"
        )
