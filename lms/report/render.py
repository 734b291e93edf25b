"""Render statistics as text for people, and the memory of a step as a picture."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lms.errors import LMSError, PlaceError, pip_install
from lms.ir.liveness import Timeline
from lms.ir.swap_plan import SwapPlan
from lms.report.stats import UNROLL, GraphStats, Planned, Report, counted, latest_of
from lms.user_files import require_file

MIB = 1 << 20
PICTURES = (".png", ".svg")
UNCOUNTED = "device"
"""The transport whose copies nothing counts."""
NAMED_TENSORS = 8
NAMED_BYTES = MIB // 20
"""The least that is worth a line."""
SPARE = "that the allocator needs beyond these"
TOLD_ERROR = 0.1
"""A measured peak that is above the plan by more than this share is explained."""
MOST_ERROR = 1.0
"""By more than this share the allocator, which gives up to twice the size, does not exceed a plan."""
LEFT_ALONE = "stays as it is"
"""The words in every warning of a step that has no plan."""
OF_OTHERS = "; what stays as it is (see the warnings) has no plan and may have taken more"
OF_LOOPS = "; what loops keep for their backward pass is in no plan"
OUTSIDE = (
    "; what ran outside of the planned steps, such as predict() or other training, may be in it, and memory "
    "that kernels take beside their tensors"
)
WHY_MORE = "; where it has room the allocator gives a buffer up to twice its size, and counts all of it"
OF_KERNELS = "; kernels' scratch memory is in no plan; cuDNN takes most in the first step, to try algorithms"
MOST_UNEDITED = 5
"""Lines about graphs that stay as they are."""
NAME_WIDTH = 34
"""Characters of a tensor's name beside the picture."""


def mib(nbytes: int | None) -> str:
    """Write bytes as MiB, or a dash where they are unknown."""
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f} MiB"


def render_report(report: Report) -> str:
    """Render the report as a table of lines."""
    device = ("device", f"{report.device.name}, limit {mib(report.device.limit_bytes)}")
    if report.idle:
        return _lines([("mode", report.idle), device, ("measured peak", mib(report.measured_peak_bytes))])
    rows: list[tuple[str, str]] = [
        device,
        ("transport", report.transport),
        ("graphs looked at", str(len(report.graphs))),
        ("graphs edited", str(len(report.edited))),
    ]
    for graph, count in _distinct(report.edited):
        rows += _graph_rows(graph, count)
    rows += [(graph.name, graph.why + _first_run(graph)) for graph in _told_unedited(report)]
    rows += [
        ("planned peak", _planned(report)),
        ("measured peak", _measured(report)),
    ]
    if report.transport == UNCOUNTED:
        rows.append(("moved so far", "- TensorFlow makes the copies and counts none"))
    elif report.transport != "none":
        first = ", the first copy of the variables in it" if _streams(report) else ""
        moved = f"{mib(report.store.bytes_out)} out, {mib(report.store.bytes_in)} in"
        rows.append(("moved so far", moved + first))
        rows.append(("held at most", mib(report.store.peak_bytes)))
    if report.retries:
        rows.append(("planned again", f"{counted(report.retries, 'time')}, after running out of memory"))
    return _lines([*rows, *(("warning", text) for text in report.warnings)])


def _told_unedited(report: Report) -> list[GraphStats]:
    """Return the latest graphs that stay as they are; beside edited ones those that XLA compiles whole."""
    if not report.edited:
        return list(report.graphs[-MOST_UNEDITED:])
    return [graph for graph in latest_of(report.graphs) if graph.whole][-MOST_UNEDITED:]


def _streams(report: Report) -> bool:
    return any(graph.streamed.nodes for graph in report.edited)


def _lines(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(["Large Model Support", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _distinct(graphs: Sequence[GraphStats]) -> list[tuple[GraphStats, int]]:
    """Return the latest of each graph that was planned alike several times, and how often it was."""
    counts: dict[tuple[object, ...], tuple[GraphStats, int]] = {}
    for graph in graphs:
        same = (graph.name, graph.ops, graph.policy, graph.why, graph.swap_ins, graph.open_sizes)
        counts[same] = graph, counts.get(same, (graph, 0))[1] + 1
    return list(counts.values())


def _graph_rows(graph: GraphStats, plans: int) -> Iterable[tuple[str, str]]:
    planned = f" (planned {plans} times)" if plans > 1 else ""
    yield "graph", f"{graph.name}{planned}: {graph.ops:,} ops, policy {_policy(graph)}, {graph.why}"
    if graph.open_sizes:
        yield "  peak", f"- {graph.open_sizes}"
    else:
        before, after = mib(graph.peak_before_bytes), mib(graph.planned_peak_bytes)
        when = "with the variables on the host and nothing swapped" if graph.streamed.nodes else "before"
        yield "  peak", f"{before} {when}, {after} planned"
    yield "  in it", _peak_parts(graph)
    if graph.budget_bytes is not None:
        least = "" if graph.open_sizes else f", {mib(graph.floor_bytes)} is the least possible"
        yield "  budget", f"{mib(graph.budget_bytes)} for the step{least}"
    if graph.tensors or not graph.streamed.nodes:
        out, back = mib(graph.bytes_out), mib(graph.bytes_in)
        went, came = counted(graph.tensors, "tensor"), counted(graph.swap_ins, "time")
        lists = f"; {counted(graph.lists, 'list')} of loops among them" if graph.lists else ""
        yield "  swapped", f"{went} out ({out}), {came} in ({back}) a step{lists}"
    if (streamed := graph.streamed).nodes:
        many = counted(streamed.state + streamed.weights, "variable")
        moved = f"{mib(streamed.bytes_out)} out, {mib(streamed.bytes_in)} in a step"
        yield "  on the host", f"{many} between steps ({mib(streamed.nbytes)}), {moved}"
    if graph.recomputed is not None:
        again, spent = graph.recomputed, f"{graph.recomputed.seconds * 1000:,.1f} ms"
        made = f"{counted(again.tensors, 'tensor')} ({mib(again.nbytes)})"
        yield "  recomputed", f"{made} by {counted(again.ops, 'op')}, about {spent} a step"
    if graph.segments:
        held = f"{counted(graph.segments, 'segment')} of {counted(graph.compiled_ops, 'op')}"
        yield "  XLA", f"{held}{_first_run(graph)}"
    if graph.executed is not None:
        what = f", {graph.streamed.copies_out} of them planned for variables" if graph.streamed.nodes else ""
        yield "  executed", f"{counted(graph.executed, 'swap-out')} in the first run{what}"
    yield (
        "  edit",
        f"{graph.edit_s * 1000:.0f} ms, {graph.added_ops} ops and {graph.control_edges} control edges added",
    )
    times = f"measured, of {graph.measured_ops:,} ops" if graph.measured_ops else "estimated"
    yield "  times", times
    for reason, count in graph.rejected:
        yield "  stays", f"{counted(count, 'tensor')}: {reason}"
    for note in graph.notes:
        yield "  note", note


def _policy(graph: GraphStats) -> str:
    """Write the policy that the user chose, and in brackets the one that made the plan if it differs."""
    if graph.asked_policy in ("", graph.policy):
        return graph.policy
    how = f"budget {mib(graph.budget_bytes)}" if graph.policy == "budget" else graph.policy
    return f"{graph.asked_policy} ({how})"


def _peak_parts(graph: GraphStats) -> str:
    """Write the parts that add up to the planned peak."""
    text = f"{mib(graph.base_bytes)} from outside of the step (variables, constants, data, buffers)"
    if graph.planned_peak_bytes is None or graph.step_bytes is None:
        return text
    text += f", {mib(graph.step_bytes)} of its tensors"
    spare = graph.planned_peak_bytes - graph.base_bytes - graph.step_bytes
    return f"{text}, {mib(spare)} {SPARE}" if spare > 0 else text


def _planned(report: Report) -> str:
    """Write the planned peak, and what it leaves of the limit for fragmentation and kernels' scratch."""
    text, peak, limit = mib(report.planned_peak_bytes), report.planned_peak_bytes, report.device.limit_bytes
    if report.open_sizes:
        return f"- {report.open_sizes}"
    if report.fusion_bytes:
        text += f", {mib(report.fusion_bytes)} of it Horovod's buffer (HOROVOD_FUSION_THRESHOLD)"
    if peak is None or limit is None:
        return text
    return f"{text}, {mib(limit - peak)} ({(limit - peak) / limit:.0%}) of the limit left"


def _measured(report: Report) -> str:
    text, error = mib(report.measured_peak_bytes), report.peak_error
    if error is None:
        return text
    return f"{text} ({error:+.1%} against planned{_why_more(report, error) if error > TOLD_ERROR else ''})"


def _first_run(graph: GraphStats) -> str:
    """Return how long the first run of a step took that XLA compiles."""
    took = graph.first_run_s
    return "" if took is None else f"; the first run, with compiling, took {took:.1f} s"


def _why_more(report: Report, error: float) -> str:
    if any(LEFT_ALONE in warning for warning in report.warnings):
        return OF_OTHERS
    if report.loops:
        return OF_LOOPS
    why = OUTSIDE if error > MOST_ERROR else WHY_MORE
    return f"{OF_KERNELS}{why}" if report.device.type == "GPU" else why


OPEN = "No policy swaps a tensor of unknown size: give these sizes, or try a smaller batch."
LESS = "policy 'all' (LMS_POLICY=all), or a smaller batch."
MORE_ROOM, OTHER_PLAN = f"Try a larger margin (LMS_MARGIN=0.2), {LESS}", f"Try {LESS}"
ROOMIER = 8 / 9
"""The bytes of a plan with that margin over those with the usual one of 0.1."""
NO_ROOM = "No plan needs less: take a smaller batch, or a device with more memory."
MAY_STREAM = (
    "Variables lie on the host between steps with optimizer_state 'host' and variables 'host' "
    "(LMS_OPTIMIZER_STATE=host, LMS_VARIABLES=host)."
)
SMALLER = "Take a smaller model, or a device with more memory."
MUCH_BEFORE = 1 / 3
"""The share of a device that is in use before the step, from which on :data:`MAY_STREAM` is worth a line."""
MAY_SWAP = "Nothing is swapped with recompute 'only': try 'auto' (LMS_RECOMPUTE=auto), or a smaller batch."
ALL_ALONE = (
    "Policy 'all' swaps all that it can already: try 'auto' (LMS_POLICY=auto), whose plans look for room "
    "where free memory lies in pieces, or take a smaller batch."
)
BOTH = "Policies 'all' and 'auto' were both tried: take a smaller batch, or a device with more memory."
ADVICE = {
    "all": "Policy 'all' swaps all that it can already: take a smaller batch, or a device with more memory.",
    "threshold": "Try policy 'auto' or 'all' (LMS_POLICY=all), or a smaller batch.",
}
"""By the policy of the plan that failed what may help; for others :func:`_more_room`."""


def explain_out_of_memory(
    planned: Planned | None, report: Report, *, policy: str = "", swaps: bool = True, streams: bool = True
) -> str:
    """Return the text to add to TensorFlow's message when a step ran out of device memory.

    Args:
        planned: The latest plan.
        report: What is known of all steps.
        policy: What the configuration asks for; behind ``all`` other plans were tried, too.
        swaps: Whether plans may swap; with ``recompute="only"`` none does.
        streams: Whether values of variables lie in host memory already.
    """
    lines = [
        f"LMS: the step ran out of memory on {report.device.name} (limit {mib(report.device.limit_bytes)})."
    ]
    if planned is None and not report.graphs:
        lines.append("No graph was looked at yet: it was before the step, as where variables are made.")
        return "\n".join([*lines, SMALLER if streams else MAY_STREAM])
    if planned is None:
        lines.append(f"LMS edited no graph: {report.graphs[-1].why}.")
        return "\n".join([*lines, "Try policy 'all' (LMS_POLICY=all), or a smaller batch."])
    plan = planned.plan
    advice = ADVICE.get(plan.policy, _more_room(plan)) if swaps else MAY_SWAP
    if policy == "all":
        advice = ALL_ALONE if plan.policy == "all" else BOTH
    step = planned.name, planned.function
    same = [graph for graph in report.graphs if (graph.name, graph.function) == step]
    peak = max((graph.planned_peak_bytes or 0 for graph in same), default=0)
    loops = max((graph.loops for graph in same), default=0)
    if loops:
        lines += [_needs_in_loops(planned, loops), f"{UNROLL[0].upper()}{UNROLL[1:]}."]
    else:
        lines += [_needs(planned, swaps, peak), OPEN if planned.open_sizes else advice]
    if not streams and planned.base_bytes > MUCH_BEFORE * (report.device.limit_bytes or math.inf):
        lines.append(MAY_STREAM)
    return "\n".join([*_largest(planned), *lines])  # what may help comes last: lmsrun repeats the last lines


def _more_room(plan: SwapPlan) -> str:
    """Return what may help against a plan that needs more than it was to."""
    if not plan.feasible or plan.peak_bytes <= plan.floor_bytes:
        return NO_ROOM
    return MORE_ROOM if plan.floor_bytes <= ROOMIER * (plan.budget_bytes or math.inf) else OTHER_PLAN


def explain_unplanned(name: str, limit_bytes: int | None) -> str:
    """Return the text to add to TensorFlow's message when a function without a plan ran out of device memory.

    Args:
        name: The function's.
        limit_bytes: Of the device.
    """
    return (
        f"LMS: {name} ran out of memory (limit {mib(limit_bytes)}). It has no plan: it trains nothing, as "
        "evaluate and predict do, or LMS left it unedited and warned of it. Take a smaller batch there."
    )


def _largest(planned: Planned) -> list[str]:
    """Return lines with the largest tensors at the planned peak, and the sum of the others."""
    live = planned.largest_at_peak(len(planned.graph.tensors))
    named = [(name, nbytes) for name, nbytes in live[:NAMED_TENSORS] if nbytes >= NAMED_BYTES]
    lines = [f"  {mib(nbytes):>14}  {name}" for name, nbytes in named]
    others, rest = len(live) - len(named), sum(nbytes for _, nbytes in live[len(named) :])
    if lines and rest >= NAMED_BYTES:
        lines.append(f"  {mib(rest):>14}  in {others:,} smaller ones")
    return ["LMS: the largest tensors alive at the planned peak:", *lines] if lines else []


def _needs_in_loops(planned: Planned, loops: int) -> str:
    kept = f"what {counted(loops, 'loop')} {'keeps' if loops == 1 else 'keep'} for the backward pass"
    swapped = counted(planned.plan.tensors_out, "tensor")
    return (
        f"What {planned.name} needs is not known: {kept} is in no plan. Planned without: {swapped} swapped."
    )


def _needs(planned: Planned, swaps: bool, peak_bytes: int) -> str:
    plan, spare = planned.plan, peak_bytes - planned.plan.peak_bytes - planned.base_bytes
    swapped = f"{counted(plan.tensors_out, 'tensor')} swapped"
    if planned.open_sizes:
        return (
            f"What {planned.name} needs is not known: {planned.open_sizes}. Planned without these: {swapped}."
        )
    chunks = f", {mib(spare)} {SPARE}" if spare >= NAMED_BYTES else ""
    return (
        f"Planned for {planned.name}: {mib(plan.peak_bytes)} for the step, {mib(planned.base_bytes)} in use "
        f"before{chunks}; {swapped}; no plan {'' if swaps else 'without swaps '}needs less than "
        f"{mib(plan.floor_bytes)}."
    )


def plot_memory(planned: Planned, path: str | os.PathLike[str]) -> None:
    """Draw the memory over a step, before and after the edit, with the tensors at the peak named.

    Args:
        planned: The step.
        path: File to write; its ending says PNG or SVG.

    Raises:
        LMSError: If the file cannot be written, its ending is another one, or matplotlib is missing.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise PlaceError(f"found {path!r}; needed in lms.plot(): the name of a .png or .svg file to write")
    require_drawable(Path(path))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LMSError(f"lms.plot needs matplotlib; try {pip_install('plot')}") from error
    before, after = planned.before(), planned.after()
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes, legend = figure.subplots(1, 2, width_ratios=(3, 1.15))
    _draw(axes, before, planned.base_bytes, "before", "#b0553a")
    _draw(axes, after, planned.base_bytes, "after", "#2f6f9f")
    if planned.plan.budget_bytes is not None:
        budget = (planned.base_bytes + planned.plan.budget_bytes) / MIB
        axes.axhline(budget, color="#555555", linestyle="--", linewidth=1, label=f"budget {budget:,.0f} MiB")
    axes.set(
        xlabel="progress of the step, % of its changes of memory",
        ylabel="tensors on the device, MiB",
        title=planned.name,
        xlim=(0, 100),
        ylim=0,
    )
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    legend.axis("off")
    legend.text(
        0, 1, _peak_text(planned), va="top", family="monospace", fontsize=7.5, transform=legend.transAxes
    )
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise PlaceError(f"cannot write {os.fspath(path)!r}: {error.strerror or error}") from error


def require_drawable(path: Path) -> None:
    """Check that a picture can be written at ``path``.

    Raises:
        PlaceError: If it cannot; the text says why and what to give.
    """
    if path.suffix.lower() not in PICTURES:
        raise PlaceError(f"cannot draw into {os.fspath(path)!r}; needed a name that ends in .png or .svg")
    require_file(path, "lms.plot()")


def _draw(axes: Any, line: Timeline, base: int, label: str, color: str) -> None:
    """Draw memory at the points where it changes; the time between them takes no room on the axis."""
    values = [(nbytes + base) / MIB for nbytes in line.allocated]
    changes = [now for earlier, now in zip([0.0, *values], values, strict=False) if now != earlier] or [0.0]
    places = [100 * index / len(changes) for index in range(len(changes) + 1)]
    peak = max(changes)
    changes.append(changes[-1])  # the last one lasts to the end
    axes.fill_between(places, changes, color=color, alpha=0.18, linewidth=0, step="post")
    axes.step(
        places, changes, color=color, linewidth=1.2, where="post", label=f"{label}: peak {peak:,.0f} MiB"
    )
    axes.plot(places[changes.index(peak)], peak, "o", color=color, markersize=5)


def _peak_text(planned: Planned) -> str:
    plan, live = planned.plan, planned.largest_at_peak(len(planned.graph.tensors))
    named = [(name, nbytes) for name, nbytes in live[: NAMED_TENSORS * 3] if nbytes >= NAMED_BYTES]
    rest = sum(nbytes for _, nbytes in live[len(named) :])
    parts: Sequence[str] = (
        f"{counted(plan.tensors_out, 'tensor')} swapped",
        f"{mib(plan.bytes_out)} out, {mib(plan.bytes_in)} in",
        *((f"not drawn: {planned.open_sizes.count:,} of unknown size",) if planned.open_sizes else ()),
        "",
        "alive at the peak (after)",
        *(f"{mib(nbytes):>13} {_short(name)}" for name, nbytes in named),
        *((f"{mib(rest):>13} in {len(live) - len(named):,} smaller ones",) if len(live) > len(named) else ()),
        *((f"{mib(planned.base_bytes):>13} in use before the step",) if planned.base_bytes else ()),
    )
    return "\n".join(parts)


def _short(name: str) -> str:
    """Shorten a name to as many of its last parts as fit, at least one."""
    if len(name) <= NAME_WIDTH:
        return name
    tail = name[-NAME_WIDTH + len(".../") :]
    return ".../" + (tail.partition("/")[2] or tail)
