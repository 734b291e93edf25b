"""The table of :mod:`gpu_lms`: a line for each way in which a model ran."""

from collections.abc import Sequence

from lms_children import Found, table
from models import ZOOS

CHECK = "a check of the script, no measurement"

Row = tuple[str, str, Found | None]
"""Model, way, and what was found, or how it failed; ``None``: it does not fit."""

HEADINGS = (
    "model",
    "way",
    "units",
    "multiple",
    "goal",
    "step",
    "time a unit",
    "simulated",
    "peak of plan",
    "recomputed",
    "GiB planned out/in",
    "GiB traced out/in",
    "hidden, trace",
    "hidden, times",
)

FOOTNOTE = (
    "time a unit: against no LMS at its largest; simulated: a step in the timed simulator, against the "
    "measured one; unified memory: pages of a pool of eight limits, on a card of which others hold the rest; "
    "peaks: from the second step on; recomputed: ops; traced bytes hold the training data, too "
    "('-': the profiler saw no GPU, for which it may lack the rights)"
)


def render(document: Found, rows: Sequence[Row]) -> str:
    """Render what was found as text."""
    machine = document["machine"]
    name = (machine["gpus"] or ["CPU"])[0]
    lines = [f"{name}{': ' + CHECK if document['quick'] else ''}; TensorFlow {machine['tensorflow']}"]
    copies = document.get("copies")
    if copies is not None:
        rates = (copies[f"{way}_bytes_per_s"] for way in ("out", "in", "both"))
        out, back, both = ("-" if rate is None else f"{rate / 1e9:.1f}" for rate in rates)
        lines.append(f"copies ({copies['transport']}): {out} GB/s out, {back} in, {both} both at once")
    return "\n".join([*lines, table([HEADINGS, *map(_row, rows)]), FOOTNOTE])


def _row(row: Row) -> tuple[str, ...]:
    model, way, found = row
    if found is None or "error" in found:
        text = "does not fit" if found is None else f"failed: {found['error']}"
        return (model, way, text, *[""] * (len(HEADINGS) - 3))
    trace, target = found.get("trace"), ZOOS[found["zoo"]][model].target
    planned = found["policy"] != "off"
    seen = [trace[f"bytes_{way}"] / trace["steps"] for way in ("out", "in")] if trace else [0.0, 0.0]
    return (
        model,
        way,
        str(found["units"]),
        f"{found.get('multiple', 1.0):.1f}x",
        "-" if target is None else f"{target:g}x",
        f"{1e3 * found['step_s']:.0f} ms",
        f"{found['time_ratio']:.2f}",
        f"{found['simulated_s'] / found['step_s'] - 1:+.0%}" if "simulated_s" in found else "-",
        f"{found['peak_bytes'] / found['planned_peak_bytes'] - 1:+.1%}"
        if found.get("planned_peak_bytes")
        else "-",
        str(found["recomputed_ops"]) if planned else "-",
        _gib(found["bytes_out"], found["bytes_in"]) if planned else "-",
        _gib(*seen),
        _share(trace["share"] if trace else None),
        _share(found.get("hidden_by_time")),
    )


def _gib(out: float, back: float) -> str:
    return f"{out / 2**30:.2f} / {back / 2**30:.2f}" if out or back else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
