"""Random training steps from a seed: what people put between ops, where a model by hand has a layer.

Results are read several times, shapes between ops that TensorFlow merges, terms are shared, and parts lie in
loops and conditions.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

ROWS, WIDTH, LATEST = 24, 32, 6
SIDE, DEPTH = 4, 2
"""A row as a small image: 4 by 4, of 2 channels."""
OPS = (6, 16)
STEPS = 3

Weights = dict[str, Any]
Make = Callable[[Weights, Any, Any, Any], Any]
Update = Callable[[Sequence[Any], Sequence[Any]], None]


def layer(w: Weights, x: Any) -> Any:
    """What becomes one kernel."""
    return tf.nn.bias_add(tf.matmul(x, w["kernel"]), w["bias"])


def noisy(w: Weights, x: Any) -> Any:
    """A shape that is read between two ops that become one."""
    made = layer(w, x)
    noise = tf.random.stateless_uniform(tf.raw_ops.Shape(input=made), seed=[1, 2])
    return tf.nn.relu(made) * tf.matmul(noise, w["kernel"])


def scaled_swish(x: Any) -> Any:
    """A factor that another op reads too."""
    scaled = 1.5 * x
    return tf.stop_gradient(x * tf.sigmoid(scaled) + tf.tanh(scaled))


def image(x: Any) -> Any:
    """Each row as an image."""
    return tf.reshape(x, (-1, SIDE, SIDE, DEPTH))


def flat(x: Any) -> Any:
    """Each image as a row."""
    return tf.reshape(x, (-1, WIDTH))


def convolved(w: Weights, x: Any) -> Any:
    """A convolution with its bias and activation."""
    return flat(tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(image(x), w["filter"], 1, "SAME"), w["offset"])))


def depthwise(w: Weights, x: Any) -> Any:
    """A convolution that a normalisation follows."""
    made = tf.nn.depthwise_conv2d(image(x), w["depth"], (1, 1, 1, 1), "SAME")
    return flat(tf.nn.relu6(batch_normal(w, made)))


def batch_normal(w: Weights, x: Any) -> Any:
    """Normalise images in one op."""
    made, *_ = tf.compat.v1.nn.fused_batch_norm(x, w["scale"], w["offset"], is_training=True)
    return made


def layer_normal(x: Any) -> Any:
    """Normalise rows in many ops."""
    mean, spread = tf.nn.moments(x, 1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(spread + 1e-3)


def attention(a: Any, b: Any) -> Any:
    """Products of batches of matrices."""
    query, key = (tf.reshape(x, (-1, SIDE, WIDTH // SIDE)) for x in (a, b))
    return flat(tf.matmul(tf.nn.softmax(0.3 * tf.matmul(query, key, transpose_b=True)), query))


def looped(w: Weights, a: Any, b: Any) -> Any:
    """A few turns, in a loop of TensorFlow's."""
    return tf.while_loop(
        lambda turn, _: turn < 3, lambda turn, x: (turn + 1, tf.tanh(tf.matmul(x, w["kernel"]) + a)), (0, b)
    )[1]


def chosen(w: Weights, a: Any, b: Any, c: Any) -> Any:
    """One of two ways, as a sum says."""
    return tf.cond(tf.reduce_sum(b) > 0, lambda: tf.nn.gelu(layer(w, a)) + c, lambda: tf.tanh(c) * a)


def remembered(w: Weights, a: Any) -> Any:
    """A mean that is kept from step to step."""
    w["mean"].assign(0.9 * w["mean"] + 0.1 * tf.reduce_mean(a, 0))
    return a - w["mean"]


def parted(a: Any, b: Any) -> Any:
    """Two joined, cut in four, and two of these joined."""
    parts = tf.split(tf.concat([a, tf.tanh(b)], 1), 4, 1)
    return tf.concat([parts[2] * 0.5, parts[1]], 1)


def drawn(a: Any, b: Any) -> Any:
    """Columns by number, some twice."""
    columns = [(7 * place) % WIDTH for place in range(0, WIDTH, 2)] * 2
    return tf.gather(a, columns, axis=1) + tf.gather(b, list(range(WIDTH - 1, -1, -1)), axis=1)


def sorted_rows(a: Any, b: Any) -> Any:
    """Rows in the order of their sums."""
    return tf.gather(a, tf.argsort(tf.reduce_sum(b, 1)))


def halved(a: Any) -> Any:
    """In half precision and back."""
    half = tf.cast(tf.tanh(a), tf.float16)
    return tf.cast(half * half + half, tf.float32)


def spread_loss_terms(a: Any, b: Any) -> Any:
    """As a variational autoencoder's loss reads what its encoder says."""
    return 1 + a - tf.tanh(b) ** 2 - tf.exp(-tf.abs(a))


MAKES: tuple[Make, ...] = (
    lambda w, a, b, c: layer(w, a),
    lambda w, a, b, c: tf.nn.relu(layer(w, a)),
    lambda w, a, b, c: tf.nn.gelu(layer(w, a)),
    lambda w, a, b, c: tf.nn.gelu(layer(w, a), approximate=True),
    lambda w, a, b, c: tf.math.erf(a) * (0.5 * b),
    lambda w, a, b, c: noisy(w, a),
    lambda w, a, b, c: scaled_swish(a),
    lambda w, a, b, c: a * tf.sigmoid(a),
    lambda w, a, b, c: tf.sin(-a),
    lambda w, a, b, c: tf.nn.softplus(a) - tf.nn.elu(b),
    lambda w, a, b, c: tf.tanh(a) * b,
    lambda w, a, b, c: a + b,
    lambda w, a, b, c: tf.maximum(a, b) + tf.minimum(b, c),
    lambda w, a, b, c: tf.where(a > 0, b, 0.1 * c),
    lambda w, a, b, c: tf.clip_by_value(a, -1.0, 1.0) / (1.5 + tf.tanh(b)),
    lambda w, a, b, c: (a + tf.exp(-tf.abs(b))) + (a + tf.tanh(c)),
    lambda w, a, b, c: 0.4 * tf.add_n([a, b, tf.matmul(c, w["kernel"])]),
    lambda w, a, b, c: 0.3 * tf.add_n([a, b, c, tf.tanh(a), 0.5 * b]),
    lambda w, a, b, c: tf.split(tf.concat([a, b, a], 0), 3)[1] - c,
    lambda w, a, b, c: tf.concat([a, b], -1)[..., ::2],
    lambda w, a, b, c: tf.transpose(tf.tanh(tf.transpose(a))),
    lambda w, a, b, c: tf.pad(a, [[0, 0], [2, 2]])[:, 2:-2] * 0.5,
    lambda w, a, b, c: tf.roll(a, 3, 1) + tf.reverse(b, [1]),
    lambda w, a, b, c: tf.nn.softmax(a) + b,
    lambda w, a, b, c: a * tf.reduce_mean(tf.tanh(b), 1, keepdims=True),
    lambda w, a, b, c: a - tf.reduce_logsumexp(b, 1, keepdims=True),
    lambda w, a, b, c: a - tf.reduce_max(b, 0),
    lambda w, a, b, c: 0.1 * tf.cumsum(a, 1),
    lambda w, a, b, c: sum(tf.unstack(tf.stack([a, b, tf.tanh(c)]))),
    lambda w, a, b, c: parted(a, b),
    lambda w, a, b, c: drawn(a, b),
    lambda w, a, b, c: sorted_rows(a, b),
    lambda w, a, b, c: convolved(w, a),
    lambda w, a, b, c: depthwise(w, a),
    lambda w, a, b, c: flat(tf.nn.max_pool2d(image(a), 3, 1, "SAME")),
    lambda w, a, b, c: flat(tf.nn.avg_pool2d(image(a), 2, 1, "SAME")),
    lambda w, a, b, c: tf.nn.relu(flat(batch_normal(w, image(a)))),
    lambda w, a, b, c: layer_normal(a),
    lambda w, a, b, c: tf.nn.gelu(layer_normal(a + b)),
    lambda w, a, b, c: attention(a, b),
    lambda w, a, b, c: tf.nn.dropout(a, 0.2, seed=3),
    lambda w, a, b, c: halved(a),
    lambda w, a, b, c: spread_loss_terms(a, b),
    lambda w, a, b, c: remembered(w, a),
)
SELDOM: tuple[Make, ...] = (lambda w, a, b, c: looped(w, a, b), lambda w, a, b, c: chosen(w, a, b, c))
"""These take TensorFlow long to trace."""
SELDOM_SHARE = 0.04


def loss_of(choice: random.Random, w: Weights, x: Any) -> Any:
    """A random graph of some of these."""
    made = [x]
    for _ in range(choice.randint(*OPS)):
        read = [choice.choice(made[-LATEST:]) for _ in range(3)]
        makes = SELDOM if choice.random() < SELDOM_SHARE else MAKES
        made.append(choice.choice(makes)(w, *read) * 0.7)
    ends = [*made[-4:], layer(w, made[-1])]
    return tf.add_n([tf.reduce_mean(tf.tanh(one) ** 2) for one in ends])


def start() -> Weights:
    """All variables, the same each time."""
    numbers = np.random.default_rng(0)
    sizes = {
        "kernel": (WIDTH, WIDTH),
        "bias": (WIDTH,),
        "filter": (3, 3, DEPTH, DEPTH),
        "depth": (3, 3, DEPTH, 1),
        "scale": (DEPTH,),
        "offset": (DEPTH,),
        "mean": (WIDTH,),
    }
    return {
        name: tf.Variable(numbers.normal(size=size).astype("f") * 0.1, trainable=name != "mean", name=name)
        for name, size in sizes.items()
    }


def descend(weights: Sequence[Any], slopes: Sequence[Any]) -> None:
    """Clip each gradient by itself."""
    for weight, slope in zip(weights, slopes, strict=True):
        weight.assign_sub(0.05 * tf.clip_by_norm(slope, 1.0))


def adam(weights: Sequence[Any], slopes: Sequence[Any], slots: Sequence[Any]) -> None:
    """Clip all gradients together, which makes each wait for all, and move by two slots a weight."""
    slopes, _ = tf.clip_by_global_norm(slopes, 1.0)
    rates = {
        "beta1_power": 0.9,
        "beta2_power": 0.999,
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-7,
    }
    for place, (weight, slope) in enumerate(zip(weights, slopes, strict=True)):
        first, second = slots[2 * place : 2 * place + 2]
        tf.raw_ops.ResourceApplyAdam(var=weight.handle, m=first.handle, v=second.handle, grad=slope, **rates)


def train(seed: int) -> tuple[Any, ...]:
    """All variables after some steps from the same start."""
    tf.random.set_seed(1)
    w = start()
    slots = [tf.Variable(tf.zeros_like(one)) for one in w.values() for _ in range(2)]
    settings = random.Random(f"settings {seed}")  # noqa: S311
    with_adam, open_size, returns = (settings.random() < 0.5 for _ in range(3))
    signature = [tf.TensorSpec([None if open_size else ROWS, WIDTH])]

    @tf.function(autograph=False, input_signature=signature)  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(random.Random(seed), w, x)  # noqa: S311
        weights = [one for one in w.values() if one.trainable]
        found = zip(weights, tape.gradient(loss, weights), range(len(weights)), strict=True)
        used = [(weight, slope, place) for weight, slope, place in found if slope is not None]
        weights, slopes = [weight for weight, _, _ in used], [slope for _, slope, _ in used]
        if with_adam:
            adam(weights, slopes, [slots[2 * place + part] for _, _, place in used for part in (0, 1)])
        else:
            descend(weights, slopes)
        return loss if returns else None

    numbers = np.random.default_rng(1)
    for _ in range(STEPS):
        step(tf.constant(numbers.normal(size=(ROWS, WIDTH)).astype("f")))
    return tuple(one.numpy() for one in (*w.values(), *slots))
