"""Edit a graph that TensorFlow has optimized: run the passes over each device and frame."""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import graph_pb2

from lms.device.device import Device
from lms.device.memory_pool import Rooms
from lms.engine.passes import (
    Counting,
    Pass,
    arguments_of,
    fed_nodes,
    is_edited,
    kept_nodes,
    run_passes,
    standard_passes,
    variables_in_loop,
    variables_known,
)
from lms.engine.work import Specialised, Task, Work, place_of
from lms.errors import LMSError
from lms.ir.graph import GraphError
from lms.optimizer.stopped import LEFT, stopped
from lms.planner.planner import usable_bytes
from lms.reader.function_bodies import unread_arguments
from lms.reader.node_table import ROOT, NodeTable
from lms.reader.step_reader import read_step
from lms.reader.survey import step_frames
from lms.rewriter.streamable import Finder, bytes_by_kind
from lms.rewriter.sum_order import has_long_sums, named_beginnings
from lms.rewriter.validation import require_same_pairs
from lms.rewriter.writer import RewriteError, put_copies_first
from lms.specialiser.decided_branches import may_decide, with_branches_taken
from lms.specialiser.late_sources import delay_sources
from lms.specialiser.needless_nodes import without_needless

if TYPE_CHECKING:
    from lms.engine.engine import Engine

logger = logging.getLogger("lms")

FEWEST_OPS = 24
"""A graph of fewer ops has no step in it."""

KEPT_EDITS = 4
"""The number of edits that are kept for other functions with the same graph: a model compiled again."""

MUCH_BEFORE = 1 / 3
"""The share of a device in use before a step, from which on it is told which variables stay there."""

ROOM = 0.01
"""An edit is used again where the device has as much room as when it was planned, but for this share."""


@dataclass(frozen=True)
class Edit:
    """The result of the passes over a graph."""

    works: tuple[Work, ...] = ()
    """One for each device and frame."""
    graph: bytes | None = None
    """The edited graph; ``None`` where it stays as it is."""
    is_whole: bool = False
    """Whether XLA shall compile the step as one: the graph is one that ends before any of its ops has run."""


class Editing:
    """Runs the passes for one engine, and keeps the latest edits.

    Args:
        engine: The engine whose configuration, devices and store are used.
        environ: The process's variables.
    """

    def __init__(self, engine: "Engine", environ: Mapping[str, str]) -> None:
        self._engine, self._environ = engine, environ
        used = engine.resources
        rooms = Rooms()
        self._counting = Counting(used.fusion, used.host, rooms)
        self._passes = standard_passes(
            self._counting,
            used.host,
            used.transport,
            rooms,
            engine.config.bandwidth_gb_s,
            used.pool,
            used.profiles,
            used.load_fillers,
            used.load_assignment,
        )
        self._kept: OrderedDict[object, Edit] = OrderedDict()
        self._lock = threading.Lock()

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
        graph_def, task = self._specialised(graph_def, task)
        used = self._engine.resources
        shares, facts = used.host.shares, (_key(graph_def, task), used.profiles().kept)
        flags = task.compiled, task.may_be_whole
        known = self._kept_for((*facts, *flags, shares))
        if known is not None:
            if self._is_refused(task, len(graph_def.node)):
                return Edit()
            if (again := self._used_again(known, task)) is not None:
                return again
        works = self._works(task, graph_def)
        if len({work.whole for work in works}) > 1:  # another device or frame of it needs segments
            task = replace(task, may_be_whole=False)
            graph_def = graph_pb2.GraphDef.FromString(task.request.graph)
            works = self._works(task, graph_def)
        if self._may_move_variables(task):
            before = shares
            graph_def, works, shares = self._with_variables_moved(task, graph_def, works)
            flags = flags if shares == before else (False, False)
        made = _as_edit(works, graph_def)
        if works and shares == used.host.shares:  # else another thread has moved variables meanwhile
            self._keep((*facts, *flags, shares), made)
        return made

    def _specialised(self, graph_def: Any, task: Task) -> tuple[Any, Task]:
        """Return a session's graph without the conditions that its call decides, and the task with it."""
        if task.is_body or task.predicates is None or not may_decide(graph_def, task.predicates):
            return graph_def, task
        if self._fits_as_it_is(task, graph_def):
            self._engine.steps.keeps_conditions(keeps=True)
            return graph_def, task
        kept, fed = kept_nodes(task, graph_def), fed_nodes(task, graph_def)
        fetches = task.request.item.fetches()
        table = NodeTable.of(graph_def, fed)
        taken = with_branches_taken(graph_def, table, task.predicates, kept, fetches)
        if taken is None:
            return graph_def, task
        made = without_needless(taken.graph_def, kept)
        outputs = {**taken.outputs, **delay_sources(made, kept, task.config.min_tensor_bytes)}
        made = without_needless(made, kept)
        try:
            sums = self._sums(task, graph_def, NodeTable.of(made, fed))
        except RewriteError as error:
            logger.info("%s keeps its conditions: %s", task.name, error)
            return graph_def, task
        self._engine.steps.keeps_conditions(keeps=False)
        request = replace(task.request, graph=made.SerializeToString())
        return made, replace(task, request=request, specialised=Specialised(outputs, taken.like, sums))

    def _fits_as_it_is(self, task: Task, graph_def: Any) -> bool:
        """Tell whether a step needs no plan for certain, also with its conditions."""
        begun = (
            Work(task, one, place_of(one, self._environ), graph_def=graph_def) for one in self._devices(task)
        )
        passes = [self._passes.parse, *self._passes.survey]
        return all(run_passes(passes, work).fits for work in begun)

    def _sums(self, task: Task, graph_def: Any, specialised: NodeTable) -> dict[str, int]:
        """Return by name the slots that sums begin with in a graph that is specialised.

        Raises:
            RewriteError: If TensorFlow would merge other nodes in the specialised graph.
        """
        sums: dict[str, int] = {}
        for device in self._devices(task):
            place = place_of(device, self._environ)
            work = run_passes([self._passes.parse], Work(task, device, place, graph_def=graph_def))
            table = work.table
            assert table is not None  # noqa: S101 - it is parsed
            require_same_pairs(place.kernels, table, specialised)
            if has_long_sums(table):
                work = run_passes(self._passes.survey[:1], work)
                sums |= named_beginnings(read_step(table, work.outputs, place, fetches=work.fetches))
        return sums

    def _works(self, task: Task, graph_def: Any) -> list[Work]:
        works: list[Work] = []
        for device in self._devices(task):
            works += self._edit_for(device, task, graph_def, works[-1] if works else None)
        return works

    def _may_move_variables(self, task: Task) -> bool:
        """Tell whether a step that does not fit may have more of its variables on the host.

        Plans for a device of another size move nothing, nor do those of IBM's classes.
        """
        is_real = not self._engine.resources.assumes_limit and task.limit_bytes is None
        is_ours = task.guest is None and self._engine.guest is None
        config = task.config
        swaps = config.policy != "threshold" and config.recompute != "only"
        return is_real and is_ours and swaps

    def _with_variables_moved(
        self, task: Task, graph_def: Any, works: list[Work]
    ) -> tuple[Any, list[Work], tuple[float, float]]:
        """Plan a step again with more and more variables on the host, until it fits or none are left.

        Returns:
            The graph of the last plans, these, and the shares of the variables that stream in them.
        """
        host = self._engine.resources.host
        before = shares = host.shares
        plain = replace(task, compiled=False, may_be_whole=False)  # XLA finds no variables on the host
        while lacking := self._lacking_bytes(task, works):
            if not host.take_more(lacking, _streamable(works)):
                break
            moved_def = graph_pb2.GraphDef.FromString(task.request.graph)
            try:
                works, graph_def = self._works(plain, moved_def), moved_def
            except (GraphError, LMSError) as error:  # the host is full, for example
                logger.info("%s keeps more of its variables on the device: %s", task.name, error)
                host.shares = shares
                graph_def = graph_pb2.GraphDef.FromString(task.request.graph)
                works = self._works(task if shares == before else plain, graph_def)
                break
            shares = host.shares
        if lacking and any(map(_is_full_before, works)):
            self._engine.books.tell_of_kept(task.name, host.obstacle, map(_kept_variables, works))
        if shares != before:
            self._engine.steps.growth.renew_all()
            self._engine.books.tell_of_moved(task, works)
        return graph_def, works, shares

    def _lacking_bytes(self, task: Task, works: Sequence[Work]) -> int:
        """Return what devices lack for the plans of a step, or for variables that they have no room for."""
        if lacking := max(map(_lacking_bytes, works), default=0):
            return lacking
        streamed: set[int] = set()
        for work in works:
            if work.table is not None:
                streamed.update(arguments_of(work.table, work.streamed.handles))
        return self._engine.resources.host.lacking_bytes(task.inputs, streamed) if works else 0

    def _kept_for(self, key: object) -> Edit | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: object, made: Edit) -> None:
        with self._lock:
            self._kept[key] = replace(made, works=tuple(map(_to_keep, made.works)))
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT_EDITS:
                self._kept.popitem(last=False)

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

    def _used_again(self, known: Edit, task: Task) -> Edit | None:
        """Return the kept edit for another function; ``None`` if the device's free room differs.

        Raises:
            LMSError: If the store has no room left for what is swapped.
        """
        works = [
            self._counting.apply(replace(work, task=task, seconds={}))
            for work in known.works
            if work.device in self._devices(task)
        ]
        if len(works) < len(known.works):
            return None
        rooms = zip(known.works, works, strict=True)
        if not all(_is_alike(then.limit_bytes, now.limit_bytes) for then, now in rooms):
            return None
        for work in works:
            if work.edits is not None:
                self._engine.resources.transport().require_room(work.stored_bytes)
        return replace(known, works=tuple(works))

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
            later = partial(run_passes, passes.plan, replace(_to_keep(begun.of_frame(frames[0])), fits=False))
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


def _lacking_bytes(work: Work) -> int:
    """Return what the best plan of a frame takes more than its device has; 0 where it fits."""
    decided, limit = work.decision, work.limit_bytes
    if decided is None:
        return 0
    made = decided.plan
    if limit is None or work.device.limit_bytes is None:
        return 0
    # Where variables move anyway, as many do as leave the margin free.
    usable = usable_bytes(work.task.config, limit) if work.streamed.nodes else limit
    lacking = decided.peak_bytes - (limit if usable is None else usable)
    if work.task.config.policy != "budget" and not made.feasible and made.budget_bytes is not None:
        lacking = max(lacking, made.peak_bytes - made.budget_bytes)
    return max(0, lacking + max(0, work.residents.nbytes - work.device.limit_bytes))


def _is_full_before(work: Work) -> bool:
    """Tell whether much of a device is in use before the step: by its variables, more likely than not."""
    limit = work.device.limit_bytes
    return limit is not None and work.residents.nbytes > MUCH_BEFORE * limit


def _kept_variables(work: Work) -> Mapping[str, int]:
    """Return how many variables of a frame cannot stream, by reason."""
    if work.streamed.stay or work.table is None or work.frame is None:
        return work.streamed.stay
    return variables_in_loop(work) if work.frame != ROOT else _found(work)[1]


def _found(work: Work) -> tuple[dict[bool, int], Mapping[str, int]]:
    """Return the bytes of the variables of a frame that can stream, and by reason how many cannot."""
    assert work.table is not None  # noqa: S101 - a graph that has been read
    known = variables_known(work.table, work.task.inputs)
    least, fetches = work.task.config.min_tensor_bytes, set(work.fetches)
    finder = Finder(work.table, work.outputs, known, work.place.holds, least, fetches)
    return bytes_by_kind(finder.variables()), finder.stay


def _streamable(works: Iterable[Work]) -> dict[bool, int]:
    """Return the bytes of a step's variables that can stream: an optimizer's state (True), and the others."""
    total = {True: 0, False: 0}
    for work in works:
        found: Mapping[bool, int] = work.streamed.streamable
        if not found and work.table is not None and work.frame == ROOT:
            found, _ = _found(work)
        for kind, nbytes in found.items():
            total[kind] += nbytes
    return total


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


def _key(graph_def: Any, task: Task) -> object:
    """Return what an edit depends on besides the device's free room: the graph and the facts of its call."""
    bare = graph_pb2.GraphDef()
    bare.CopyFrom(graph_def)
    for node in bare.node:
        node.ClearField("experimental_debug_info")  # the name of the traced function: another each time
        if node.op == "_Arg":  # of a variable the number of its handle
            node.attr.pop("_user_specified_name", None)
    digest = hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()
    item = task.request.item
    names = tuple(item.fetches()), frozenset(fed_nodes(task, graph_def))
    hints = task.hints
    known = sorted(hints.arguments.items()), hints.batches, hints.batch_size, sorted(hints.feeds.items())
    return digest, task.config, task.is_body, repr(known), names, repr(task.specialised)


def _to_keep(work: Work) -> Work:
    """Return the work without the tensors of its call, which would live on with a kept edit."""
    request = replace(work.task.request, graph=b"")
    return replace(work, task=replace(work.task, request=request, inputs=(), guest=None), graph_def=None)


def _is_alike(then: int | None, now: int | None) -> bool:
    if then is None or now is None:
        return then is now
    return abs(now - then) <= ROOM * then
