"""Training steps of well-known networks as graphs of the engine, at full size, without TensorFlow.

Each layer adds its forward ops at once and remembers its backward ops, which :meth:`Net.train` then adds in
reverse, as a gradient tape does. Bytes are fp32; arithmetic is 2 operations a multiply-add.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from lms.ir.graph import Graph, GraphBuilder

FP32 = 4
WORKSPACE_BYTES = 64 * 2**20
"""Scratch that a convolution library takes for a large kernel."""


@dataclass
class Value:
    """A tensor of the forward pass and the gradients that have arrived for it."""

    tensor: int
    shape: tuple[int, ...]
    gradients: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Exact size."""
        return prod(self.shape) * FP32


class Net:
    """A network under construction."""

    def __init__(self, batch: int, *image: int) -> None:
        self.build = GraphBuilder()
        self._backward: list[Callable[[], None]] = []
        self._count = 0
        shape = (batch, *image)
        (tensor,) = self.build.add("images", "Placeholder", outputs=[prod(shape) * FP32])
        self.input = Value(tensor, shape)

    def conv(self, x: Value, filters: int, kernel: int, stride: int = 1) -> Value:
        """Convolve a value without bias and with padding, in as many dimensions as it has."""
        shape = (x.shape[0], *(-(-size // stride) for size in x.shape[1:-1]), filters)
        weights = prod([kernel] * (len(shape) - 2)) * x.shape[-1] * filters
        flops = 2.0 * prod(shape[:-1]) * weights
        return self._linear(f"Conv{len(shape) - 2}D", x, shape, weights, flops)

    def up_conv(self, x: Value, filters: int, stride: int = 2) -> Value:
        """Convolve a value transposed; the kernel is as large as the stride."""
        shape = (x.shape[0], *(size * stride for size in x.shape[1:-1]), filters)
        weights = prod([stride] * (len(shape) - 2)) * x.shape[-1] * filters
        return self._linear(
            f"Conv{len(shape) - 2}DBackpropInput", x, shape, weights, 2.0 * prod(x.shape[:-1]) * weights
        )

    def dense(self, x: Value, units: int) -> Value:
        """Multiply the last dimension of a value by a matrix."""
        shape = (*x.shape[:-1], units)
        weights = x.shape[-1] * units
        return self._linear("MatMul", x, shape, weights, 2.0 * prod(shape[:-1]) * weights)

    def matmul(self, x: Value, y: Value, columns: int) -> Value:
        """Multiply two values batch by batch; ``columns`` is the last dimension of the product."""
        name = self._name("matmul")
        shape = (*x.shape[:-1], columns)
        flops = 2.0 * prod(shape) * x.shape[-1]
        z = self._value(name, "BatchMatMulV2", [x.tensor, y.tensor], shape, flops=flops)

        def backward() -> None:
            gradient = self._sum(z)
            self._gradient(x, name + "_x", "BatchMatMulV2", [gradient, y.tensor], flops=flops)
            self._gradient(y, name + "_y", "BatchMatMulV2", [x.tensor, gradient], flops=flops)

        self._backward.append(backward)
        return z

    def heads(self, x: Value, shape: tuple[int, ...]) -> Value:
        """Move the heads of a value to another dimension; the gradient moves them back."""
        name = self._name("transpose")
        y = self._value(name, "Transpose", [x.tensor], shape)
        self._backward.append(lambda: self._gradient(x, name, "Transpose", [self._sum(y)]))
        return y

    def softmax(self, x: Value) -> Value:
        """Normalise the last dimension; the gradient, told as one op, reads the output."""
        name = self._name("softmax")
        y = self._value(name, "Softmax", [x.tensor], x.shape)
        self._backward.append(lambda: self._gradient(x, name, "Mul", [self._sum(y), y.tensor]))
        return y

    def gelu(self, x: Value) -> Value:
        """Apply a smooth activation; its gradient, told as one op, reads the input."""
        name = self._name("gelu")
        y = self._value(name, "Erf", [x.tensor], x.shape, flops=10.0 * prod(x.shape))
        self._backward.append(
            lambda: self._gradient(x, name, "Mul", [self._sum(y), x.tensor], flops=20.0 * prod(x.shape))
        )
        return y

    def norm(self, x: Value) -> Value:
        """Batch normalisation; its gradient reads the input again."""
        name = self._name("norm")
        y = self._value(name, "FusedBatchNormV3", [x.tensor], x.shape, flops=8.0 * prod(x.shape))

        def backward() -> None:
            self._gradient(
                x, name, "FusedBatchNormGradV3", [self._sum(y), x.tensor], flops=12.0 * prod(x.shape)
            )

        self._backward.append(backward)
        return y

    def relu(self, x: Value) -> Value:
        """Rectify a value, in place where it can be; the gradient reads the output."""
        name = self._name("relu")
        y = self._value(name, "Relu", [x.tensor], x.shape)

        def backward() -> None:
            self._gradient(x, name, "ReluGrad", [self._sum(y), y.tensor])

        self._backward.append(backward)
        return y

    def add(self, x: Value, y: Value) -> Value:
        """Add two values; the gradient passes through."""
        z = self._value(self._name("add"), "AddV2", [x.tensor, y.tensor], x.shape)

        def backward() -> None:
            gradient = self._sum(z)
            x.gradients.append(gradient)
            y.gradients.append(gradient)

        self._backward.append(backward)
        return z

    def concat(self, x: Value, y: Value) -> Value:
        """Join the channels of two values; the gradient is cut into two slices."""
        name = self._name("concat")
        z = self._value(name, "ConcatV2", [x.tensor, y.tensor], (*x.shape[:-1], x.shape[-1] + y.shape[-1]))

        def backward() -> None:
            gradient = self._sum(z)
            self._gradient(x, name + "_x", "Slice", [gradient])
            self._gradient(y, name + "_y", "Slice", [gradient])

        self._backward.append(backward)
        return z

    def pool(self, x: Value, stride: int = 2) -> Value:
        """Max pooling; its gradient reads input and output."""
        name = self._name("pool")
        shape = (x.shape[0], *(-(-size // stride) for size in x.shape[1:-1]), x.shape[-1])
        y = self._value(name, "MaxPool", [x.tensor], shape)

        def backward() -> None:
            self._gradient(x, name, "MaxPoolGrad", [x.tensor, y.tensor, self._sum(y)])

        self._backward.append(backward)
        return y

    def mean(self, x: Value) -> Value:
        """Take the mean over all positions."""
        name = self._name("mean")
        y = self._value(name, "Mean", [x.tensor], (x.shape[0], x.shape[-1]))
        self._backward.append(lambda: self._gradient(x, name, "Tile", [self._sum(y)]))
        return y

    def train(self, y: Value) -> Graph:
        """Close the net with a loss and add the backward pass."""
        name = self._name("loss")
        loss, gradient = self.build.add(
            name, "SoftmaxCrossEntropyWithLogits", inputs=[y.tensor], outputs=[y.shape[0] * FP32, y.nbytes]
        )
        y.gradients.append(gradient)
        for backward in reversed(self._backward):
            backward()
        return self.build.build(kept=[loss])

    def _linear(self, kind: str, x: Value, shape: tuple[int, ...], weights: int, flops: float) -> Value:
        name = self._name(kind.lower())
        scratch = min(WORKSPACE_BYTES, prod(shape) * FP32)
        (kernel,) = self.build.add(name + "/kernel", "ReadVariableOp", outputs=[weights * FP32])
        y = self._value(name, kind, [x.tensor, kernel], shape, flops=flops, scratch=scratch)

        def backward() -> None:
            gradient = self._sum(y)
            (update,) = self.build.add(
                f"gradients/{name}/kernel",
                kind + "BackpropFilter",
                inputs=[x.tensor, gradient],
                outputs=[weights * FP32],
                workspace_bytes=scratch,
                flops=flops,
            )
            self.build.add(f"update/{name}", "ResourceApplyMomentum", inputs=[update])
            if x is not self.input:
                self._gradient(
                    x, name, kind + "BackpropInput", [kernel, gradient], flops=flops, scratch=scratch
                )

        self._backward.append(backward)
        return y

    def _value(
        self,
        name: str,
        op_type: str,
        inputs: list[int],
        shape: tuple[int, ...],
        *,
        flops: float = 0.0,
        scratch: int = 0,
    ) -> Value:
        (tensor,) = self.build.add(
            name, op_type, inputs=inputs, outputs=[prod(shape) * FP32], flops=flops, workspace_bytes=scratch
        )
        return Value(tensor, shape)

    def _gradient(
        self, x: Value, name: str, op_type: str, inputs: list[int], *, flops: float = 0.0, scratch: int = 0
    ) -> None:
        if x is not self.input:
            made = self._value(
                f"gradients/{name}/{op_type}", op_type, inputs, x.shape, flops=flops, scratch=scratch
            )
            x.gradients.append(made.tensor)

    def _sum(self, y: Value) -> int:
        """Sum the gradients of a value that have arrived."""
        if len(y.gradients) > 1:
            name = self._name("gradients/addn")
            y.gradients = [self._value(name, "AddN", y.gradients, y.shape).tensor]
        return y.gradients[0]

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"


def resnet(blocks: tuple[int, ...], batch: int, size: int = 224) -> Graph:
    """Build a ResNet with bottlenecks: ``blocks`` (3, 4, 6, 3) is ResNet-50, (3, 8, 36, 3) is ResNet-152."""
    net = Net(batch, size, size, 3)
    x = net.pool(net.relu(net.norm(net.conv(net.input, 64, 7, 2))))
    for stage, count in enumerate(blocks):
        for block in range(count):
            x = _bottleneck(net, x, 64 * 2**stage, 2 if stage and not block else 1, block == 0)
    return net.train(net.dense(net.mean(x), 1000))


def _bottleneck(net: Net, x: Value, filters: int, stride: int, project: bool) -> Value:
    y = net.relu(net.norm(net.conv(x, filters, 1)))
    y = net.relu(net.norm(net.conv(y, filters, 3, stride)))
    y = net.norm(net.conv(y, 4 * filters, 1))
    shortcut = net.norm(net.conv(x, 4 * filters, 1, stride)) if project else x
    return net.relu(net.add(y, shortcut))


def plain_chain(layers: int, batch: int, size: int = 64, filters: int = 64) -> Graph:
    """Build a chain of convolutions of one size, each with an activation whose gradient reads its input."""
    net = Net(batch, size, size, filters)
    x = net.input
    for _ in range(layers):
        x = net.gelu(net.conv(x, filters, 3))
    return net.train(net.dense(net.mean(x), 10))


def encoder(layers: int, batch: int, words: int = 512, width: int = 768, heads: int = 12) -> Graph:
    """Build a stack of transformer encoders with norms before attention and MLP; 12 layers are BERT-base."""
    net = Net(batch, words, width)
    x = net.dense(net.input, width)
    split, turned = (batch, heads, words, width // heads), (batch, heads, width // heads, words)
    for _ in range(layers):
        y = net.norm(x)
        query, key, value = (net.heads(net.dense(y, width), shape) for shape in (split, turned, split))
        weights = net.softmax(net.matmul(query, key, words))
        mixed = net.heads(net.matmul(weights, value, width // heads), (batch, words, width))
        x = net.add(net.dense(mixed, width), x)
        x = net.add(net.dense(net.gelu(net.dense(net.norm(x), 4 * width)), width), x)
    return net.train(net.dense(net.mean(x), 1000))


def unet3d(batch: int, size: int, filters: int = 32, depth: int = 4) -> Graph:
    """Build a 3D U-Net on cubes with four channels, two convolutions per level."""
    net = Net(batch, size, size, size, 4)
    x, skips = net.input, []
    for level in range(depth):
        x = _double(net, x, filters * 2**level)
        skips.append(x)
        x = net.pool(x)
    x = _double(net, x, filters * 2**depth)
    for level in reversed(range(depth)):
        x = net.concat(net.up_conv(x, filters * 2**level), skips[level])
        x = _double(net, x, filters * 2**level)
    return net.train(net.conv(x, 3, 1))


def _double(net: Net, x: Value, filters: int) -> Value:
    for _ in range(2):
        x = net.relu(net.norm(net.conv(x, filters, 3)))
    return x


def chain_of_blocks(blocks: int, nbytes: int = 2**20) -> Graph:
    """Build a deep residual net of small tensors, for tests of scale: about 25 ops per block."""
    net = Net(1, nbytes // FP32 // 16, 16)
    x = net.relu(net.conv(net.input, 16, 1))
    for _ in range(blocks):
        x = net.add(net.relu(net.norm(net.conv(net.relu(net.norm(net.conv(x, 16, 1))), 16, 1))), x)
    return net.train(x)
