"""Control edges in a hand-made graph that then go round its groups, as an edit leaves them."""

from collections.abc import Sequence
from typing import Any

from lms.kernels import Detours, Group, find_groups, with_their_groups


def lead_round(graph: Any, order: Sequence[Any], edges: Sequence[tuple[str, str]]) -> list[Group]:
    """The groups of ``graph``, with ``edges`` (names of two ops) added and taken off them."""
    groups = find_groups(order)
    for before, after in edges:
        graph.get_operation_by_name(after)._add_control_input(graph.get_operation_by_name(before))
    tied = with_their_groups([graph.get_operation_by_name(name) for edge in edges for name in edge], groups)
    detours = Detours({op: place for place, op in enumerate(order)}, tied, lambda op, purpose: None)
    for group in groups:
        detours.round(group)
    return groups
