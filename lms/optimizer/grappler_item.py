"""Ask TensorFlow about a graph that it is about to run: its fetches, preserved nodes and shapes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lms.optimizer.c_api import TensorFlow
from lms.optimizer.errors import PluginError


class Output(NamedTuple):
    """The type and shape that TensorFlow inferred for an output of a node."""

    dtype: int
    """Of the ``DataType`` enum of types.proto."""
    dims: tuple[int, ...] | None
    """The sizes; ``None`` is an unknown rank, -1 an open dimension."""


ReadOutputs = Callable[[TensorFlow, int, Sequence[str]], list[list[Output]]]
"""``(TensorFlow, the address of a TF_GraphProperties, names of nodes) -> the outputs of each``."""


class GrapplerItem:
    """One graph, as long as TensorFlow waits for the editor; afterwards every method raises.

    Args:
        calls: TensorFlow's C API.
        address: Of the ``TF_GrapplerItem``.
        read_outputs: Decodes what TensorFlow inferred.
    """

    def __init__(self, calls: TensorFlow, address: int, read_outputs: ReadOutputs) -> None:
        self._calls, self._address, self._read_outputs = calls, address, read_outputs
        self._properties = 0

    def fetches(self) -> list[str]:
        """Return the fetched nodes, as TensorFlow writes them: ``name`` or ``name:1``.

        Raises:
            PluginError: If the item is no longer valid.
        """
        return self._calls.names(self._calls.fetch_size, self._calls.fetch_list, self._valid())

    def preserved(self) -> list[str]:
        """Return the nodes that must keep their names: fetched, fed or with effects; sorted.

        Raises:
            PluginError: If the item is no longer valid.
        """
        found = self._calls.names(self._calls.preserved_size, self._calls.preserved_list, self._valid())
        return sorted(found)  # TensorFlow keeps them in a hash set: their order is by chance

    def output_properties(self, names: Sequence[str]) -> list[list[Output]]:
        """Return the outputs of each node; none for a node that has none or is not in the graph.

        TensorFlow infers the shapes of the whole graph the first time, by ``TF_InferStatically``.

        Raises:
            PluginError: If the item is no longer valid, or TensorFlow cannot infer shapes.
        """
        return self._read_outputs(self._calls, self._inferred(), names)

    def close(self) -> None:
        """Free what TensorFlow inferred; the item is no longer valid."""
        self._address, properties = 0, self._properties
        self._properties = 0
        if properties:
            self._calls.delete_properties(properties)

    def _valid(self) -> int:
        if not self._address:
            raise PluginError("the graph is no longer TensorFlow's to ask; needed: ask inside the editor")
        return self._address

    def _inferred(self) -> int:
        address = self._valid()
        if not self._properties:
            self._properties = self._calls.new_properties(address)
            with self._calls.status() as status:
                self._calls.infer(self._properties, 0, 0, 0, 0, status)
                if failure := self._calls.failure(status):
                    self._calls.delete_properties(self._properties)
                    self._properties = 0
                    raise PluginError(
                        f"TensorFlow cannot infer the shapes of a graph: {failure}; it stays as it is"
                    )
        return self._properties
