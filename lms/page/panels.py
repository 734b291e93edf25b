"""The panels of what Large Model Support did in one process, from the document that the process wrote."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lms.page.reading import duration, items, number, size, table, text, whole
from lms.page.shell import Panel, render_table, scrolled
from lms.page.small_charts import POOL_KEYS, draw_policies, draw_pool, draw_steps
from lms.page.step_chart import FATES, OUTSIDE, Tensor, count_left_out, draw_step, read_tensors
from lms.page.svg import safe, tag

SIMULATED = (
    "Simulated: times follow from a model of the device and its link, and memory from the plan; neither was "
    "measured."
)
TENSORS_ONLY = (
    "Peaks here are the bytes of the tensors; the planned peak at the top also counts what the "
    "allocator needs beyond these."
)
PLANNED = (
    "The most on the device at once, by the plan: variables, tensors, and what the allocator needs "
    "beyond these."
)
MEASURED = "The most that the allocator gave out at once since the step was planned, whatever ran then."
BEFORE = "The same count of tensors for the step as TensorFlow would run it."
BEFORE_ON_HOST = (
    "The step without swapping, its variables on the host already: {} that lie there between steps."
)
SLOWER = "Time of the step as planned by that without changes, both from a model of the device and its link."
MOVED = "Counted by what makes the copies, since the process began."
BUDGETS = "A budget is a share of what the step's tensors take without swapping."
LIMIT = "What the allocator of the device may give out."
UNKNOWN = "unknown"


def lms_panels(document: Mapping[str, Any], index: int, who: str = "", note: str = "") -> list[Panel]:
    """Make the panels of a document.

    Args:
        document: As ``lms.report().to_json()`` gives it, from here or from outside.
        index: Its number among the reports of the page's data.
        who: Whose it is, where a page has several.
        note: What else is to be said of the step.
    """
    key = f"r{index}-"
    step = table(document.get("step"))
    tensors = read_tensors(step)
    ending = f" ({who})" if who else ""
    panels = []
    if step:
        panels.append(_timeline(step, index, key, ending, note))
        panels.append(_at_peak(step, tensors, key, ending))
        panels.append(_pool(step, tensors, key, ending))
    panels.append(_steps(document, key, ending))
    if step:
        panels.append(_policies(step, key, ending))
    return panels


def _timeline(step: Mapping[str, Any], index: int, key: str, ending: str, first: str) -> Panel:
    name = f"{key}step"
    hide = "".join(
        f'<li><button type="button" aria-pressed="true" data-hide="{fate}">{_swatch(class_)}{safe(meaning)}'
        "</button></li>"
        for fate, (class_, meaning) in FATES.items()
    )
    presses = (
        ("+", "zoom in"),
        ("-", "zoom out"),
        ("0", "whole step"),
        ("ArrowLeft", "earlier"),
        ("ArrowRight", "later"),
    )
    moves = "".join(
        f'<li><button type="button" data-press="{press}">{meaning}</button></li>'
        for press, meaning in presses
    )
    label = "Memory over the step: arrow keys move the cursor, plus and minus zoom, 0 shows the whole step"
    html = (
        f'<ul class="keys js" hidden aria-label="Show and hide">{hide}</ul>'
        f'<ul class="keys js" hidden aria-label="Move and zoom">{moves}</ul>'
        '<div class="scroll wide">'
        f'<div class="chart" data-step="{index}" tabindex="0" role="group" aria-label="{label}">'
        f"{draw_step(step, name)}</div></div>"
        f'<ul class="keys static" aria-label="Colours">{_legend(FATES.values())}</ul>'
        '<p class="said note js" hidden aria-live="polite"></p>'
    )
    left_out = count_left_out(step)
    open_sizes = text(step.get("open_sizes"))
    note = " ".join(
        filter(
            None,
            [
                *(first, SIMULATED, TENSORS_ONLY, _before_note(step)),
                left_out and f"{left_out}.",
                open_sizes and f"Not in it: {open_sizes}.",
            ],
        )
    )
    return Panel(name, f"The step over time{ending}", html, note)


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<li>{_swatch(class_)}{safe(meaning)}</li>" for class_, meaning in keys)


def _swatch(class_: str) -> str:
    box = tag("rect", x=0.5, y=0.5, width=10.0, height=10.0, class_=class_)
    return f'<svg class="swatch" viewBox="0 0 11 11" aria-hidden="true">{box}</svg>'


def _breakable(told: str) -> str:
    """Let names of ops end a line behind their slashes, and not in the middle of a word."""
    return safe(told).replace("/", "/<wbr>")


def _at_peak(step: Mapping[str, Any], tensors: Sequence[Tensor], key: str, ending: str) -> Panel:
    at_peak = table(step.get("at_peak"))
    numbers = [number(index) for index in items(at_peak.get("tensors"), 200)]
    live = [tensors[int(index)] for index in numbers if index is not None and index < len(tensors)]
    base = number(step.get("base_bytes")) or 0.0
    total = (number(step.get("peak_bytes")) or 0.0) + base
    rows = [
        [
            safe(one.name.rpartition("/")[2]),
            safe(one.op),
            _breakable(one.layer or "-"),
            safe(one.shape or UNKNOWN),
            size(one.nbytes),
            f"{one.nbytes / total:.1%}" if total else "-",
            f"{_swatch(FATES[one.fate][0])}{safe(one.fate)}",
            _breakable(one.why or UNKNOWN),
        ]
        for one in live
    ]
    if base:
        outside = "variables, constants, data and buffers that lie there when the step begins"
        share = f"{base / total:.1%}" if total else "-"
        rows.append(
            [
                "before the step",
                "-",
                "-",
                "-",
                size(base),
                share,
                f"{_swatch(FATES[OUTSIDE][0])}kept",
                outside,
            ]
        )
    heads = ("tensor", "op", "layer", "shape", "bytes", "share", "fate", "why")
    left, left_bytes = whole(at_peak.get("left_out")) or 0, number(at_peak.get("left_out_bytes"))
    note = f"At the peak of the planned step, {size(total)} of tensors"
    note += f", while {text(at_peak.get('op'), 'an unknown op')} runs."
    if left:
        note += f" {left:,} smaller tensors ({size(left_bytes)}) are left out."
    caption = "Tensors on the device at the peak, the largest first"
    html = render_table(caption, heads, rows, numeric=(4, 5), tight=(3, 6))
    return Panel(f"{key}peak", f"Tensors at the peak{ending}", html, note)


def _pool(step: Mapping[str, Any], tensors: Sequence[Tensor], key: str, ending: str) -> Panel:
    pool = table(step.get("pool"))
    drawn = draw_pool(pool, tensors, f"{key}pool")
    note = (
        "The simulated allocator at its fullest moment of ten steps, each row a part of the region that is "
        f"left to the step. {size(number(pool.get('used')))} of {size(number(pool.get('size')))} in use, "
        f"{size(number(pool.get('free_bytes')))} free in {whole(pool.get('holes')) or 0:,} holes, the "
        f"largest {size(number(pool.get('largest_hole_bytes')))}."
    )
    if left := whole(pool.get("chunks_left_out")):
        note += f" {left:,} small chunks ({size(number(pool.get('chunks_left_out_bytes')))}) are not drawn."
    asked, found = number(pool.get("asked")), number(pool.get("size"))
    if asked and found and found > asked * 1.05:
        note += f" The region had to grow beyond the {size(asked)} that are there."
    legend = f'<ul class="keys" aria-label="Colours">{_legend(POOL_KEYS)}</ul>'
    html = scrolled("The allocator's pool", drawn) + legend if drawn else f"<p>{UNKNOWN}</p>"
    return Panel(f"{key}pool", f"The allocator's pool{ending}", html, note)


def _steps(document: Mapping[str, Any], key: str, ending: str) -> Panel:
    drawn = draw_steps(document, f"{key}steps")
    count = whole(document.get("step_count")) or 0
    shown = len(items(document.get("steps")))
    planned, measured = (
        number(document.get("planned_peak_bytes")),
        number(document.get("measured_peak_bytes")),
    )
    note = f"Measured: {count:,} steps ran" + (f", {shown:,} of them are drawn." if shown < count else ".")
    note += (
        " The memory is the most so far, which the allocator counts, so it never falls."
        f" Planned peak {size(planned)}, measured {size(measured)}"
    )
    note += f" ({measured / planned - 1:+.1%})." if planned and measured is not None else "."
    if measured is None:
        note += " This device's allocator does not count its peak."
    note += " The first step includes tracing and planning."
    html = scrolled("The steps that ran", drawn) if drawn else "<p>No step was recorded.</p>"
    return Panel(f"{key}steps", f"The steps that ran{ending}", html, note)


def _policies(step: Mapping[str, Any], key: str, ending: str) -> Panel:
    drawn = draw_policies(step, f"{key}policies")
    left = text(table(step.get("policies")).get("left_out"))
    note = f"{SIMULATED} Left and low is better. {BUDGETS}" + (f" Left out: {left}." if left else "")
    rows = []
    for row in items(table(step.get("policies")).get("points"), 64):
        cells = [*items(row, 4), None, None, None, None][:4]
        rows.append([safe(text(cells[0], "?")), size(number(cells[1])), duration(number(cells[2]))])
    listed = render_table("Policies", ("policy", "memory", "time of a step"), rows, numeric=(1, 2))
    more = f"<details><summary>As a table</summary>{listed}</details>"
    chart = scrolled("Memory against time", drawn) if drawn else "<p>No other policy was planned.</p>"
    html = chart + more
    return Panel(f"{key}policies", f"Memory against time{ending}", html, note)


def verdict_of(document: Mapping[str, Any]) -> tuple[str, list[str], list[tuple[str, str, str]]]:
    """Judge one process.

    Returns:
        ``good``, ``bad`` or ``unsure``; sentences for people; facts as names, values and what they mean.
    """
    idle = text(document.get("idle"))
    limit = number(table(document.get("device")).get("limit_bytes"))
    planned, measured = (
        number(document.get("planned_peak_bytes")),
        number(document.get("measured_peak_bytes")),
    )
    known = [value for value in (planned, measured) if value is not None]
    highest = max(known, default=None)
    step = table(document.get("step"))
    before, after = table(step.get("before")), table(step.get("after"))
    plain_s, planned_s = number(before.get("seconds")), number(after.get("seconds"))
    slowdown = planned_s / plain_s if plain_s and planned_s else None
    told: list[str] = []
    tone = "unsure"
    if idle:
        told.append(f"Large Model Support planned nothing: {idle}.")
    elif highest is None:
        told.append("Whether the step fits is unknown: no peak was planned or measured.")
    elif limit is None:
        told.append(f"The step needs {size(highest)}; the device's limit is unknown.")
    elif highest <= limit:
        tone = "good"
        spare = f"{size(limit - highest)} ({(limit - highest) / limit:.0%})"
        told.append(f"Fits: {size(highest)} of {size(limit)}, {spare} to spare.")
    else:
        tone = "bad"
        more = size(highest - limit)
        told.append(f"Does not fit: {size(highest)} is {more} more than the limit of {size(limit)}.")
    if slowdown is not None:
        told.append(f"A step takes {slowdown:.2f} times as long as without changes (simulated).")
    if step:
        told.append(
            "Copies and recomputation give the same bits by design: the project's tests check it, this run "
            "did not."
        )
    facts = [
        ("planned peak", size(planned), PLANNED),
        ("measured peak", size(measured), MEASURED),
        ("limit of the device", size(limit), LIMIT),
        ("peak without changes", size(_before(step)), _before_note(step) or BEFORE),
        ("slowdown (simulated)", UNKNOWN if slowdown is None else f"{slowdown:.2f}x", SLOWER),
        ("moved so far", _moved(document), MOVED),
    ]
    return tone, told, facts


def _before(step: Mapping[str, Any]) -> float | None:
    peak, base = number(step.get("peak_before_bytes")), number(step.get("base_bytes"))
    return None if peak is None or step.get("open_sizes") else peak + (base or 0.0)


def _before_note(step: Mapping[str, Any]) -> str:
    """Say what the unchanged step has on the host already."""
    host = number(step.get("host_variables_bytes"))
    return BEFORE_ON_HOST.format(size(host)) if host else ""


def _moved(document: Mapping[str, Any]) -> str:
    moved = table(document.get("moved"))
    if not moved:
        return "not counted"
    return f"{size(number(moved.get('out_bytes')))} out, {size(number(moved.get('in_bytes')))} in"


def render_verdict(tone: str, told: Sequence[str], facts: Sequence[tuple[str, str, str]]) -> str:
    """Write the verdict, its first sentence largest, and the facts below it, each with what it means."""
    lines = "".join(f"<p>{safe(line)}</p>" for line in told)
    cells = "".join(
        f'<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd><dd class="means">{safe(meaning)}</dd></div>'
        for name, value, meaning in facts
    )
    return f'<div class="verdict {tone}" role="status">{lines}</div><dl class="facts">{cells}</dl>'


def config_panel(document: Mapping[str, Any], command: Sequence[str] = (), more: str = "") -> Panel:
    """Make the panel of configuration, versions and warnings, with the data to keep."""
    config = table(document.get("config"))
    rows = [[safe(name), safe(value)] for name, value in list(config.items())[:60]]
    versions = [
        [safe(name), safe(version)] for name, version in list(table(document.get("versions")).items())[:20]
    ]
    warnings = [text(line) for line in items(document.get("warnings"), 40) if text(line)]
    graphs = [
        [
            safe(text(graph.get("name"), "?")),
            safe(text(graph.get("policy"), "-")),
            safe("yes" if graph.get("edited") is True else "no"),
            safe(text(graph.get("why"), UNKNOWN)),
        ]
        for graph in map(table, items(document.get("graphs"), 32))
    ]
    parts = [more]
    if command:
        parts.append(f"<h3>To run it again</h3><pre>{safe_lines(command)}</pre>")
    default = "<p>Every setting of Large Model Support has its default, or is unknown.</p>"
    settings = render_table("Settings that differ from their defaults", ("setting", "value"), rows)
    parts.append(settings if rows else default)
    if graphs:
        parts.append(
            render_table(
                "Graphs looked at", ("graph", "policy", "edited", "what was done, or why nothing"), graphs
            )
        )
    if versions:
        parts.append(render_table("Versions", ("package", "version"), versions))
    if warnings:
        parts.append(
            "<h3>Warnings</h3><ul>" + "".join(f"<li>{safe(line)}</li>" for line in warnings) + "</ul>"
        )
    parts.append(
        '<p class="js" hidden><button type="button" id="save-json">Save the data as JSON</button></p>'
    )
    note = "The data of this page are in it as JSON, in the element with the id lms-data."
    return Panel("configuration", "Configuration and data", "".join(parts), note)


def safe_lines(lines: Sequence[str]) -> str:
    """Escape lines and keep their ends."""
    return "\n".join(safe(line) for line in lines)
