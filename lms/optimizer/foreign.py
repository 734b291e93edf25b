"""Recognise plug-in graph optimizers that are not ours.

TensorFlow takes one for each device type: a second one ends the process (``LOG(FATAL)`` in
custom_graph_optimizer_registry.cc). So a plug-in that serves a device type already must be known before.
"""

import ctypes
import mmap
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lms.optimizer.c_api import (
    DEVICE_TYPES,
    INIT_GRAPH,
    Configs,
    Optimizer,
    Params,
    TensorFlow,
    mapped_files,
    struct_size,
)
from lms.optimizer.errors import PluginError

INIT_SYMBOL = "TF_InitGraph"
_ROOM_BYTES = 256
"""Left behind each structure: a plug-in for a later TensorFlow may fill in fields that we do not know."""


@dataclass(frozen=True)
class ForeignPlugin:
    """A shared object that registers a graph optimizer."""

    path: str
    device_type: str


class _Symbol(ctypes.Structure):
    """``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def require_no_other(device_types: Iterable[str], calls: TensorFlow) -> None:
    """Make sure that no plug-in serves these device types, which ours does not serve yet.

    Raises:
        PluginError: If one does.
    """
    if lost := sorted(registered_by_ctypes().intersection(device_types)):
        raise PluginError(
            f"another import of lms serves {', '.join(lost)} in this process, and TensorFlow takes one "
            "plug-in for each device type; LMS stays off. Try: start Python again"
        )
    for other in find_plugins(calls, mapped_files(), plugin_files(plugin_folders())):
        if other.device_type in device_types:
            raise PluginError(
                f"{other.path} is a graph optimizer for {other.device_type}, and TensorFlow takes one for "
                "each device type; LMS stays off. Try: uninstall the package that brings it"
            )


def registered_by_ctypes() -> set[str]:
    """Return the device types that are served by Python functions and not by a shared object.

    TensorFlow's module keeps them, for ours may be imported a second time, as notebooks do that reload.
    """
    kept: set[str] = vars(sys.modules["tensorflow"]).setdefault("_lms_registered_by_ctypes", set())
    return kept


def find_plugins(
    calls: TensorFlow, loaded: Iterable[str], others: Iterable[str] = ()
) -> Iterator[ForeignPlugin]:
    """Ask every shared object that can register a graph optimizer for its device type.

    Args:
        calls: TensorFlow's C API.
        loaded: Files that this process has mapped, of any kind.
        others: Shared objects that it has not; they are loaded to be asked.
    """
    modes = [(path, os.RTLD_NOLOAD) for path in loaded] + [(path, os.RTLD_LOCAL) for path in others]
    asked: set[int] = set()
    for path, mode in modes:
        try:
            library = ctypes.CDLL(path, mode=mode)
            address = ctypes.cast(library[INIT_SYMBOL], ctypes.c_void_p).value or 0
        except (OSError, AttributeError):  # not loaded, no shared object, or no graph optimizer
            continue
        if address not in asked:  # a library finds the symbols of those that it depends on as well
            asked.add(address)
            yield from (ForeignPlugin(_file_of(address) or path, one) for one in _served(library, calls))


def plugin_folders() -> list[Path]:
    """Return the folders whose plug-ins TensorFlow loads when it is imported; see its ``__init__.py``."""
    places = [path for path in sys.path if "site-packages" in path] + site.getsitepackages()
    if site.ENABLE_USER_SITE and site.USER_SITE:
        places.append(site.USER_SITE)
    places += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders = [Path(place) / "tensorflow-plugins" for place in places]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def plugin_files(folders: Sequence[Path]) -> list[str]:
    """Return the shared objects in these folders that contain :data:`INIT_SYMBOL`, without loading any."""
    found = []
    for path in sorted(path for folder in folders for path in folder.iterdir() if ".so" in path.suffixes):
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if data.find(INIT_SYMBOL.encode()) >= 0:
                    found.append(str(path))
        except (OSError, ValueError):  # unreadable or empty: TensorFlow cannot load it either
            continue
    return found


def _served(library: ctypes.CDLL, calls: TensorFlow) -> list[str]:
    """Return the device types that a shared object serves, or would once it is registered."""
    try:
        bits = library.lms_plugin_registered()  # a copy of ours: idle until it is told to register
    except AttributeError:
        return _ask(library, calls)
    return [name for index, name in enumerate(DEVICE_TYPES) if bits >> index & 1]


def _ask(library: ctypes.CDLL, calls: TensorFlow) -> list[str]:
    """Call the plug-in as TensorFlow would, and keep only the device type of its answer."""
    params, configs, optimizer = (_roomy(kind) for kind in (Params, Configs, Optimizer))
    params.optimizer_configs, params.optimizer = ctypes.pointer(configs), ctypes.pointer(optimizer)
    params.patch_version = 1  # GO_PATCH of grappler.h
    with calls.status() as status:
        INIT_GRAPH((INIT_SYMBOL, library))(ctypes.byref(params), status)
        if calls.failure(status) or not params.device_type:
            return []  # TensorFlow refuses it as well
    return [params.device_type.decode(errors="replace")]


def _roomy(kind: type[ctypes.Structure]) -> Any:
    """Make a structure of zeros, with its size in it and room behind it."""
    made = kind.from_buffer(ctypes.create_string_buffer(ctypes.sizeof(kind) + _ROOM_BYTES))
    made.struct_size = struct_size(kind)
    return made


def _file_of(address: int) -> str | None:
    """Return the shared object that holds a function."""
    found = _Symbol()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found)) or not found.file:
        return None
    return os.fsdecode(found.file)
