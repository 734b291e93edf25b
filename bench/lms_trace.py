"""Reads a trace of TensorFlow's profiler: how much of the copying went on while the device computed.

On a GPU the profiler writes a plane ``/device:GPU:0`` with a line a stream; copies are the events
``MemcpyD2H`` and ``MemcpyH2D``, whose detail says how many bytes they moved, and what is neither that nor
housekeeping is a kernel. Without a GPU the ops on ``/host:CPU`` stand in, with the swap ops of the transport
``host`` as copies. (Names: TensorFlow's cupti_tracer.cc and cupti_collector.cc.)
"""

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT, IN, COMPUTE = "out", "in", "compute"
GPU_COPIES = {"MemcpyD2H": OUT, "MemcpyH2D": IN}
GPU_IDLE = (
    "MemcpyD2D",
    "MemcpyP2P",
    "MemcpyOther",
    "Memset",
    "MemoryAlloc",
    "MemoryFree",
    "Overhead",
    "Generic",
)
"""Neither copies to or from the host nor arithmetic."""
HOST_COPIES = {"LmsSwapOut": OUT, "LmsSwapIn": IN}
HOST_OP = re.compile(r"^[\w./>\-]+:(_?[A-Z]\w*)$")
"""The executor's events are named ``name of the node:type of the op``."""
SIZE = re.compile(r"\bsize:(\d+)")

Span = tuple[int, int]
"""First and last picosecond of something that went on."""


@dataclass(frozen=True)
class Activity:
    """One copy or one kernel."""

    kind: str
    """``out``, ``in`` or ``compute``."""
    span: Span
    nbytes: int = 0


@dataclass(frozen=True)
class Overlap:
    """What a trace says about copies; times are those in which at least one of a kind went on."""

    source: str
    """``GPU`` or ``host``."""
    compute_s: float
    out_s: float
    in_s: float
    copies_s: float
    hidden_s: float
    """The part of ``copies_s`` in which something was computed, too."""
    bytes_out: int
    """Of all copies to the host, also of results; 0 where the trace does not say."""
    bytes_in: int
    """Of all copies to the device, also of training data; 0 where the trace does not say."""

    @property
    def share(self) -> float | None:
        """``hidden_s`` over ``copies_s``; ``None`` if nothing was copied."""
        return self.hidden_s / self.copies_s if self.copies_s else None


def read_space(directory: str) -> Any:
    """Read the newest trace below a log directory, as the profiler's own message.

    Raises:
        FileNotFoundError: If there is none.
    """
    traces = sorted(Path(directory).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"no *.xplane.pb below {directory}; the profiler has written nothing")
    space = importlib.import_module("tensorflow.tsl.profiler.protobuf.xplane_pb2").XSpace()
    space.ParseFromString(traces[-1].read_bytes())
    return space


def overlap_of(space: Any) -> Overlap:
    """Find the copies and the compute of a trace: of its GPU, or else of the host's ops."""
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU:")]
    if gpus:
        return _overlap("GPU", [found for plane in gpus for found in _gpu_activities(plane)])
    hosts = [plane for plane in space.planes if plane.name.startswith("/host:CPU")]
    return _overlap("host", [found for plane in hosts for found in _host_activities(plane)])


def _gpu_activities(plane: Any) -> Iterator[Activity]:
    for line in plane.lines:
        if line.name.startswith("Stream #"):
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name not in GPU_IDLE:
                    kind = GPU_COPIES.get(name, COMPUTE)
                    yield Activity(kind, _span(line, event), 0 if kind == COMPUTE else _nbytes(plane, event))


def _host_activities(plane: Any) -> Iterator[Activity]:
    for line in plane.lines:
        for event in line.events:
            op = HOST_OP.match(plane.event_metadata[event.metadata_id].name)
            if op:
                yield Activity(HOST_COPIES.get(op[1], COMPUTE), _span(line, event))


def _span(line: Any, event: Any) -> Span:
    start = line.timestamp_ns * 1000 + event.offset_ps
    return start, start + event.duration_ps


def _nbytes(plane: Any, event: Any) -> int:
    """Read the size in a copy's detail, such as ``kind_src:device kind_dst:pinned size:4096 dest:0``."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            size = SIZE.search(text)
            return int(size[1]) if size else 0
    return 0


def _overlap(source: str, found: Sequence[Activity]) -> Overlap:
    spans = {kind: merged(one.span for one in found if one.kind == kind) for kind in (OUT, IN, COMPUTE)}
    copies = merged([*spans[OUT], *spans[IN]])
    return Overlap(
        source=source,
        compute_s=_seconds(spans[COMPUTE]),
        out_s=_seconds(spans[OUT]),
        in_s=_seconds(spans[IN]),
        copies_s=_seconds(copies),
        hidden_s=_seconds(common(copies, spans[COMPUTE])),
        bytes_out=sum(one.nbytes for one in found if one.kind == OUT),
        bytes_in=sum(one.nbytes for one in found if one.kind == IN),
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap: the same time in spans that are apart, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Intersect two lists of merged spans: the time that is in both."""
    result: list[Span] = []
    left = right = 0
    while left < len(some) and right < len(others):
        start, end = max(some[left][0], others[right][0]), min(some[left][1], others[right][1])
        if start < end:
            result.append((start, end))
        if some[left][1] < others[right][1]:
            left += 1
        else:
            right += 1
    return result


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans) / 1e12
