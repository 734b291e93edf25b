"""Trains with updates that a condition leaves out in some steps; prints what it found as JSON."""

import hashlib
import json
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import lms  # noqa: E402
from lms.device.own_ops import load_filler  # noqa: E402
from lms.ir.swap_plan import Filler  # noqa: E402
from lms.passes import writing  # noqa: E402
from lms.rewriter import branches  # noqa: E402

WIDTH, LAYERS, STEPS = 128, 4, 6
exits: list[str] = []
write = branches.Exits.write


def counted(self: Any, name: str, nodes: Any) -> Any:
    exits.append(name)
    return write(self, name, nodes)


branches.Exits.write = counted  # type: ignore[method-assign]

apply = writing.Writing.apply


def filled(self: Any, work: Any) -> Any:
    """Write a plan with a filler at each op of its chain, none of which takes any memory."""
    decision = work.decision
    chain = [op for op in decision.plan.order if op in decision.case.big]
    fillers = tuple(
        Filler(op, copies=False, sizes=(256,), least=1 << 40, follower=later, last=op, until=later)
        for op, later in pairwise(chain)
    )
    return apply(
        self, replace(work, decision=replace(decision, plan=replace(decision.plan, fillers=fillers)))
    )


def train() -> str:
    """Train a network, and return the digest of all that it has learned and returned."""
    random = tf.random.Generator.from_seed(1)
    weights = [tf.Variable(random.normal((WIDTH, WIDTH)) / WIDTH**0.5) for _ in range(LAYERS)]
    slots = [tf.Variable(tf.zeros((WIDTH * WIDTH,)), trainable=False) for _ in weights]
    left_out = tf.Variable(0)

    @tf.function
    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            made = rows
            for weight in weights:
                made = tf.nn.gelu(made @ weight)
            loss = tf.reduce_mean((made - rows) ** 2)
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)

        def update() -> None:
            for weight, slot, gradient in zip(weights, slots, gradients, strict=True):
                slot.assign(0.9 * slot + tf.reshape(gradient, [-1]) / norm)

                def shrink(weight: Any = weight, slot: Any = slot) -> None:
                    weight.assign_sub(0.1 * tf.reshape(tf.tanh(slot), (WIDTH, WIDTH)))

                if weight is weights[0]:
                    tf.cond(tf.reduce_sum(slot) > 0.0, shrink, lambda: None)
                else:
                    shrink()

        def leave_out() -> None:
            left_out.assign_add(1)

        tf.cond(tf.math.is_finite(norm), update, leave_out)
        return loss, [tf.reduce_sum(tf.sin(weight) * tf.cos(weight)) for weight in weights]

    digest = hashlib.sha256()
    for number in range(STEPS):
        rows = random.normal((1024, WIDTH))
        _, sums = step(rows * float("inf") if number % 3 == 1 else rows)
        digest.update(np.stack([one.numpy() for one in sums]).tobytes())
    for variable in (*weights, *slots, left_out):
        digest.update(variable.numpy().tobytes())
    assert left_out.numpy() == STEPS // 3, left_out  # noqa: S101
    return digest.hexdigest()


found: dict[str, Any] = {"off": train()}
for name, config in {
    "all": {"policy": "all"},
    "host": {"policy": "all", "optimizer_state": "host", "variables": "host"},
}.items():
    lms.enable(min_tensor_bytes=4096, **config)
    found[name] = train()
    report = lms.report()
    (graph,) = report.edited[-1:]
    found[f"{name}_exits"] = sum(one.endswith("passed") for one in exits)
    found[f"{name}_copies"] = [graph.copies_out, graph.executed]
    found[f"{name}_warnings"] = list(report.warnings)
    found[f"{name}_streamed"] = [graph.streamed.state, graph.streamed.weights]
    exits.clear()
    lms.disable()
load_filler(os.environ)
writing.Writing.apply = filled  # type: ignore[method-assign]
lms.enable(min_tensor_bytes=4096, policy="all")
found["filled"], found["filled_warnings"] = train(), list(lms.report().warnings)
print(json.dumps(found))
