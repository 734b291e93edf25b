"""Remember the batch sizes that each step was planned for, and ask for a new plan when they grow.

A step whose kernels count their own random numbers from a seed keeps its first plan: with a new one it would
have new kernels, and draw from the beginning again.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class _Step:
    """The sizes and shapes that a step was planned for."""

    generation: int = 0
    batch_size: int | None = None
    batches: Shapes = ()
    arguments: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """By function of the runtime the shapes of those of its arguments whose shape is open."""
    whole: dict[str, int] = field(default_factory=dict)
    """By function of the runtime the latest plan that leaves it to XLA."""
    never_whole: bool = False
    draws: set[str] = field(default_factory=set)
    """The functions of the runtime whose random numbers would begin anew with another plan, whose kernels are
    new."""

    @property
    def draws_on(self) -> bool:
        """Tell whether random numbers of the latest plan would begin anew with another one."""
        return any(self.whole.get(name) != self.generation for name in self.draws)

    def grown(self, what: str, was: object, will: object) -> str:
        """Count another plan, unless that would change what the step computes; return what has grown."""
        if self.draws_on:
            kept = f"keeps its plan for {what} of {was} with {will}"
            return f"{kept}: a new one would begin its random numbers anew"
        self.generation += 1
        return f"was planned for {what} of {was}, and is again for {will}"


class Growth:
    """Remembers by function the sizes that its step was planned for, and counts its plans."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()
        self._nameless: dict[str, _Step] = {}
        """Steps that no ``tf.function`` calls, by the name of the runtime's function."""

    def planned(
        self,
        function: Any,
        name: str,
        batch_size: int | None,
        batches: Shapes,
        open_arguments: Mapping[int, tuple[int, ...]],
        *,
        draws: bool = False,
    ) -> None:
        """Note that a step is planned for batches of this size or these shapes, and for these arguments.

        A body that the step runs is planned apart, and knows none of its arguments. ``draws``: whether a
        kernel of it counts its own random numbers from a seed.
        """
        step = self._step(function, name)
        step.draws |= {name} if draws else set()
        step.batch_size, step.batches = batch_size or step.batch_size, batches or step.batches
        step.arguments[name] = {**step.arguments.get(name, {}), **open_arguments}

    def generation(self, function: Any, name: str) -> int:
        """Return the number of a step's latest plan."""
        found = self._known(function, name)
        return 0 if found is None else found.generation

    def renew(self, function: Any, name: str) -> None:
        """Have a step planned again at its next call."""
        self._step(function, name).generation += 1

    def renew_all(self) -> None:
        """Have all steps planned again at their next calls, unless their random numbers would begin anew."""
        for step in (*self._steps.values(), *self._nameless.values()):
            step.generation += 0 if step.draws_on else 1

    def leave_whole(self, function: Any, name: str, generation: int) -> None:
        """Note that a plan of a step leaves it to XLA, which compiles it whole."""
        self._step(function, name).whole[name] = generation

    def is_whole(self, function: Any, name: str) -> bool:
        """Tell whether the latest plan of a step leaves it to XLA."""
        step = self._known(function, name)
        return step is not None and step.whole.get(name) == step.generation

    def may_be_whole(self, function: Any, name: str) -> bool:
        """Tell whether a plan may leave a step to XLA."""
        step = self._known(function, name)
        return step is None or not step.never_whole

    def forbid_whole(self, function: Any, name: str) -> bool:
        """Have a step planned again that was left to XLA; return False where it was not."""
        step = self._known(function, name)
        if step is None or step.whole.get(name) != step.generation:
            return False
        step.never_whole = True
        step.generation += 1
        return True

    def watches_shapes(self, function: Any) -> bool:
        """Tell whether the shapes of each batch must be known to see the step's growth."""
        return function in self._steps and bool(self._steps[function].batches)

    def watches_size(self, function: Any) -> bool:
        """Tell whether the step was planned for a batch size, so that a larger one must be seen."""
        return function in self._steps and self._steps[function].batch_size is not None

    def at_least(self, function: Any, shapes: Shapes) -> Shapes:
        """Return ``shapes``, each dimension at least as large as the step was planned for."""
        planned = self._steps[function].batches if function in self._steps else ()
        if [len(shape) for shape in planned] != [len(shape) for shape in shapes]:
            return shapes
        pairs = zip(planned, shapes, strict=True)
        return tuple(tuple(map(max, earlier, now)) for earlier, now in pairs)

    def outgrown(self, function: Any, batch_size: int | None, batches: Shapes) -> str:
        """Have a step planned again if it was planned for smaller batches than it is about to get.

        Args:
            function: What is about to run.
            batch_size: The size of its batches, if Keras or a dataset has told it.
            batches: The shapes to plan for, from :meth:`at_least`.

        Returns:
            What has grown; empty where nothing has.
        """
        step = self._steps.get(function)
        if step is None:
            return ""
        if batch_size and step.batch_size and batch_size > step.batch_size:
            was, step.batch_size = step.batch_size, batch_size
            return step.grown("batches", was, batch_size)
        if batches and step.batches and batches != step.batches:
            earlier, step.batches = step.batches, batches
            return step.grown("batches", _text(earlier), _text(batches))
        return ""

    def outgrown_arguments(self, function: Any, name: str, inputs: Sequence[Any]) -> str:
        """Have a step planned again if it was planned for smaller arguments; return what has grown."""
        step = self._known(function, name)
        known = None if step is None else step.arguments.get(name)
        if step is None or not known:
            return ""
        now = {number: tuple(inputs[number].shape) for number in known}
        larger = {n: tuple(map(max, known[n], now[n])) for n in known if len(known[n]) == len(now[n])}
        if all(larger[n] == known[n] for n in larger):
            return ""
        step.arguments[name] = {**known, **larger}
        was, will = (_text(tuple(shapes[n] for n in larger)) for shapes in (known, larger))
        return step.grown("arguments", was, will)

    def argument_shapes(self, function: Any, name: str, inputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """Return the shapes to plan for of the tensors that a function of the runtime is called with."""
        step = self._known(function, name)
        known = {} if step is None else step.arguments.get(name, {})
        return {number: known.get(number) or shape for number, shape in _plain_shapes(inputs)}

    def _known(self, function: Any, name: str) -> _Step | None:
        return self._steps.get(function) if function is not None else self._nameless.get(name)

    def _step(self, function: Any, name: str) -> _Step:
        if function is None:
            return self._nameless.setdefault(name, _Step())
        return self._steps.setdefault(function, _Step())


def _plain_shapes(inputs: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    found = []
    for number, tensor in enumerate(inputs):
        shape = getattr(tensor, "shape", None)
        if shape is not None and getattr(shape, "rank", None) is not None and shape.is_fully_defined():
            found.append((number, tuple(shape.as_list())))
    return found


def _text(shapes: Shapes) -> str:
    """Write shapes for people: ``16x128 and 16x20``."""
    return " and ".join("x".join(map(str, shape)) or "1" for shape in shapes)
