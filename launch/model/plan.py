"""What would run: one frozen value that ``plan`` prints and ``run`` starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launch.model.idset import IdSet
from launch.model.topology import Gpu

MemPolicy = Literal["bind", "preferred", "preferred-many", "none"]

MODULE = "-m"
"""In a program's place: the word behind it is a module for ``python -m``."""
SCHEMA = "lmsrun.plan/1"
SHIM = Path(__file__).resolve().parents[2] / "lmsrun" / "__main__.py"
"""What a rank starts with: our entry point, by path, so that nothing near the program shadows it."""


@dataclass(frozen=True)
class RankPlan:
    """Where one rank runs and with what. ``cpus`` empty means: do not bind CPUs."""

    rank: int
    local_rank: int
    host: str
    gpu: Gpu | None
    numa_node: int | None
    cpus: IdSet
    mem_policy: MemPolicy
    mem_nodes: IdSet
    host_mem_limit_mb: int | None
    env: Mapping[str, str]
    """Only what lmsrun adds to the inherited environment."""
    argv: tuple[str, ...]
    """The whole command of the rank, binding and shim included."""


@dataclass(frozen=True)
class LaunchPlan:
    """A whole job. ``commands`` is what the launcher executes (for ``local``: one per rank)."""

    world_size: int
    launcher: str
    ranks: tuple[RankPlan, ...]
    commands: tuple[tuple[str, ...], ...]
    warnings: tuple[str, ...] = field(default=())
    masked: frozenset[str] = frozenset()
    """Variables whose values are shown to nobody: those of ``-x NAME=VALUE``, which may be secrets."""
    framework: str = "horovod"
    """How ranks find each other; ``tensorflow``: each gets ``TF_CONFIG`` when the job starts."""
    tf_port: int | None = None
    """First port of TensorFlow's servers; None: free ones, found when the job starts."""
    gpu_memory_bytes: int | None = None
    """Replace the memory that was read of each GPU; None: what was read counts."""
