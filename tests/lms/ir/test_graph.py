import pytest

from lms.ir.graph import GraphBuilder, GraphError, Use


def test_op_types_say_what_shares_a_buffer_what_is_in_place_and_what_lies_outside():
    build = GraphBuilder()
    (x,) = build.add("x", "Placeholder", outputs=[1024])
    (y,) = build.add("y", "Conv2D", inputs=[x], outputs=[1024])
    (z,) = build.add("z", "Reshape", inputs=[y], outputs=[1024])
    (w,) = build.add("w", "Identity", inputs=[z], outputs=[1024])
    (r,) = build.add("r", "Relu", inputs=[w], outputs=[1024])
    a, b = build.add("n", "IdentityN", inputs=[r, y], outputs=[1024, 1024])
    graph = build.build(kept=[r])

    assert graph.roots == (x, y, y, y, r, r, y)
    assert [tensor.outside for tensor in graph.tensors] == [True] + [False] * 6
    assert graph.ops[4].in_place == (0,) and graph.ops[1].in_place == ()
    assert graph.uses[y] == (Use(1 + 1, 0), Use(5, 1))
    assert graph.successors[1] == (2, 5) and graph.predecessors[5] == (1, 4)
    assert graph.tensor_name(b) == "n:1" and a != b


def test_given_facts_go_before_those_of_the_type():
    build = GraphBuilder()
    (x,) = build.add("x", "Identity", outputs=[8])
    (y,) = build.add("y", "Reshape", inputs=[x], outputs=[8], aliases=[None], forbidden="mine")
    (z,) = build.add("z", "Custom", inputs=[y], outputs=[8], in_place=[0], outside=True, chainable=False)
    graph = build.build()
    assert graph.roots == (x, y, z)
    assert graph.tensors[y].forbidden == "mine"
    assert graph.ops[2].in_place == (0,) and not graph.ops[2].chainable and graph.tensors[z].outside


def test_collectives_are_not_chainable_and_cheap_producers_are_forbidden():
    build = GraphBuilder()
    build.add("h", "HorovodAllreduce", outputs=[8])
    (zeros,) = build.add("z", "ZerosLike", outputs=[8])
    graph = build.build()
    assert not graph.ops[0].chainable
    assert graph.tensors[zeros].forbidden == "cheaper to make than to move"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"inputs": [7]}, "no earlier op makes"),
        ({"inputs": [-1]}, "no earlier op makes"),
        ({"controls": [1]}, "not earlier"),
        ({"inputs": [0], "outputs": [8], "aliases": [1]}, "shares input 1"),
    ],
)
def test_contradictions_are_refused(wrong, text):
    build = GraphBuilder()
    build.add("x", "Op", outputs=[8])
    with pytest.raises(GraphError, match=text):
        build.add("y", "Op", **wrong)


def test_kept_tensors_must_exist():
    with pytest.raises(GraphError, match="kept"):
        GraphBuilder().build(kept=[0])


def test_a_default_that_a_session_may_replace_is_no_alias():
    build = GraphBuilder()
    (default,) = build.add("default", "Relu", outputs=[8])
    (fed,) = build.add("fed", "PlaceholderWithDefault", inputs=[default], outputs=[8])
    assert build.build().roots[fed] == fed
