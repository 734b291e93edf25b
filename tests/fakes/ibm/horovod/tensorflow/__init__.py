"""Bound at import, as in Horovod: whoever wants to see init must have wrapped it by now."""

from horovod.common.basics import HorovodBasics

_basics = HorovodBasics()


def init(*args: object, **kwargs: object) -> None:
    """As in Horovod's mpi_ops."""
    _basics.init(*args, **kwargs)  # type: ignore[arg-type]
