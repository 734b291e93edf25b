"""GPUs to plan for that are not at hand, by the figures of their makers.

Sources: NVIDIA's data sheets "V100 GPU" (2020), "A100 Tensor Core GPU" (2022), "H100 Tensor Core GPU" (2023),
"H200 Tensor Core GPU" (2024), "GH200 Grace Hopper Superchip" (2023), "L4 Tensor Core GPU" (2023), and the
whitepaper "Ada GPU Architecture" (2023) for the RTX 4090. Rates are without sparsity; a share of each is
reached (:data:`REACHED`). Of the link of a GH200 415 GB/s to the device and 170 back are assumed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lms.simulate.cost_model import Costs

REACHED, STREAMED = 0.5, 0.75
"""The shares of the arithmetic and of the memory's rate that are assumed of all kernels."""
H100_REACHED, H100_STREAMED, HOPPER = 0.47, 0.9, 9
"""What products of matrices, and plain kernels, reached on an H100, and the compute capability from
which on these are taken; :mod:`lms.simulate.cost_model` has the shares of other kernels."""
COPIED = 0.75
"""The share of the link's rate that copies reach."""
USABLE = 0.94
"""The share of a GPU's memory that TensorFlow takes; the driver and its libraries keep the rest."""


@dataclass(frozen=True)
class Gpu:
    """A model of GPU."""

    name: str
    memory_gib: float
    tflops: float
    """Of matrix arithmetic on ``float32`` (TF32 where it has that)."""
    half_tflops: float
    memory_gb_s: float
    link_gb_s: float
    """Each way, to and from the host."""
    capability: int
    back_gb_s: float | None = None
    """To the host, where that is another figure."""

    @property
    def limit_bytes(self) -> int:
        """The bytes that TensorFlow can allocate."""
        return int(self.memory_gib * 2**30 * USABLE)

    @property
    def costs(self) -> Costs:
        """The times of ops and copies."""
        out = self.link_gb_s if self.back_gb_s is None else self.back_gb_s
        return Costs(
            self._flops_per_s(self.tflops),
            self.memory_gb_s * 1e9 * (H100_STREAMED if self.is_measured else STREAMED),
            out_bytes_per_s=out * 1e9 * COPIED,
            in_bytes_per_s=self.link_gb_s * 1e9 * COPIED,
            has_shares=self.is_measured,
        )

    @property
    def half_costs(self) -> Costs:
        """The same for arithmetic in half precision."""
        return replace(self.costs, flops_per_s=self._flops_per_s(self.half_tflops))

    @property
    def is_measured(self) -> bool:
        """Whether kernels were measured on a GPU of this generation."""
        return self.capability >= HOPPER

    def _flops_per_s(self, tflops: float) -> float:
        return tflops * 1e12 * (H100_REACHED if self.is_measured else REACHED)


GPUS = {
    one.name: one
    for one in (
        Gpu("V100-16", 16, 15.7, 125, 900, 16, 7),
        Gpu("V100-32", 32, 15.7, 125, 900, 16, 7),
        Gpu("A100-40", 40, 156, 312, 1555, 32, 8),
        Gpu("A100-80", 80, 156, 312, 2039, 32, 8),
        Gpu("H100", 80, 494, 989, 3350, 64, 9),
        Gpu("H200", 141, 494, 989, 4800, 64, 9),
        Gpu("GH200", 96, 494, 989, 4000, 415 / COPIED, 9, 170 / COPIED),
        Gpu("RTX4090", 24, 82.6, 165, 1008, 32, 8),
        Gpu("L4", 24, 60, 121, 300, 32, 8),
    )
}
"""By the name to ask for."""

ALL, HERE = "all", "here"
"""To ask for each of them, and for the device at hand, where its memory is known."""
NAMES = (HERE, ALL, *GPUS)
"""All that can be asked for."""


def each_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of single devices that are asked for, each once."""
    return tuple(dict.fromkeys(one for name in names for one in (GPUS if name == ALL else (name,))))


def known_as(name: str) -> Gpu | None:
    """Return the GPU of the table whose model a driver's name for a GPU holds, whatever its memory.

    ``None`` for parts of one (MIG) and for laptops' ones, which are slower.
    """
    words = re.split(r"[\s-]+", name.upper())
    if {"MIG", "LAPTOP"} & {*words}:
        return None
    spoken = {*words, *("".join(pair) for pair in zip(words, words[1:], strict=False))}
    return next((gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in spoken), None)
