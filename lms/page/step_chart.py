"""The memory of a step over time, before and after, with what computes and copies below it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lms.page.palette import STYLE
from lms.page.reading import byte_ticks, duration, items, number, numbers, size, table, text, whole
from lms.page.svg import Canvas, fitted, safe, tag, text_width

WIDTH, LEFT, RIGHT = 1100.0, 74.0, 16.0
SIDE_HEIGHT, LANE_HEIGHT = 190.0, 20.0
UNITS = 1000.0
"""The width of the zoomed part in its own units: the whole step."""
OUTSIDE, OTHERS = "outside", "others"
FATES: Mapping[str, tuple[str, str]] = {
    OUTSIDE: ("lm-bar", "on the device before the step"),
    OTHERS: ("lm-k5", "smaller tensors, summed up"),
    "kept": ("lm-k0", "kept"),
    "recomputed": ("lm-k4", "recomputed"),
    "swapped": ("lm-k1", "swapped"),
    "scratch": ("lm-k2", "scratch of a kernel"),
}
"""What a band may be, from the bottom of the stack, with its colour and its name."""


class Tensor(NamedTuple):
    """A tensor as a document tells it."""

    name: str
    op: str
    shape: str
    nbytes: float
    fate: str
    why: str

    @property
    def layer(self) -> str:
        """The part of the name that several ops share."""
        return self.name.rpartition("/")[0]


class Stay(NamedTuple):
    """A stay of a tensor on the device, in seconds."""

    tensor: Tensor
    begin_s: float
    end_s: float


def read_tensors(step: Mapping[str, Any]) -> list[Tensor]:
    """Read the tensors that a step names."""
    found = []
    for row in items(step.get("tensors")):
        cells = [*items(row, 6), *[None] * 6][:6]
        fate = text(cells[4])
        found.append(
            Tensor(
                text(cells[0], "?"),
                text(cells[1], "?"),
                text(cells[2]),
                number(cells[3]) or 0.0,
                fate if fate in FATES else "kept",
                text(cells[5]),
            )
        )
    return found


def _stays(rows: Any, tensors: Sequence[Tensor]) -> list[Stay]:
    found = []
    for row in items(rows):
        cells = numbers(row, 3)
        if cells and None not in cells[:3]:
            index, begin_s, end_s = (value or 0.0 for value in cells[:3])
            if index < len(tensors) and begin_s <= end_s:
                found.append(Stay(tensors[int(index)], begin_s, end_s))
    return found


class _Side(NamedTuple):
    """One half of the chart."""

    title: str
    stays: list[Stay]
    rest: list[tuple[float, float]]
    seconds: float
    peak: float
    peak_s: float

    @classmethod
    def of(cls, title: str, side: Mapping[str, Any], tensors: Sequence[Tensor]) -> "_Side":
        order = list(FATES)
        stays = _stays(side.get("stays"), tensors)
        stays.sort(key=lambda stay: (order.index(stay.tensor.fate), stay.begin_s))
        rest = [
            (cells[0] or 0.0, cells[1] or 0.0)
            for row in items(side.get("rest"))
            if (cells := numbers(row, 2))
        ]
        return cls(
            title,
            stays,
            sorted(rest),
            number(side.get("seconds")) or 0.0,
            number(side.get("peak_bytes")) or 0.0,
            number(side.get("peak_s")) or 0.0,
        )


def draw_step(step: Mapping[str, Any], key: str, *, alone: bool = False) -> str:
    """Draw a step as SVG; a script may zoom what has the class ``lm-zoom``.

    Args:
        step: Of a document.
        key: Begins the ids of the drawing.
        alone: Whether it stands in a file of its own, with its CSS, a ground and a legend.
    """
    tensors = read_tensors(step)
    before = _Side.of("as TensorFlow would run it", table(step.get("before")), tensors)
    after = _Side.of("as planned", table(step.get("after")), tensors)
    base = number(step.get("base_bytes")) or 0.0
    limit = number(step.get("limit_bytes"))
    whole_s = max(before.seconds, after.seconds, 1e-9)
    top = max(before.peak + base, after.peak + base, 1.0)
    if limit and limit < 2 * top:
        top = max(top, limit)
    top *= 1.04
    canvas = Canvas()
    y = 8.0
    for side in (before, after):
        _draw_side(canvas, side, y, base, limit, top, whole_s)
        y += SIDE_HEIGHT + 34
    y = _draw_lanes(canvas, table(step.get("after")), tensors, y, whole_s)
    _draw_ticks(canvas, y, whole_s)
    peaks = [
        f"{size(base + side.peak)} after {duration(side.peak_s)} of {duration(side.seconds)}"
        for side in (before, after)
    ]
    told = (
        f"{text(step.get('name'), 'The step')}: without changes its peak is {peaks[0]}, as planned "
        f"{peaks[1]}. The limit is {size(limit)}."
    )
    height = y + 30
    if alone:
        _draw_legend(canvas, y + 30)
        height = y + 56
    style = STYLE if alone else ""
    return canvas.document(WIDTH, height, "Memory over the step", told, key=key, style=style)


def _draw_legend(canvas: Canvas, y: float) -> None:
    left = LEFT
    for class_, meaning in FATES.values():
        canvas.box(left, y, 12, 12, class_, round_=2)
        canvas.text(left + 17, y + 10, meaning, "lm-dim lm-small")
        left += text_width(meaning, 11) + 34


def _draw_side(
    canvas: Canvas, side: _Side, y: float, base: float, limit: float | None, top: float, whole_s: float
) -> None:
    inner = WIDTH - LEFT - RIGHT
    title = f"{side.title}: peak {size(base + side.peak)}, where the upright dashes are"
    canvas.text(LEFT, y + 12, fitted(title, inner), "lm-text lm-bold")
    y += 18
    for tick in byte_ticks(top):
        at = y + SIDE_HEIGHT * (1 - tick / top)
        canvas.parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="lm-grid"))
        canvas.text(LEFT - 6, at + 4, size(tick), "lm-dim lm-tiny", anchor="end")
    bands = "".join(_bands(side, base, top, whole_s))
    peak_x = side.peak_s / whole_s * UNITS
    mark = tag("line", x1=peak_x, x2=peak_x, y1=0.0, y2=SIDE_HEIGHT, class_="lm-limit lm-steps")
    canvas.parts.append(_zoomed(y, SIDE_HEIGHT, bands + mark))
    if limit is not None and limit <= top:
        at = y + SIDE_HEIGHT * (1 - limit / top)
        canvas.parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="lm-limit"))
        canvas.text(WIDTH - RIGHT - 4, at - 4, f"limit {size(limit)}", "lm-bad lm-small", anchor="end")
    canvas.height = y + SIDE_HEIGHT


def _zoomed(y: float, height: float, content: str) -> str:
    return tag(
        "svg",
        content,
        x=LEFT,
        y=y,
        width=WIDTH - LEFT - RIGHT,
        height=height,
        viewBox=f"0 0 {UNITS:.0f} {height:.0f}",
        preserveAspectRatio="none",
        class_="lm-zoom",
    )


def _bands(side: _Side, base: float, top: float, whole_s: float) -> list[str]:
    """Stack the bands: paths whose floor changes wherever a band below them begins or ends."""
    times = sorted(
        {0.0, side.seconds, *(when for when, _ in side.rest)}
        | {when for stay in side.stays for when in (stay.begin_s, stay.end_s)}
    )
    groups: dict[str, list[str]] = {fate: [] for fate in FATES}
    outside = [(0.0, 0.0, base), (side.seconds, 0.0, base)]
    groups[OUTSIDE].append(_band(outside, top, whole_s, f"{FATES[OUTSIDE][1]}, {size(base)}"))
    floor = {when: base for when in times}
    level, at, rest = 0.0, 0, []
    for when in times:
        while at < len(side.rest) and side.rest[at][0] <= when:
            level, at = side.rest[at][1], at + 1
        rest.append((when, base, base + level))
        floor[when] += level
    groups[OTHERS].append(_band(rest, top, whole_s, FATES[OTHERS][1]))
    for stay in side.stays:
        tensor = stay.tensor
        points = []
        for when in times:
            if stay.begin_s <= when < stay.end_s:
                points.append((when, floor[when], floor[when] + tensor.nbytes))
                floor[when] += tensor.nbytes
        if points:
            points.append((stay.end_s, points[-1][1], points[-1][2]))
            tip = ", ".join(filter(None, [tensor.name, tensor.shape, size(tensor.nbytes), tensor.fate]))
            groups[tensor.fate].append(_band(points, top, whole_s, tip))
    return [
        tag("g", "".join(paths), class_=f"{FATES[fate][0]} lm-thin lm-steps", data_fate=fate)
        for fate, paths in groups.items()
        if paths
    ]


def _band(points: Sequence[tuple[float, float, float]], top: float, whole_s: float, tip: str) -> str:
    """Write one band as a path of steps: along its upper edge, and back along its lower one.

    Steps that nobody could see, less than a part of a pixel high or wide, are left out.
    """
    corners: list[tuple[float, float, float]] = []
    for when, floor, ceiling in points:
        low, high = (SIDE_HEIGHT * (1 - one / top) for one in (floor, ceiling))
        corner = (when / whole_s * UNITS, low, high)
        if corners and (
            corner[0] - corners[-1][0] < _LEAST
            or (abs(corner[1] - corners[-1][1]) < _LEAST and abs(corner[2] - corners[-1][2]) < _LEAST)
        ):
            continue
        corners.append(corner)
    end = points[-1][0] / whole_s * UNITS
    path = [f"M{_short(corners[0][0])} {_short(corners[0][2])}"]
    for _, (x, _, y) in zip(corners, corners[1:], strict=False):
        path.append(f"H{_short(x)}V{_short(y)}")
    path.append(f"H{_short(end)}V{_short(corners[-1][1])}")
    for at in range(len(corners) - 1, 0, -1):
        path.append(f"H{_short(corners[at][0])}V{_short(corners[at - 1][1])}")
    path.append("H" + _short(corners[0][0]) + "Z")
    return f'<path d="{"".join(path)}"><title>{safe(tip)}</title></path>'


_LEAST = 0.35
"""Of a pixel."""


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _draw_lanes(
    canvas: Canvas, after: Mapping[str, Any], tensors: Sequence[Tensor], y: float, whole_s: float
) -> float:
    """Paint when compute runs, and which tensors are copied out and back."""
    busy = [
        (cells[0] or 0.0, cells[1] or 0.0, "compute")
        for row in items(after.get("busy"))
        if (cells := numbers(row, 2))
    ]
    lanes = [("compute", "lm-k3", busy)]
    for name, key, class_ in (("copies out", "out", "lm-k1"), ("copies in", "in", "lm-k6")):
        copies = [
            (stay.begin_s, stay.end_s, f"{stay.tensor.name}, {size(stay.tensor.nbytes)}")
            for stay in _stays(after.get(key), tensors)
        ]
        lanes.append((name, class_, copies))
    for name, class_, spans in lanes:
        canvas.text(LEFT - 6, y + 14, name, "lm-dim lm-small", anchor="end")
        shapes = "".join(
            tag(
                "rect",
                tag("title", safe(tip)),
                x=begin / whole_s * UNITS,
                y=0.0,
                width=max((end - begin) / whole_s * UNITS, 0.4),
                height=LANE_HEIGHT,
            )
            for begin, end, tip in spans
        )
        ground = tag("rect", x=0.0, y=0.0, width=UNITS, height=LANE_HEIGHT, class_="lm-hole lm-thin")
        content = ground + tag("g", shapes, class_=f"{class_} lm-flat")
        canvas.parts.append(_zoomed(y, LANE_HEIGHT, content))
        y += LANE_HEIGHT + 5
    return y


def _draw_ticks(canvas: Canvas, y: float, whole_s: float) -> None:
    inner = WIDTH - LEFT - RIGHT
    for tenth in range(0, 11, 2):
        x = LEFT + inner * tenth / 10
        anchor = "start" if tenth == 0 else "end" if tenth == 10 else "middle"
        canvas.parts.append(
            tag(
                "text",
                safe(duration(whole_s * tenth / 10)),
                x=x,
                y=y + 12,
                class_="lm-dim lm-tiny lm-tick",
                text_anchor=anchor,
                data_share=tenth / 10,
            )
        )
    canvas.height = y + 16


def count_left_out(step: Mapping[str, Any]) -> str:
    """Say what the chart leaves out."""
    after, before = table(step.get("after")), table(step.get("before"))
    told = []
    rest = max(whole(after.get("rest_count")) or 0, whole(before.get("rest_count")) or 0)
    if rest:
        told.append(f"{rest:,} smaller tensors are drawn as one band")
    if copies := whole(after.get("copies_left_out")):
        told.append(f"{copies:,} short copies are not drawn")
    return "; ".join(told)
