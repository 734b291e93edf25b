"""Sums with terms that a branch or a loop hands on, with and without LMS."""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import lms

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

    def make(self, number: float) -> Any:
        """Make a term that nothing else reads."""
        return tf.exp(tf.zeros([256]) * self.one) * (number * self.one)

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


def main() -> None:
    """Run each step alone, then with LMS, and print the sums of both."""
    names = ("of_branch", "of_case", "of_loop")
    found: dict[str, list[float]] = {name: [] for name in names}
    for policy in ("", "all"):
        if policy:
            lms.enable(policy=policy, min_tensor_bytes=4096)
        steps = Steps()
        for name in names:
            step = steps.step_of(getattr(steps, name))
            found[name] += [float(step()[1][0]) for _ in range(3)]
    swapped = [graph.tensors for graph in lms.report().edited]
    print(json.dumps({"found": found, "swapped": swapped}))


if __name__ == "__main__":
    main()
