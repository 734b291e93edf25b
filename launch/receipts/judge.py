"""Receipts: what each rank found when it read its own binding back, collected and judged against the plan.

Ranks write them, so to the launcher they are data from outside: size-limited JSON objects, nothing more.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.model.plan import MemPolicy, RankPlan
from launch.model.text import count_of
from launch.receipts.file import END, compare_binding, parse_expected_ids, short_text

SCHEMA = "lmsrun.receipts/1"
STAGES = ("start", "framework", "init")
MAX_RECEIPT_BYTES = 1 << 16

_POLICIES: Mapping[str, MemPolicy] = {
    "bind": "bind",
    "preferred": "preferred",
    "preferred-many": "preferred-many",
}

Stages = Mapping[str, Mapping[str, Any]]
"""The receipts of one rank by stage."""


@dataclass(frozen=True)
class RankReceipt:
    """What is known of one rank. ``verified`` None: no binding was asked for."""

    rank: int
    local_rank: int
    host: str
    gpu: str | None
    numa_node: int | None
    cpus: str | None
    mem_policy: str | None
    mem_nodes: str | None
    host_mem_limit_mb: int | None
    lms: str
    verified: bool | None
    reasons: tuple[str, ...]
    stages: tuple[str, ...]
    pid: int | None = None
    visible_gpus: tuple[str, ...] | None = None
    """Names what TensorFlow lists, which does not tell which GPU each is; None: nothing was reported."""
    met_by: str | None = None
    """What brought the ranks together: ``horovod`` or ``tensorflow``; None: nothing yet."""


def read_receipts(directory: Path, ranks: Sequence[int]) -> dict[int, dict[str, dict[str, Any]]]:
    """Read the stages that have arrived of each rank; what is not a small JSON object is left out."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for rank in ranks:
        stages = {stage: read_object(directory / f"rank-{rank}.{stage}.json") for stage in (*STAGES, END)}
        found[rank] = {stage: content for stage, content in stages.items() if content is not None}
    return found


@dataclass(frozen=True)
class Failure:
    """How a rank under another launcher failed."""

    rank: int
    host: str
    exit_code: int
    how: str


def read_first_failure(directory: Path) -> Failure | None:
    """Read the first failure that was reported, by the time at which its receipt arrived here."""
    arrived = []
    for path in directory.glob(f"rank-*.{END}.json"):
        content = read_object(path) or {}
        rank, code = to_number(content.get("rank")), to_number(content.get("code"))
        if rank is not None and rank >= 0 and code is not None and 0 < code < 256:
            failure = Failure(
                rank, short_text(content.get("host")) or "?", code, short_text(content.get("how")) or "failed"
            )
            arrived.append((path.lstat().st_mtime_ns, rank, failure))
    return min(arrived, key=lambda entry: entry[:2])[2] if arrived else None


def read_leaving_before(
    directory: Path, rank: int, others: Set[int], ended: Iterable[int] = ()
) -> frozenset[int]:
    """Return which of ``others`` began to exit before ``rank`` did.

    Args:
        directory: Where the bootstrap leaves word of a rank that begins to exit.
        rank: The one that failed.
        others: Those asked for.
        ended: The ranks that have ended, in that order. It tells of those without word: they have left by
            ``os._exit``, or run no Python.
    """
    times = {}
    for number in {rank, *others}:
        try:
            times[number] = (directory / f"rank-{number}.exit.json").lstat().st_mtime_ns
        except OSError:
            continue
    order = [*ended]
    earlier = {*order[: order.index(rank)]} if rank in order else set[int]()

    def left_before(number: int) -> bool:
        told = number in times and rank in times
        return times[number] < times[rank] if told else number in earlier

    return frozenset(filter(left_before, others))


def adopt_binding(plan: RankPlan, stages: Stages) -> RankPlan:
    """Adopt for the plan what a rank that planned for itself on its own machine found verified at its start.

    The launcher's plan assumed what that machine is like; only what changes later is a fault.
    """
    start = stages.get("start")
    if start is None or start.get("verified") is not True:
        return plan
    try:
        cpus, mem_nodes = (parse_expected_ids(start.get(key)) for key in ("cpus", "mem_nodes"))
    except ValueError:
        return plan
    policy = _POLICIES.get(short_text(start.get("mem_policy")) or "", "none")
    numa_node = to_number(start.get("numa_node"))
    return replace(plan, cpus=cpus, mem_policy=policy, mem_nodes=mem_nodes, numa_node=numa_node)


def judge_rank(plan: RankPlan, stages: Stages, numa: str, world_size: int | None = None) -> RankReceipt:
    """Compare what one rank read back, at its start and after ``hvd.init()``, with what was planned.

    Args:
        plan: Of this rank.
        stages: What has arrived of it.
        numa: The option; ``off`` judges no binding.
        world_size: How many ranks Horovod should count; None: they come and go.
    """
    start, framework, init = (stages.get(stage, {}) for stage in STAGES)
    latest = {**start, **{key: init[key] for key in ("cpus", "mem_policy", "mem_nodes") if key in init}}
    verified, reasons = _verdict(plan, stages, numa)
    if apart := _describe_apart(stages.get("init", {}), world_size):
        verified, reasons = False, [apart, *(reasons if verified is not None else [])]
    return RankReceipt(
        rank=plan.rank,
        local_rank=plan.local_rank,
        host=short_text(start.get("host")) or plan.host,
        gpu=_gpu_text(plan),
        numa_node=plan.numa_node,
        cpus=short_text(latest.get("cpus")),
        mem_policy=short_text(latest.get("mem_policy")),
        mem_nodes=short_text(latest.get("mem_nodes")),
        host_mem_limit_mb=to_number(start.get("host_mem_limit_mb")),
        lms=_lms_text(framework),
        verified=verified,
        reasons=tuple(reasons),
        stages=tuple(stage for stage in STAGES if stage in stages),
        pid=to_number(start.get("pid")),
        visible_gpus=_listed_gpus(framework),
        met_by=None if "init" not in stages else "tensorflow" if "tf_size" in init else "horovod",
    )


def judge_ranks(
    ranks: Sequence[RankPlan], stages: Mapping[int, Stages], numa: str, world_size: int | None = None
) -> tuple[RankReceipt, ...]:
    """Judge every rank, in the plan's order."""
    return tuple(judge_rank(rank, stages.get(rank.rank, {}), numa, world_size) for rank in ranks)


def to_json(
    job_id: str, receipts: Sequence[RankReceipt], moves: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Build the content of ``receipts.json``; ``moves`` are those of an elastic job."""
    ranks = [_to_object(receipt) for receipt in receipts]
    return {"schema": SCHEMA, "job_id": job_id, "ranks": ranks, **({"moves": list(moves)} if moves else {})}


def from_json(document: Any) -> tuple[RankReceipt, ...]:
    """Read ``receipts.json`` back.

    Raises:
        ValueError: If it is not such a document.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} document")
    try:
        return tuple(_from_object(entry) for entry in document["ranks"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged {SCHEMA} document: {error}") from error


def _to_object(receipt: RankReceipt) -> dict[str, Any]:
    return {
        **vars(receipt),
        "reasons": list(receipt.reasons),
        "stages": list(receipt.stages),
        "visible_gpus": None if receipt.visible_gpus is None else list(receipt.visible_gpus),
    }


def _from_object(entry: Mapping[str, Any]) -> RankReceipt:
    tuples = {key: tuple(entry[key]) for key in ("reasons", "stages")}
    seen = entry["visible_gpus"]
    return RankReceipt(**{**entry, **tuples, "visible_gpus": None if seen is None else tuple(seen)})


def _verdict(plan: RankPlan, stages: Stages, numa: str) -> tuple[bool | None, list[str]]:
    if numa == "off":
        return None, ["binding is off"]
    start, init = stages.get("start"), stages.get("init")
    if start is None:
        how = short_text(stages.get(END, {}).get("how"))
        return False, [f"no receipt: the worker {how or 'did not get as far as its program'}"]
    own = [text for text in to_texts(start.get("reasons")) if text]
    differing = compare_binding(plan.cpus, plan.mem_policy, plan.mem_nodes, start, "at start")
    # The worker's own words come first; what the launcher finds beyond them is added.
    reasons = own + [reason for reason in differing if reason not in own]
    if init is not None:
        reasons += compare_binding(plan.cpus, plan.mem_policy, plan.mem_nodes, init, when_of(init))
    if not plan.cpus and plan.mem_policy == "none":
        return False, reasons or ["nothing was bound; the plan's warnings say why"]
    return not reasons, reasons


def _describe_apart(init: Mapping[str, Any], world_size: int | None) -> str | None:
    """Describe ranks that have not found each other: under a foreign MPI each is a job of its own."""
    who, found = "Horovod", to_number(init.get("hvd_size"))
    if found is None:
        who, found = "MultiWorkerMirroredStrategy", to_number(init.get("tf_size"))
    if found is None or world_size is None or found == world_size:
        return None
    remedy = "" if who == "Horovod" else "; try --framework tensorflow"
    return f"{who} counts {count_of(found, 'rank')} {when_of(init)}, started {world_size}{remedy}"


def when_of(init: Mapping[str, Any]) -> str:
    """Say when a rank wrote its ``init`` receipt."""
    return "with its strategy made" if "tf_size" in init else "after hvd.init()"


def _lms_text(framework: Mapping[str, Any]) -> str:
    lms = framework.get("lms")
    if not isinstance(lms, dict):
        return "-"
    if lms.get("active") is True:
        return short_text(lms.get("mode")) or "on"
    why = short_text(lms.get("why"))
    asked = lms.get("requested") not in (None, "off")
    return f"not active: {why}" if asked and why else "off"


def _listed_gpus(framework: Mapping[str, Any]) -> tuple[str, ...] | None:
    found = framework.get("visible_gpus")
    return to_texts(found) if isinstance(found, list) else None


def _gpu_text(plan: RankPlan) -> str | None:
    if plan.gpu is None:
        return None
    return " ".join(filter(None, [plan.gpu.address, plan.gpu.name]))


def read_object(path: Path) -> dict[str, Any] | None:
    """One receipt from outside; None for what is not a small JSON object in a file of its own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # One read is enough: a regular file gives all it has, and anything else is no receipt.
        text = os.read(fd, MAX_RECEIPT_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(fd)
    if len(text) > MAX_RECEIPT_BYTES:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def to_texts(value: Any) -> tuple[str, ...]:
    """Collect the texts of a receipt's list, short and printable."""
    items = value if isinstance(value, list) else []
    return tuple(text for item in items[:64] if (text := short_text(item)) is not None)


def to_number(value: Any) -> int | None:
    """Accept a receipt's whole number; None for all else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
