"""Models that Keras fits: transformers, images, sequences."""

import functools
from typing import Any

import tensorflow as tf
from case_tools import (
    BATCH,
    CLASSES,
    Case,
    Variables,
    cross_entropy,
    fit,
    fitted,
    labels_of,
    numbers,
    start_anew,
    words_of,
)

keras, layers = tf.keras, tf.keras.layers
VOCABULARY, LENGTH, WIDTH, HEADS = 200, 32, 64, 4
WINDOW = 4
IMAGE = 32


class Positions(layers.Layer):  # type: ignore[misc, name-defined]
    """Adds what is learnt for each place of a sequence."""

    def build(self, shape: Any) -> None:
        """Make the weight."""
        self.table = self.add_weight(name="table", shape=tuple(shape[1:]), initializer="random_normal")
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        """Add it."""
        return x + self.table


class WindowAttention(layers.Layer):  # type: ignore[misc, name-defined]
    """Looks at square windows, rolled by a part of their size, with what is learnt of each distance."""

    def __init__(self, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift

    def build(self, shape: Any) -> None:
        """Make the weights."""
        self.width = shape[-1]
        self.queries = self.add_weight(name="queries", shape=(self.width, 3 * self.width))
        self.out = self.add_weight(name="out", shape=(self.width, self.width))
        self.distances = self.add_weight(name="distances", shape=((2 * WINDOW - 1) ** 2, self.heads))
        places = [(row, column) for row in range(WINDOW) for column in range(WINDOW)]
        self.which = [
            (row - other_row + WINDOW - 1) * (2 * WINDOW - 1) + column - other_column + WINDOW - 1
            for row, column in places
            for other_row, other_column in places
        ]

    def call(self, x: Any) -> Any:
        """Attend inside of the windows."""
        side, area, depth = x.shape[1], WINDOW * WINDOW, self.width // self.heads
        x = tf.roll(x, (-self.shift, -self.shift), (1, 2))
        x = tf.reshape(x, (-1, side // WINDOW, WINDOW, side // WINDOW, WINDOW, self.width))
        x = tf.reshape(tf.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, area, self.width))
        parts = tf.reshape(tf.matmul(x, self.queries), (-1, area, 3, self.heads, depth))
        query, key, value = tf.unstack(tf.transpose(parts, (2, 0, 3, 1, 4)))
        near = tf.reshape(tf.gather(self.distances, self.which), (area, area, self.heads))
        scores = tf.matmul(query, key, transpose_b=True) * depth**-0.5 + tf.transpose(near, (2, 0, 1))
        x = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), (0, 2, 1, 3))
        x = tf.matmul(tf.reshape(x, (-1, area, self.width)), self.out)
        x = tf.reshape(x, (-1, side // WINDOW, side // WINDOW, WINDOW, WINDOW, self.width))
        x = tf.reshape(tf.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, side, side, self.width))
        return tf.roll(x, (self.shift, self.shift), (1, 2))


def attend(x: Any, drop: float, **options: Any) -> Any:
    """One block of a transformer that normalises first."""
    normal = layers.LayerNormalization()(x)
    seen = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=drop)(normal, normal, **options)
    x = layers.Add()([x, layers.Dropout(drop)(seen)])
    hidden = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dropout(drop)(layers.Dense(WIDTH)(hidden))])


def encoder() -> Any:
    """BERT-like: sentences of different length, masked, with dropout."""
    words = layers.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(words))
    x = layers.Dropout(0.1)(layers.LayerNormalization()(x))
    for _ in range(2):
        x = attend(x, 0.1)
    return keras.Model(words, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def decoder() -> Any:
    """GPT-like: each word sees those before it."""
    words = layers.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(words))
    for _ in range(2):
        x = attend(x, 0.1, use_causal_mask=True)
    return keras.Model(words, layers.Dense(CLASSES)(layers.LayerNormalization()(x)[:, -1]))


def vision_transformer() -> Any:
    """ViT-like: an image in patches."""
    image = layers.Input((IMAGE, IMAGE, 3))
    x = layers.Reshape((-1, WIDTH))(layers.Conv2D(WIDTH, 4, strides=4)(image))
    x = Positions()(x)
    for _ in range(2):
        x = attend(x, 0.0)
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def swin() -> Any:
    """Swin-like: windows, rolled in every second block, and patches that are merged."""
    image = layers.Input((IMAGE, IMAGE, 3))
    x = layers.LayerNormalization()(layers.Conv2D(32, 2, strides=2)(image))
    for stage in range(2):
        for shift in (0, WINDOW // 2):
            seen = WindowAttention(2, shift)(layers.LayerNormalization()(x))
            x = layers.Add()([x, seen])
            hidden = layers.Dense(128 << stage, "gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(32 << stage)(hidden)])
        if stage == 0:
            corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
            x = layers.LayerNormalization()(layers.Concatenate()(corners))
            x = layers.Dense(64, use_bias=False)(x)
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def residual() -> Any:
    """Convolutions, each normalised, with a way round every two."""
    image = layers.Input((IMAGE, IMAGE, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(image)))
    for _ in range(2):
        way = x
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(x)))
        x = layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(x))
        x = layers.ReLU()(layers.Add()([x, way]))
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def grouped() -> Any:
    """Convolutions, normalised in groups of channels and with some of it dropped, and two unrolled layers."""
    image = layers.Input((IMAGE, IMAGE, 3))
    x = layers.Conv2D(16, 3, padding="same")(image)
    for _ in range(3):
        y = layers.Activation("swish")(layers.GroupNormalization(4)(x))
        x = layers.Add()([x, layers.Dropout(0.2)(layers.Conv2D(16, 3, padding="same")(y))])
    rows = layers.Reshape((8, -1))(layers.AveragePooling2D(4)(x))
    rows = layers.LSTM(32, return_sequences=True, unroll=True)(rows)
    return keras.Model(image, layers.Dense(CLASSES)(layers.LSTM(32, unroll=True)(rows)))


def connected() -> Any:
    """Convolutions that read all before them, beside a pooling whose windows overlap."""
    image = layers.Input((IMAGE, IMAGE, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
    for _ in range(3):
        normal = layers.Activation("swish")(layers.BatchNormalization()(x))
        parts = [x, layers.Conv2D(8, 3, padding="same")(normal)]
        parts.append(layers.DepthwiseConv2D(3, padding="same")(layers.MaxPooling2D(3, 1, "same")(normal)))
        x = layers.Concatenate()(parts)
    return keras.Model(image, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def volumes() -> Any:
    """A small U-Net in three dimensions."""
    volume = layers.Input((16, 16, 16, 1))
    high = layers.Conv3D(8, 3, padding="same", activation="relu")(volume)
    low = layers.Conv3D(16, 3, padding="same", activation="relu")(layers.MaxPooling3D()(high))
    x = layers.Concatenate()([high, layers.Conv3DTranspose(8, 2, strides=2)(low)])
    x = layers.LeakyReLU()(layers.Conv3D(8, 3, padding="same")(x))
    return keras.Model(volume, layers.Dense(CLASSES)(layers.GlobalAveragePooling3D()(x)))


def convnext() -> Any:
    """ConvNeXtTiny of ``keras.applications``."""
    return keras.applications.ConvNeXtTiny(
        weights=None, input_shape=(IMAGE, IMAGE, 3), classes=CLASSES, classifier_activation=None
    )


def recurrent(layer: Any) -> Any:
    """Two layers that take a sequence in a ``while`` loop, with a wide one between them."""
    series = layers.Input((24, 16))
    x = layers.Dense(128, "gelu")(layer(32, return_sequences=True)(series))
    return keras.Model(series, layers.Dense(CLASSES)(layer(32)(layers.Dense(32)(x))))


def bidirectional() -> Any:
    """Sentences of different length, read both ways."""
    words = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 32, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(x)
    x = layers.Bidirectional(layers.GRU(16))(x)
    return keras.Model(words, layers.Dense(CLASSES)(layers.Dense(128, "relu")(x)))


def dense() -> Any:
    """Dense layers with what LMS meets most often."""
    rows = layers.Input((128,))
    x = rows
    for activation in ("gelu", "swish", "tanh", "relu"):
        x = layers.LayerNormalization()(layers.Dense(256, activation)(x))
    return keras.Model(rows, layers.Dense(CLASSES)(layers.Dropout(0.2)(x)))


def images(count: int) -> Any:
    """Random images."""
    return numbers(count, IMAGE, IMAGE, 3)


def sentences(count: int) -> Any:
    """Random sentences."""
    return words_of(count, LENGTH, VOCABULARY)


def rows(count: int) -> Any:
    """Random rows."""
    return numbers(count, 128)


def series(count: int) -> Any:
    """Random sequences."""
    return numbers(count, 24, 16)


def adam() -> Any:
    """Adam, as most scripts have it."""
    return keras.optimizers.Adam(1e-3)


def adamw() -> Any:
    """Adam that makes the weights smaller."""
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01)


def momentum() -> Any:
    """Gradient descent with momentum."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


def half_precision(policy: str, steps: int) -> Variables:
    """Convolutions and dense layers in half precision: as ``mixed_float16`` with the loss scaled."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        start_anew()
        image = layers.Input((IMAGE, IMAGE, 3))
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(image)
        x = layers.BatchNormalization()(layers.Conv2D(16, 3, strides=2, padding="same")(x))
        x = layers.Dense(128, "gelu")(layers.Reshape((-1, 16))(x))
        x = layers.Dense(CLASSES, dtype="float32")(layers.GlobalAveragePooling1D()(x))
        count = steps * BATCH
        return fit(keras.Model(image, x), adam(), images(count), labels_of(count))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def accumulation_by_keras(steps: int) -> Variables:
    """Keras 3 sums the gradients of four steps, and updates in a condition."""
    start_anew()
    optimizer = keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=4)
    return fit(encoder(), optimizer, sentences(steps * BATCH), labels_of(steps * BATCH))


def several_steps_a_call(steps: int) -> Variables:
    """Four steps in each call of Keras's function."""
    start_anew()
    count = steps * BATCH
    return fit(vision_transformer(), adamw(), images(count), labels_of(count), steps_per_execution=4)


def open_batches(steps: int) -> Variables:
    """The last batch is smaller, so the size is open."""
    start_anew()
    model, count = dense(), steps * BATCH - 3
    model.compile(adamw(), "mse")
    model.fit(rows(count), numbers(count, CLASSES), batch_size=BATCH, epochs=1, verbose=0, shuffle=False)
    return [*model.variables, *model.optimizer.variables]


def grown_batches(steps: int) -> Variables:
    """Half of the steps with small batches, then with large ones."""
    start_anew()
    model, half = dense(), max(1, steps // 2)
    model.compile(adamw(), "mse")
    for size in (BATCH, 4 * BATCH):
        x, y = rows(half * size), numbers(half * size, CLASSES)
        model.fit(x, y, batch_size=size, epochs=1, verbose=0, shuffle=False)
    return [*model.variables, *model.optimizer.variables]


def unknown_length(steps: int) -> Variables:
    """Two epochs of as many batches as come: Keras calls the step once more after the last."""
    start_anew()
    half = max(1, steps // 2)
    x, y = sentences(half * BATCH), labels_of(half * BATCH)
    signature = (tf.TensorSpec((BATCH, LENGTH), tf.int32), tf.TensorSpec((BATCH,), tf.int32))

    def batches() -> Any:
        for start in range(0, half * BATCH, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    model = encoder()
    model.compile(keras.optimizers.AdamW(1e-3, weight_decay=0.1), cross_entropy())
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=signature), epochs=2, verbose=0)
    return [*model.variables, *model.optimizer.variables]


CASES = {
    "encoder": Case(fitted(encoder, sentences, adamw)),
    "decoder": Case(fitted(decoder, sentences, adamw)),
    "vit": Case(fitted(vision_transformer, images, adamw)),
    "swin": Case(fitted(swin, images, adamw)),
    "residual": Case(fitted(residual, images, adam)),
    "grouped": Case(fitted(grouped, images, adam)),
    "connected": Case(fitted(connected, images, momentum)),
    "volumes": Case(fitted(volumes, lambda count: numbers(count, 16, 16, 16, 1), momentum)),
    "convnext": Case(fitted(convnext, images, momentum), steps=5),
    "lstm": Case(fitted(lambda: recurrent(layers.LSTM), series, adam)),
    "gru": Case(fitted(lambda: recurrent(layers.GRU), series, adam)),
    "bidirectional": Case(fitted(bidirectional, sentences, adam)),
    "adamw": Case(fitted(dense, rows, adamw)),
    "mixed_bfloat16": Case(functools.partial(half_precision, "mixed_bfloat16")),
    "mixed_float16": Case(functools.partial(half_precision, "mixed_float16")),
    "accumulation by Keras": Case(accumulation_by_keras, keras=("3",)),
    "steps_per_execution": Case(several_steps_a_call),
    "open batches": Case(open_batches),
    "grown batches": Case(grown_batches),
    "unknown length": Case(unknown_length),
}
