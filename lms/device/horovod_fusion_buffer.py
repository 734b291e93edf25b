"""Horovod's fusion buffer: device memory that the first exchange of several tensors takes, for good."""

import sys
from collections.abc import Callable, Iterable, Mapping

from lms.process_state import has_peers
from lms.simulate.bfc_arena import LARGEST_WASTE_BYTES

THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
"""Bytes of the buffer; 0 exchanges each tensor by itself."""

DEFAULT_BYTES = 128 << 20
"""What Horovod takes where the variable is not set: ``SetTensorFusionThresholdBytes`` in its
``common/operations.cc``. Measured with 0.28.1: two gradients of 4 KB each leave 128.0 MiB in use."""

FUSED_TYPES = ("HorovodAllreduce", "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodReducescatter")
"""Beginnings of the types of ops whose tensors may share the buffer; a broadcast never does."""


class FusionBuffer:
    """Tracks whether Horovod has still to allocate its buffer.

    Horovod allocates it through TensorFlow, whole, whatever little is exchanged (``FusionBufferManager``).

    Args:
        environ: The process's variables.
        grows: Tells whether the memory pool of a type of device grows bit by bit.
        late: Whether tensors were made before anybody watched, the buffer perhaps among them.
    """

    def __init__(self, environ: Mapping[str, str], grows: Callable[[str], bool], *, late: bool) -> None:
        self._environ, self._grows, self._late = environ, grows, late
        self._expected = self._taken = False

    def pending_bytes(self, exchanges: Iterable[tuple[str, int]], device_type: str, in_use_bytes: int) -> int:
        """Return the bytes that the first run of a step will take for the buffer.

        0 where the step needs no buffer, or there is one already.

        Args:
            exchanges: The types of the step's ops, each with the number of its inputs.
            device_type: ``GPU`` or ``CPU``: the device whose memory is planned.
            in_use_bytes: What lies on the device now.
        """
        nbytes = taken_bytes(buffer_bytes(self._environ), self._grows(device_type))
        self._taken = self._taken or (self._late and in_use_bytes >= nbytes)
        comes = not self._taken and fuses(exchanges) and _is_on(device_type)
        # A call may trace several graphs; one that exchanges nothing takes nothing back.
        self._expected = self._expected or comes
        return nbytes if comes else 0

    def step_done(self) -> None:
        """Note that a step has run: from now on the allocator counts the buffer."""
        self._taken = self._taken or self._expected


def buffer_bytes(environ: Mapping[str, str]) -> int:
    """Return the bytes of the buffer as Horovod reads its variable."""
    text = environ.get(THRESHOLD, "").strip()
    return int(text) if text.isdigit() else DEFAULT_BYTES


def taken_bytes(nbytes: int, grows: bool) -> int:
    """Return the bytes that the allocator takes for a buffer of ``nbytes``, and counts.

    A pool that grows does so by a power of two, and a chunk of it is handed out whole unless half of it would
    remain. Measured on the CPU device: 24 MiB asked for are 32 MiB in use, 40 MiB are 64 MiB.
    """
    region = 1 << max(0, nbytes - 1).bit_length()
    return region if grows and nbytes and region - nbytes < LARGEST_WASTE_BYTES else nbytes


def fuses(exchanges: Iterable[tuple[str, int]]) -> bool:
    """Tell whether a step exchanges more than one tensor."""
    return sum(inputs for op_type, inputs in exchanges if op_type.startswith(FUSED_TYPES)) > 1


def _is_on(device_type: str) -> bool:
    """Tell whether Horovod's tensors lie on this type of device, and there are peers to exchange with."""
    if not has_peers():
        return False
    horovod = sys.modules["horovod.tensorflow"]
    return device_type == "CPU" or bool(horovod.cuda_built() or horovod.rocm_built())
