"""Steps whose batches grow beyond what they were planned for are traced and planned again."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Planned:
    batch_size: int | None = None
    shapes: Shapes = ()
    nested: tuple["weakref.ref[Any]", ...] = ()
    """The functions that were traced within the step. One may hold the model, and that the step's function,
    which would keep itself then."""


class Growth:
    """Remembers by function what its step was planned for."""

    def __init__(self) -> None:
        self._planned: weakref.WeakKeyDictionary[Any, _Planned] = weakref.WeakKeyDictionary()

    def planned(self, functions: Sequence[Any], batch_size: int | None, shapes: Shapes) -> None:
        """The step of the first of ``functions`` is planned for batches of this size, or of these shapes."""
        if functions and (batch_size or shapes):
            first, *nested = functions
            self._planned[first] = _Planned(batch_size, shapes, tuple(map(weakref.ref, nested)))

    def watches_shapes(self, function: Any) -> bool:
        """Whether the shapes of each batch must be known to see the step's growth."""
        return function in self._planned and bool(self._planned[function].shapes)

    def watches_size(self, function: Any) -> bool:
        """Whether a larger size of its batches is to be seen: the step was planned for one."""
        return function in self._planned and self._planned[function].batch_size is not None

    def at_least(self, function: Any, shapes: Shapes) -> Shapes:
        """``shapes`` where they are larger than those that the step was planned for, else those.

        So a function that is traced again for any other reason keeps the room that it had.
        """
        planned = self._planned.get(function, _Planned()).shapes
        if [len(shape) for shape in planned] != [len(shape) for shape in shapes]:
            return shapes
        pairs = zip(planned, shapes, strict=True)
        return tuple(tuple(map(max, earlier, now)) for earlier, now in pairs)

    def outgrown(self, function: Any, batch_size: int | None, shapes: Shapes) -> str:
        """Forget the traces of a step that was planned for less than it is about to get.

        Args:
            function: What is about to run.
            batch_size: The size of its batches, if Keras or a dataset has told it.
            shapes: The shapes to plan for, from :meth:`at_least`.

        Returns:
            What has grown; empty where nothing has.
        """
        planned = self._planned.get(function)
        if planned is None:
            return ""
        if batch_size and planned.batch_size and batch_size > planned.batch_size:
            grown = f"was planned for batches of {planned.batch_size}, and is again for {batch_size}"
        elif shapes and planned.shapes and shapes != planned.shapes:
            grown = f"was planned for batches of {_text(planned.shapes)}, and is again for {_text(shapes)}"
        else:
            return ""
        for traced in (function, *(nested() for nested in planned.nested)):
            if traced is not None:
                traced._function_cache.clear()
        return grown


def _text(shapes: Shapes) -> str:
    """``16x128 and 16x20``."""
    return " and ".join("x".join(map(str, shape)) or "1" for shape in shapes)
