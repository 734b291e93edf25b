"""Decide about steps that XLA compiles: as one, in segments, or not at all."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from lms.calls.compiled_functions import CompiledFunctions
from lms.calls.planning_engine import PlanningEngine
from lms.config import LMSConfig
from lms.device.device import Device
from lms.intercept.batch_growth import Growth
from lms.intercept.function_calls import Call, RuntimeCall
from lms.optimizer.stopped import LEFT
from lms.passes.work import Work
from lms.report.render import mib
from lms.rewriter.segments import compiled_types, why_no_xla
from lms.swaps.swap_planner import LEAVES_WHAT_FITS, usable_bytes

OFF = "xla is 'off'; with xla='whole', the default, a step that fits is compiled as one"
"""Why XLA compiles nothing at all."""

SWAPS_ALL = (
    "swaps what fits, too, and no swap would survive in what is compiled as one; policy 'auto' leaves what "
    "fits to XLA"
)
"""Why it compiles nothing as one with a policy, whose name comes before."""


@dataclass(frozen=True)
class _Room:
    """Holds what a step may need that XLA compiles as one."""

    step: str
    device: Device
    nbytes: int
    """Of all that the device holds."""


class _FirstRun(threading.local):
    """Holds the rooms of this thread's steps that XLA compiles as one, until they have run so once."""

    def __init__(self) -> None:
        self.rooms: list[_Room] = []


class CompiledSteps:
    """Decides for one engine which steps XLA compiles, and how.

    Args:
        engine: The engine that plans the steps.
        growth: Knows which plans leave a step to XLA.
    """

    def __init__(self, engine: PlanningEngine, growth: Growth) -> None:
        self._engine, self._growth = engine, growth
        self._functions = CompiledFunctions()
        self._first = _FirstRun()

    def without(self) -> Callable[[str], str] | None:
        """Return what names the copies to run once LMS is off, where variables lie on the host."""
        return self._functions.without_xla if self._engine.resources.host.is_on else None

    def may_compile(self, runtime: RuntimeCall) -> bool:
        """Tell whether XLA may compile a step, as one or in segments."""
        return bool(runtime.copy) and self._why_no_xla() is None

    def may_be_whole(self, call: Call, runtime: RuntimeCall) -> bool:
        """Tell whether XLA can compile what it was to compile, for all that is known."""
        copy, may = self._functions.copy_of(runtime.name), self._growth.may_be_whole
        if copy is None or not may(call.function, runtime.name):
            return False
        return copy.types <= compiled_types(self._engine.resources.devices[0].type)

    def left_whole(self, works: Sequence[Work]) -> None:
        """Note what a step may need that XLA shall compile as one, when it runs for the first time."""
        for work in works:
            room = usable_bytes(self._engine.config, work.limit_bytes)
            if room is not None:
                self._first.rooms.append(_Room(work.task.name, work.device, work.residents.nbytes + room))

    def drops_xla(self, function: Any) -> bool:
        """Warn that XLA is switched off for ``function``, unless it runs whole or in segments."""
        engine = self._engine
        if (obstacle := self._why_no_xla()) is None:
            return False
        if engine.refusal() is not None:
            return True
        engine.books.warn(f"XLA is off for {function._name}: {obstacle}")
        return True

    def without_xla(self, call: Call, runtime: RuntimeCall) -> str:
        """Return the name of the copy to run of a step that XLA compiles, unless it is left to XLA.

        That is also how XLA is off for a step that was traced before LMS could say so.
        """
        engine = self._engine
        if engine.resources.host.is_on:  # what XLA compiles would find no variables there
            return self._functions.without_xla(runtime.name)
        if runtime.taped or "__backward_" in runtime.name or engine.refusal() is not None:
            return ""
        if self._growth.is_whole(call.function, runtime.name):
            return ""
        copy = self._functions.copy_of(runtime.name)
        return "" if copy is None else copy.name

    def is_left_to_xla(
        self, call: Call, runtime: RuntimeCall, generation: int, error: tf.errors.OpError
    ) -> bool:
        """Tell whether a copy ended with ``error`` because its plan leaves the step to XLA, and note that."""
        if LEFT not in error.message:
            return False
        self._growth.leave_whole(call.function, runtime.name, generation)
        return True

    def ran_whole(self, call: Call, runtime: RuntimeCall) -> None:
        """Have a step run in segments from now on that needed more than it may, compiled as one."""
        for room in self._first.rooms:
            memory, forbid = room.device.memory(), self._growth.forbid_whole
            if memory is not None and memory[1] > room.nbytes and forbid(call.function, runtime.name):
                took = f"{mib(memory[1])} where {mib(room.nbytes)} are allowed"
                now = "in segments" if self._engine.config.xla == "auto" else "without XLA"
                self._engine.books.warn(f"{room.step} runs {now} from now on: as one it took {took}")

    def ran(self) -> None:
        """Note that a function of the runtime has run, or has failed."""
        self._first.rooms = []

    def _why_no_xla(self) -> str | None:
        """Return why XLA compiles no step here, whole or in segments; ``None`` where it may."""
        config, used = self._engine.config, self._engine.resources
        if config.policy not in LEAVES_WHAT_FITS and config.xla == "whole":
            return f"policy {config.policy!r} {SWAPS_ALL}"
        if config.xla == "off":
            return OFF
        if context.is_async():
            return "eager execution is asynchronous (tf.config.experimental.set_synchronous_execution)"
        if config.xla == "auto" and (refused := segments_refused(config)) is not None:
            return refused
        if used.host.is_on:
            return "XLA compiles no function whose variables may lie on the host"
        return why_no_xla(used.devices[0])


def segments_refused(config: LMSConfig) -> str | None:
    """Return why no step can run in segments with a configuration; ``None`` where they can."""
    against = {
        "policy='threshold'": config.policy == "threshold",
        "optimizer_state='host'": config.optimizer_state == "host",
        "variables='host'": config.variables == "host",
    }
    found = next((name for name, holds in against.items() if holds), None)
    return None if found is None else f"xla='auto' does not work with {found}; leave one of them out"
