"""Free what TensorFlow keeps of a function for plans that run no more: kernels, and with them constants.

Each plan of a function has kernels of its own, and these hold the graph's constants on the device. TensorFlow
keeps them as long as the function, so each new plan would take as much memory again. It frees them where the
function is taken out of its context. Put back, the function is optimized anew at its next call.

A function that was put back no longer knows which line of the program made an op, which errors tell. So only
functions with large constants are. Those whose kernels count random numbers are not: they would begin anew.
"""

import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from tensorflow.python.eager import context

LEAST_BYTES = 1 << 20
"""Leaves constants that take less where they are."""


@dataclass
class _Kernels:
    """Holds what is known of a function's kernels."""

    plans: set[tuple[int, int]] = field(default_factory=set)
    """Those that have kernels: the engine's number, and the plan's."""
    constant_bytes: int = 0
    draws: bool = False


_lock = threading.Lock()
_engines = itertools.count()
_known: dict[str, _Kernels] = {}
"""By function, in the whole process: as long as TensorFlow keeps kernels."""


class OldKernels:
    """Frees the kernels of one engine's functions, and of engines before it."""

    def __init__(self) -> None:
        self._engine = next(_engines)

    def planned(self, name: str, constant_bytes: int, *, draws: bool) -> None:
        """Note what the constants of a function take on the device, and whether a kernel of it draws."""
        with _lock:
            known = _known.setdefault(name, _Kernels())
            known.constant_bytes = max(known.constant_bytes, constant_bytes)
            known.draws |= draws

    def runs(self, name: str, plan: int, others: Collection[int], *, is_alone: bool) -> None:
        """Free the kernels of a function if some are of a plan that runs no more.

        Args:
            name: The function, which is about to run.
            plan: The number of its plan.
            others: The numbers of plans that may run again.
            is_alone: Whether no other thread may call the function meanwhile.
        """
        with _lock:
            known = _known.setdefault(name, _Kernels())
            kept = {(self._engine, number) for number in (plan, *others)}
            frees = is_alone and not known.draws and known.constant_bytes >= LEAST_BYTES
            is_old = not known.plans <= kept
            if frees and is_old:
                known.plans.clear()
            known.plans.add((self._engine, plan))
        if frees and is_old:
            # Ctrl-C ends no other thread than the main one: the function is back in any case.
            worker = threading.Thread(target=_put_back, args=(name.encode(),))
            worker.start()
            worker.join()


def _put_back(name: bytes) -> None:
    """Take a function out of TensorFlow's context, which frees its kernels, and put it back."""
    runtime = context.context()
    if runtime.has_function(name):
        definition = runtime.get_function_def(name)
        runtime.remove_function(name)
        runtime.add_function_def(definition)
