"""A guest that hangs while it boots is booted anew; one that runs is left to run, and run once."""

import json
from pathlib import Path

import numa_guest
import pytest
from numa_guest import UP, boot

RIG = """#!/bin/sh
echo "$@" >> {starts}
[ $(wc -l < {starts}) -gt {hangs} ] || exec sleep 60
echo "{up}" >&2
sleep 4  # longer than a boot may take
echo {{}}
exit 3
"""


def _rig(folder: Path, hangs: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    rig = folder / "rig"
    starts = folder / "starts"
    rig.write_text(RIG.format(starts=starts, hangs=hangs, up=UP))
    rig.chmod(0o755)
    monkeypatch.setattr(numa_guest, "RIG", rig)
    monkeypatch.setattr(numa_guest, "BOOT_S", 3)
    return starts


def test_a_guest_that_does_not_come_up_is_booted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = _rig(tmp_path, 1, monkeypatch)
    with pytest.warns(UserWarning, match=r"guest dgx: boot 1 had not come up"):
        done = boot("dgx", {"one": ["true"]}, tmp_path)
    assert (done.returncode, done.stdout) == (3, "{}\n")
    assert len(starts.read_text().splitlines()) == 2
    assert json.loads((tmp_path / "steps.json").read_text()) == {"one": ["true"]}


def test_a_guest_that_never_comes_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _rig(tmp_path, 9, monkeypatch)
    with (
        pytest.warns(UserWarning, match="had not come up"),
        pytest.raises(AssertionError, match="none of 3 boots"),
    ):
        boot("flat", {}, tmp_path)
    assert len(starts.read_text().splitlines()) == numa_guest.BOOTS
