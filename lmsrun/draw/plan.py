"""A plan as a drawing: each host's machine with its ranks, one below the other."""

import re
from collections.abc import Mapping, Sequence

from launch.model.text import count_of
from launch.model.topology import Machine
from lms.page.palette import STYLE
from lms.page.svg import Canvas
from lmsrun.draw.machine import draw_machine
from lmsrun.draw.marks import Mark

MOST_HOSTS = 4
"""More are counted and not drawn."""
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')


def draw_plan(
    marks: Sequence[Mark],
    machines: Mapping[str, Machine],
    *,
    key: str = "lm",
    style: bool = True,
) -> str:
    """Draw a plan as SVG.

    Args:
        marks: The ranks, host by host.
        machines: The machine of each host.
        key: Begins the ids of the drawing.
        style: Whether its CSS travels with it.
    """
    hosts = list(dict.fromkeys(mark.host for mark in marks))
    drawings = []
    for number, host in enumerate(hosts[:MOST_HOSTS]):
        own = [mark for mark in marks if mark.host == host]
        title = f"{count_of(len(own), 'rank')} on {host}"
        alone = len(hosts) == 1
        drawn = draw_machine(
            machines[host],
            own,
            title=title,
            key=key if alone else f"{key}-{number}",
            style=style and alone,
        )
        if alone:
            return drawn
        drawings.append(drawn)
    return _stacked(drawings, len(marks), len(hosts), key, STYLE if style else "")


def drawing_size(svg: str) -> tuple[float, float]:
    """Return the width and the height of a drawing in pixels."""
    found = _SIZE.search(svg)
    return (float(found[1]), float(found[2])) if found else (0.0, 0.0)


def _stacked(drawings: Sequence[str], ranks: int, hosts: int, key: str, style: str) -> str:
    canvas, y = Canvas(), 0.0
    sizes = [drawing_size(drawn) for drawn in drawings]
    width = max(width for width, _ in sizes)
    for drawn, (_, height) in zip(drawings, sizes, strict=True):
        canvas.add([drawn.replace("<svg ", f'<svg y="{y:.0f}" ', 1)])
        y += height
    if hosts > len(drawings):
        canvas.text(16, y + 20, f"{count_of(hosts - len(drawings), 'more host')} not drawn.", "lm-dim")
        y += 34
    title = f"{count_of(ranks, 'rank')} on {count_of(hosts, 'host')}"
    shown = f"The first {len(drawings)} hosts are drawn one below the other."
    return canvas.document(width, y, title, shown, key=key, style=style)
