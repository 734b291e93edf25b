"""The table of what ``bench/lms.py`` has measured, and the goals that were missed."""

from collections.abc import Iterable
from typing import Any

from lms_children import Found, table

TIME_GOAL, PEAK_GOAL = 1.3, 0.10
POLICIES = ("all", "auto")

HEADINGS = (
    "TensorFlow",
    "model",
    "limit",
    "without",
    "all",
    "auto",
    "multiple",
    "goal",
    "time: auto 2x",
    "all 2x",
    "auto most",
    "all most",
    "peak: auto",
    "all",
    "GiB moved: auto 2x",
    "all 2x",
    "edit",
)


def render(entries: Iterable[Found]) -> str:
    """Render the results as a table."""
    return table([HEADINGS, *(_row(entry) for entry in entries)])


def _row(entry: Found) -> tuple[str, ...]:
    with_lms, double, times = (entry.get(key, {}) for key in ("with", "double", "time"))
    at_least = ">= " if entry.get("goal_only") else ""
    return (
        f"{entry['tensorflow']}, Keras {entry['keras']}",
        entry["model"],
        f"{entry['limit_mb']} MiB",
        _cell(entry.get("without"), lambda found: str(found["units"])),
        *(_cell(with_lms.get(policy), lambda found: str(found["units"])) for policy in POLICIES),
        _cell(multiple(entry), lambda value: f"{at_least}{value:.1f}x"),
        f"{entry['target']:g}x",
        *(_cell(times.get(f"{policy} at 2x"), ratio_text) for policy in ("auto", "all")),
        *(_cell(times.get(f"{policy} at most"), ratio_text) for policy in ("auto", "all")),
        *(
            _cell(with_lms.get(policy), lambda found: f"{peak_error(found):+.1%}")
            for policy in ("auto", "all")
        ),
        *(_cell(double.get(policy), _moved) for policy in ("auto", "all")),
        _cell(entry.get("edit"), lambda edit: f"{edit['edit_s'] * 1000:.0f} ms, {edit['ops']:,} ops"),
    )


def _cell(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def ratio_text(found: Found) -> str:
    """Write a ratio of times with its spread."""
    if "error" in found:
        return "failed"
    return f"{found['ratio']:.2f} ({found['lowest']:.2f}-{found['highest']:.2f})"


def _moved(found: Found) -> str:
    return f"{(found['counted_bytes_out'] + found['counted_bytes_in']) / 2**30:.2f}"


def peak_error(found: Found) -> float:
    """How far the measured peak is above the planned one."""
    return float(found["measured_peak_bytes"] / found["planned_peak_bytes"] - 1)


def multiple(entry: Found) -> float | None:
    """Divide the largest batch with LMS that was tried by the largest without; None where one is missing."""
    units = [found["units"] for found in entry.get("with", {}).values()]
    without = entry.get("without", {}).get("units")
    return max(units) / without if units and without else None


def misses(entries: Iterable[Found]) -> list[str]:
    """List the goals that were missed, one line each."""
    found = []
    for entry in entries:
        where = f"TensorFlow {entry['tensorflow']}, Keras {entry['keras']}, {entry['model']}"
        reached = multiple(entry)
        if "error" in entry:
            found.append(f"{where}: {entry['error'].splitlines()[0]}")
        found += [f"{where}: {name}: {why.splitlines()[0]}" for name, why in entry.get("failed", {}).items()]
        if reached is not None and reached < entry["target"]:
            found.append(f"{where}: {reached:.1f}x instead of {entry['target']:g}x")
        found += [
            f"{where}: {name}: {ratio_text(pair)} of the time a unit (goal {TIME_GOAL})"
            for name, pair in entry.get("time", {}).items()
            if "error" in pair or pair["ratio"] > TIME_GOAL
        ]
        found += [
            f"{where}: {policy}: measured peak {peak_error(one):+.1%} against planned (goal {PEAK_GOAL:.0%})"
            for policy, one in entry.get("with", {}).items()
            if abs(peak_error(one)) > PEAK_GOAL
        ]
    return found
