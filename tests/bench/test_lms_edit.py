"""The benchmark of an edit's time: a real run of a case, and what it makes of several."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.tensorflow
def test_a_case_times_each_phase_of_the_whole_edit() -> None:
    pytest.importorskip("tensorflow")
    argv = [sys.executable, str(BENCH / "lms_edit.py"), "--case", "deep-3k"]
    argv += ["--policies", "auto", "--keras", "3", "--repeats", "1"]
    done = subprocess.run(
        argv,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["edited"], result["why"]
    names = ("parse", "shapes", "read", "plan", "write", "validate")
    phases = {name: result["seconds"][name] for name in names}
    assert min(phases.values()) > 0, phases
    assert sum(phases.values()) <= result["seconds"]["edit"]
    assert 0 < result["again_s"] < result["seconds"]["edit_cpu"], "planned once"


def test_growth_compares_the_time_of_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    import lms_edit

    results = [
        {"model": model, "policy": policy, "ops": ops, "seconds": {"edit_cpu": seconds}}
        for model, policy, ops, seconds in (
            ("deep-3k", "all", 3000, 0.2),
            ("deep-30k", "all", 30000, 3.0),
            ("deep-30k", "auto", 30000, 3.0),
        )
    ]
    assert lms_edit.growths(results) == {"all": pytest.approx(1.5)}, "auto has nothing to compare with"


def test_a_case_that_is_measured_again_takes_its_old_place_in_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    import lms_document
    import lms_edit

    def case(tensorflow: str, edit_s: float) -> dict[str, object]:
        return {"tensorflow": tensorflow, "model": "m", "policy": "all", "keras": "3", "edit_s": edit_s}

    old, other, new = case("2.21.0", 1.0), case("2.15.1", 2.0), case("2.21.0", 3.0)
    assert lms_edit.merged([old, other], [new]) == [other, new]
    path = tmp_path / "new" / "document.json"
    lms_document.write_part(path, "results", [1])
    lms_document.write_part(path, "edits", [old])
    lms_document.write_part(path, "edits", [new])
    assert lms_document.read_document(path) == {"schema": lms_document.SCHEMA, "results": [1], "edits": [new]}
