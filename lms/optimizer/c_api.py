"""Call TensorFlow's C API in the libraries that this process has loaded.

The structures follow tensorflow/c/experimental/grappler/grappler.h, tf_buffer.h and tf_status.h of TensorFlow
2.15.1, 2.18.1 and 2.21.0, which are the same there. A test compares them with the installed header.
"""

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lms.errors import pip_install
from lms.optimizer.errors import PluginError

DEVICE_TYPES = ("CPU", "GPU")
"""The device types that the plug-in can register; ``plugin.c`` numbers them in this order."""

OK, ABORTED = 0, 10
"""Of ``TF_Code``. MetaOptimizer takes ABORTED for "did nothing": it neither logs nor copies the graph."""

_MAPS = Path("/proc/self/maps")
_LIBRARIES = re.compile(r"(libtensorflow\w*\.so[.\d]*|(lib)?_pywrap_tensorflow\w*\.so)$")
_TRI_STATES = 19

CREATE = ctypes.CFUNCTYPE(ctypes.c_void_p)
OPTIMIZE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DEALLOCATE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)


class Buffer(ctypes.Structure):
    """``TF_Buffer``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("data_deallocator", ctypes.c_void_p),
    )


class Configs(ctypes.Structure):
    """``TP_OptimizerConfigs``; all zero is ``TF_TriState_Default``: nothing is switched off."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("ext", ctypes.c_void_p),
        ("toggles", ctypes.c_int32 * _TRI_STATES),
    )


class Optimizer(ctypes.Structure):
    """``TP_Optimizer``."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("ext", ctypes.c_void_p),
        ("create_func", CREATE),
        ("optimize_func", OPTIMIZE),
        ("destroy_func", DESTROY),
    )


class Params(ctypes.Structure):
    """``TP_OptimizerRegistrationParams``."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("ext", ctypes.c_void_p),
        ("major_version", ctypes.c_int32),
        ("minor_version", ctypes.c_int32),
        ("patch_version", ctypes.c_int32),
        ("device_type", ctypes.c_char_p),
        ("optimizer_configs", ctypes.POINTER(Configs)),
        ("optimizer", ctypes.POINTER(Optimizer)),
    )


INIT_GRAPH = ctypes.CFUNCTYPE(None, ctypes.POINTER(Params), ctypes.c_void_p)


def struct_size(structure: type[ctypes.Structure]) -> int:
    """Return where the last field ends, as ``TF_OFFSET_OF_END`` does.

    Padding does not count.
    """
    field = getattr(structure, structure._fields_[-1][0])
    return int(field.offset + field.size)


def mapped_files(maps: Path = _MAPS) -> list[str]:
    """Return the files that this process has mapped, each once, in the order of their addresses.

    Args:
        maps: ``/proc/self/maps``; a file that was removed since stands there with its old name.
    """
    found: dict[str, None] = {}
    for line in os.fsdecode(maps.read_bytes()).split("\n"):
        path = line.split(maxsplit=5)[5:]
        if path and path[0].startswith("/"):
            found[path[0].removesuffix(" (deleted)")] = None
    return list(found)


class TensorFlow:
    """The functions of TensorFlow's C API that the plug-in needs.

    Raises:
        PluginError: If TensorFlow's libraries are not loaded, or lack one of the functions.
    """

    def __init__(self) -> None:
        self._libraries = [
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            for path in mapped_files()
            if _LIBRARIES.search(path)
        ]
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        flag = ctypes.c_ubyte
        names = [pointer, pointer, pointer, number, pointer, ctypes.c_size_t, pointer]
        self.load_plugin = self._function("TF_LoadPluggableDeviceLibrary", pointer, text, pointer)
        self.new_status = self._function("TF_NewStatus", pointer)
        self.delete_status = self._function("TF_DeleteStatus", None, pointer)
        self.set_status = self._function("TF_SetStatus", None, pointer, number, text)
        self.get_code = self._function("TF_GetCode", number, pointer)
        self.get_message = self._function("TF_Message", text, pointer)
        self.new_properties = self._function("TF_NewGraphProperties", pointer, pointer)
        self.delete_properties = self._function("TF_DeleteGraphProperties", None, pointer)
        self.infer = self._function("TF_InferStatically", None, pointer, flag, flag, flag, flag, pointer)
        self.output_count = self._function(
            "TF_GetOutputPropertiesListSize", None, pointer, text, pointer, pointer
        )
        self.outputs = self._function(
            "TF_GetOutputPropertiesList", None, pointer, text, pointer, number, pointer
        )
        self.fetch_size = self._function("TF_GetFetchNodesListSize", None, *[pointer] * 4)
        self.fetch_list = self._function("TF_GetFetchNodesList", None, *names)
        self.preserved_size = self._function("TF_GetNodesToPreserveListSize", None, *[pointer] * 4)
        self.preserved_list = self._function("TF_GetNodesToPreserveList", None, *names)

    def find(self, symbol: str) -> Any:
        """Return the function of this name, not yet typed; ``None`` where no library exports it."""
        for library in self._libraries:
            try:
                return library[symbol]
            except AttributeError:
                continue
        return None

    def _function(self, symbol: str, result: Any, *arguments: Any) -> Any:
        found = self.find(symbol)
        if found is None:
            raise PluginError(
                f"{symbol} is in none of the {len(self._libraries)} loaded libraries of TensorFlow; needed "
                f"TensorFlow 2.15 to 2.21 as its wheels have it. Try: {pip_install('tensorflow')}"
            )
        found.restype, found.argtypes = result, arguments
        return found

    @contextmanager
    def status(self) -> Iterator[int]:
        """Make a ``TF_Status`` for the ``with`` block, and free it at the end."""
        status = self.new_status()
        try:
            yield status
        finally:
            self.delete_status(status)

    def failure(self, status: int) -> str | None:
        """Return the message of the status, on one line; ``None`` if it is good."""
        if self.get_code(status) == OK:
            return None
        return " ".join(self.get_message(status).decode(errors="replace").split())

    def names(self, size: Any, fill: Any, item: int) -> list[str]:
        """Return the names that ``size`` and ``fill``, two C functions, give of a Grappler item."""
        count, storage_size = ctypes.c_int(), ctypes.c_size_t()
        with self.status() as status:
            size(item, ctypes.byref(count), ctypes.byref(storage_size), status)
            values = (ctypes.c_void_p * count.value)()
            lengths = (ctypes.c_size_t * count.value)()
            storage = ctypes.create_string_buffer(max(1, storage_size.value))
            fill(item, values, lengths, count, storage, storage_size, status)
            if failure := self.failure(status):
                raise PluginError(f"TensorFlow does not name the nodes: {failure}; this graph stays as it is")
            return [
                ctypes.string_at(values[index] or 0, lengths[index]).decode() for index in range(count.value)
            ]


@functools.cache
def find_tensorflow() -> TensorFlow:
    """Find the functions once; TensorFlow must have been imported.

    Raises:
        PluginError: As :class:`TensorFlow` does.
    """
    return TensorFlow()
