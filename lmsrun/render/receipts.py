"""Receipts as a table for people, in plain text: it is printed among the ranks' own output."""

from collections.abc import Sequence

from launch.receipts.judge import RankReceipt

_INITIALISED = "yes, also after hvd.init()"
_MET = {"tensorflow": "yes, also with its strategy made"}
_HEADS = ("rank", "host", "GPU", "NUMA node", "CPUs", "memory", "host limit", "LMS", "verified")


def render_receipts(receipts: Sequence[RankReceipt]) -> str:
    """One row a rank: where it really runs, and whether that is where the plan put it."""
    rows = [_HEADS, *map(_row, receipts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _row(receipt: RankReceipt) -> tuple[str, ...]:
    limit = receipt.host_mem_limit_mb
    return (
        str(receipt.rank),
        receipt.host,
        _gpu(receipt),
        "?" if receipt.numa_node is None else str(receipt.numa_node),
        receipt.cpus or "?",
        " ".join(filter(None, [receipt.mem_policy, receipt.mem_nodes])) or "?",
        "-" if limit is None else f"{limit} MiB",
        receipt.lms,
        _verdict(receipt),
    )


def _gpu(receipt: RankReceipt) -> str:
    """Name the planned GPU; which one TensorFlow lists is not known by name, but that it lists none is."""
    if receipt.gpu and "framework" in receipt.stages and receipt.visible_gpus == ():
        return f"{receipt.gpu}, but TensorFlow reports none"
    return receipt.gpu or "-"


def _verdict(receipt: RankReceipt) -> str:
    if receipt.verified:
        return _MET.get(receipt.met_by or "", _INITIALISED) if "init" in receipt.stages else "yes"
    word = "-" if receipt.verified is None else "NO"
    return ": ".join(filter(None, [word, "; ".join(receipt.reasons)]))
