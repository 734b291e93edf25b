"""What convolutions that XLA compiles need beside what they read and make."""

import pytest

tf = pytest.importorskip("tensorflow")

from lms.compiled import is_compiled  # noqa: E402
from lms.tf_graph import read_graph  # noqa: E402

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(("groups", "scratch"), [(12, 2 * 5 * 5 * 12 * 12 * 4), (3, 0)])
def test_only_the_filter_of_a_depthwise_convolution_is_held_as_one_over_all_channels(
    groups: int, scratch: int
) -> None:
    @tf.function(jit_compile=True)
    def layer(images, filters):
        return tf.nn.convolution(images, filters, 1, "SAME")

    @tf.function
    def gradients(images, filters):
        with tf.GradientTape() as tape:
            tape.watch([images, filters])
            loss = tf.reduce_sum(layer(images, filters) ** 2)
        return tape.gradient(loss, [images, filters])

    shapes = (2, 8, 8, 12), (5, 5, 12 // groups, 12)
    graph = gradients.get_concrete_function(*map(tf.TensorSpec, shapes)).graph
    view = read_graph(graph, "CPU")
    compiled = [op.id for op, made in zip(view.graph.ops, view.ops, strict=True) if is_compiled(made)]
    assert [view.graph.ops[op].workspace_bytes for op in compiled] == [0, scratch]
