"""Take the branches of random graphs and compare what they compute; prints how many differ, as JSON.

They compute with whole numbers, so that no order of additions makes a difference.

Run as a child process with the first seed and the number of graphs.
"""

import json
import os
import random
import sys
from itertools import product
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from lms.reader.node_table import NodeTable  # noqa: E402
from lms.specialiser.decided_branches import with_branches_taken  # noqa: E402
from lms.specialiser.late_sources import delay_sources  # noqa: E402
from lms.specialiser.needless_nodes import without_needless  # noqa: E402

v1 = tf.compat.v1
v1.disable_v2_behavior()
SIZE, DEPTH, STEPS = 5, 2, 5
UNARY = (tf.nn.relu, tf.negative, lambda one: one - 3.0, lambda one: tf.where(one > 0.0, one, one * 2.0))
BINARY = (tf.add, tf.subtract, tf.maximum)
EXACT = 2**52
OPS = ("Switch", "Merge")


class Program:
    """A random program over tensors, whose conditions are fed, computed from what is fed, or by values."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.rows = v1.placeholder(tf.float64, [SIZE], name="rows")
        self.fed = [v1.placeholder(tf.bool, [], name=f"fed{number}") for number in range(2)]
        self.fed.append(v1.placeholder_with_default(True, [], name="fed2"))
        self.result = self.block([self.rows, self.rows * 2.0], DEPTH)
        self.gradient = tf.gradients(tf.reduce_sum(self.result * 3.0), self.rows)[0]

    def predicate(self, known: list[Any]) -> Any:
        """Return a predicate."""
        kind, one = self.random.randrange(6), self.random.choice(self.fed)
        if kind == 0:
            return tf.reduce_sum(self.random.choice(known)) > 1.0
        if kind == 1:
            return tf.logical_not(one)
        if kind == 2:
            return tf.logical_and(one, self.random.choice(self.fed))
        if kind == 3:
            return tf.logical_or(one, tf.reduce_sum(self.random.choice(known)) > 1.0)
        return one

    def block(self, known: list[Any], depth: int) -> Any:
        """Return what a few random ops make of some of the tensors."""
        known = list(known)
        for _ in range(STEPS):
            known.append(self.step(known, depth))
        return tf.add_n(known[-3:])

    def step(self, known: list[Any], depth: int) -> Any:
        """Return one more tensor."""
        kind = self.random.randrange(8)
        if kind < 3 and depth:
            return v1.cond(
                self.predicate(known),
                lambda: self.block(known, depth - 1),
                lambda: self.block(known, depth - 1),
            )
        if kind == 3 and depth:
            start = self.random.choice(known)
            return tf.while_loop(
                lambda turn, _: turn < 2, lambda turn, one: (turn + 1, self.turn(one, depth)), (0, start)
            )[1]
        if kind == 4:
            return self.random.choice(known) + tf.fill([SIZE], tf.constant(4.0, tf.float64))
        if kind == 5:
            return self.random.choice(UNARY)(self.random.choice(known))
        return self.random.choice(BINARY)(self.random.choice(known), self.random.choice(known))

    def turn(self, one: Any, depth: int) -> Any:
        """Return what a turn of a loop makes."""
        if self.random.random() < 0.5:
            return tf.nn.relu(one) - one
        return v1.cond(self.predicate([one]), lambda: self.block([one, one], depth - 1), lambda: one - 7.0)


def run(graph: Any, feeds: dict[str, Any], fetches: list[str]) -> list[Any]:
    """Run a graph as it is."""
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with v1.Session(graph=graph, config=config) as session:
        found: list[Any] = session.run(fetches, feeds)
        return found


def count(graph_def: Any) -> int:
    """Count the nodes that part or join branches."""
    return sum(node.op in OPS for node in graph_def.node)


def differs(seed: int) -> tuple[bool, int, int]:
    """Tell whether a program computes anything else with its branches taken; how many nodes these had."""
    with tf.Graph().as_default() as graph:
        program = Program(seed)
        fetches = [program.result.name, program.gradient.name]
    rows = np.random.default_rng(seed).integers(-9, 9, SIZE).astype("d")
    before = after = 0
    for first, second, third in product((True, False), (True, False), (True, False, None)):
        fed = {"fed0": first, "fed1": second} | ({} if third is None else {"fed2": third})
        feeds = {"rows:0": rows, **{f"{name}:0": value for name, value in fed.items()}}
        expected = run(graph, feeds, fetches)
        kept = {"rows", *fed, *(name.partition(":")[0] for name in fetches)}
        graph_def = graph.as_graph_def()
        before += count(graph_def)
        taken = with_branches_taken(graph_def, NodeTable.of(graph_def, {"rows", *fed}), fed, kept, fetches)
        if taken is None:
            after += count(graph_def)
            continue
        delay_sources(taken.graph_def, kept, 0)
        made = without_needless(taken.graph_def, kept)
        after += count(made)
        with tf.Graph().as_default() as edited:
            tf.import_graph_def(made, name="")
        known = {name: value for name, value in feeds.items() if name[:-2] in {*kept}}
        found = run(edited, known, fetches)
        if max(np.abs(one).max() for one in expected) > EXACT:
            raise OverflowError(f"{seed}: {expected}")
        if any(map(np.any, (a != b for a, b in zip(expected, found, strict=True)))):
            return True, before, after
    return False, before, after


first, number = map(int, sys.argv[1:])
results = {seed: differs(seed) for seed in range(first, first + number)}
print(
    json.dumps(
        {
            "differ": [seed for seed, (differs_, _, _) in results.items() if differs_],
            "before": sum(one for _, one, _ in results.values()),
            "after": sum(one for _, _, one in results.values()),
        }
    )
)
