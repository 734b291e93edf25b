"""The launcher of one host: every rank is a process that lmsrun itself starts."""

from collections.abc import Sequence

from launch.plan import RankPlan

NAME = "local"


def build_commands(ranks: Sequence[RankPlan]) -> tuple[tuple[str, ...], ...]:
    """One command a rank: its binding, the shim, the program."""
    return tuple(rank.argv for rank in ranks)
