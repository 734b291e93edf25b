"""Plug-ins of others: known before ours is loaded, for TensorFlow would end the process."""

import shutil
from pathlib import Path

import pytest
from c_files import build
from plugin_child import run_cases

from lms.optimizer.compiled_form import SOURCE
from lms.optimizer.foreign import plugin_files

pytestmark = pytest.mark.tensorflow


def foreign(output: Path, device_type: str) -> Path:
    return build("foreign_plugin.c", output, f'-DDEVICE_TYPE="{device_type}"')


@pytest.mark.parametrize(
    ("when", "form"), [("loaded", "compiled"), ("loaded", "ctypes"), ("deleted", "compiled")]
)
def test_another_plugin_for_the_device_type_keeps_ours_off(tmp_path: Path, when: str, form: str) -> None:
    path = foreign(tmp_path / "libother.so", "CPU")
    assert_refused(path, run_cases("foreign", str(path), when, LMS_PLUGIN=form).only)


def test_one_that_lies_in_the_folder_of_plugins_keeps_ours_off(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "tensorflow-plugins"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("TF_InitGraph")
    (folder / "empty.so").touch()
    (folder / "broken.so").write_text("TF_InitGraph, but no shared object")
    path = foreign(folder / "libother.so.2", "CPU")
    assert plugin_files([folder]) == [str(folder / "broken.so"), str(path)]
    assert_refused(path, run_cases("foreign", str(path), "folder", LMS_PLUGIN="compiled").only)


def assert_refused(path: Path, found: dict[str, object]) -> None:
    assert found == {
        "refused": f"{path} is a graph optimizer for CPU, and TensorFlow takes one for each device type; "
        "LMS stays off. Try: uninstall the package that brings it",
        "again": True,
        "plain": 1.0,
        "armed": "the plug-in is not loaded; needed load() before",
    }


def test_one_for_another_device_type_does_not_matter(tmp_path: Path) -> None:
    path = foreign(tmp_path / "libother.so", "XPU")
    found = run_cases("foreign", str(path), "loaded", LMS_PLUGIN="compiled").only
    assert found == {"refused": "nothing was refused", "again": True, "plain": 1.0, "edited": 2.0}


def test_a_second_copy_of_ours_is_seen_once_it_serves_a_type(tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    shutil.copy(build(str(SOURCE), tmp_path / "plugin.so"), copy)
    found = run_cases("other_copy", str(copy), LMS_PLUGIN="compiled").only
    assert found.pop("refused").startswith(f"{copy} is a graph optimizer for CPU")
    assert found == {"idle": [], "GPU": "compiled", "step": 1.0}
