"""Variables of any step stream without a cycle: random steps with several updates of each variable."""

import pytest

pytest.importorskip("tensorflow")
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2

from lms.engine.tracing import Drawn
from lms.optimizer.grappler_item import Output
from lms.reader.node_table import NodeTable
from lms.rewriter.streaming import stream_variables

pytestmark = pytest.mark.tensorflow

FLOAT = tf.float32.as_datatype_enum
VALUES, NUMBER = Output(FLOAT, (1024,)), Output(FLOAT, ())
UPDATE = "ResourceApplyGradientDescent"
CPU = "/device:CPU:0"
KINDS = ("read", "read", "gather", "op", "op", "gradient", "norm", "scale", "update", "train", "train")
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 3),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    max_size=60,
)


class Step:
    """A step as TensorFlow traces it: reads of a variable wait for its updates, and these for the reads."""

    def __init__(self) -> None:
        self.graph_def = graph_pb2.GraphDef()
        self.outputs: list[list[Output]] = []
        self.values, self.numbers = [self.add("IteratorGetNext", VALUES)], list[str]()
        self.updated: dict[int, str] = {}
        self.used: dict[int, list[str]] = {}
        for number in range(4):
            self.add("_Arg", Output(tf.resource.as_datatype_enum, ()), name=f"v{number}")

    def add(self, op: str, *made: Output, name: str = "", reads: tuple[str, ...] = ()) -> str:
        name = name or f"{op}_{len(self.outputs)}"
        self.graph_def.node.add(name=name, op=op, input=reads, device=CPU)
        self.outputs.append(list(made))
        return name

    def act(self, action: str, number: int, one: int, other: int) -> None:
        """Add a node, of what there is for it to read."""
        first, second = (self.values[place % len(self.values)] for place in (one, other))
        waits = (f"^{self.updated[number]}",) if number in self.updated else ()
        if action in ("read", "gather"):
            indices = () if action == "read" else ("IteratorGetNext_0",)
            op = "ReadVariableOp" if action == "read" else "ResourceGather"
            self.values.append(self.add(op, VALUES, reads=(f"v{number}", *indices, *waits)))
            self.used.setdefault(number, []).append(self.values[-1])
        elif action in ("op", "gradient"):
            name = f"gradients/slope_{len(self.outputs)}" if action == "gradient" else ""
            self.values.append(self.add("MatMul", VALUES, name=name, reads=(first, second)))
        elif action == "norm":
            self.numbers.append(self.add("L2Loss", NUMBER, reads=(first,)))
        elif action == "scale" and self.numbers:
            by = self.numbers[other % len(self.numbers)]
            self.values.append(self.add("Mul", VALUES, reads=(first, by)))
        elif action == "update":
            waits += tuple(f"^{use}" for use in self.used.pop(number, ()))
            self.updated[number] = self.add(UPDATE, reads=(f"v{number}", first, *waits))
        elif action == "train":
            self.train(number, (number + 1 + one % 3) % 4, other)

    def train(self, *numbers: int) -> None:
        """Add both passes through two variables, and their updates."""
        *variables, other = numbers
        for number in variables:
            self.act("read", number, 0, 0)
            self.act("op", 0, -1, -2)
        for number in variables if other % 2 else reversed(variables):
            self.act("gradient", 0, -1, -2 - other % 2)
            if other % 3 == 1:
                self.act("norm", 0, -1, 0)
                self.act("scale", 0, -1, other)
            self.act("update", number, -1, 0)


@settings(max_examples=400, deadline=None)
@given(ACTIONS)
def test_variables_stream_without_a_cycle(actions: list[tuple[str, int, int, int]]) -> None:
    step = Step()
    for action in actions:
        step.act(*action)
    step.add("_Retval", reads=(step.values[-1],))
    known = {f"v{number}": VALUES for number in range(4)}
    table, drawn = NodeTable.of(step.graph_def), Drawn()
    streamed = stream_variables(
        step.graph_def, table, step.outputs, drawn, drawn, known, lambda device: True, lambda kind: 1.0, 256
    )
    edited = NodeTable.of(step.graph_def)
    assert len(edited.order) == len(table.nodes) + len(streamed.nodes)
