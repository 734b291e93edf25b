"""Edit a graph that TensorFlow has optimized: run the passes over each device and frame."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import graph_pb2

from lms.device.device import Device
from lms.engine.kept_edits import Edit, KeptEdits, key_of, to_keep
from lms.engine.moving_variables import MovingVariables
from lms.engine.pass_order import standard_passes
from lms.optimizer.stopped import LEFT, stopped
from lms.passes.counting import Counting
from lms.passes.parsing import is_edited
from lms.passes.specialising import Specialising
from lms.passes.work import Pass, Task, Work, place_of, run_passes
from lms.reader.function_bodies import unread_arguments
from lms.reader.survey import step_frames
from lms.rewriter.writer import RewriteError, put_copies_first

if TYPE_CHECKING:
    from lms.engine.engine import Engine

logger = logging.getLogger("lms")

FEWEST_OPS = 24
"""A graph of fewer ops has no step in it."""


class Editing:
    """Runs the passes for one engine, and keeps the latest edits.

    Args:
        engine: The engine whose configuration, devices and store are used.
        environ: The process's variables.
    """

    def __init__(self, engine: "Engine", environ: Mapping[str, str]) -> None:
        self._engine, self._environ = engine, environ
        used = engine.resources
        counting = Counting(used.fusion, used.host, used.rooms)
        self._passes = standard_passes(used, counting, used.rooms, engine.config.bandwidth_gb_s)
        self._specialising = Specialising(
            self._passes.survey, environ, engine.steps.sessions.keeps_conditions
        )
        self._moving = MovingVariables(engine, self._works)
        self._kept = KeptEdits(counting, used)

    def edit(self, task: Task) -> Edit:
        """Plan and edit a graph.

        Raises:
            LMSError: If it cannot be planned, or the store cannot hold what would be swapped.
            GraphError: If it is no order of ops at all.
        """
        graph_def = graph_pb2.GraphDef.FromString(task.request.graph)
        if len(graph_def.node) < FEWEST_OPS or is_edited(graph_def, task.request.graph):
            return Edit()
        task = _task_of(graph_def, task)
        if self._specialising.requires(task, graph_def):
            task, graph_def = self._specialising.apply(task, graph_def, self._devices(task))
        used = self._engine.resources
        shares, facts = used.host.shares, (key_of(graph_def, task), used.profiles().kept)
        flags = task.compiled, task.may_be_whole
        known = self._kept.find((*facts, *flags, shares))
        if known is not None:
            if self._is_refused(task, len(graph_def.node)):
                return Edit()
            if (again := self._kept.used_again(known, task, self._devices(task))) is not None:
                return again
        works = self._works(task, graph_def)
        if len({work.whole for work in works}) > 1:  # another device or frame of it needs segments
            task = replace(task, may_be_whole=False)
            graph_def = graph_pb2.GraphDef.FromString(task.request.graph)
            works = self._works(task, graph_def)
        if self._moving.may_move(task):
            before = shares
            graph_def, works, shares = self._moving.move(task, graph_def, works)
            flags = flags if shares == before else (False, False)
        made = _as_edit(works, graph_def)
        if works and shares == used.host.shares:  # else another thread has moved variables meanwhile
            self._kept.keep((*facts, *flags, shares), made)
        return made

    def _works(self, task: Task, graph_def: Any) -> list[Work]:
        works: list[Work] = []
        for device in self._devices(task):
            works += self._edit_for(device, task, graph_def, works[-1] if works else None)
        return works

    def _is_refused(self, task: Task, ops: int) -> bool:
        """Tell whether no step may be planned now, and note it; else warn of doubtful options."""
        if (refusal := self._engine.refusal()) is not None:
            self._engine.books.skip(task.name, refusal, ops)
            return True
        self._engine.tell_of_options()
        return False

    def _devices(self, task: Task) -> tuple[Device, ...]:
        found: tuple[Device, ...] = self._engine.resources.devices
        if task.limit_bytes is None:
            return found
        return tuple(replace(device, limit_bytes=task.limit_bytes) for device in found)

    def _edit_for(self, device: Device, task: Task, graph_def: Any, earlier: Work | None) -> list[Work]:
        """Plan the memory of one device, in each frame that holds a step."""
        place = place_of(device, self._environ)
        passes = self._passes
        begun = Work(task, device, place, graph_def=graph_def)
        if earlier is not None:
            begun = replace(earlier.reopened(), device=device, place=place)
        begun = run_passes([passes.parse], begun)
        if begun.table is None or (len(self._engine.resources.devices) > 1 and not _is_used(begun)):
            return []
        frames = [begun.table.frames[frame].name for frame in step_frames(begun.table, is_body=task.is_body)]
        if not frames:
            return []
        if self._is_refused(task, len(begun.table.nodes)):
            return []
        begun = run_passes(passes.survey, begun)
        if begun.fits and self._engine.may_postpone(task):
            later = partial(run_passes, passes.plan, replace(to_keep(begun.of_frame(frames[0])), fits=False))
            return [replace(begun, later=later)]
        works: list[Work] = []
        for name in frames:
            if works:
                begun = run_passes([passes.parse, *passes.survey], works[-1].reopened())
            works.append(self._planned(begun.of_frame(name)))
        return works

    def _planned(self, work: Work) -> Work:
        """Plan a frame, and write the plan."""
        made = run_passes(self._passes.plan, work)
        repeats = made.decision is not None and made.decision.recomputation is not None
        graph = work.graph_def.SerializeToString() if repeats else b""  # writing spoils it
        held = replace(work, sums=made.sums, held_bytes=made.held_bytes)  # the graph is changed for good
        return written(self._passes.write, made, lambda error: self._without_repeats(held, graph, error))

    def _without_repeats(self, work: Work, graph: bytes, error: RewriteError) -> Work:
        """Plan a step again that TensorFlow would refuse with repeated ops."""
        self._engine.books.warn(f"{work.task.name} is planned without recomputing: {error}")
        task = replace(work.task, config=replace(work.task.config, recompute="off"))
        graph_def = graph_pb2.GraphDef.FromString(graph)
        again = replace(work, task=task, graph_def=graph_def, table=None)
        return self._planned(run_passes([self._passes.parse], again))


def _as_edit(works: Sequence[Work], graph_def: Any) -> Edit:
    if any(work.whole for work in works):
        return Edit(tuple(works), stopped(graph_def, LEFT), is_whole=True)
    if not any(work.edits for work in works):
        return Edit(tuple(works))
    put_copies_first(works[-1].graph_def)
    return Edit(tuple(works), works[-1].graph_def.SerializeToString())


def written(passes: Sequence[Pass], work: Work, refused: Callable[[RewriteError], Work]) -> Work:
    """Write and validate a plan; ``refused`` makes another where ops that it repeats are the reason.

    Raises:
        RewriteError: If the graph is refused, and no op is repeated or nothing else may be done.
    """
    try:
        return run_passes(passes, work)
    except RewriteError as error:
        if work.decision is None or work.decision.recomputation is None:
            raise
        if work.task.config.recompute != "auto":
            raise
        return refused(error)


def _is_used(work: Work) -> bool:
    """Tell whether any op of a graph runs on the work's device."""
    assert work.table is not None  # noqa: S101 - a graph that has been read
    return any(work.place.holds(node.device) for node in work.table.nodes)


def _task_of(graph_def: Any, task: Task) -> Task:
    """Return the task of this graph.

    A function that runs within the called one has arguments of its own: nothing is known of them.
    """
    types = {node.attr["index"].i: node.attr["T"].type for node in graph_def.node if node.op == "_Arg"}
    given = {number: one.dtype.as_datatype_enum for number, one in enumerate(task.inputs)}
    if types == given:
        return task
    if task.function and types.items() <= given.items():
        if given.keys() - types.keys() <= unread_arguments(task.function):
            return task
    hints = replace(task.hints, arguments={})
    has_segments = task.compiled and task.config.xla == "auto"
    return replace(task, inputs=(), is_body=True, compiled=has_segments, may_be_whole=False, hints=hints)
