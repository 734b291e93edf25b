"""Drawings in files of their own: a dark viewer may be black as their text is, so they have a ground."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import machines
import pytest

from lms.page.step_chart import draw_step
from lmsrun.draw.forecast import draw_forecast
from lmsrun.draw.machine import draw_machine
from lmsrun.draw.marks import Mark
from lmsrun.draw.plan import draw_plan

SVG = "{http://www.w3.org/2000/svg}"
REPORT = Path(__file__).resolve().parents[2] / "golden" / "lms-report.json"
MARK = Mark(0, "a", frozenset({0}), frozenset({0}), "bind", None)
CURVE = [[0.0, 1 << 30], [0.5, 8 << 30]]
MODE: dict[str, Any] = {
    "mode": "off",
    "largest_batch": 32,
    "is_more": False,
    "curve": CURVE,
}
FORECAST = {"step": "train", "gpus": [{"gpu": "L4", "memory_bytes": 16 << 30, "modes": [MODE] * 4}]}


def one_machine() -> str:
    return draw_machine(machines.machine("single"))


def two_hosts() -> str:
    hosts = dict.fromkeys(("a", "b"), machines.machine("single"))
    return draw_plan([MARK, replace(MARK, rank=1, host="b")], hosts)


def more_hosts_than_are_drawn() -> str:
    hosts = dict.fromkeys("abcdef", machines.machine("single"))
    return draw_plan([replace(MARK, rank=rank, host=host) for rank, host in enumerate(hosts)], hosts)


def step() -> str:
    return draw_step(json.loads(REPORT.read_text())["step"], "lm", alone=True)


def forecast() -> str:
    return draw_forecast(FORECAST)


@pytest.mark.parametrize("draw", [one_machine, two_hosts, more_hosts_than_are_drawn, step, forecast])
def test_a_drawing_of_its_own_is_painted_on_a_sheet_as_large_as_it_is(draw: Callable[[], str]) -> None:
    drawing = ET.fromstring(draw())  # noqa: S314 - our own
    sheets = [element for element in drawing.iter(SVG + "rect") if element.get("class") == "lm-page"]
    assert len(sheets) == 1
    painted = [
        element for element in drawing if element.tag not in (SVG + "title", SVG + "desc", SVG + "style")
    ]
    assert painted[0] is sheets[0]
    x, y, width, height = (float(sheets[0].attrib[name]) for name in ("x", "y", "width", "height"))
    assert [x, y, width, height] == [float(number) for number in drawing.attrib["viewBox"].split()]


def test_a_forecast_says_what_its_lines_are_and_cuts_nothing_off() -> None:
    more = {**MODE, "mode": "mixed precision", "largest_batch": 1 << 20, "is_more": True}
    drawing = draw_forecast(
        {"step": "train", "gpus": [{"gpu": "L4", "memory_bytes": 16 << 30, "modes": [more]}]}
    )
    assert "mixed precision, batch &gt; 1,048,576<" in drawing and "…" not in drawing
    assert "what the GPU has" in drawing and "memory in use, over the time of a step" in drawing
