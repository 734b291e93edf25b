"""Stop a step that shall not run in the graph that TensorFlow has optimized."""

from typing import Any

from tensorflow.core.framework import graph_pb2, types_pb2

LEFT = "lms: this step is left to XLA, which compiles it as one"
"""The message of the error with which a step ends where XLA shall run the function as it was traced."""

NOT_PLANNED = "lms: this step was not planned, and does not run"
"""The message where its planning ended in what the user must hear of, which is raised in its place."""


def stopped(graph_def: Any, why: str) -> bytes:
    """Return a graph that ends with the error ``why`` before any of its ops has run.

    The ops that only read what is there at the beginning wait for the error, and so all the others. An op in
    a loop could not wait for it: it is outside of the loop.
    """
    stopped_def = graph_pb2.GraphDef()
    stopped_def.CopyFrom(graph_def)
    host = "/job:localhost/replica:0/task:0/device:CPU:0"
    there = {node.name for node in stopped_def.node if node.op in ("_Arg", "Const") and not node.input}
    for node in stopped_def.node:
        makers = {text.removeprefix("^").partition(":")[0] for text in node.input}
        if node.name not in there and makers <= there:
            node.input.append("^lms/stop")
    for name, dtype in (("lms/false", types_pb2.DT_BOOL), ("lms/why", types_pb2.DT_STRING)):
        node = stopped_def.node.add(name=name, op="Const", device=host)
        node.attr["dtype"].type = dtype
        node.attr["value"].tensor.dtype = dtype
        node.attr["value"].tensor.tensor_shape.SetInParent()
    stopped_def.node[-2].attr["value"].tensor.bool_val.append(False)
    stopped_def.node[-1].attr["value"].tensor.string_val.append(why.encode())
    stop = stopped_def.node.add(name="lms/stop", op="Assert", device=host, input=["lms/false", "lms/why"])
    stop.attr["T"].list.type.append(types_pb2.DT_STRING)
    stop.attr["summarize"].i = 3
    found: bytes = stopped_def.SerializeToString()
    return found
