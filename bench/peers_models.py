"""Five models made of blocks, for ``bench/peers.py``: a block is what one wraps to have it computed again.

Each has what its kind is known for: dropout and attention, batch normalisation, concatenations, skips over
long distances, and parameters that take more memory than activations.
"""

from collections.abc import Callable
from typing import Any

from models import Build, Model

Block = Callable[[Any], Any]
Apply = Callable[[Block, Any], Any]
"""Puts a block behind a tensor."""


def _encoder(keras: Any, shape: tuple[int, ...], apply: Apply) -> Any:
    """Build a transformer encoder with gelu and dropout: six layers that normalise first."""
    layers = keras.layers

    def attention(x: Any) -> Any:
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, shape[-1] // 4, dropout=0.1)(y, y)
        return layers.Add()([x, layers.Dropout(0.1)(y)])

    def feed_forward(x: Any) -> Any:
        y = layers.Dense(4 * shape[-1], activation="gelu")(layers.LayerNormalization()(x))
        return layers.Add()([x, layers.Dropout(0.1)(layers.Dense(shape[-1])(y))])

    inputs = x = layers.Input(shape)
    for _ in range(6):
        x = apply(feed_forward, apply(attention, x))
    return _classifier(keras, inputs, layers.GlobalAveragePooling1D()(x))


def _resnet(keras: Any, shape: tuple[int, ...], apply: Apply) -> Any:
    """Build a residual network of twelve blocks of two convolutions with batch normalisation."""
    layers = keras.layers

    def block(x: Any) -> Any:
        y = x
        for _ in range(2):
            y = layers.Conv2D(x.shape[-1], 3, padding="same", use_bias=False)(y)
            y = layers.ReLU()(layers.BatchNormalization()(y))
        return layers.Add()([x, y])

    inputs = layers.Input(shape)
    x = layers.Conv2D(24, 3, padding="same", use_bias=False)(inputs)
    for _ in range(12):
        x = apply(block, x)
    return _classifier(keras, inputs, layers.GlobalAveragePooling2D()(x))


def _densenet(keras: Any, shape: tuple[int, ...], apply: Apply) -> Any:
    """Build a dense network: sixteen layers, each of which reads all before it."""
    layers = keras.layers

    def layer(x: Any) -> Any:
        y = layers.ReLU()(layers.BatchNormalization()(x))
        return layers.Concatenate()([x, layers.Conv2D(12, 3, padding="same", use_bias=False)(y)])

    inputs = layers.Input(shape)
    x = layers.Conv2D(24, 3, padding="same", use_bias=False)(inputs)
    for _ in range(16):
        x = apply(layer, x)
    return _classifier(keras, inputs, layers.GlobalAveragePooling2D()(x))


def _unet(keras: Any, shape: tuple[int, ...], apply: Apply) -> Any:
    """Build a U-Net of three levels, with two convolutions per level and no normalisation."""
    layers = keras.layers

    def double(filters: int) -> Block:
        def block(x: Any) -> Any:
            for _ in range(2):
                x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
            return x

        return block

    inputs = x = layers.Input(shape)
    skips = []
    for filters in (16, 32, 64):
        x = apply(double(filters), x)
        skips.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = apply(double(128), x)
    for filters, skip in zip((64, 32, 16), reversed(skips), strict=True):
        x = apply(double(filters), layers.Concatenate()([layers.UpSampling2D(2)(x), skip]))
    return _classifier(keras, inputs, layers.GlobalAveragePooling2D()(x))


def _wide(keras: Any, shape: tuple[int, ...], apply: Apply) -> Any:
    """Build a chain of eight wide dense layers, whose variables take more than their activations."""
    inputs = x = keras.layers.Input(shape)
    for _ in range(8):
        x = apply(keras.layers.Dense(shape[-1], activation="relu"), x)
    return _classifier(keras, inputs, x)


def _classifier(keras: Any, inputs: Any, features: Any) -> Any:
    return keras.Model(inputs, keras.layers.Dense(10)(features))


def _plain(make: Callable[[Any, tuple[int, ...], Apply], Any]) -> Build:
    return lambda keras, shape: make(keras, shape, lambda block, x: block(x))


def _by_hand(make: Callable[[Any, tuple[int, ...], Apply], Any]) -> Build:
    """Wrap each block in ``tf.recompute_grad``, as its documentation shows."""

    def build(keras: Any, shape: tuple[int, ...]) -> Any:
        import tensorflow as tf

        class Recomputed(keras.layers.Layer):  # type: ignore[misc]
            def __init__(self, block: Any) -> None:
                super().__init__()
                self.block = block

            def call(self, x: Any) -> Any:
                return tf.recompute_grad(lambda y: self.block(y, training=True))(x)

        def apply(block: Block, x: Any) -> Any:
            inputs = keras.layers.Input(x.shape[1:])
            return Recomputed(keras.Model(inputs, block(inputs)))(x)

        return make(keras, shape, apply)

    return build


def _zoo(wrap: Callable[[Callable[[Any, tuple[int, ...], Apply], Any]], Build]) -> dict[str, Model]:
    image, images = (32, 32, 3), "images of 32x32"
    return {
        "encoder": Model("sequences of 64", 120, None, lambda n: (n, 64, 128), wrap(_encoder)),
        "resnet": Model(images, 120, None, lambda n: (n, *image), wrap(_resnet)),
        "densenet": Model(images, 120, None, lambda n: (n, *image), wrap(_densenet)),
        "unet": Model(images, 120, None, lambda n: (n, *image), wrap(_unet)),
        "wide": Model("rows of 1,024", 160, None, lambda n: (n, 1024), wrap(_wide)),
    }


PEERS, PEERS_BY_HAND = _zoo(_plain), _zoo(_by_hand)
