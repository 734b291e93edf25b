"""Runs tests of Keras's own, under LMS where ``TRAINER_POLICY`` names one; writes what each came to as JSON.

A plug-in of pytest. ``TRAINER_OUTCOMES`` is the file to write.
"""

import importlib
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

import lms

POLICY, OUTCOMES = "TRAINER_POLICY", "TRAINER_OUTCOMES"
MOST_TEXT = 1500
OUTCOME: dict[str, Any] = {}
SAID: dict[str, str] = {}


def pytest_sessionstart() -> None:
    """Switch LMS on for everything, down to the smallest tensor."""
    if policy := os.environ.get(POLICY):
        warnings.filterwarnings("ignore", category=UserWarning)
        lms.enable(enabled=True, policy=policy, min_tensor_bytes=1)


def pytest_collectstart() -> None:
    """Have ``import jax`` work at the head of a test file; what uses it is for another back end."""
    importlib.import_module("keras")  # it looks for the real one
    if "jax" not in sys.modules:
        sys.modules["jax"] = types.ModuleType("jax")


def pytest_collection_finish() -> None:
    """Have nobody take the stand-in for the real one."""
    if not hasattr(sys.modules.get("jax"), "__file__"):
        sys.modules.pop("jax", None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended: a failure of its set-up counts."""
    if report.when == "call" or report.outcome != "passed":
        name = report.nodeid.rpartition("/")[2]
        OUTCOME[name] = report.outcome
        if report.outcome == "failed":
            SAID[name] = report.longreprtext[-MOST_TEXT:]


def pytest_sessionfinish() -> None:
    """Write all."""
    found: dict[str, Any] = {"outcome": OUTCOME, "said": SAID}
    if os.environ.get(POLICY):
        report = lms.report()
        found["tensors"] = sum(graph.tensors for graph in report.graphs)
        found["swap_outs"] = report.store.swap_outs
    Path(os.environ[OUTCOMES]).write_text(json.dumps(found), encoding="utf-8")
