"""The pass that has variables stream from host memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensorflow.core.framework import graph_pb2

from lms.optimizer.grappler_item import Output
from lms.passes.parsing import fed_nodes
from lms.passes.work import Work
from lms.reader.node_table import ROOT, NodeTable
from lms.rewriter.streamable import IN_LOOP
from lms.rewriter.streaming import Streamed, stream_variables
from lms.rewriter.validation import require_same_pairs
from lms.transports.base import Transport
from lms.variables.handles import static_bytes, value_shape, value_type, variable_handles
from lms.variables.on_host import HostVariables


class Streaming:
    """Has variables stream whose values lie in host memory between steps."""

    name = "stream"

    def __init__(self, host: HostVariables, transport: Callable[[], Transport]) -> None:
        self._host, self._transport = host, transport

    def requires(self, work: Work) -> bool:
        """Tell whether any variables stream; none do in a step that was postponed before they did."""
        return self._host.streams and work.frame is not None and work.graph_def is not None

    def apply(self, work: Work) -> Work:
        """Edit a copy of the graph, and read it again."""
        assert work.table is not None  # noqa: S101 - Parsing went before
        item, config = work.task.request.item, work.task.config
        known = variables_known(work.table, work.task.inputs)
        if work.frame != ROOT:
            return replace(work, streamed=Streamed(stay=variables_in_loop(work)))
        graph_def = graph_pb2.GraphDef()
        graph_def.CopyFrom(work.graph_def)
        fed = fed_nodes(work.task, graph_def)
        table = NodeTable.of(graph_def, fed)
        streamed = stream_variables(
            graph_def,
            table,
            work.outputs,
            self._transport(),
            self._host.values(),
            known,
            work.place.holds,
            self._host.share,
            config.min_tensor_bytes,
            item.fetches(),
        )
        if not streamed.nodes:
            return replace(work, streamed=streamed)
        edited = NodeTable.of(graph_def, fed)
        require_same_pairs(work.place.kernels, table, edited)
        before = dict(zip(table.names, work.outputs, strict=True))
        outputs = [streamed.outputs.get(name) or before.get(name, ()) for name in edited.names]
        return replace(work, graph_def=graph_def, streamed=streamed, table=edited, outputs=outputs)


def variables_in_loop(work: Work) -> dict[str, int]:
    """Count the variables of a frame that is not the root: none of them can stream."""
    least = max(1, work.task.config.min_tensor_bytes)
    large = sum(
        static_bytes(value_shape(handle), value_type(handle)) >= least
        for handle in variable_handles(work.task.inputs)
        if work.place.holds(handle.device)
    )
    return {IN_LOOP: large} if large else {}


def variables_known(table: NodeTable, inputs: Sequence[Any]) -> Mapping[str, Output]:
    """Return type and shape of the variables that a function is called with, by the names of their nodes."""
    found: dict[str, Output] = {}
    for node, op_type in enumerate(table.types):
        number = table.nodes[node].attr["index"].i if op_type == "_Arg" else len(inputs)
        if number < len(inputs):
            for handle in variable_handles([inputs[number]]):
                shape = value_shape(handle)
                dims = None if shape.rank is None else tuple(-1 if d is None else d for d in shape.as_list())
                found[table.names[node]] = Output(value_type(handle).as_datatype_enum, dims)
    return found
