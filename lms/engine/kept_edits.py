"""Keep the latest edits for other functions with the same graph, such as those of a model compiled again."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from tensorflow.core.framework import graph_pb2

from lms.device.device import Device
from lms.passes.counting import Counting
from lms.passes.parsing import fed_nodes
from lms.passes.work import Task, Work
from lms.process.resources import Resources

KEPT_EDITS = 4
"""The number of edits that are kept."""

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
    """Tells whether XLA shall compile the step as one: the graph ends before any of its ops has run."""


class KeptEdits:
    """The latest edits of an engine, by what they depend on.

    Args:
        counting: Counts what lies on a device now.
        resources: What the engine uses of its process.
    """

    def __init__(self, counting: Counting, resources: Resources) -> None:
        self._counting, self._resources = counting, resources
        self._kept: OrderedDict[object, Edit] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: object) -> Edit | None:
        """Return the edit that was kept under a key."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def keep(self, key: object, made: Edit) -> None:
        """Keep an edit, and forget the one that was not used for longest."""
        with self._lock:
            self._kept[key] = replace(made, works=tuple(map(to_keep, made.works)))
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT_EDITS:
                self._kept.popitem(last=False)

    def used_again(self, known: Edit, task: Task, devices: Collection[Device]) -> Edit | None:
        """Return a kept edit for another function; ``None`` if a device's free room differs.

        What ran apart from other ranks runs with them as it is. Where its peak no longer fits beside what its
        runs have left on the device, its figures stay those that it was planned with.

        Raises:
            LMSError: If the store has no room left for what is swapped.
        """
        works = [
            self._counting.apply(replace(work, task=task, seconds={}))
            for work in known.works
            if work.device in devices
        ]
        if len(works) < len(known.works):
            return None
        pairs = list(zip(known.works, works, strict=True))
        if task.tried:
            works = [
                replace(now, residents=then.residents) if _outgrows(then, now.limit_bytes) else now
                for then, now in pairs
            ]
        elif not all(_serves(then, now) for then, now in pairs):
            return None
        for work in works:
            if work.edits is not None:
                self._resources.transport().require_room(work.stored_bytes)
        return replace(known, works=tuple(works))


def key_of(graph_def: Any, task: Task) -> object:
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
    mappings = (hints.arguments, hints.feeds, hints.values)
    known = hints.batches, hints.batch_size, *(sorted(one.items()) for one in mappings)
    return digest, task.config, task.is_body, repr(known), names, repr(task.specialised)


def to_keep(work: Work) -> Work:
    """Return the work without the tensors of its call, which would live on with a kept edit."""
    request = replace(work.task.request, graph=b"")
    return replace(work, task=replace(work.task, request=request, inputs=(), guest=None), graph_def=None)


def _serves(then: Work, now: Work) -> bool:
    """Tell whether a device has about as much room as it had for a kept edit, and the edit still fits."""
    before, room = then.limit_bytes, now.limit_bytes
    if before is None or room is None:
        return before is room
    return abs(room - before) <= ROOM * before and not _outgrows(then, room)


def _outgrows(work: Work, room: int | None) -> bool:
    """Tell whether a work fitted when it was planned, and needs more than ``room``."""
    peak = work.most_bytes if work.decision is None else work.decision.peak_bytes
    if peak is None or room is None or work.limit_bytes is None:
        return False
    return room < peak <= work.limit_bytes
