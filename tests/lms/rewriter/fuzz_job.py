"""Edits random graphs and runs them; prints as JSON what went wrong, by seed.

    python fuzz_job.py FIRST COUNT

Each graph is read, planned for a random budget, written, validated and run in a session without any of
TensorFlow's optimizations: its results must be those of the graph as it was, bit for bit, unless it holds a
sum whose order TensorFlow leaves to chance. A damaged copy of it must be refused or read, and nothing else.
Every other graph is edited as on a GPU, where copies are launched before the kernels that follow.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

sys.path.append(str(Path(__file__).resolve().parents[1] / "bits"))

import tensorflow as tf  # noqa: E402
from racing_sums import racing_sums  # noqa: E402
from tensorflow.core.framework import graph_pb2  # noqa: E402
from tensorflow.core.protobuf import rewriter_config_pb2  # noqa: E402

from lms.config import LMSConfig  # noqa: E402
from lms.device.kernels import OneDnnCpu  # noqa: E402
from lms.errors import UnreadableError  # noqa: E402
from lms.planner.hybrid import decide, plan_recomputed  # noqa: E402
from lms.planner.recomputation import Repeats  # noqa: E402
from lms.planner.recomputation import recompute as recomputed  # noqa: E402
from lms.reader.node_table import NodeTable  # noqa: E402
from lms.reader.shapes import infer  # noqa: E402
from lms.reader.step_reader import read_step  # noqa: E402
from lms.reader.survey import Place, step_frames  # noqa: E402
from lms.rewriter import writer  # noqa: E402
from lms.rewriter.decision import write_decision  # noqa: E402
from lms.rewriter.validation import validate  # noqa: E402
from lms.rewriter.writer import RewriteError  # noqa: E402
from lms.transports.host import HostTransport  # noqa: E402

v1 = tf.compat.v1
v1.disable_control_flow_v2()  # conditions and loops as an executor has them, in frames
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
ROWS, WIDTH = 16, 32
FORWARD = 12
"""The layers of the forward pass."""
PLACE = Place(lambda device: True, OneDnnCpu())


COPIES_AT_ONCE = writer._copies_at_once
GATE = "/lms/launched"
"""The end of the name of a node that kernels behind a copy wait for."""


class TensorFlowRefusesError(Exception):
    """TensorFlow itself cannot read a graph."""


def random_graph(seed: int) -> tuple[Any, list[str]]:
    """A GraphDef with conditions and loops as an executor has them, and what to fetch."""
    choice = random.Random(seed)  # noqa: S311
    graph = tf.Graph()
    with graph.as_default():
        # No constants: TensorFlow works out what depends on them alone before a graph runs.
        tensors = [v1.random_uniform((ROWS, WIDTH), -1, 1, seed=1)]
        weight = v1.random_uniform((WIDTH, WIDTH), -0.2, 0.2, seed=2)
        for number in range(choice.randint(10, 40)):
            is_backward = number > FORWARD
            with tf.name_scope("gradient_tape" if is_backward else "model"):
                # Gradients read what the forward pass has made, the latest first.
                saved = tensors[: max(1, 2 * FORWARD - number)] if is_backward else tensors[-5:]
                tensors.append(_layer(choice, tensors, saved, weight))
        ends = [tf.identity(one, "end") for one in choice.sample(tensors, min(3, len(tensors)))]
    # A session leaves out what is not needed, and so does TensorFlow before it calls the plug-in.
    graph_def = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), [one.op.name for one in ends])
    for node in graph_def.node:
        node.device = CPU
    return graph_def, [one.name for one in ends]


def _layer(choice: random.Random, tensors: list[Any], saved: list[Any], weight: Any) -> Any:
    one, other = choice.choice(tensors[-5:]), choice.choice(saved[-5:])
    kind = choice.randrange(12)
    if kind < 3:
        return tf.matmul(one, weight)
    if kind < 5:
        return one + other
    if kind == 5:
        return tf.tanh(tf.reshape(one, (WIDTH, ROWS)))[:ROWS] if ROWS == WIDTH else tf.tanh(one)
    if kind == 6:
        return tf.split(tf.concat([one, other], 1), 2, 1)[choice.randrange(2)]
    if kind == 7:
        return tf.add_n([one, other, *choice.sample(tensors, choice.randrange(len(tensors)) % 4)])
    if kind == 8:
        flat = tf.reshape(one, (-1,))
        return tf.reshape(tf.nn.relu(flat), (ROWS, WIDTH))
    if kind == 9:
        return tf.identity(tf.stop_gradient(one)) * 0.5
    if kind == 10:
        asked = tf.reduce_sum(other) > choice.random()
        return v1.cond(asked, lambda: tf.tanh(one @ weight), lambda: one * 2.0)
    turns = choice.randint(1, 3)
    return v1.while_loop(lambda i, x: i < turns, lambda i, x: (i + 1, tf.tanh(x @ weight + one)), [0, other])[
        1
    ]


def edited(graph_def: Any, seed: int, transport: HostTransport, fetches: list[str]) -> tuple[Any, int, int]:
    """An edited copy of a graph, how many tensors are swapped, and how many ops are repeated."""
    choice = random.Random(-seed)  # noqa: S311
    copy = graph_pb2.GraphDef.FromString(graph_def.SerializeToString())
    table = NodeTable.of(copy)
    try:
        known = infer(copy, [fetch.partition(":")[0] for fetch in fetches])
    except (IndexError, RuntimeError, ValueError, tf.errors.OpError) as error:
        raise TensorFlowRefusesError from error
    outputs = [known.get(name, []) for name in table.names]
    step = read_step(table, outputs, PLACE, choice.choice([*step_frames(table)] or [0]), fetches)
    policy = choice.choice(("all", "budget"))
    least = choice.choice((1, 1, 1024, 4096))
    budget = choice.randint(20, 200) * 1024 if policy == "budget" else None
    recompute = choice.choice(("auto", "only", "off"))
    config = LMSConfig(
        enabled=True, policy=policy, budget_bytes=budget, min_tensor_bytes=least, recompute=recompute
    )
    decided = decide(step.graph, config, "CPU", None)
    plan = decided.plan
    assert plan.peak_bytes <= plan.peak_before_bytes or plan.policy != "budget" or plan.feasible
    repeats = Repeats(decided.case.buffers, least)
    if recompute != "off" and decided.graph is step.graph and repeats.candidates:  # whether it pays or not
        count = choice.randint(1, len(repeats.candidates))
        made = recomputed(repeats, choice.sample(repeats.candidates, count))
        before = decided.plan.peak_before_bytes
        decided = plan_recomputed(made, config, "CPU", None, decided.case.costs, before)
    plan = decided.plan
    if plan.is_empty:
        return copy, 0, 0
    edits = write_decision(copy, step, decided, transport)
    validate(copy, table, outputs, edits.nodes, PLACE.kernels)
    return copy, len(plan.swaps), plan.recomputed.ops if plan.recomputed else 0


def run(graph_def: Any, fetches: list[str]) -> list[Any]:
    """What a session makes of a graph, without any optimization."""
    config = v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.disable_meta_optimizer = True
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    config.graph_options.optimizer_options.opt_level = -1
    config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = 1
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        with v1.Session(graph=graph, config=config) as session:
            return list(session.run(fetches))


def damaged(graph_def: Any, seed: int) -> Any:
    """A copy with one thing wrong."""
    choice = random.Random(seed)  # noqa: S311
    copy = graph_pb2.GraphDef.FromString(graph_def.SerializeToString())
    node = choice.choice([one for one in copy.node if one.input])
    kind = choice.randrange(5)
    if kind == 0:
        node.input[0] = "nobody"
    elif kind == 1:
        node.input.append(f"^{choice.choice(copy.node).name}")
    elif kind == 2:
        node.input[0] = choice.choice(copy.node).name
    elif kind == 3:
        node.op = choice.choice(("Enter", "Exit", "Merge", "Switch", "NextIteration"))
    else:
        del copy.node[choice.randrange(len(copy.node))]
    return copy


def main(first: int, count: int) -> dict[str, Any]:
    """Return by kind the seeds that went wrong, negative of damaged copies, and the tensors swapped."""
    transport = HostTransport(os.environ)
    found: dict[str, Any] = {
        "differ": [],
        "racing": [],
        "refused": [],
        "faults": [],
        "swapped": 0,
        "repeated": 0,
        "gates": 0,
    }
    for seed in range(first, first + count):
        graph_def, fetches = random_graph(seed)
        at_once = COPIES_AT_ONCE if seed % 2 else lambda *_: False
        writer._copies_at_once = at_once
        try:
            copy, swapped, repeated = edited(graph_def, seed, transport, fetches)
        except RewriteError as error:
            found["refused"].append((seed, str(error)))
            continue
        except Exception as error:  # noqa: BLE001
            found["faults"].append((seed, f"{type(error).__name__}: {error}"))
            continue
        found["swapped"] += swapped
        found["repeated"] += repeated
        found["gates"] += sum(node.name.endswith(GATE) for node in copy.node)
        before, after = run(graph_def, fetches), run(copy, fetches)
        if any(one.tobytes() != other.tobytes() for one, other in zip(before, after, strict=True)):
            found["racing" if racing_sums(graph_def, fetches) else "differ"].append(seed)
        try:
            edited(damaged(graph_def, seed), seed, transport, fetches)
        except (UnreadableError, RewriteError, TensorFlowRefusesError):
            pass
        except Exception as error:  # noqa: BLE001
            found["faults"].append((-seed, f"{type(error).__name__}: {error}"))
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
