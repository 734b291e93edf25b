"""Which of a machine's GPUs the job gets: ``--gpus`` and the caller's own ``CUDA_VISIBLE_DEVICES``."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.model.errors import PlanError
from launch.model.settings import Place
from launch.model.topology import Gpu, Machine

_VISIBLE = {"amd": "HIP_VISIBLE_DEVICES"}
"""By vendor; CUDA's variable otherwise."""
_INSTEAD = "CUDA_VISIBLE_DEVICES"
"""HIP reads it where its own variable is not set (AMD's documentation, "GPU isolation techniques")."""
_BELOW_HIP = "ROCR_VISIBLE_DEVICES"
"""Hides AMD's GPUs before HIP counts them: HIP's indexes are places in this list."""


@dataclass(frozen=True)
class GpuChoice:
    """The job's GPUs in PCI order. ``env`` makes exactly these visible, empty when that needs no variable."""

    gpus: tuple[Gpu, ...]
    env: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> str:
        """What names the GPUs to CUDA under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``: UUIDs if all have one.

        HIP's variable takes indexes alone (AMD's documentation of HIP's environment variables).
        """
        named = all(gpu.uuid and gpu.vendor != "amd" for gpu in self.gpus)
        return ",".join((gpu.uuid if named else None) or str(gpu.index) for gpu in self.gpus)


def choose_gpus(machine: Machine, wanted: str, environ: Mapping[str, str]) -> GpuChoice:
    """Choose the job's GPUs.

    All of them stay visible to every rank, for CUDA's peer access and for scripts that index by local rank;
    ranks select theirs by local rank.

    Args:
        machine: Whose GPUs.
        wanted: ``auto``, ``none`` or a list, as ``--gpus`` takes it.
        environ: The variables of the ranks as the user has them, for the devices that they hide already.

    Raises:
        PlanError: If a wanted GPU does not exist, is hidden, or is named twice.
    """
    machine, below = _as_hip_counts(machine, environ.get(_BELOW_HIP))
    variable = _visible_variable(machine.gpus)
    if wanted == "none":
        return GpuChoice((), ((variable, "-1"),) if machine.gpus else ())
    named = variable if variable in environ else _INSTEAD
    visible, warnings = _visible(machine, environ.get(named), named)
    if wanted != "auto" and below and not machine.gpus:
        raise PlanError(f"--gpus is {wanted!r}, and {below[0].partition(';')[0]}; unset that variable")
    chosen = visible if wanted == "auto" else _listed(machine, visible, wanted.split(","), named)
    choice = GpuChoice(chosen, warnings=(*below, *warnings))
    whole = chosen == machine.gpus and environ.get(variable, choice.tokens) == choice.tokens
    return choice if whole or not chosen else replace(choice, env=((variable, choice.tokens),))


def pick_gpus(
    choice: GpuChoice, count: int, place: Place, is_busy: Callable[[Gpu], bool]
) -> tuple[GpuChoice, tuple[str, ...]]:
    """Pick the GPUs of ``count`` ranks among the job's, those that nobody uses first.

    If these are not the first ones, the ranks see no others: a script that indexes by local rank must find
    its own GPU.

    Args:
        choice: The job's GPUs.
        count: How many ranks.
        place: ``spread`` takes from each NUMA node in turn, anything else in PCI order.
        is_busy: Whether somebody else uses a GPU.

    Returns:
        The choice, and what a person should know of it.
    """
    if count >= len(choice.gpus):
        return choice, ()
    order = sorted(choice.gpus, key=is_busy)
    free = [gpu for gpu in order if not is_busy(gpu)]
    pools = [free, order[len(free) :]]
    taken = [gpu for pool in pools for gpu in (_in_turn(pool) if place == "spread" else pool)][:count]
    picked = _in_pci_order(taken)
    said = _say_place(choice, picked, order[:count], place)
    if picked == choice.gpus[:count]:
        return choice, said
    narrowed = replace(choice, gpus=picked)
    return replace(narrowed, env=((_visible_variable(picked), narrowed.tokens),)), said


def _in_turn(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Order the same GPUs in turns: one of each NUMA node, then a second one of each, and so on."""
    turns: Counter[int | None] = Counter()
    order = []
    for place, gpu in enumerate(gpus):
        order.append((turns[gpu.numa_node], place, gpu))
        turns[gpu.numa_node] += 1
    return [gpu for _, _, gpu in sorted(order, key=lambda entry: entry[:2])]


def _say_place(
    choice: GpuChoice, picked: Sequence[Gpu], packed: Sequence[Gpu], place: Place
) -> tuple[str, ...]:
    """Say how the ranks lie over the nodes, where that was asked for and matters, or where they lie unevenly.

    Args:
        choice: The job's GPUs.
        picked: Those that the ranks get.
        packed: Those that they would get in PCI order.
        place: What was asked for.
    """
    if len(picked) == 1:
        return ()
    spread = _per_node(_in_turn(choice.gpus)[: len(picked)])
    now = _per_node(picked)
    if place == "spread":
        is_evener = sorted(now.values(), reverse=True) < sorted(_per_node(packed).values(), reverse=True)
        said = f"--place spread: ranks on {_render_counts(now)}, to share the nodes' memory more evenly"
        return (said,) if is_evener else ()
    even = max(spread.values()) < max(now.values())
    if place == "auto" and not even:
        return ()
    hint = f"; --place spread would put them on {_render_counts(spread)}" if even else ""
    return (f"ranks are packed on {_render_counts(now)}, on GPUs that are neighbours{hint}",)


def _per_node(gpus: Sequence[Gpu]) -> Counter[int | None]:
    return Counter(gpu.numa_node for gpu in gpus)


def _render_counts(counts: Counter[int | None]) -> str:
    nodes = sorted(counts.items(), key=lambda entry: (entry[0] is None, entry[0] or 0))
    shown = " + ".join(f"{'unknown' if node is None else node} ({count})" for node, count in nodes)
    return f"node{'s' * (len(nodes) > 1)} {shown}"


def _visible_variable(gpus: Sequence[Gpu]) -> str:
    return _VISIBLE.get((gpus[0].vendor or "") if gpus else "", "CUDA_VISIBLE_DEVICES")


def _as_hip_counts(machine: Machine, text: str | None) -> tuple[Machine, tuple[str, ...]]:
    if text is None or not any(gpu.vendor == "amd" for gpu in machine.gpus):
        return machine, ()
    left, warnings = _visible(machine, text, _BELOW_HIP)
    order = [find_gpu(machine, token.strip()) for token in text.split(",")]
    renumbered = sorted(left, key=order.index)
    counted = tuple(replace(gpu, index=index) for index, gpu in enumerate(renumbered))
    return replace(machine, gpus=counted), warnings


def _visible(machine: Machine, text: str | None, variable: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """CUDA's own reading: tokens up to the first one that names no device."""
    if text is None or not machine.gpus:
        return machine.gpus, ()
    found: list[Gpu] = []
    tokens = [token.strip() for token in text.split(",")]
    for token in tokens:
        gpu = find_gpu(machine, token)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    left = tokens[len(found) :]
    mixed = len({gpu.name for gpu in machine.gpus}) > 1 and any(map(str.isdigit, tokens))
    warnings = [f"{variable}={text!r} hides every GPU; unset it or use --gpus"] if not found else []
    if found and any(left):
        warnings.append(f"{variable}={text!r}: {left[0]!r} names no further GPU, and ends the list there")
    if mixed and found:
        warnings.append(
            f"{variable}={text!r} is read in PCI order, because these GPUs differ; UUIDs would be certain"
        )
    return _in_pci_order(found), tuple(warnings)


def _listed(
    machine: Machine, visible: Sequence[Gpu], tokens: Sequence[str], variable: str
) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for token in tokens:
        gpu = find_gpu(machine, token)
        if gpu is None:
            needed = (
                "needed auto, none or some of these; try auto for all of them, or a list such as 0"
                if machine.gpus
                else "needed auto or none; try auto for ranks on CPUs"
            )
            raise PlanError(
                f"--gpus names {token!r}, which is not here; this machine has {_some(machine.gpus)}; {needed}"
            )
        if gpu not in visible and not token.startswith("MIG-"):
            tried = f"{'auto for all that it leaves, or ' if visible else ''}to unset {variable}"
            raise PlanError(
                f"--gpus names {token!r}, which {variable} hides; it leaves {_some(visible)}; "
                f"needed GPUs that it leaves; try {tried}"
            )
        if gpu in chosen:
            raise PlanError(f"--gpus names GPU {gpu.index} twice; needed each GPU once; try to leave one out")
        chosen.append(gpu)
    return _in_pci_order(chosen)


def find_gpu(machine: Machine, token: str) -> Gpu | None:
    """Find the GPU that an index in PCI order, a PCI address, or the start of a UUID names.

    A MIG device of a known GPU becomes that GPU under the MIG device's own UUID, its memory unknown.
    """
    if token.isascii() and token.isdigit():
        return next((gpu for gpu in machine.gpus if gpu.index == int(token[:9])), None)
    if token.startswith("MIG-"):
        known = next((gpu for gpu in machine.gpus if gpu.uuid == token), None)
        return known or _mig(machine, token)
    if token.startswith("GPU-"):
        matches = [gpu for gpu in machine.gpus if gpu.uuid and gpu.uuid.startswith(token)]
        return matches[0] if len(matches) == 1 else None
    address = _short_address(token)
    # The address of a GPU in several parts names none of them; the address with a part's number does.
    return next((gpu for gpu in machine.gpus if gpu.address == address), None)


def _mig(machine: Machine, token: str) -> Gpu | None:
    # MIG-GPU-<uuid of the GPU>/<instance>/<compute instance> names its GPU; the newer MIG-<uuid> does not.
    parent = find_gpu(machine, token.removeprefix("MIG-").partition("/")[0])
    if parent is None and len({gpu.numa_node for gpu in machine.gpus}) == 1:
        parent = machine.gpus[0]
    if parent is not None:
        return replace(parent, uuid=token, memory_bytes=None)
    return Gpu(len(machine.gpus), "", uuid=token, vendor="nvidia") if machine.gpus else None


def _short_address(token: str) -> str:
    """nvidia-smi writes eight digits of PCI domain, sysfs four."""
    domain, colon, rest = token.lower().partition(":")
    if not rest.count(":"):
        return f"0000:{token.lower()}" if colon else token
    return f"{domain[-4:]:0>4}:{rest}" if domain[:-4].strip("0") == "" else token


def _in_pci_order(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _some(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} ({gpu.address or gpu.uuid})" for gpu in gpus) or "no GPU"
