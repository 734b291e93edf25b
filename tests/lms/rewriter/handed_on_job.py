"""Sums with terms that a branch or a loop hands on, with and without LMS."""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import lms

ROWS = 1 << 18
LARGE = 1e8
"""Beside this 1 is lost: it shows in which order three numbers are added."""


class Steps:
    """A step that swaps, with one sum beside it."""

    def __init__(self) -> None:
        self.weights = [
            tf.Variable(tf.random.stateless_normal((64, 64), (layer, 1)) / 8) for layer in range(6)
        ]
        self.one, self.zero = tf.Variable(1.0), tf.Variable(0.0)
        self.held = tf.Variable(tf.fill([256], LARGE))
        self.large = tf.Variable(tf.fill([ROWS], LARGE))
        self.plus, self.minus = (tf.Variable(tf.fill([64, 64], number)) for number in (LARGE, -LARGE))

    def make(self, number: float, rows: int = 256) -> Any:
        """Make a term that nothing else reads."""
        return tf.exp(tf.zeros([rows]) * self.one) * (number * self.one)

    def add(self, handed_on: Any) -> Any:
        """Add a term that is never free, one that is handed on, and one that is free: in this order 1.

        TensorFlow puts the terms in the order of their names.
        """
        with tf.name_scope("z"):
            return tf.raw_ops.AddN(inputs=[self.held.read_value(), handed_on, self.make(1.0)])

    def of_branch(self) -> Any:
        """Add what a branch has made."""
        return self.add(tf.cond(self.one > 0, lambda: self.make(-LARGE), lambda: self.make(2.0)))

    def of_case(self) -> Any:
        """Add what one of three branches has made."""
        branches = [lambda number=number: self.make(number) for number in (-LARGE, 2.0, 3.0)]
        return self.add(tf.switch_case(tf.cast(self.zero, tf.int32), branches))

    def of_loop(self) -> Any:
        """Add what a loop has made."""
        made = self.make(-LARGE)
        for _ in tf.range(4 * tf.cast(self.one, tf.int32)):
            made = made * self.one
        return self.add(made)

    def read_again(self) -> Any:
        """Add what a loop has made and an op reads behind the sum: without an edit it is held."""
        made = tf.while_loop(
            lambda turn, _: turn < tf.cast(4 * self.one, tf.int32),
            lambda turn, value: (turn + 1, value * self.one),
            (tf.constant(0), self.make(-LARGE, ROWS)),
        )[1]
        held = tf.fill([ROWS], LARGE) * self.one
        with tf.control_dependencies([self.net()]), tf.name_scope("z"):
            free = self.make(1.0, ROWS)
            added = tf.raw_ops.AddN(inputs=[self.large.read_value(), made, free])
        with tf.control_dependencies([self.net() + added[0]]):
            return added[:1] + 0.0 * tf.reduce_sum(tf.sin(made) + held)

    def in_branch(self) -> Any:
        """Add in one branch what the other one reads late: a branch that is not taken holds nothing."""
        with tf.name_scope("a"):
            made = self.make(-LARGE)

        def late() -> Any:
            mean = self.net()
            for _ in range(20):
                mean = tf.nn.tanh(mean * 1.1)
            return made + mean

        return tf.cond(self.one < 0, late, lambda: self.add(made))

    def net(self) -> Any:
        """Return the mean of what a network makes."""
        x = tf.fill([512, 64], 0.5) * self.one
        for weight in self.weights:
            x = tf.nn.relu(x @ weight)
        return tf.reduce_mean(x)

    def repeated(self) -> Any:
        """Return a step that adds what a branch has made, and runs its readers again behind the sum."""

        @tf.function
        def step() -> tuple[Any, Any]:
            made = tf.stop_gradient(tf.cond(self.one > 0, lambda: self.plane(1.0), lambda: self.plane(2.0)))
            with tf.GradientTape() as tape:
                x = tf.fill([64, 64], 0.3) * self.one
                for weight in self.weights:
                    x = tf.nn.tanh(tf.nn.tanh(x @ weight) + made)
                loss = tf.reduce_mean(x)
                with tf.control_dependencies([loss]):
                    held = self.plus.read_value(), self.minus.read_value()
                    added = tf.raw_ops.AddN(inputs=[*held, made])
                loss *= 1 + tf.stop_gradient(added[0, 0]) * 1e-9
            for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
                weight.assign_sub(gradient)
            return loss, added[0]

        return step

    def plane(self, number: float) -> Any:
        """Make a square that nothing else reads."""
        return tf.exp(tf.zeros([64, 64]) * self.one) * (number * self.one)

    def step_of(self, way: Callable[[], Any]) -> Any:
        """Return a training step with a sum."""

        @tf.function
        def step() -> tuple[Any, Any]:
            with tf.GradientTape() as tape:
                x = tf.fill([512, 64], 0.5)
                for weight in self.weights:
                    x = tf.nn.relu(x @ weight)
                loss = tf.reduce_mean(x)
            for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
                weight.assign_sub(gradient)
            return loss, way()

        return step


WAYS = ("of_branch", "of_case", "of_loop", "read_again", "in_branch")


def main() -> None:
    """Run each step alone, then with LMS, and print the sums of both."""
    found: dict[str, list[float]] = {name: [] for name in (*WAYS, "repeated")}
    swapped = []
    for options in ({}, {"policy": "all"}, {"policy": "all", "recompute": "only"}):
        if options:
            lms.enable(**options, min_tensor_bytes=4096)
        steps = Steps()
        for name in ("repeated",) if "recompute" in options else WAYS if options else found:
            step = steps.repeated() if name == "repeated" else steps.step_of(getattr(steps, name))
            found[name] += [float(step()[1][0]) for _ in range(3)]
        if options:
            swapped += [graph.tensors or graph.recomputed[0] for graph in lms.report().edited]
            lms.disable()
    print(json.dumps({"found": found, "edited": swapped}))


if __name__ == "__main__":
    main()
