"""The name of a guard."""

from pathlib import Path

import pytest

from launch.system.process_name import rename_process


def test_without_proc_a_process_keeps_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path, **_: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    name = Path("/proc/self/comm").read_text().strip()
    monkeypatch.setattr(Path, "read_text", absent)
    rename_process(name)
