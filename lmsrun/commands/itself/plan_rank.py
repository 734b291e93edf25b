"""``lmsrun plan-rank``: what a rank that an elastic job has moved asks for its new binding."""

from collections.abc import Mapping, Sequence

from launch.model.errors import UsageError
from launch.rank.self_plan import plan_again


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print ``LMSRUN_EXPECT`` of the rank that the environment describes."""
    if argv:
        raise UsageError("plan-rank is what ranks of elastic jobs start; see lmsrun worker --help")
    print(plan_again(environ))
    return 0
