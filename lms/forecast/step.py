"""A training step as it was traced, for any batch: what grows with the batch is a line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lms.ir.graph import Graph
from lms.simulate.cost_model import Costs, Work, work_of


@dataclass(frozen=True)
class TracedStep:
    """A step as it was traced, for any batch."""

    graph: Graph
    batch: int
    other: Graph | None
    """The same for twice the batch; ``None`` where no size of it is known."""
    weights_bytes: int
    state_bytes: int
    """Of variables that only updates read."""
    constant_bytes: int = 0
    is_fixed: bool = False
    """Whether the trace has fixed the batch, so that what grows with it is a guess."""
    moved_bytes: int = 0
    """Of the variables that stream: they lie in host memory between steps."""
    with_variables_moved: Callable[[float, float], "TracedStep | None"] | None = field(
        default=None, repr=False, compare=False
    )
    """Reads the step in which these shares of an optimizer's state and of the weights stream; ``None`` where
    none can."""
    stacked: "TracedStep | None" = field(default=None, repr=False, compare=False)
    """The step in which the lists of its loops are tensors, which can be swapped; ``None`` without such."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of variables and constants, which lie on the device before the step."""
        return self.weights_bytes + self.state_bytes + self.constant_bytes - self.moved_bytes

    def of(self, batch: int) -> Graph:
        """Return the step for a batch."""
        if self.other is None or batch == self.batch:
            return self.graph
        more = (batch - self.batch) / self.batch

        def size(one: int | None, two: int | None) -> int | None:
            return one if one is None or two is None else max(0, int(one + (two - one) * more))

        def flops(one: float | None, two: float | None) -> float | None:
            return one if one is None or two is None else max(0.0, one + (two - one) * more)

        tensors = tuple(
            one._replace(nbytes=size(one.nbytes, two.nbytes))
            for one, two in zip(self.graph.tensors, self.other.tensors, strict=True)
        )
        ops = tuple(
            one._replace(
                workspace_bytes=size(one.workspace_bytes, two.workspace_bytes) or 0,
                flops=flops(one.flops, two.flops),
            )
            for one, two in zip(self.graph.ops, self.other.ops, strict=True)
        )
        return replace(self.graph, ops=ops, tensors=tensors)

    @cached_property
    def growth(self) -> tuple[float, ...]:
        """Bytes by which each tensor grows with an example."""
        return self._growth([one.nbytes or 0 for one in self.graph.tensors], "tensors", "nbytes")

    @cached_property
    def scratch_growth(self) -> tuple[float, ...]:
        """Bytes by which the scratch memory of each op grows with an example."""
        return self._growth([one.workspace_bytes for one in self.graph.ops], "ops", "workspace_bytes")

    def _growth(self, sizes: Sequence[int], kind: str, name: str) -> tuple[float, ...]:
        if self.other is None:
            return (0.0,) * len(sizes)
        doubled = (getattr(one, name) or 0 for one in getattr(self.other, kind))
        return tuple((two - one) / self.batch for one, two in zip(sizes, doubled, strict=True))

    def op_seconds(self, batch: int, costs: Costs, scale: float = 1.0) -> tuple[float, ...]:
        """Return the time of each op for a batch; ``scale``: the bytes of a number against those traced."""
        more = (batch - self.batch) / self.batch
        kinds, numbers = self._work
        seconds = [
            0.0
            if one is None or two is None
            else costs.seconds_of(
                Work(
                    one.flops + (two.flops - one.flops) * more,
                    scale * (one.touched + (two.touched - one.touched) * more),
                    one.flops_share,
                    one.bytes_share,
                )
            )
            for one, two in kinds
        ]
        return tuple([seconds[number] for number in numbers])

    @cached_property
    def _work(self) -> tuple[Sequence[tuple[Work | None, Work | None]], Sequence[int]]:
        """The kinds of work, each for the traced batch and for twice as much, and the kind of each op."""
        other = self.other or self.graph
        numbers: dict[tuple[Work | None, Work | None], int] = {}
        kinds = ((work_of(self.graph, op), work_of(other, op)) for op in range(len(self.graph.ops)))
        found = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        return list(numbers), found
