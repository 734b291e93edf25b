"""Steps for a GPU, traced here and optimized by Grappler beside a virtual GPU."""

from functools import cache
from typing import Any

import pytest
from child_job import run_job

pytestmark = pytest.mark.tensorflow

IMAGE_BYTES = 16 * 32 * 32 * 8 * 4
"""Of one activation of the step in gpu_job.py, and of its one large constant."""


@cache
def _seen(case: str) -> dict[str, Any]:
    pytest.importorskip("tensorflow")
    seen = run_job("gpu_job.py", case)
    assert seen["outs"] == seen["tensors"] > 0, "every swap is still there behind Grappler"
    assert seen["ins"] >= seen["outs"] and seen["on_gpu"]
    assert seen["after_turned"] == seen["plain_turned"], "after lms.disable() the options are those of before"
    return seen


def test_images_stay_as_they_are_where_the_kernels_take_them() -> None:
    seen = _seen("hopper")
    assert seen["plain_turned"] > 0, "TensorFlow turns them by itself"
    assert seen["turned"] == 0
    assert seen["reserve"] < 2 * IMAGE_BYTES


@pytest.mark.parametrize("case", ["volta", "fused", "asked"])
def test_room_is_kept_for_an_image_that_is_turned_on_its_way(case: str) -> None:
    seen = _seen(case)
    assert seen["turned"] > seen["plain_turned"]
    assert 2 * IMAGE_BYTES <= seen["reserve"] < 3 * IMAGE_BYTES


def test_half_precision_is_left_to_tensorflow() -> None:
    seen = _seen("half")
    assert seen["turned"] == seen["plain_turned"] == 0


def test_a_normalisation_that_turns_its_images_itself_is_planned_with_its_copies() -> None:
    turned, alone = _seen("fused"), _seen("refused")
    assert alone["turned"] == 0
    more = (alone["peak"] - alone["reserve"]) - (turned["peak"] - turned["reserve"])
    assert more == 3 * IMAGE_BYTES, "its gradient has copies of what it reads, twice, and of what it makes"


def test_with_a_folder_to_store_in_a_gpu_swaps_through_the_host() -> None:
    pytest.importorskip("tensorflow")
    seen = run_job("gpu_job.py", "stored")
    assert seen["transport"] == "file" and seen["on_host"]
    assert seen["outs"] == seen["tensors"] > 0 and seen["ins"] >= seen["outs"]


def test_what_lies_on_the_host_beside_a_gpu_is_not_swapped() -> None:
    tf = pytest.importorskip("tensorflow")
    from lms.host_side import HOST_INTEGERS, with_host_side
    from lms.tf_graph import read_graph

    @tf.function
    def ranked(x: Any) -> Any:
        sorted_out = tf.raw_ops.Unique(x=tf.exp(x)).y
        return tf.reduce_sum(tf.cast(tf.argsort(x), tf.float32)) + tf.reduce_sum(sorted_out)

    graph = ranked.get_concrete_function(tf.TensorSpec((1000,))).graph
    view = with_host_side(read_graph(graph, "GPU"), lambda op_type: op_type == "Unique")
    found = {view.graph.tensor_name(tensor.id): tensor for tensor in view.graph.tensors}
    (unique,) = (tensor for name, tensor in found.items() if name.endswith("Unique:0"))
    (indices,) = (tensor for name, tensor in found.items() if name.endswith("TopKV2:1"))
    (values,) = (tensor for name, tensor in found.items() if name.endswith("Exp:0"))
    assert unique.outside and not indices.outside
    assert indices.forbidden == HOST_INTEGERS
    assert not values.outside and values.forbidden is None
