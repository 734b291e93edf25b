"""The picture of a step: what stands in it."""

from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
from lms.config import LMSConfig
from lms.errors import LMSError
from lms.graph import GraphBuilder
from lms.planner import plan
from lms.report import plot_memory, require_drawable
from lms.stats import Planned

MIB = 1 << 20


def planned() -> Planned:
    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[MIB])
    made = []
    for index in range(4):
        name = f"a_model_with_a_long_name/block_{index}/convolution"
        made += [value := build.add(name, "Conv2D", inputs=[value], outputs=[8 * MIB])[0]]
    (gradient,) = build.add("loss", "Loss", inputs=[value], outputs=[1024])
    for index in reversed(range(4)):
        (gradient,) = build.add(f"b{index}", "ConvGrad", inputs=[made[index], gradient], outputs=[1024])
    graph = build.build(kept=[gradient])
    return Planned("a step", graph, plan(graph, LMSConfig(policy="all")), 3 * MIB)


def test_the_picture_names_what_is_alive_at_the_peak(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_memory(planned(), tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "before: peak 35 MiB" in drawn and "after: peak 19 MiB" in drawn
    assert "8.0 MiB .../block_1/convolution:0" in drawn
    assert "3.0 MiB in use before the step" in drawn and "3 tensors swapped" in drawn


def test_a_png_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_memory(planned(), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LMSError, match="ends in .png or .svg"):
        plot_memory(planned(), tmp_path / "memory.pdf")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/memory.png", "there is no folder"),
        ("folder.svg", "it is a folder"),
        ("file/a.png", "is no folder"),
    ],
)
def test_a_place_that_cannot_be_drawn_into_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(LMSError, match=f"cannot write '.*': .*{why}.*; needed in lms.plot"):
        require_drawable(tmp_path / name)


def test_a_disk_without_room_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", full)
    with pytest.raises(LMSError, match="memory.png': No space left on device"):
        plot_memory(planned(), tmp_path / "memory.png")
