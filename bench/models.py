"""The models of the Large Model Support benchmark: small images, real layers and depth.

Memory grows linearly with the *units* of a model, so that two limits compare as a plain ratio: images for
the residual networks, columns of 16 pixels for the inception network, slices of 8 voxels for the 3D U-Net.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """A network and how its input grows."""

    unit: str
    limit_mb: int
    """Device memory for the benchmark, MiB."""
    target: float
    """The multiple to reach."""
    input_shape: Callable[[int], tuple[int, ...]]
    """Units to the shape of one batch."""
    build: Callable[[Any, tuple[int, ...]], Any]
    """Keras and the shape of one example to a model that ends in logits."""


def _resnet(name: str) -> Callable[[Any, tuple[int, ...]], Any]:
    def build(keras: Any, shape: tuple[int, ...]) -> Any:
        maker = getattr(keras.applications, name)
        return maker(weights=None, input_shape=shape, classes=10, classifier_activation=None)

    return build


def _conv(keras: Any, x: Any, filters: int, size: int, strides: int = 1, dims: int = 2) -> Any:
    layers = keras.layers
    conv = layers.Conv2D if dims == 2 else layers.Conv3D
    x = conv(filters, size, strides=strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def _inception(keras: Any, x: Any, widths: tuple[int, int, int, int, int, int]) -> Any:
    one, reduce3, three, reduce5, five, pool = widths
    layers = keras.layers
    return layers.Concatenate()(
        [
            _conv(keras, x, one, 1),
            _conv(keras, _conv(keras, x, reduce3, 1), three, 3),
            _conv(keras, _conv(keras, x, reduce5, 1), five, 5),
            _conv(keras, layers.MaxPooling2D(3, strides=1, padding="same")(x), pool, 1),
        ]
    )


INCEPTION_STAGES = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Widths of the nine inception blocks of GoogLeNet (Szegedy et al. 2015, table 1)."""


def _googlenet(keras: Any, shape: tuple[int, ...]) -> Any:
    layers = keras.layers
    inputs = layers.Input(shape)
    x = _conv(keras, inputs, 64, 7, strides=2)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = _conv(keras, _conv(keras, x, 64, 1), 192, 3)
    for stage in INCEPTION_STAGES:
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        for widths in stage:
            x = _inception(keras, x, widths)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def _context(keras: Any, x: Any, filters: int) -> Any:
    """A residual context module: two convolutions with dropout between them, and the input added."""
    y = keras.layers.Dropout(0.3, seed=1)(_conv(keras, x, filters, 3, dims=3))
    return keras.layers.Add()([x, _conv(keras, y, filters, 3, dims=3)])


def _unet3d(keras: Any, shape: tuple[int, ...]) -> Any:
    """The residual 3D U-Net of Isensee et al. 2017, with context modules and deep supervision."""
    layers = keras.layers
    inputs = layers.Input(shape)
    x = _context(keras, _conv(keras, inputs, 16, 3, dims=3), 16)
    skips = []
    for filters in (32, 64, 128):
        skips.append(x)
        x = _context(keras, _conv(keras, x, filters, 3, strides=2, dims=3), filters)
    heads = []
    for filters, skip in zip((64, 32, 16), reversed(skips), strict=True):
        up = _conv(keras, layers.UpSampling3D(2)(x), filters, 3, dims=3)
        x = _conv(keras, layers.Concatenate()([up, skip]), filters, 3, dims=3)
        x = _conv(keras, x, filters, 1, dims=3)
        heads.append(layers.Conv3D(4, 1)(x))
    total = heads[0]
    for head in heads[1:]:
        total = layers.Add()([layers.UpSampling3D(2)(total), head])
    return keras.Model(inputs, layers.GlobalAveragePooling3D()(total))


MODELS = {
    "resnet50": Model("images of 64x64", 400, 6.0, lambda n: (n, 64, 64, 3), _resnet("ResNet50")),
    "resnet152": Model("images of 64x64", 600, 9.0, lambda n: (n, 64, 64, 3), _resnet("ResNet152")),
    "googlenet": Model(
        "columns of 16 pixels (4 images, 64 high)", 150, 3.0, lambda n: (4, 64, 16 * n, 3), _googlenet
    ),
    "unet3d": Model("slices of 8 voxels (32x32)", 200, 6.0, lambda n: (1, 32, 32, 8 * n, 1), _unet3d),
}
