"""The models of the Large Model Support benchmarks.

``MODELS`` has real layers and depth and small images, for the CPU device; ``FULL`` has images of real size,
for a GPU; ``TINY`` is there to try a benchmark's own code. A model grows in *units*; its memory grows with
the ``amount`` of images, pixels or voxels that so many units are, so that two limits compare as a ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[Any, tuple[int, ...]], Any]


@dataclass(frozen=True)
class Model:
    """A network and how its input grows."""

    unit: str
    limit_mb: int
    """Device memory for the benchmark, MiB."""
    target: float | None
    """The multiple to reach, if anybody has published one."""
    input_shape: Callable[[int], tuple[int, ...]]
    """Units to the shape of one batch."""
    build: Build
    """Keras and the shape of one example to a model that ends in logits."""
    amount: Callable[[int], int] = lambda units: units
    """Units to images, pixels or voxels."""


def _application(name: str, classes: int) -> Build:
    def build(keras: Any, shape: tuple[int, ...]) -> Any:
        maker = getattr(keras.applications, name)
        return maker(weights=None, input_shape=shape, classes=classes, classifier_activation=None)

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
    """Add a residual context module: two convolutions with dropout between them, and the input added."""
    y = keras.layers.Dropout(0.3, seed=1)(_conv(keras, x, filters, 3, dims=3))
    return keras.layers.Add()([x, _conv(keras, y, filters, 3, dims=3)])


def _unet3d(keras: Any, shape: tuple[int, ...], depth: int, pooled: bool) -> Any:
    """Build the residual 3D U-Net of Isensee et al. 2017, with context modules and deep supervision.

    With ``pooled`` it ends in one row of logits an image, else in logits for each voxel.
    """
    layers = keras.layers
    inputs = layers.Input(shape)
    x = _context(keras, _conv(keras, inputs, 16, 3, dims=3), 16)
    skips = []
    for level in range(1, depth):
        skips.append(x)
        x = _context(keras, _conv(keras, x, 16 << level, 3, strides=2, dims=3), 16 << level)
    heads = []
    for level, skip in reversed(list(enumerate(skips))):
        up = _conv(keras, layers.UpSampling3D(2)(x), 16 << level, 3, dims=3)
        x = _conv(keras, layers.Concatenate()([up, skip]), 16 << level, 3, dims=3)
        x = _conv(keras, x, 16 << level, 1, dims=3)
        if level < 3:
            heads.append(layers.Conv3D(4, 1)(x))
    total = heads[0]
    for head in heads[1:]:
        total = layers.Add()([layers.UpSampling3D(2)(total), head])
    return keras.Model(inputs, layers.GlobalAveragePooling3D()(total) if pooled else total)


def _unet3d_small(keras: Any, shape: tuple[int, ...]) -> Any:
    return _unet3d(keras, shape, depth=4, pooled=True)


def _unet3d_full(keras: Any, shape: tuple[int, ...]) -> Any:
    return _unet3d(keras, shape, depth=5, pooled=False)


def _unet3d_plain(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build the 3D U-Net of Çiçek et al. 2016 at half its width, with two convolutions per level."""
    layers = keras.layers
    inputs = x = layers.Input(shape)
    skips = []
    for filters in (16, 32, 64):
        x = _conv(keras, _conv(keras, x, filters, 3, dims=3), filters * 2, 3, dims=3)
        skips.append(x)
        x = layers.MaxPooling3D(2)(x)
    x = _conv(keras, _conv(keras, x, 128, 3, dims=3), 256, 3, dims=3)
    for filters, skip in zip((128, 64, 32), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.UpSampling3D(2)(x), skip])
        x = _conv(keras, _conv(keras, x, filters, 3, dims=3), filters, 3, dims=3)
    return keras.Model(inputs, layers.GlobalAveragePooling3D()(layers.Conv3D(10, 1)(x)))


GROWTH = 12
"""Channels that each layer of a dense block adds."""


def _densenet(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build a DenseNet-BC (Huang et al. 2017): three blocks of eight layers, each reads all before it."""
    layers = keras.layers

    def conv(x: Any, filters: int, size: int) -> Any:
        x = layers.ReLU()(layers.BatchNormalization()(x))
        return layers.Conv2D(filters, size, padding="same", use_bias=False)(x)

    inputs = layers.Input(shape)
    x = layers.Conv2D(2 * GROWTH, 3, padding="same", use_bias=False)(inputs)
    for block in range(3):
        if block:
            x = layers.AveragePooling2D(2)(conv(x, x.shape[-1] // 2, 1))
        for _ in range(8):
            x = layers.Concatenate()([x, conv(conv(x, 4 * GROWTH, 1), GROWTH, 3)])
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10)(x))


def _preactivation(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build a pre-activation ResNet (He et al. 2016) of 100 convolutions at one resolution."""
    layers = keras.layers
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs := layers.Input(shape))
    for _ in range(49):
        y = x
        for _ in range(2):
            y = layers.ReLU()(layers.BatchNormalization()(y))
            y = layers.Conv2D(16, 3, padding="same", use_bias=False)(y)
        x = layers.Add()([x, y])
    x = layers.Conv2D(16, 1, use_bias=False)(layers.ReLU()(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


TRANSFORMER_WIDTH = 128


def _transformer(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build an encoder of twelve layers with four heads, which normalises first."""
    layers = keras.layers
    x = layers.Dense(TRANSFORMER_WIDTH)(inputs := layers.Input(shape))
    for _ in range(12):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, TRANSFORMER_WIDTH // 4)(y, y)])
        y = layers.Dense(4 * TRANSFORMER_WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(TRANSFORMER_WIDTH)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def _convnext(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build a ConvNeXt (Liu et al. 2022) of a quarter of Tiny's width, on images of 64 pixels a side."""
    layers = keras.layers
    x = inputs = layers.Input(shape)
    for stage, blocks in enumerate((3, 3, 9, 3)):
        width, size = 24 << stage, 2 if stage else 4
        x = layers.LayerNormalization()(layers.Conv2D(width, size, strides=size)(x))
        for _ in range(blocks):
            y = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
            y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
            x = layers.Add()([x, y])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _chain(keras: Any, shape: tuple[int, ...]) -> Any:
    inputs = x = keras.layers.Input(shape)
    for _ in range(8):
        x = _conv(keras, x, 8, 3)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x)))


SLICES, COLUMNS = "slices of 8 voxels (32x32)", "columns of 16 pixels (4 images, 64 high)"
MODELS = {
    "resnet50": Model("images of 64x64", 400, 6.0, lambda n: (n, 64, 64, 3), _application("ResNet50", 10)),
    "resnet152": Model("images of 64x64", 600, 9.0, lambda n: (n, 64, 64, 3), _application("ResNet152", 10)),
    "googlenet": Model(COLUMNS, 150, 3.0, lambda n: (4, 64, 16 * n, 3), _googlenet),
    "densenet": Model("images of 32x32", 200, 5.0, lambda n: (n, 32, 32, 3), _densenet),
    "unet3d": Model(SLICES, 200, 6.0, lambda n: (1, 32, 32, 8 * n, 1), _unet3d_small),
    "unet3d-plain": Model(SLICES, 300, 4.0, lambda n: (1, 32, 32, 8 * n, 1), _unet3d_plain),
    "preactivation": Model("images of 32x32", 200, 24.0, lambda n: (n, 32, 32, 3), _preactivation),
    "transformer": Model("rows of 128 tokens", 200, 24.0, lambda n: (n, 128, 64), _transformer),
    "convnext": Model("images of 64x64", 200, 6.0, lambda n: (n, 64, 64, 3), _convnext),
}


def _square(n: int) -> tuple[int, ...]:
    return (1, 32 * n, 32 * n, 3)


def _pixels(n: int) -> int:
    return (32 * n) ** 2


VIT_WIDTH, VIT_HEADS, VIT_LAYERS, VIT_PATCH = 1024, 16, 24, 16


def _block(keras: Any, x: Any, width: int, heads: int, causal: bool) -> Any:
    """Add a layer of a transformer that normalises first."""
    layers = keras.layers
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=causal)
    x = layers.Add()([x, y])
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(y)])


def _vit_large(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build ViT-L/16 (Dosovitskiy et al. 2021) without class token and positions: the mean of all patches."""
    layers = keras.layers
    x = inputs = layers.Input(shape)
    x = layers.Conv2D(VIT_WIDTH, VIT_PATCH, strides=VIT_PATCH)(x)
    x = layers.Reshape((-1, VIT_WIDTH))(x)
    for _ in range(VIT_LAYERS):
        x = _block(keras, x, VIT_WIDTH, VIT_HEADS, causal=False)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(1000)(x))


GPT2_WIDTH, GPT2_HEADS, GPT2_LAYERS, GPT2_TOKENS = 1024, 16, 24, 50257


def _gpt2_medium(keras: Any, shape: tuple[int, ...]) -> Any:
    """Build GPT-2 medium (Radford et al. 2019) without positions, its output layer apart from its embedding.

    The inputs, of 0 to 1, stand for the tokens.
    """
    layers = keras.layers
    x = inputs = layers.Input(shape)
    x = layers.Embedding(GPT2_TOKENS, GPT2_WIDTH)(layers.Rescaling(GPT2_TOKENS - 1.0)(x))
    for _ in range(GPT2_LAYERS):
        x = _block(keras, x, GPT2_WIDTH, GPT2_HEADS, causal=True)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(GPT2_TOKENS, use_bias=False)(x))


FULL_LIMIT_MB, LARGE_LIMIT_MB = 8192, 16384
SQUARE, CUBE = "x 32 pixels, square", "x 16 voxels, cubed"
FULL = {
    "resnet50": Model(
        "images of 224x224", FULL_LIMIT_MB, 4.9, lambda n: (n, 224, 224, 3), _application("ResNet50", 1000)
    ),
    "resnet152": Model(
        "images of 224x224", FULL_LIMIT_MB, 4.6, lambda n: (n, 224, 224, 3), _application("ResNet152", 1000)
    ),
    "inceptionv3": Model(
        "images of 299x299",
        FULL_LIMIT_MB,
        None,
        lambda n: (n, 299, 299, 3),
        _application("InceptionV3", 1000),
    ),
    "googlenet-size": Model(SQUARE, FULL_LIMIT_MB, 2.5, _square, _googlenet, _pixels),
    "resnet50-size": Model(SQUARE, FULL_LIMIT_MB, 10.0, _square, _application("ResNet50", 1000), _pixels),
    "resnet152-size": Model(SQUARE, FULL_LIMIT_MB, None, _square, _application("ResNet152", 1000), _pixels),
    "unet3d-size": Model(
        CUBE,
        FULL_LIMIT_MB,
        5.6,
        lambda n: (1, 16 * n, 16 * n, 16 * n, 4),
        _unet3d_full,
        lambda n: (16 * n) ** 3,
    ),
    "vit-large": Model("images of 224x224", LARGE_LIMIT_MB, None, lambda n: (n, 224, 224, 3), _vit_large),
    "gpt2-medium": Model("rows of 1,024 tokens", LARGE_LIMIT_MB, None, lambda n: (n, 1024), _gpt2_medium),
}
"""Targets are the multiples that IBM published; no figure is known for those without one."""

TINY = {  # no figures of anybody
    "tiny": Model("images of 32x32", 32, 1.5, lambda n: (n, 32, 32, 3), _chain),
}

ZOOS = {"small": MODELS, "full": FULL, "tiny": TINY}
