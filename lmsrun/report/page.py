"""A job as one HTML page: a verdict, the machine with its ranks, the ranks side by side, and what LMS did."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launch.ending.device_memory import explain_lack_of_memory
from launch.model.idset import format_ids
from launch.model.text import count_of
from launch.receipts.judge import RankReceipt
from lms.page.panels import config_panel, lms_panels, render_verdict, safe_lines, verdict_of
from lms.page.reading import duration, items, number, numbers, size, table, text, whole
from lms.page.shell import Panel, render_page, render_table, scrolled
from lms.page.svg import safe
from lmsrun.draw.marks import STATES, with_receipts
from lmsrun.draw.plan import MOST_HOSTS, draw_plan
from lmsrun.report.record import Record, known_ranks

MOST_BYTES = 1_000_000
"""Of a page."""
MOST_ROWS = 256
MOST_DRAWN = 3
"""The ranks whose steps are drawn; of those with the same plan the slowest one stands for all."""
UNKNOWN = "unknown"
RUNS = (
    "What Large Model Support did is not known yet: each rank writes its report when it ends. lmsrun top "
    "shows a job that runs."
)


def render_report(record: Record) -> str:
    """Write the page of a job, of at most ``MOST_BYTES``: fewer ranks are drawn where it would be larger."""
    groups = _groups(record)
    for most in (MOST_DRAWN, 2, 1):
        if most <= len(groups):
            page = _render(record, groups, most)
            if len(page.encode()) <= MOST_BYTES:
                return page
    return _render(record, groups, 0)


def _render(record: Record, groups: Sequence[tuple[int, Sequence[int]]], most: int) -> str:
    drawn = groups[:most]
    panels = [*_failure(record), *_machine(record), _ranks(record)]
    for number_, (rank, alike) in enumerate(drawn):
        who = f"rank {rank}" if len(drawn) > 1 else ""
        note = f"Drawn is rank {rank}." if len(known_ranks(record)) > 1 else ""
        if len(alike) > 1:
            note += f" {count_of(len(alike) - 1, 'other rank')} planned alike."
        panels += lms_panels(record.reports[rank], number_, who, note)
    if len(groups) > most:
        left = ", ".join(str(rank) for _, alike in groups[most:] for rank in alike[:8])
        html = f"<p>The steps of these ranks have other plans and are not drawn: {safe(left)}.</p>"
        panels.append(Panel("left-out", "Left out", html))
    first = record.reports[drawn[0][0]] if drawn else next(iter(record.reports.values()), {})
    panels.append(config_panel(first, _again(record), _job_facts(record)))
    kept = {rank for rank, _ in drawn}
    data = {
        "job": {**record.told, "ranks": items(record.told.get("ranks"), MOST_ROWS)},
        "reports": [record.reports[rank] for rank, _ in drawn],
        "others": [_short(report) for rank, report in record.reports.items() if rank not in kept][:MOST_ROWS],
    }
    ranks = count_of(len(known_ranks(record)), "rank")
    return render_page(f"Report of {_name(record)}, {ranks}", _verdict(record, first), panels, data)


def _name(record: Record) -> str:
    return record.name or record.folder.resolve().name or "a job"


def _short(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without what makes it large."""
    names = ("rank", "host", "planned_peak_bytes", "measured_peak_bytes", "step_count", "moved", "retries")
    return {name: report.get(name) for name in names}


def _groups(record: Record) -> list[tuple[int, Sequence[int]]]:
    """Group the ranks that have steps by alike plans, each with its slowest rank; the slowest first."""
    alike: dict[str, list[int]] = {}
    for rank, report in record.reports.items():
        step = table(report.get("step"))
        if step:
            names = ("name", "ops", "policy", "limit_bytes")  # Peaks differ by what else lies on a device.
            alike.setdefault(repr([step.get(name) for name in names]), []).append(rank)
    groups = [
        (max(ranks, key=lambda rank: (_median_s(record, rank) or 0.0, -rank)), ranks)
        for ranks in alike.values()
    ]
    return sorted(groups, key=lambda group: (-(_median_s(record, group[0]) or 0.0), group[0]))


def _median_s(record: Record, rank: int) -> float | None:
    """Return the median time of a rank's steps; the first, which is traced and planned, counts only alone."""
    rows = [numbers(row, 2) for row in items(table(record.reports.get(rank)).get("steps"))]
    times = [row[1] for row in rows if row and row[1] is not None]
    return statistics.median(times[1:] or times) if times else None


def _verdict(record: Record, first: Mapping[str, Any]) -> str:
    code = record.told.get("exit_code")
    verified = sum(receipt.verified is True for receipt in record.receipts)
    ranks = len(known_ranks(record))
    fullest = max(record.reports.values(), key=_highest_bytes, default=first)
    tone, told, facts = verdict_of(fullest) if first else ("unsure", [], [])
    if not first:
        told = [RUNS if record.is_running else _without_reports(record.receipts)]
    elif len(record.reports) < ranks:
        told.append(f"{ranks - len(record.reports)} of {count_of(ranks, 'rank')} left no report.")
    if not record.receipts:
        bound, tone = "Whether the ranks run where they were planned is unknown.", "unsure"
    elif verified == ranks:
        all_of = (
            f"All {ranks} ranks verified where they were" if ranks > 1 else "The rank verified where it was"
        )
        bound = f"{all_of} planned."
    else:
        bound = f"{verified} of {count_of(ranks, 'rank')} verified where they were planned."
        tone = "bad" if any(receipt.verified is False for receipt in record.receipts) else "unsure"
    notes = [f"{note[:1].upper()}{note[1:]}." for note in record.notes[:6]]
    cause = text(table(record.told.get("cause")).get("line"))
    if code is None:
        ended, tone = _not_ended(record), "unsure" if tone == "good" else tone
    elif code == 0:
        ended = f"The job was {cause}, and its ranks left with 0." if cause else "The job ended well."
    else:
        ended = f"The job failed with code {code}" + (f": {cause}." if cause else ".")
        return render_verdict("bad", [ended, *_lack_of_memory(record), bound, *told, *notes], facts)
    return render_verdict(tone, [*told[:1], f"{ended} {bound}", *told[1:], *notes], facts)


def _not_ended(record: Record) -> str:
    if record.is_running:
        return "The job still runs."
    if not record.receipts:
        return "How the job ended is unknown."
    host = text(record.told.get("host"), "another host")
    return f"The job's end was not written down: it still runs on {host}, or lmsrun was killed there."


def _last_lines(record: Record) -> list[str]:
    cause = table(record.told.get("cause"))
    return [text(line).expandtabs(4) for line in items(cause.get("last_lines"), 40)]


def _lack_of_memory(record: Record) -> list[str]:
    """Say that a device ran out of memory, if the last lines do, and what to try."""
    said = explain_lack_of_memory(_last_lines(record), {receipt.lms for receipt in record.receipts})
    return [f"{said[0].upper()}{said[1:]}."] if said else []


def _failure(record: Record) -> list[Panel]:
    """Show what the rank that failed first wrote last."""
    cause = table(record.told.get("cause"))
    lines = _last_lines(record)
    if not lines or not record.told.get("exit_code"):
        return []
    rank = whole(cause.get("rank"))
    who = "the launcher" if rank is None else f"rank {rank}"
    return [Panel("failure", f"The last lines of {who}", f"<pre>{safe_lines(lines)}</pre>")]


def _without_reports(receipts: Sequence[RankReceipt]) -> str:
    said = {receipt.lms for receipt in receipts if receipt.lms != "-"}
    if not said or "graph" in said:
        return "What Large Model Support did is unknown: no rank left a report."
    return f"Large Model Support planned nothing here: {', '.join(sorted(said))}."


def _machine(record: Record) -> list[Panel]:
    """Draw the machine with its ranks, if it is known."""
    hosts = {mark.host for mark in record.marks}
    if not record.marks or not hosts <= record.machines.keys():
        return [Panel("machine", "The machine and its ranks", f"<p>{UNKNOWN}: there is no plan to draw.</p>")]
    marks = with_receipts(record.marks, record.receipts)
    svg = draw_plan(marks, record.machines, key="machine-drawing", style=False)
    note = "Colours tell ranks apart."
    if any(mark.gpu for mark in marks):
        note = "Colours tell ranks apart; ✓ was read back from the kernel as planned, ✗ is elsewhere."
    if len(hosts) > MOST_HOSTS:
        note += f" {len(hosts) - MOST_HOSTS} more hosts are not drawn."
    return [Panel("machine", "The machine and its ranks", scrolled("The machine", svg), note)]


def _ranks(record: Record) -> Panel:
    ranks = known_ranks(record)
    receipts = {receipt.rank: receipt for receipt in record.receipts}
    marks = {mark.rank: mark for mark in with_receipts(record.marks, record.receipts)}
    medians = {rank: _median_s(record, rank) for rank in ranks}
    timed = {rank: value for rank, value in medians.items() if value is not None}
    slowest = max(timed, key=lambda rank: timed[rank]) if len(timed) > 1 else None
    rows, not_told = [], "not yet" if record.is_running else UNKNOWN
    for rank in _chosen(ranks, slowest):
        receipt, mark, report = receipts.get(rank), marks.get(rank), table(record.reports.get(rank))
        place = (
            [mark.host, mark.gpu or "-", format_ids(mark.cpus) or "not bound"] if mark else ["-", "-", "-"]
        )
        mark_slow = " <strong>slowest</strong>" if rank == slowest else ""
        rows.append(
            [
                str(rank),
                safe(receipt.host if receipt else place[0]),
                safe(place[1]),
                safe(place[2]),
                _found(receipt, place[2]) if receipt else not_told,
                _memory(receipt) if receipt else not_told,
                _state(receipt) if receipt else not_told,
                safe(receipt.lms) if receipt else not_told,
                size(number(report.get("planned_peak_bytes"))) if report else not_told,
                size(number(report.get("measured_peak_bytes"))) if report else not_told,
                str(whole(report.get("step_count")) or UNKNOWN) if report else not_told,
                duration(medians[rank]) + mark_slow if report else not_told,
                _exit_code(record, rank, "it runs" if record.is_running else UNKNOWN),
            ]
        )
    heads = (
        *("rank", "host", "GPU", "planned CPUs", "found CPUs", "memory", "verified", "LMS"),
        *("planned peak", "measured peak", "steps", "median step", "exit"),
    )
    left = len(ranks) - len(rows)
    note = f"{left} more ranks are left out. " if left else ""
    if slowest is not None:
        fastest = min(timed.values())
        note += f"Rank {slowest} is the slowest: {timed[slowest] / fastest:.2f} times the fastest."
    html = render_table(
        "Where each rank ran, and what it needed", heads, rows, numeric=(8, 9, 10, 11), tight=(3, 4)
    )
    return Panel("ranks", "Ranks side by side", html, note)


def _chosen(ranks: Sequence[int], slowest: int | None) -> list[int]:
    """As many ranks as are shown, the slowest among them."""
    chosen = list(ranks[:MOST_ROWS])
    return chosen if slowest is None or slowest in chosen else [*chosen, slowest]


def _found(receipt: RankReceipt, planned: str) -> str:
    if not receipt.cpus:
        return UNKNOWN
    return "as planned" if receipt.cpus == planned else safe(receipt.cpus)


def _memory(receipt: RankReceipt) -> str:
    return safe(" ".join(filter(None, [receipt.mem_policy, receipt.mem_nodes])) or UNKNOWN)


def _state(receipt: RankReceipt) -> str:
    if receipt.verified:
        return '<span class="good">✓ yes</span>'
    why = safe("; ".join(map(str, receipt.reasons)) or STATES["unknown"])
    return f"- {why}" if receipt.verified is None else f'<span class="bad">✗ no: {why}</span>'


def _highest_bytes(report: Mapping[str, Any]) -> float:
    """Return the most that a rank's device held, or was planned to hold."""
    peaks = (number(report.get(name)) for name in ("measured_peak_bytes", "planned_peak_bytes"))
    return max((peak for peak in peaks if peak is not None), default=-1.0)


def _exit_code(record: Record, rank: int, otherwise: str) -> str:
    code = whole(table(record.told.get("exit_codes")).get(str(rank)))
    if code is None:
        return otherwise
    failed = code and whole(table(record.told.get("cause")).get("rank")) == rank
    return f"{code} <strong>failed first</strong>" if failed else str(code)


def _again(record: Record) -> list[str]:
    words = [text(word) for word in items(record.told.get("command"), 400)]
    if not words:
        return []
    if words[0].endswith("__main__.py"):
        words[0] = "lmsrun"
    return [shlex.join(words), "# in the same folder, with the same variables of the environment"]


def _job_facts(record: Record) -> str:
    """When and with what the job ran, and what its plan warned of."""
    told = record.told
    missing = {"ended": "not yet: the job runs" if record.is_running else UNKNOWN}
    names = ("host", "job_id", "started", "ended")
    rows = [[name, safe(text(told.get(name), missing.get(name, UNKNOWN)))] for name in names]
    rows += [[safe(name), safe(value)] for name, value in list(table(told.get("versions")).items())[:12]]
    warnings = "".join(f"<li>{safe_lines([line])}</li>" for line in record.warnings)
    listed = f"<h3>Warnings of the plan</h3><ul>{warnings}</ul>" if warnings else ""
    return render_table("The job", ("what", "value"), rows) + listed
