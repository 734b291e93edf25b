"""Remember the batch sizes that each step was planned for, and ask for a new plan when they grow.

A plan serves all batches of which no dimension is larger than in those that it was made for. Long batches
of few rows and short ones of many get plans of their own, for one plan for both would be for a batch of many
long rows, which nobody feeds; so plans that were made before may be the right ones again. Not so where a call
takes several batches. Each trace of a function is a step of its own.

A step whose kernels count their own random numbers from a seed keeps its first plan: with a new one it would
have new kernels, and draw from the beginning again.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

Shapes = tuple[tuple[int, ...], ...]
Arguments = dict[int, tuple[int, ...]]

TRACED_ONCE = "to plan it once, begin with the longest batch or pad all to one length"
"""The remedy for batches of many lengths."""

SPREAD = 1.5
"""Batches get one plan where the largest dimensions of both make at most so many times the most elements that
were fed. Batches of as many words with 10 to 500 words a row need ten plans then."""


@dataclass
class _Plan:
    """Hold what a plan was made for."""

    generation: int
    batches: Shapes
    arguments: Arguments


@dataclass
class _Step:
    """The sizes and shapes that a step was planned for."""

    generation: int = 0
    """The number of the plan to run."""
    newest: int = 0
    """The largest number of a plan."""
    batch_size: int | None = None
    batches: Shapes = ()
    arguments: Arguments = field(default_factory=dict)
    """The shapes of those of its arguments whose shape is open, by their numbers."""
    plans: list[_Plan] = field(default_factory=list)
    """The plans that may run again."""
    takes_several: bool = False
    """Set where a call takes several batches, of which only the first is looked at."""
    fed: dict[str, int] = field(default_factory=dict)
    """The most elements of any batches, and of any arguments."""
    whole: set[int] = field(default_factory=set)
    """The numbers of the plans that leave the step to XLA."""
    never_whole: bool = False
    draws: bool = False
    """Tells whether its random numbers begin anew with another plan, whose kernels are new."""

    @property
    def draws_on(self) -> bool:
        """Tell whether random numbers of the latest plan would begin anew with another one."""
        return self.draws and self.generation not in self.whole

    def to_plan_for(
        self, kind: str, shapes: Shapes, now: Shapes, plans: Mapping[Shapes, _Plan]
    ) -> tuple[Shapes, _Plan | None]:
        """Return the shapes to plan for, and the plan for these if there is one.

        Args:
            kind: Of what these are the shapes: ``batches`` or ``arguments``.
            shapes: Those of a call.
            now: Those of the plan that ran last.
            plans: Plans by the shapes that they were made for.
        """
        most = self.fed[kind] = max(self.fed.get(kind, _elements(now)), _elements(shapes))
        if self.draws_on or self.takes_several:
            return _largest(now, shapes) or shapes, None
        if serving := [made for made in plans if _covers(made, shapes)]:
            best = min(serving, key=_elements)
            return best, plans[best]
        if _covers(now, shapes):
            return now, None
        found = [(made, larger) for made in {now, *plans} if (larger := _largest(made, shapes)) is not None]
        if not found:
            return shapes, None
        _, larger = min(found, key=lambda one: (_elements(one[1]), one[0] != now))
        return larger if _elements(larger) <= SPREAD * most else shapes, None

    def note_plan(self) -> None:
        """Note that the plan to run is made."""
        self.plans = [one for one in self.plans if one.generation != self.generation]
        self.plans.append(_Plan(self.generation, self.batches, self.arguments))

    def renew(self, kept: Iterable[_Plan] = ()) -> None:
        """Have another plan made; of those before it only the ``kept`` ones may run again."""
        self.plans = [*kept]
        self.newest += 1
        self.generation = self.newest

    def grown(self, what: str, was: object, will: object) -> str:
        """Count another plan, unless that would change what the step computes; return what has grown."""
        if self.draws_on:
            kept = f"keeps its plan for {what} of {was} with {will}"
            return f"{kept}: a new one would begin its random numbers anew"
        self.renew(one for one in self.plans if not _all_cover(self.batches, self.arguments, one))
        return f"was planned for {what} of {was}, and is again for {will}"


class Growth:
    """Remembers the sizes that each step was planned for, and counts its plans.

    A step is named by its function, or session and set of feeds and fetches, and by the function of the
    runtime: one for each trace, empty for a session. Without a ``tf.function`` it has only the second name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: weakref.WeakKeyDictionary[Any, dict[str, _Step]] = weakref.WeakKeyDictionary()
        self._nameless: dict[str, _Step] = {}

    def planned(
        self,
        function: Any,
        batches: Shapes,
        name: str = "",
        *,
        batch_size: int | None = None,
        open_arguments: Mapping[int, tuple[int, ...]] | None = None,
        draws: bool = False,
    ) -> None:
        """Note that a step is planned for batches of this size or these shapes, and for these arguments.

        A body that the step runs is planned apart, and knows none of its arguments. ``draws``: whether a
        kernel of it counts its own random numbers from a seed.
        """
        step = self._step(function, name)
        step.draws |= draws
        step.batch_size, step.batches = batch_size or step.batch_size, batches or step.batches
        step.arguments = {**step.arguments, **(open_arguments or {})}
        step.note_plan()

    def generation(self, function: Any, name: str = "") -> int:
        """Return the number of a step's latest plan."""
        found = self._known(function, name)
        return 0 if found is None else found.generation

    def beside(self, function: Any, name: str = "") -> frozenset[int]:
        """Return the numbers of the plans of a step that may run again, but for the one to run."""
        found = self._known(function, name)
        plans = [] if found is None else found.plans
        return frozenset(one.generation for one in plans) - {self.generation(function, name)}

    def renew(self, function: Any, names: Iterable[str] = ("",)) -> None:
        """Have steps planned again at their next calls, and all other traces of their function."""
        named = [self._step(function, name) for name in names]
        for step in {id(one): one for one in (*named, *self._traces(function))}.values():
            step.renew(one for one in step.plans if one.generation != step.generation)

    def renew_trace(self, function: Any, name: str) -> None:
        """Have one trace planned again at its next call, also if that is without its function.

        Such a call runs the plan of the same number.
        """
        steps = [self._step(function, name), *([self._step(None, name)] if name else [])]
        generation = steps[0].generation
        for step in {id(one): one for one in steps if one.generation == generation}.values():
            step.renew(one for one in step.plans if one.generation != generation)

    def renew_wholly(self, function: Any, name: str = "") -> bool:
        """Have a step planned again for all its batches; return False if random numbers would begin anew."""
        step = self._step(function, name)
        if not step.draws_on:
            step.renew()
        return not step.draws_on

    def renew_all(self) -> None:
        """Have all steps planned again at their next calls, unless their random numbers would begin anew."""
        with self._lock:  # another thread may add one
            traces = [*self._steps.values(), self._nameless]
            steps = [step for one in traces for step in one.values()]
        for step in steps:
            if not step.draws_on:
                step.renew()

    def plan_together(self, function: Any) -> None:
        """Plan for the largest dimensions of all batches: a call takes several, of any sizes."""
        for step in self._traces(function):
            step.takes_several = True

    def leave_whole(self, function: Any, name: str, generation: int) -> None:
        """Note that a plan of a step leaves it to XLA, which compiles it whole."""
        self._step(function, name).whole.add(generation)

    def is_whole(self, function: Any, name: str) -> bool:
        """Tell whether the latest plan of a step leaves it to XLA."""
        step = self._known(function, name)
        return step is not None and step.generation in step.whole

    def may_be_whole(self, function: Any, name: str) -> bool:
        """Tell whether a plan may leave a step to XLA."""
        step = self._known(function, name)
        return step is None or not step.never_whole

    def forbid_whole(self, function: Any, name: str) -> bool:
        """Have a step planned again that was left to XLA; return False where it was not."""
        step = self._known(function, name)
        if step is None or step.generation not in step.whole:
            return False
        step.never_whole = True
        step.renew()
        return True

    def watches_shapes(self, function: Any) -> bool:
        """Tell whether the shapes of each batch must be known to see a step's growth."""
        return any(step.batches for step in self._traces(function))

    def watches_size(self, function: Any) -> bool:
        """Tell whether a step was planned for a batch size, so that a larger one must be seen."""
        return any(step.batch_size is not None for step in self._traces(function))

    def at_least(self, function: Any, shapes: Shapes, name: str = "") -> Shapes:
        """Return the shapes to plan for of batches of ``shapes``: those of a plan that serves them, if any.

        That plan is the one to run then.
        """
        step = self._known(function, name)
        if step is None:
            return shapes
        plans = {one.batches: one for one in step.plans if one.arguments == step.arguments}
        planned, best = step.to_plan_for("batches", shapes, step.batches, plans)
        if best is not None:
            step.batches, step.generation = best.batches, best.generation
        return planned

    def outgrown(self, function: Any, batches: Shapes, batch_size: int | None = None, name: str = "") -> str:
        """Have a step planned again if it was planned for smaller batches than it is about to get.

        Args:
            function: What is about to run.
            batches: The shapes to plan for, from :meth:`at_least`.
            batch_size: The size of its batches, if Keras or a dataset has told it.
            name: The function of the runtime.

        Returns:
            What has grown; empty where nothing has.
        """
        step = self._known(function, name)
        if step is None:
            return ""
        if batch_size and step.batch_size and batch_size > step.batch_size:
            was, step.batch_size = step.batch_size, batch_size
            step.plans = []
            return step.grown("batches", was, batch_size)
        if batches and step.batches and batches != step.batches:
            earlier, step.batches = step.batches, batches
            return step.grown("batches", _text(earlier), _text(batches))
        return ""

    def outgrown_arguments(self, function: Any, name: str, inputs: Sequence[Any]) -> str:
        """Have a step planned again if it was planned for smaller arguments; return what has grown."""
        step = self._known(function, name)
        if step is None or not step.arguments:
            return ""
        known = step.arguments
        numbers = [number for number in known if len(known[number]) == len(inputs[number].shape)]
        now = tuple(tuple(inputs[number].shape) for number in numbers)
        before = tuple(known[number] for number in numbers)
        plans = {
            tuple(one.arguments[number] for number in numbers): one
            for one in step.plans
            if one.batches == step.batches and one.arguments.keys() == known.keys()
        }
        planned, best = step.to_plan_for("arguments", now, before, plans)
        if planned == before:
            return ""
        step.arguments = {**known, **dict(zip(numbers, planned, strict=True))}
        if best is not None:
            step.arguments, step.generation = best.arguments, best.generation
            return ""
        return step.grown("arguments", _text(before), _text(planned))

    def argument_shapes(self, function: Any, name: str, inputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
        """Return the shapes to plan for of the tensors that a function of the runtime is called with."""
        step = self._known(function, name)
        known = {} if step is None else step.arguments
        return {number: known.get(number) or shape for number, shape in _plain_shapes(inputs)}

    def _known(self, function: Any, name: str) -> _Step | None:
        return (self._nameless if function is None else self._steps.get(function, {})).get(name)

    def _step(self, function: Any, name: str) -> _Step:
        with self._lock:
            traces = self._nameless if function is None else self._steps.setdefault(function, {})
            return traces.setdefault(name, _Step())

    def _traces(self, function: Any) -> list[_Step]:
        with self._lock:  # another thread may add one
            return [] if function is None else [*self._steps.get(function, {}).values()]


def _all_cover(batches: Shapes, arguments: Arguments, plan: _Plan) -> bool:
    """Tell whether batches and arguments are as large as those of a plan in all dimensions."""
    if arguments.keys() != plan.arguments.keys():
        return False
    theirs = (plan.arguments[number] for number in arguments)
    return _covers((*batches, *arguments.values()), (*plan.batches, *theirs))


def _covers(shapes: Shapes, others: Shapes) -> bool:
    return _largest(shapes, others) == shapes


def _largest(shapes: Shapes, others: Shapes) -> Shapes | None:
    """Return the larger of each dimension; ``None`` where the ranks are not the same."""
    if [*map(len, shapes)] != [*map(len, others)]:
        return None
    return tuple(tuple(map(max, one, other)) for one, other in zip(shapes, others, strict=True))


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    return sum(map(prod, shapes))


def _plain_shapes(inputs: Sequence[Any]) -> list[tuple[int, tuple[int, ...]]]:
    found = []
    for number, tensor in enumerate(inputs):
        shape = getattr(tensor, "shape", None)
        if shape is not None and getattr(shape, "rank", None) is not None and shape.is_fully_defined():
            found.append((number, tuple(shape.as_list())))
    return found


def _text(shapes: Shapes) -> str:
    """Write shapes for people: ``16x128 and 16x20``; single numbers only where there is nothing else."""
    told = [shape for shape in shapes if shape] or shapes[:1]
    return " and ".join("x".join(map(str, shape)) or "1" for shape in told)
