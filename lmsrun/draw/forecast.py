"""Draw the memory over a step with its largest batch, for each GPU and each way to run it."""

from collections.abc import Mapping, Sequence
from typing import Any

from lms.page.palette import STYLE
from lms.page.reading import byte_ticks, duration, size
from lms.page.svg import Canvas, fitted, tag, text_width

WIDTH, LEFT, GAP = 1000.0, 70.0, 70.0
HEIGHT, ROW = 120.0, 190.0
COLUMNS = 3


def draw_forecast(found: Mapping[str, Any]) -> str:
    """Draw what a forecast's document holds; the document is lmsrun's own."""
    canvas = Canvas()
    y = 8.0
    for gpu in found["gpus"]:
        canvas.text(LEFT, y + 14, f"{gpu['gpu']}: {size(gpu['memory_bytes'])}", "lm-text lm-bold")
        for number, one in enumerate(gpu["modes"]):
            row, column = divmod(number, COLUMNS)
            width = (WIDTH - 16 - LEFT - GAP * (COLUMNS - 1)) / COLUMNS
            _draw_mode(
                canvas, one, gpu["memory_bytes"], LEFT + column * (width + GAP), y + 26 + row * ROW, width
            )
        y += 26 + ROW * -(-len(gpu["modes"]) // COLUMNS) + 10
    y = _draw_legend(canvas, y)
    told = f"Memory over a step of {found['step']}, for {len(found['gpus'])} GPUs"
    title = "Memory over a step, forecast"
    return canvas.document(WIDTH, y, title, told, key="forecast", style=STYLE)


def _draw_legend(canvas: Canvas, y: float) -> float:
    left = LEFT
    meanings = (("lm-l1", "memory in use, over the time of a step"), ("lm-limit", "what the GPU has"))
    for class_, meaning in meanings:
        canvas.parts.append(tag("line", x1=left, x2=left + 24, y1=y, y2=y, class_=f"lm-line {class_}"))
        canvas.text(left + 30, y + 4, meaning, "lm-dim lm-small")
        left += text_width(meaning, 11) + 54
    return y + 20


def _draw_mode(
    canvas: Canvas, one: Mapping[str, Any], limit: float, x: float, y: float, width: float
) -> None:
    batch = one["largest_batch"]
    curve: Sequence[Sequence[float]] = one["curve"]
    more = "> " if one["is_more"] else ""
    what = f"batch {more}{batch:,}" if batch else "the traced batch"
    canvas.text(x, y + 12, fitted(f"{one['mode']}, {what}", width), "lm-text")
    y += 20
    top = max([limit, *(nbytes for _, nbytes in curve)]) * 1.05
    for tick in byte_ticks(top):
        at = y + HEIGHT * (1 - tick / top)
        canvas.parts.append(tag("line", x1=x, x2=x + width, y1=at, y2=at, class_="lm-grid"))
        canvas.text(x - 6, at + 4, size(tick), "lm-dim lm-tiny", anchor="end")
    last = max((when for when, _ in curve), default=0.0) or 1.0
    drawn = " ".join(
        f"{x + when / last * width:.1f},{y + HEIGHT * (1 - nbytes / top):.1f}" for when, nbytes in curve
    )
    canvas.parts.append(tag("polyline", points=drawn, class_="lm-line lm-l1"))
    at = y + HEIGHT * (1 - limit / top)
    canvas.parts.append(tag("line", x1=x, x2=x + width, y1=at, y2=at, class_="lm-line lm-limit"))
    canvas.text(x, y + HEIGHT + 14, "0", "lm-dim lm-tiny")
    canvas.text(x + width, y + HEIGHT + 14, duration(last), "lm-dim lm-tiny", anchor="end")
    canvas.height = y + HEIGHT + 20
