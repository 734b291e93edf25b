"""Measure how long the ops of a training step take on this machine, for later plans."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Profile:
    """What was measured; filled at the end of the ``with`` block, and printed as lines of text."""

    steps: dict[str, str] = field(default_factory=dict)
    """For each training step what was measured of it."""

    def __str__(self) -> str:
        """Return a line for each step."""
        return "\n".join(f"{name}: {text}" for name, text in self.steps.items())


@contextmanager
def profile() -> Iterator[Profile]:
    """Measure the ops of the training steps that run in the ``with`` block.

    On the CPU device it takes the time of each call of a kernel, on a GPU that of the kernels themselves.

    Plans that are made from then on use the measured times in place of estimated ones, for the same step with
    the same batch on the same machine: in this process, and in later ones. A step that was planned before
    keeps its plan. Measure three steps or more, and nothing else beside them::

        lms.enable()
        with lms.profile() as measured:
            model.fit(x, y, steps_per_epoch=3)
        print(measured)

    Yields:
        What was measured, once the block is left.

    Raises:
        LMSError: If LMS is not on, another profiler is at work, no training step ran, the profiler
            may not trace the GPU, or the times cannot be kept.
    """
    installation = importlib.import_module("lms.engine.installation")
    engine = installation.engine()
    measuring = importlib.import_module("lms.engine.measuring")
    engine.resources.profiles().prepare()  # what cannot be kept need not be measured
    made = Profile()
    engine.steps.functions_run.clear()
    device_type = engine.resources.devices[0].type
    with importlib.import_module("lms.profiling.op_trace").tracing(device_type) as trace:
        yield made
    made.steps = measuring.keep(engine, trace.data)
