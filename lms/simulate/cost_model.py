"""Estimate the time of ops and copies: from a roofline of the device, or a profile where there is one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from lms.ir.graph import Graph
from lms.ir.op_traits import AGAIN, ALIAS_TYPES, OUTSIDE_TYPES, STREAM_TYPES

FLOPS_PER_BYTE = {"Conv": 60.0, "MatMul": 60.0, "Einsum": 60.0}
"""Arithmetic guessed per byte touched, by a part of the op type, where an op does not state its own."""

FLOPS_SHARES = {"Conv3D": 0.2, "Conv2D": 0.5, "DepthwiseConv2d": 0.5}
"""The share of a GPU's arithmetic that cuDNN's kernels reach of what products of matrices do, by the
beginning of the op type."""
BYTES_SHARES = {
    "Tile": 0.4,
    "Softmax": 0.33,
    "LogSoftmax": 0.33,
    "SparseSoftmaxCrossEntropyWithLogits": 0.15,
    "SoftmaxCrossEntropyWithLogits": 0.15,
    "Einsum": 0.65,
    "Erfc": 0.5,
    "MaxPoolGrad": 0.45,
    "BiasAddGrad": 0.5,
}
"""The share of a GPU's bytes a second that TensorFlow's kernels reach of what plain ones do, by op type."""
BINARY = frozenset("Mul AddV2 Add Sub SquaredDifference RealDiv DivNoNan Maximum Minimum SelectV2".split())
REDUCTIONS = frozenset("Sum Mean Max Min Prod".split())
BROADCAST_SHARE, FEW_SHARE, MANY_SHARE = 0.55, 0.3, 0.8
"""The same for ops that broadcast a smaller operand, for reductions to few numbers, and for those to many."""
FEW_BYTES, NUMBER_BYTES = 1 << 18, 8
"""The most bytes of few numbers, and of a single one."""


@dataclass(frozen=True)
class Costs:
    """A device and its link to the host.

    The defaults are a V100 on PCIe 3: a good half of its 15.7 TFLOP/s (fp32) and 0.9 TB/s is what real
    kernels reach, and a pinned copy moves 12 GB/s each way.
    """

    flops_per_s: float = 9e12
    device_bytes_per_s: float = 6e11
    launch_s: float = 5e-6
    """Least time of any op that has work on the device."""
    out_bytes_per_s: float = 12e9
    """Device to host."""
    in_bytes_per_s: float = 12e9
    """Host to device."""
    copy_latency_s: float = 1e-5
    overlaps: bool = True
    """Whether copies run beside compute."""
    resident_bytes: int | None = None
    """Bytes in use on the device before the step, where its pool grows region by region; else ``None``."""
    frees_at_once: bool = False
    """Whether a copy to the host frees its buffer as soon as it is done, as on a CPU device."""
    threads: int = 1
    """How many ops run at once: on a CPU the executor's threads."""
    makes_batches: bool = False
    """Whether input pipelines make their batches in the device's memory, as on a CPU device."""
    fills: bool = True
    """Whether plans may have fillers (:mod:`lms.simulate.fillers`)."""
    has_shares: bool = False
    """Whether kernels reach but the shares of these rates that were seen on an H100 (:func:`work_of`)."""
    maps_pages: bool = False
    """Whether the allocator puts a buffer together from free pages, so that free memory lies in no pieces."""
    host_room_bytes: int | None = None
    """Bytes that the host holds of a step's swapped tensors at once; ``None`` where no limit is known."""
    profile_s: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds by op name; they go before the roofline, for an op that is repeated, too."""

    def host_lacks(self, nbytes: int) -> int:
        """Return by how much a step's swapped bytes are more than the host can hold."""
        return 0 if self.host_room_bytes is None else max(0, nbytes - self.host_room_bytes)

    def op_seconds(self, graph: Graph) -> tuple[float, ...]:
        """Return the time of each op, by id."""
        return tuple(self._one(graph, op) for op in range(len(graph.ops)))

    def out_seconds(self, nbytes: int) -> float:
        """Return the time of a copy to the host."""
        return self.copy_latency_s + nbytes / self.out_bytes_per_s

    def in_seconds(self, nbytes: int) -> float:
        """Return the time of a copy back to the device."""
        return self.copy_latency_s + nbytes / self.in_bytes_per_s

    def with_link(self, out_bytes_per_s: float, in_bytes_per_s: float | None = None) -> "Costs":
        """Return the same costs with another link; it is as fast back as out unless told otherwise."""
        back = out_bytes_per_s if in_bytes_per_s is None else in_bytes_per_s
        return replace(self, out_bytes_per_s=out_bytes_per_s, in_bytes_per_s=back)

    def seconds_of(self, work: "Work | None") -> float:
        """Return the time of an op by its work; ``None``: none on the device."""
        if work is None:
            return 0.0
        flops_s, bytes_s = work.flops / self.flops_per_s, work.touched / self.device_bytes_per_s
        if self.has_shares:
            flops_s, bytes_s = flops_s / work.flops_share, bytes_s / work.bytes_share
        return max(self.launch_s, flops_s, bytes_s)

    def _one(self, graph: Graph, op: int) -> float:
        measured = (
            self.profile_s.get(graph.ops[op].name.removesuffix(f"/{AGAIN}")) if self.profile_s else None
        )
        return self.seconds_of(work_of(graph, op)) if measured is None else measured


class Work(NamedTuple):
    """What an op does on the device."""

    flops: float
    touched: float
    """Bytes that it reads and writes."""
    flops_share: float = 1.0
    bytes_share: float = 1.0
    """The shares of a GPU's rates that its kernel reaches."""


def work_of(graph: Graph, op: int) -> Work | None:
    """Return the work of an op; ``None`` where the device has none of it.

    The shares that kernels reach are those of 6,000 kernels of a ResNet-50, a 3D U-Net and a GPT-2 on an H100
    (``docs/measurements.md``).
    """
    node = graph.ops[op]
    if node.type in ALIAS_TYPES or node.type in OUTSIDE_TYPES or node.type in STREAM_TYPES:
        return None
    touched = float(sum([graph.tensors[tensor].nbytes or 0 for tensor in (*node.inputs, *node.outputs)]))
    flops = touched * _flops_per_byte(node.type) if node.flops is None else node.flops
    return Work(flops, touched, _flops_share(node.type), _bytes_share(graph, op))


@cache
def _flops_share(op_type: str) -> float:
    return next((share for begin, share in FLOPS_SHARES.items() if op_type.startswith(begin)), 1.0)


def _bytes_share(graph: Graph, op: int) -> float:
    node = graph.ops[op]
    if node.type not in BINARY and node.type not in REDUCTIONS:
        return BYTES_SHARES.get(node.type, 1.0)
    made = max((graph.tensors[tensor].nbytes or 0 for tensor in node.outputs), default=0)
    if node.type in REDUCTIONS:
        return FEW_SHARE if made <= FEW_BYTES else MANY_SHARE
    read = (graph.tensors[tensor].nbytes or 0 for tensor in node.inputs)
    return BROADCAST_SHARE if any(NUMBER_BYTES < nbytes < made for nbytes in read) else 1.0


@cache
def _flops_per_byte(op_type: str) -> float:
    return next((rate for part, rate in FLOPS_PER_BYTE.items() if part in op_type), 0.0)


V100 = Costs()
GENERATIONS = {
    7: V100,
    8: Costs(flops_per_s=6e13, device_bytes_per_s=1.1e12, out_bytes_per_s=24e9, in_bytes_per_s=24e9),
    9: Costs(2.3e14, 3e12, out_bytes_per_s=55e9, in_bytes_per_s=55e9, has_shares=True),
}
"""By the major compute capability of NVIDIA's GPUs, each with the PCIe generation that it came with: V100,
A100 (156 TFLOP/s in TF32, 2 TB/s), H100 (495 TFLOP/s in TF32, 3.35 TB/s). Of the first two a good half or
less, as above; of the last what was measured."""

NVLINK_TO_POWER9, NVLINK_C2C = 60e9, 350e9
"""Bytes a second each way between the CPU and a GPU: AC922 (NVLink 2), Grace-Hopper."""

SUPERCHIPS = ("GH200", "GB200", "GB300")
"""In the names of GPUs that reach their CPU's memory by NVLink-C2C."""


def costs_of(device_type: str, capability: int | None = None, name: str = "", machine: str = "") -> Costs:
    """Return assumed costs of a device and its link to the host, where nothing was measured.

    On a CPU a copy to the host is a copy in memory: slow next to a GPU's link, fast next to the CPU's
    arithmetic.

    Args:
        device_type: ``CPU`` or ``GPU``.
        capability: The major compute capability: the nearest known one counts, a V100's where there is none.
        name: What the driver calls the device.
        machine: The processor's architecture, as ``platform.machine()`` has it.
    """
    if device_type == "CPU":
        return Costs(
            5e10,
            8e9,
            2e-5,
            4e9,
            4e9,
            copy_latency_s=2e-5,
            overlaps=False,
            frees_at_once=True,
            makes_batches=True,
        )
    costs = V100 if capability is None else GENERATIONS[min(max(capability, 7), 9)]
    if machine == "ppc64le":
        return costs.with_link(NVLINK_TO_POWER9)
    return costs.with_link(NVLINK_C2C) if any(chip in name for chip in SUPERCHIPS) else costs
