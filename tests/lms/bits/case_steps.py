"""Training steps that a script writes itself: tapes, loops, random numbers, nested functions."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from case_models import IMAGE, adam, adamw, decoder, encoder, images, momentum, residual, rows, sentences
from case_tools import (
    BATCH,
    CLASSES,
    TURNS,
    Case,
    Variables,
    apply,
    cross_entropy,
    dataset_of,
    labels_of,
    numbers,
    start_anew,
    variables_of,
)

keras, layers = tf.keras, tf.keras.layers


def built(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Make the slots before the first step."""
    optimizer.build(model.trainable_variables)
    return model, optimizer


def batches(steps: int, make: Callable[[int], Any] = images) -> Iterator[tuple[Any, Any]]:
    """Give as many batches as there are steps."""
    count = steps * BATCH
    yield from dataset_of(make(count), labels_of(count))


def autoencoder(steps: int) -> Variables:
    """Train a variational one: what the encoder says is read three times, and random numbers are drawn."""
    start_anew()
    wide = [layers.Dense(512, "relu"), layers.Dense(256, "relu")]
    reads = keras.Sequential([layers.Input((128,)), *wide, layers.Dense(32)])
    wide = [layers.Dense(256, "relu"), layers.Dense(512, "relu")]
    writes = keras.Sequential([layers.Input((16,)), *wide, layers.Dense(128)])
    weights = [*reads.trainable_variables, *writes.trainable_variables]
    optimizer, random = adam(), tf.random.Generator.from_seed(1)
    optimizer.build(weights)

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, spread = tf.split(reads(batch, training=True), 2, -1)
            drawn = mean + tf.exp(0.5 * spread) * random.normal(tf.shape(mean))
            error = tf.reduce_mean((writes(drawn, training=True) - batch) ** 2)
            loss = error - 0.5 * tf.reduce_mean(1 + spread - mean**2 - tf.exp(spread))
        apply(optimizer, tape, loss, weights)
        return loss

    for batch, _ in dataset_of(rows(4 * steps * BATCH), labels_of(4 * steps * BATCH), 4 * BATCH):
        step(batch)
    return [*weights, *variables_of(optimizer), random.state]


def penalty(steps: int) -> Variables:
    """Hold the slope of a critic at 1: gradients of gradients, through ``gelu``."""
    start_anew()
    parts = [layers.Dense(256, "gelu"), layers.Dense(256, "gelu"), layers.Dense(256, "gelu")]
    model = keras.Sequential([layers.Input((128,)), *parts, layers.Dense(1)])
    model, optimizer = built(model, adam())

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(batch)
                score = model(batch, training=True)
            slope = tf.norm(inner.gradient(score, batch), axis=1)
            loss = tf.reduce_mean(score) + 10 * tf.reduce_mean((slope - 1) ** 2)
        apply(optimizer, outer, loss, model.trainable_variables)
        return loss

    for batch, _ in batches(4 * steps, rows):
        step(batch)
    return variables_of(model, optimizer)


def adversaries(steps: int) -> Variables:
    """Train a generator and its critic in one step, under two tapes."""
    start_anew()
    wide = [layers.Dense(256, "gelu"), layers.Dense(256, "gelu")]
    makes = keras.Sequential([layers.Input((32,)), *wide, layers.Dense(128)])
    wide = [layers.Dense(256, "gelu"), layers.Dense(256, "gelu")]
    judges = keras.Sequential([layers.Input((128,)), *wide, layers.Dense(1)])
    pairs = [built(makes, adam()), built(judges, adam())]
    cost = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def step(batch: Any, noise: Any) -> None:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = makes(noise, training=True)
            real, false = judges(batch, training=True), judges(made, training=True)
            fooled = cost(tf.ones_like(false), false)
            wrong = cost(tf.ones_like(real), real) + cost(tf.zeros_like(false), false)
        for (model, optimizer), tape, loss in zip(pairs, (first, second), (fooled, wrong), strict=True):
            apply(optimizer, tape, loss, model.trainable_variables)

    for number, (batch, _) in enumerate(batches(steps, rows)):
        step(batch, tf.constant(numbers(BATCH, 32, seed=number)))
    return variables_of(*pairs[0], *pairs[1])


def accumulation(steps: int) -> Variables:
    """Sum the gradients of four micro-batches, one after the other in the step."""
    start_anew()
    model, optimizer = built(encoder(), adamw())
    weights, cost = model.trainable_variables, cross_entropy()

    @tf.function
    def step(words: Any, labels: Any) -> None:
        sums = [tf.zeros_like(weight) for weight in weights]
        for part in range(4):
            few = slice(2 * part, 2 * part + 2)
            with tf.GradientTape() as tape:
                loss = cost(labels[few], model(words[few], training=True)) / 4
            found = tape.gradient(loss, weights)
            sums = [one + tf.convert_to_tensor(other) for one, other in zip(sums, found, strict=True)]
        optimizer.apply_gradients(zip(sums, weights, strict=True))

    for words, labels in batches(steps, sentences):
        step(words, labels)
    return variables_of(model, optimizer)


def accumulation_in_a_loop(steps: int) -> Variables:
    """Sum the gradients of four micro-batches in a loop of TensorFlow's, in variables."""
    start_anew()
    model, optimizer = built(residual(), momentum())
    weights, cost = model.trainable_variables, cross_entropy()
    sums = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]

    @tf.function
    def step(batch: Any, labels: Any) -> None:
        for one in sums:
            one.assign(tf.zeros_like(one))
        for part in tf.range(4):
            with tf.GradientTape() as tape:
                seen = model(batch[2 * part : 2 * part + 2], training=True)
                loss = cost(labels[2 * part : 2 * part + 2], seen) / 4
            for one, found in zip(sums, tape.gradient(loss, weights), strict=True):
                one.assign_add(found)
        optimizer.apply_gradients(zip([one.read_value() for one in sums], weights, strict=True))

    for batch, labels in batches(steps):
        step(batch, labels)
    return [*variables_of(model, optimizer), *sums]


def range_loop(steps: int) -> Variables:
    """Take four steps in each call, in a loop of TensorFlow's."""
    start_anew()
    model, optimizer = built(decoder(), adamw())
    cost, given = cross_entropy(), batches(steps, sentences)

    @tf.function
    def run(words: Any, labels: Any) -> Any:
        last = 0.0
        for turn in tf.range(tf.shape(words)[0]):
            with tf.GradientTape() as tape:
                last = cost(labels[turn], model(words[turn], training=True))
            apply(optimizer, tape, last, model.trainable_variables)
        return last

    for _ in range(max(1, steps // TURNS)):
        words, labels = zip(*(next(given) for _ in range(min(steps, TURNS))), strict=True)
        run(tf.stack(words), tf.stack(labels))
    return variables_of(model, optimizer)


def iterator_loop(steps: int) -> Variables:
    """Take four batches from an iterator in each call."""
    start_anew()
    model, optimizer = built(residual(), adam())
    cost, count = cross_entropy(), steps * BATCH
    given = iter(dataset_of(images(count), labels_of(count)))

    @tf.function
    def run(given: Any) -> None:
        for _ in tf.range(min(steps, TURNS)):
            batch, labels = next(given)
            with tf.GradientTape() as tape:
                loss = cost(labels, model(batch, training=True))
            apply(optimizer, tape, loss, model.trainable_variables)

    for _ in range(max(1, steps // TURNS)):
        run(given)
    return variables_of(model, optimizer)


def dataset_loop(steps: int) -> Variables:
    """Go through a dataset inside of a function."""
    start_anew()
    model, optimizer = built(residual(), adamw())
    cost, count = cross_entropy(), steps * BATCH

    @tf.function
    def run(dataset: Any) -> Any:
        total = tf.constant(0.0)
        for batch, labels in dataset:
            with tf.GradientTape() as tape:
                loss = cost(labels, model(batch, training=True))
            apply(optimizer, tape, loss, model.trainable_variables)
            total += loss
        return total

    run(dataset_of(images(count), labels_of(count)))
    return variables_of(model, optimizer)


def noise(steps: int) -> Variables:
    """Draw random numbers by ops without a seed of their own, in a nested function."""
    start_anew()
    weight = tf.Variable(numbers(256, 256) * 0.05, name="weight")
    inner = tf.function(lambda x: tf.nn.dropout(tf.nn.gelu(tf.matmul(x, weight)), 0.5))

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(inner(batch)) ** 2) + tf.reduce_sum(tf.random.normal([256]) * weight)
        weight.assign_sub(1e-4 * tape.gradient(loss, weight))
        return loss

    for number in range(steps):
        step(tf.constant(numbers(64, 256, seed=number)))
    return [weight]


def grown_noise(steps: int) -> Variables:
    """Draw random numbers by ops without a seed of their own, while batches grow."""
    start_anew()
    weight = tf.Variable(numbers(256, 256) * 0.05, name="weight")

    @tf.function(input_signature=[tf.TensorSpec([None, 256])])  # type: ignore[untyped-decorator]
    def step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            x = batch
            for _ in range(4):
                x = tf.nn.dropout(tf.nn.gelu(tf.matmul(x, weight)), 0.3)
            loss = tf.reduce_sum(x**2)
        weight.assign_sub(1e-4 * tape.gradient(loss, weight))

    for number in range(steps):
        step(tf.constant(numbers(64 if number < steps // 2 else 256, 256, seed=number)))
    return [weight]


def equal_assignments(steps: int) -> Variables:
    """Give one value to two variables in a step."""
    start_anew()
    model, optimizer = built(residual(), momentum())
    cost, last = cross_entropy(), [tf.Variable(tf.zeros((BATCH, IMAGE, IMAGE, 3))) for _ in range(2)]

    @tf.function
    def step(batch: Any, labels: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(batch)
            loss = cost(labels, model(batch, training=True))
        slope = tf.sign(tape.gradient(loss, batch))
        for one in last:
            one.assign(slope)
        apply(optimizer, tape, loss, model.trainable_variables)

    for batch, labels in batches(steps):
        step(batch, labels)
    return [*variables_of(model, optimizer), *last]


def choices(steps: int) -> Variables:
    """Take one of two ways through the model, as the batch says."""
    start_anew()
    weights = [tf.Variable(numbers(128, 128, seed=seed) * 0.1, name=f"weight{seed}") for seed in range(4)]
    optimizer = adam()
    optimizer.build(weights)

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            x = tf.nn.gelu(tf.matmul(batch, weights[0]))
            x = tf.cond(
                tf.reduce_mean(batch) > 0,
                lambda: tf.nn.gelu(tf.matmul(tf.nn.gelu(tf.matmul(x, weights[1])), weights[2])),
                lambda: tf.tanh(tf.matmul(x, weights[2])),
            )
            loss = tf.reduce_mean(tf.matmul(x, weights[3]) ** 2)
        apply(optimizer, tape, loss, weights)
        return loss

    for number in range(steps):
        step(tf.constant(numbers(8 * BATCH, 128, seed=number)))
    return [*weights, *variables_of(optimizer)]


def kept_function(steps: int) -> Variables:
    """Call a function that TensorFlow must not put into the step."""
    start_anew()
    weights = [tf.Variable(numbers(256, 256, seed=seed) * 0.05, name=f"weight{seed}") for seed in range(3)]
    optimizer = adam()
    optimizer.build(weights)

    @tf.function(experimental_attributes={"_noinline": True})  # type: ignore[untyped-decorator]
    def kept(x: Any) -> Any:
        return tf.nn.gelu(tf.matmul(tf.nn.gelu(tf.matmul(x, weights[0])), weights[1]))

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            x = kept(tf.tanh(tf.matmul(batch, weights[2])))
            loss = tf.reduce_mean(tf.matmul(kept(x), weights[2]) ** 2)
        apply(optimizer, tape, loss, weights)
        return loss

    for number in range(steps):
        step(tf.constant(numbers(16 * BATCH, 256, seed=number)))
    return [*weights, *variables_of(optimizer)]


def shared_terms(steps: int) -> Variables:
    """Read what each layer makes many times, so that its gradient is a sum of many."""
    start_anew()
    names = range(6)
    weights = [tf.Variable(numbers(128, 128, seed=seed) * 0.1, name=f"weight{seed}") for seed in names]

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            made = [batch]
            for weight in weights:
                made.append(tf.nn.gelu(tf.matmul(made[-1], weight)))
            last = [1 + one - one**2 - tf.exp(-tf.abs(one)) for one in made]
            joined = tf.add_n([tf.tanh(one * scale) for scale, one in enumerate(made, 1)])
            loss = tf.add_n([tf.reduce_mean(one) for one in last]) + tf.reduce_mean(joined**2)
        for weight, slope in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * tf.clip_by_norm(slope, 1.0))
        return loss

    for number in range(steps):
        step(tf.constant(numbers(8 * BATCH, 128, seed=number)))
    return weights


def custom_slope(steps: int) -> Variables:
    """Give an op a gradient of one's own, and draw images by positions."""
    start_anew()
    kernel = tf.Variable(numbers(3, 3, 3, 16) * 0.1, name="kernel")
    head = tf.Variable(numbers(16, CLASSES) * 0.1, name="head")
    optimizer = momentum()
    optimizer.build([kernel, head])

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def rounded(x: Any) -> Any:
        return tf.round(4 * x) / 4, lambda slope: slope * tf.exp(-(x**2))

    @tf.function
    def step(batch: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            x = rounded(tf.nn.conv2d(batch, kernel, 1, "SAME"))
            x = tf.image.resize(tf.nn.elu(x), (24, 24)) * tf.nn.sigmoid(tf.image.resize(x, (24, 24)))
            top, which = tf.math.top_k(tf.reshape(tf.transpose(x, (0, 3, 1, 2)), (BATCH, 16, -1)), 32)
            drawn = tf.gather(tf.reshape(x, (BATCH, -1, 16)), which[:, 0], batch_dims=1)
            logits = tf.matmul(tf.reduce_mean(top, -1) + tf.reduce_mean(drawn, 1), head)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        apply(optimizer, tape, loss, [kernel, head])

    for batch, labels in batches(steps):
        step(batch, labels)
    return [kernel, head, *variables_of(optimizer)]


CASES = {
    "vae": Case(autoencoder),
    "penalty": Case(penalty),
    "adversaries": Case(adversaries),
    "accumulation": Case(accumulation),
    "accumulation in a loop": Case(accumulation_in_a_loop),
    "range loop": Case(range_loop),
    "iterator loop": Case(iterator_loop),
    "dataset loop": Case(dataset_loop),
    "noise": Case(noise),
    "grown noise": Case(grown_noise),
    "equal assignments": Case(equal_assignments),
    "choices": Case(choices),
    "kept function": Case(kept_function),
    "shared terms": Case(shared_terms),
    "custom slope": Case(custom_slope),
}
