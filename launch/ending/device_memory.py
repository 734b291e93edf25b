"""Whether a rank died because its device's memory ran out, by what it wrote last, and what to try."""

from collections.abc import Collection, Sequence

_EXPLAINED = "LMS: the step ran out of memory"
"""The words of Large Model Support behind TensorFlow's message; the lines below them say what may help."""
_SAID = (
    "ResourceExhaustedError",
    "OOM when allocating",
    "failed to allocate the scratch space",  # of cuDNN, for the algorithm that it chose earlier
    _EXPLAINED,
)
_OF_THE_HOST = ("LMS store:", "host_bfc", "pinned host memory")
"""In the messages of memory that lacks on the host, not on the device."""
_ON = ("graph", "native")


def explain_lack_of_memory(last_lines: Sequence[str], lms: Collection[str]) -> str:
    """Say that the device's memory ran out, with what to try; empty where the lines do not say so.

    Args:
        last_lines: What the rank wrote last.
        lms: What the receipts say of Large Model Support; more than one where the rank is not known.
    """
    lines = [line for line in last_lines if not any(word in line for word in _OF_THE_HOST)]
    if not any(word in line for line in lines for word in _SAID):
        return ""
    found = "the device ran out of memory"
    if "off" in lms:
        return f"{found}; Large Model Support is off, try it with --lms"
    if any(state in _ON for state in lms):
        found += " with Large Model Support on"
        if any(_EXPLAINED in line for line in lines):
            return f"{found}; its last lines say what may help, and lmsrun fit forecasts the largest batch"
        remedy = "LMS_OPTIMIZER_STATE=host and LMS_VARIABLES=host, where variables have no room"
        return f"{found}; try a smaller batch (lmsrun fit forecasts the largest one), or {remedy}"
    return found
