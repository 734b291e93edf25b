"""The filters of a configuration: what they keep on the device, and that every road leads to them."""

from typing import Any

import pytest
from child_job import run_job

from lms.config import LMSConfig
from lms.ir.graph import Graph, GraphBuilder
from lms.ir.name_filters import FIRST_GENERATION, SECOND_GENERATION, select


def chain(*names: str) -> Graph:
    """Three ops in a row, each of another type; tensor i is made by op i."""
    build, tensor = GraphBuilder(), ()
    for name, kind in zip(names or ("a/x", "b/y", "b2/z"), ("Conv2D", "Relu", "MaxPool"), strict=True):
        tensor = build.add(name, kind, inputs=tensor, outputs=[1024])
    return build.build()


def staying(graph: Graph, **filters: Any) -> list[int]:
    """The tensors that these filters keep on the device."""
    chosen = select(graph, LMSConfig.from_mapping(filters))
    assert chosen.unmatched == ()
    return [tensor.id for tensor in chosen.graph.tensors if tensor.forbidden]


@pytest.mark.parametrize(
    ("filters", "stay"),
    [
        ({}, []),
        ({"excl_scopes": {"b"}}, [1]),
        ({"excl_scopes": {"b/"}}, [1]),
        ({"excl_output_by_scopes": {"b"}}, [1, 2]),
        ({"excl_output_by_scopes": {"b/"}}, [1]),
        ({"excl_types": {"Conv2D"}}, [0]),
        ({"excl_output_by_types": {"Conv2D"}}, [0]),
        ({"excl_input_by_scopes": {"b/"}}, [0]),
        ({"excl_input_by_scopes": {"b"}}, [0, 1]),
        ({"excl_input_by_types": {"MaxPool"}}, [1]),
        ({"incl_scopes": {"b"}}, [0, 2]),
        ({"incl_types": {"Relu"}}, [0, 2]),
        ({"incl_output_by_scopes": {"a"}}, [1, 2]),
        ({"incl_output_by_types": {"Relu"}}, [0, 2]),
        ({"incl_scopes": {"a"}, "incl_output_by_types": {"Relu"}}, [2]),
        ({"incl_input_by_scopes": {"b2"}}, [0, 2]),
        ({"incl_input_by_types": {"Relu"}, "incl_output_by_types": {"MaxPool"}}, [0, 1, 2]),
        ({"incl_input_by_types": {"Relu"}, "incl_types": {"Conv2D"}}, [1, 2]),
        ({"incl_output_by_scopes": {"a", "b"}, "excl_types": {"Relu"}}, [1]),
        ({"starting_scope": "b/"}, [0]),
        ({"starting_scope": "b"}, [0]),
        ({"starting_op_names": {"b2/z"}}, [0, 1]),
    ],
)
def test_what_filters_keep(filters: dict[str, Any], stay: list[int]) -> None:
    assert staying(chain(), **filters) == stay


@pytest.mark.parametrize(
    ("filters", "stay"),
    [
        ({"excl_scopes": {"conv1"}}, [0]),
        ({"excl_output_by_scopes": {"conv1"}}, [0, 1]),
        ({"excl_output_by_scopes": {"conv1/"}}, [0]),
        ({"starting_scope": "conv10"}, [0]),
    ],
)
def test_a_layers_scope_is_found_below_its_models(filters: dict[str, Any], stay: list[int]) -> None:
    layers = ("functional_1/conv1_1/convolution", "functional_1/conv10_1/Relu")
    assert staying(chain(*layers, "gradient_tape/functional_1/conv1_1/grad"), **filters) == stay


def test_aliases_follow_their_buffer() -> None:
    build = GraphBuilder()
    (x,) = build.add("a/x", "Conv2D", outputs=[1024])
    (alias,) = build.add("b/alias", "Identity", inputs=[x], outputs=[1024])
    build.add("c/user", "MaxPool", inputs=[alias], outputs=[8])
    chosen = select(build.build(), LMSConfig(excl_input_by_scopes=("c",))).graph
    assert [tensor.forbidden is not None for tensor in chosen.tensors] == [True, True, False]


def test_a_reason_names_its_filter() -> None:
    chosen = select(chain(), LMSConfig(excl_types=("Conv2D",), incl_input_by_types=("MaxPool",))).graph
    assert [tensor.forbidden for tensor in chosen.tensors] == [
        "excluded by excl_types",
        None,
        "not included by incl_input_by_types",
    ]


def test_optimizer_scopes_are_the_backward_pass() -> None:
    assert select(chain(), LMSConfig(optimizer_scopes=("b2/",))).graph.backward == {2}
    assert select(chain(), LMSConfig(optimizer_scopes=("b", "sgd"))).graph.backward == {1, 2}


@pytest.mark.parametrize("name", [*FIRST_GENERATION, *SECOND_GENERATION])
def test_what_matches_nothing_is_told(name: str) -> None:
    value: Any = "b3" if name == "starting_scope" else ("b3",)
    chosen = select(chain(), LMSConfig(**{name: value}))
    (missed,) = chosen.unmatched
    assert (missed.filter, missed.item) == (name, "b3")
    assert missed.text.startswith(f"{name}: 'b3' matches nothing in the graph; needed one of its ")
    nothing = name.startswith(("incl", "starting"))
    assert [tensor.forbidden is not None for tensor in chosen.graph.tensors] == [nothing] * 3


@pytest.mark.tensorflow
def test_every_road_leads_to_the_same_swaps() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("selection_job.py")
    assert seen["plain"]["tensors"] > seen["enable"]["tensors"] > 0
    assert seen["enable"] == seen["variable"] == seen["class"]
    assert seen["enable"]["stay"] == {"excluded by excl_types": 6}


@pytest.mark.tensorflow
def test_a_name_that_matches_nothing_is_one_warning_in_the_process() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("selection_job.py", LMS_EXCL_SCOPES="nowhere")
    (said,) = seen["warnings"]
    assert said.startswith("step512: excl_scopes: 'nowhere' matches nothing in the graph; needed one of ")
    assert seen["variable"]["tensors"] == seen["enable"]["tensors"]
    (said,) = seen["warnings of the class"]
    assert said.startswith("excl_scopes: 'nowhere' matches nothing"), (
        "the job's name, and no error of the script's"
    )
    assert seen["class"]["tensors"] == seen["enable"]["tensors"]
