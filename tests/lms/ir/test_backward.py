"""Steps whose ops have the names that TensorFlow gives them."""

from lms.ir.backward import backward_ops
from lms.ir.graph import GraphBuilder

CONV = "model/conv/convolution"


def names_of(builder):
    graph = builder.build()
    return {graph.ops[op].name for op in backward_ops(graph)}


def test_gradients_and_what_depends_on_them_are_the_backward_pass():
    step = GraphBuilder()
    (x,) = step.add("x", "_Arg", outputs=[1024])
    (y,) = step.add("model/Relu", "Relu", inputs=[x], outputs=[1024])
    (dx,) = step.add("gradient_tape/model/ReluGrad", "ReluGrad", inputs=[y, x], outputs=[1024])
    (clipped,) = step.add("clip_by_norm/mul", "Mul", inputs=[dx], outputs=[1024])
    step.add("sgd/AssignSubVariableOp", "AssignSubVariableOp", inputs=[clipped])
    assert names_of(step) == {"gradient_tape/model/ReluGrad", "clip_by_norm/mul", "sgd/AssignSubVariableOp"}


def test_an_op_of_both_passes_with_the_name_of_a_gradient_belongs_to_the_forward_pass():
    step = GraphBuilder()
    (x,) = step.add("x", "_Arg", outputs=[1024])
    # TensorFlow transposes the image for the convolution and for its gradient, and keeps one of the two.
    turned_name = f"gradient_tape/{CONV}/Conv2DBackpropFilter-0-TransposeNHWCToNCHW-LayoutOptimizer"
    (turned,) = step.add(turned_name, "Transpose", inputs=[x], outputs=[1024])
    (y,) = step.add(CONV, "Conv2D", inputs=[turned], outputs=[1024])
    (scaled,) = step.add("gradient_tape/model/loss/mul", "Mul", inputs=[y], outputs=[1024])
    gradient = f"gradient_tape/{CONV}/Conv2DBackpropFilter"
    step.add(gradient, "Conv2DBackpropFilter", inputs=[turned, scaled], outputs=[512])
    assert names_of(step) == {"gradient_tape/model/loss/mul", gradient}


def test_a_function_that_was_inlined_and_a_session_have_prefixes_and_suffixes():
    for begin, end in (
        ("StatefulPartitionedCall/gradient_tape/", ""),
        ("gradients/", "_grad"),
        ("gradients_1/", "_grad_2"),
    ):
        outer = begin.partition("gradient")[0]
        step = GraphBuilder()
        (x,) = step.add("x", "_Arg", outputs=[1024])
        (shared,) = step.add(f"{begin}{CONV}{end}/Transpose", "Transpose", inputs=[x], outputs=[1024])
        (y,) = step.add(outer + CONV, "Conv2D", inputs=[shared], outputs=[1024])
        step.add(f"{begin}{CONV}{end}/Mul", "Mul", inputs=[y], outputs=[1024])
        assert names_of(step) == {f"{begin}{CONV}{end}/Mul"}


def test_a_gradient_of_a_users_own_behind_other_gradients_stays_in_the_backward_pass():
    step = GraphBuilder()
    (x,) = step.add("x", "_Arg", outputs=[1024])
    (y,) = step.add("model/Relu", "Relu", inputs=[x], outputs=[1024])
    (dy,) = step.add("gradient_tape/model/ReluGrad", "ReluGrad", inputs=[y], outputs=[1024])
    (own,) = step.add("model/mul", "Mul", inputs=[dy], outputs=[1024])
    step.add("gradient_tape/model/Relu_1/mul", "Mul", inputs=[own], outputs=[1024])
    assert names_of(step) == {"gradient_tape/model/ReluGrad", "model/mul", "gradient_tape/model/Relu_1/mul"}
