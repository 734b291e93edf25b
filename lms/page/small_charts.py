"""The pool as a map, the steps that ran, and the policies that might have been, as SVG."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lms.page.reading import byte_ticks, duration, items, number, numbers, size, table, text, time_ticks
from lms.page.step_chart import FATES, Tensor
from lms.page.svg import Canvas, fitted, safe, tag, text_width

WIDTH, LEFT, RIGHT = 1100.0, 74.0, 16.0
INNER = WIDTH - LEFT - RIGHT
ROWS, ROW_HEIGHT = 8, 26.0
OF_NO_TENSOR = ("lm-k7", "a variable, or what keeps small buffers apart")
POOL_KEYS = (
    *(FATES[fate] for fate in ("kept", "recomputed", "swapped", "scratch")),
    OF_NO_TENSOR,
    ("lm-hole", "free"),
)
"""What a chunk of the pool may be, with its colour and its name."""
TIME_AXIS = "time of a step"


def draw_pool(pool: Mapping[str, Any], tensors: Sequence[Tensor], key: str) -> str:
    """Draw the pool row by row, as a text is read: chunks in use, and holes between them."""
    whole = number(pool.get("size")) or 0.0
    canvas = Canvas()
    if whole < 1:
        return ""
    per_row = whole / ROWS
    for row in range(ROWS):
        y = 6 + row * (ROW_HEIGHT + 4)
        canvas.text(LEFT - 6, y + 17, size(per_row * row), "lm-dim lm-tiny", anchor="end")
        canvas.box(LEFT, y, INNER, ROW_HEIGHT, "lm-hole", round_=0)
    for row in items(pool.get("chunks")):
        cells = [*items(row, 3), None, None, None][:3]
        offset, nbytes, index = (number(cell) for cell in cells)
        if offset is None or not nbytes or offset + nbytes > whole * 1.001:
            continue
        tensor = tensors[int(index)] if index is not None and index < len(tensors) else None
        _draw_chunk(canvas, offset, nbytes, tensor, per_row)
    holes, free = number(pool.get("holes")), number(pool.get("free_bytes"))
    told = (
        f"{size(number(pool.get('used')))} of {size(whole)} in use at the fullest moment; {size(free)} free "
        f"in {int(holes or 0)} holes, the largest {size(number(pool.get('largest_hole_bytes')))}."
    )
    return canvas.document(WIDTH, canvas.height + 8, "The allocator's pool", told, key=key)


def _draw_chunk(canvas: Canvas, offset: float, nbytes: float, tensor: Tensor | None, per_row: float) -> None:
    class_ = FATES[tensor.fate][0] if tensor else OF_NO_TENSOR[0]
    name = tensor.name if tensor else OF_NO_TENSOR[1]
    tip = f"{name}, {size(nbytes)} at {size(offset)}" + (f", {tensor.fate}" if tensor else "")
    end = offset + nbytes
    while offset < end:
        row = min(int(offset / per_row), ROWS - 1)
        stop = end if row == ROWS - 1 else min(end, (row + 1) * per_row)
        if stop <= offset:
            return
        x, width = LEFT + (offset - row * per_row) / per_row * INNER, (stop - offset) / per_row * INNER
        y = 6 + row * (ROW_HEIGHT + 4)
        canvas.box(x, y, width, ROW_HEIGHT, f"{class_} lm-thin", round_=0, tip=tip)
        shown = fitted(name.rpartition("/")[2] if tensor else "", width - 8, 10)
        if len(shown) > 3:
            canvas.text(x + 4, y + 17, shown, "lm-text lm-tiny")
        offset = stop


def draw_steps(document: Mapping[str, Any], key: str) -> str:
    """Draw the time of each step, and the highest memory so far against plan and limit."""
    rows = [cells for row in items(document.get("steps")) if (cells := numbers(row, 2))]
    rows = [cells for cells in rows if cells[0] is not None and cells[1] is not None]
    if not rows:
        return ""
    last = max(cells[0] or 0.0 for cells in rows) or 1.0
    peaks = [(cells[0] or 0.0, cells[2]) for cells in rows if len(cells) > 2 and cells[2] is not None]
    planned, limit = (
        number(document.get("planned_peak_bytes")),
        number(table(document.get("device")).get("limit_bytes")),
    )
    canvas, y = Canvas(), 8.0
    longest = max(cells[1] or 0.0 for cells in rows) or 1.0
    times = [(cells[0] or 0.0, cells[1] or 0.0) for cells in rows]
    y = _curve(canvas, "time of each step", times, longest, last, y, 110, duration, time_ticks, "lm-l0")
    if peaks:
        top = max([peak or 0.0 for _, peak in peaks] + [planned or 0.0]) * 1.05
        if limit and limit < 2 * top:
            top = max(top, limit * 1.02)
        marks = [("planned", planned, "lm-l4"), ("limit", limit, "lm-limit")]
        points = [(when, peak or 0.0) for when, peak in peaks]
        title = "device memory, the highest so far"
        y = _curve(canvas, title, points, top or 1.0, last, y, 130, size, byte_ticks, "lm-l1", marks)
    for at in sorted({round(last * tenth / 10) for tenth in range(0, 11, 2)}):
        anchor = "start" if at == 0 else "end" if at >= last else "middle"
        x = LEFT + INNER * min(at / last, 1.0)
        canvas.text(x, y + 6, f"step {at:,}", "lm-dim lm-tiny", anchor=anchor)
    median = sorted(value for _, value in times)[len(times) // 2]
    told = (
        f"{len(rows)} steps are drawn, the median takes {duration(median)}, the longest {duration(longest)}. "
        f"The highest memory is {size(peaks[-1][1] if peaks else None)}, planned {size(planned)}."
    )
    return canvas.document(WIDTH, canvas.height + 10, "The steps that ran", told, key=key)


def _curve(
    canvas: Canvas,
    title: str,
    points: Sequence[tuple[float, float]],
    top: float,
    last: float,
    y: float,
    height: float,
    write: Callable[[float | None], str],
    ticks: Callable[[float], list[float]],
    class_: str,
    marks: Sequence[tuple[str, float | None, str]] = (),
) -> float:
    canvas.text(LEFT, y + 12, title, "lm-text lm-bold")
    y += 20
    for tick in ticks(top):
        at = y + height * (1 - tick / top)
        canvas.parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="lm-grid"))
        canvas.text(LEFT - 6, at + 4, write(tick), "lm-dim lm-tiny", anchor="end")
    drawn = " ".join(
        f"{LEFT + when / last * INNER:.1f},{y + height * (1 - min(value / top, 1)):.1f}"
        for when, value in points
    )
    canvas.parts.append(tag("polyline", points=drawn, class_=f"lm-line {class_}"))
    for name, value, tone in marks:
        if value is not None and value <= top:
            at = y + height * (1 - value / top)
            canvas.parts.append(
                tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_=f"lm-line {tone}")
            )
            x = WIDTH - RIGHT - 4 if name == "limit" else LEFT + 6
            end = "end" if name == "limit" else None
            canvas.text(x, at - 4, f"{name} {size(value)}", "lm-text lm-tiny", anchor=end)
    canvas.height = y + height
    return y + height + 10


def draw_policies(step: Mapping[str, Any], key: str) -> str:
    """Draw the memory and the time of a step under each policy that was tried, and where this plan is."""
    found = []
    for row in items(table(step.get("policies")).get("points"), 64):
        cells = [*items(row, 4), None, None, None, None][:4]
        nbytes, seconds = number(cells[1]), number(cells[2])
        if nbytes is not None and seconds:
            found.append((text(cells[0], "?"), nbytes, seconds, cells[3] is True))
    if len(found) < 2:
        return ""
    limit = number(step.get("limit_bytes"))
    most = max(nbytes for _, nbytes, _, _ in found) * 1.08
    longest = max(seconds for _, _, seconds, _ in found) * 1.2
    canvas, top, height = Canvas(), 14.0, 250.0
    for tick in time_ticks(longest):
        y = top + height * (1 - tick / longest)
        canvas.parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="lm-grid"))
        canvas.text(LEFT - 6, y + 4, duration(tick), "lm-dim lm-tiny", anchor="end")
    for tick in byte_ticks(most):
        anchor = "middle" if tick else "start"
        canvas.text(
            LEFT + INNER * tick / most, top + height + 16, size(tick), "lm-dim lm-tiny", anchor=anchor
        )
    if limit and limit <= most:
        x = LEFT + limit / most * INNER
        canvas.parts.append(tag("line", x1=x, x2=x, y1=top, y2=top + height, class_="lm-limit"))
        canvas.text(x + 4, top + 10, f"limit {size(limit)}", "lm-bad lm-small")
    taken = [
        (x - 8, x + 8, top + height * (1 - seconds / longest) + 4)
        for _, nbytes, seconds, _ in found
        for x in [LEFT + nbytes / most * INNER]
    ]
    canvas.text(LEFT + 4, top + 10, TIME_AXIS, "lm-dim lm-small")
    taken.append((LEFT, LEFT + 4 + text_width(TIME_AXIS, 11), top + 10))
    for name, nbytes, seconds, is_here in sorted(found, key=lambda one: not one[3]):
        x, y = LEFT + nbytes / most * INNER, top + height * (1 - seconds / longest)
        class_ = "lm-peakdot" if is_here else "lm-t0"
        tip = f"{name}: {size(nbytes)}, {duration(seconds)} a step"
        canvas.parts.append(
            tag("circle", tag("title", safe(tip)), cx=x, cy=y, r=7.0 if is_here else 5.0, class_=class_)
        )
        shown = "you are here" if is_here else name
        _label(canvas, shown, x, y, taken, (top, top + height), bold=is_here)
    canvas.text(
        LEFT + INNER / 2, top + height + 32, "device memory of the step", "lm-dim lm-small", anchor="middle"
    )
    told = "; ".join(f"{name}: {size(nbytes)}, {duration(seconds)}" for name, nbytes, seconds, _ in found)
    return canvas.document(WIDTH, top + height + 42, "Memory against time for other policies", told, key=key)


def _label(
    canvas: Canvas,
    shown: str,
    x: float,
    y: float,
    taken: list[tuple[float, float, float]],
    rows: tuple[float, float],
    *,
    bold: bool,
) -> None:
    """Write a name beside its point, between two heights, where no other name stands."""
    wide = text_width(shown, 11) + 4
    right = x + 11 + wide < WIDTH - RIGHT
    left = x + 11 if right else x - 11 - wide
    for shift in sorted(range(-140, 141, 7), key=abs):
        at = y + 4 + shift
        if rows[0] <= at <= rows[1] and all(
            abs(at - other) > 12 or left + wide < begin or left > end for begin, end, other in taken
        ):
            break
    taken.append((left, left + wide, at))
    class_ = "lm-text lm-small" + (" lm-bold" if bold else "")
    canvas.text(left, at, shown, class_)
