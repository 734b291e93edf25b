"""A guest whose kernel hangs is booted anew; one that lives is left to run, and run once."""

import json
from pathlib import Path

import numa_guest
import pytest
from numa_guest import UP, boot

RIG = """#!/bin/sh
echo "$@" >> {starts}
if [ $(wc -l < {starts}) -le {hangs} ]; then
    {before}
    exec sleep 60
fi
for beat in 1 2 3 4 5 6; do  # longer than a guest may be silent
    echo "{up}step" >&2
    sleep 1
done
echo {{}}
exit 3
"""


def _rig(folder: Path, hangs: int, monkeypatch: pytest.MonkeyPatch, before: str = "true") -> Path:
    rig = folder / "rig"
    starts = folder / "starts"
    rig.write_text(RIG.format(starts=starts, hangs=hangs, up=UP, before=before))
    rig.chmod(0o755)
    monkeypatch.setattr(numa_guest, "RIG", rig)
    monkeypatch.setattr(numa_guest, "SILENT_S", 3)
    return starts


@pytest.mark.parametrize("before", ["true", f"echo {UP}up >&2"], ids=["while booting", "in a step"])
def test_a_guest_that_hangs_is_booted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    starts = _rig(tmp_path, 1, monkeypatch, before)
    with pytest.warns(UserWarning, match=r"guest dgx: boot 1 said nothing for 3 s"):
        done = boot("dgx", {"one": ["true"]}, tmp_path)
    assert (done.returncode, done.stdout) == (3, "{}\n")
    assert len(starts.read_text().splitlines()) == 2
    assert json.loads((tmp_path / "steps.json").read_text()) == {"one": ["true"]}


def test_a_guest_that_always_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _rig(tmp_path, 9, monkeypatch)
    with (
        pytest.warns(UserWarning, match="said nothing"),
        pytest.raises(AssertionError, match="each of 3 boots"),
    ):
        boot("flat", {}, tmp_path)
    assert len(starts.read_text().splitlines()) == numa_guest.BOOTS
