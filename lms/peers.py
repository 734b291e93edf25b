"""Whether a step may have reached other ranks: then it cannot be taken back."""

import sys
from typing import Any

from lms.rewrite import MARK_ATTR
from lms.tf_graph import all_ops, has_collectives

PYTHON_TYPES = ("PyFunc", "EagerPyFunc")
"""Ops that run Python code with effects of its own. ``PyFuncStateless`` has none."""


def has_peers() -> bool:
    """Whether this process is one of several Horovod ranks."""
    horovod = sys.modules.get("horovod.tensorflow")
    return horovod is not None and bool(horovod.is_initialized()) and horovod.size() > 1


def may_reach_peers(tf_graph: Any) -> bool:
    """Whether running ``tf_graph`` may send something to other ranks.

    Collectives do. So may Python code (``tf.py_function``), whose calls no graph shows.
    """
    return has_collectives(tf_graph) or (has_peers() and any(map(runs_python, all_ops(tf_graph))))


def runs_python(op: Any) -> bool:
    """Whether an op calls Python code that is not ours."""
    return op.type in PYTHON_TYPES and MARK_ATTR not in op.node_def.attr
