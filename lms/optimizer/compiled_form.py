"""The plug-in as compiled C: it stays out of Python while idle, and reads shapes quickly."""

import array
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lms.optimizer.c_api import DEVICE_TYPES, TensorFlow
from lms.optimizer.errors import PluginError
from lms.optimizer.grappler_item import Output

VERSION = 1
"""What ``lms_plugin_version`` must give."""

SOURCE = Path(__file__).resolve().with_name("plugin.c")

Edit = Callable[[str, int, int, int], bytes | None]
"""``(device type, address of the graph, its length, address of the item) -> the edited graph``."""

Tell = Callable[[BaseException], None]

_LOST = -1
"""As in ``plugin.c``."""

_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
)


class _Calls(ctypes.Structure):
    _fields_ = (
        ("set_status", ctypes.c_void_p),
        ("get_code", ctypes.c_void_p),
        ("output_count", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
    )


class CompiledForm:
    """The shared object built from ``plugin.c``.

    Args:
        path: Of the shared object.
        calls: TensorFlow's C API.
        edit: What a graph is handed to; it raises nothing.
        tell: What a KeyboardInterrupt is handed to that came before ``edit`` could catch it.

    Raises:
        PluginError: If it cannot be loaded, or was built from another version of the source.
    """

    def __init__(self, path: Path, calls: TensorFlow, edit: Edit, tell: Tell) -> None:
        self._path, self._tensorflow, self._edit, self._tell = path, calls, edit, tell
        try:
            self._library = ctypes.CDLL(str(path))
            version = self._library.lms_plugin_version()
        except (OSError, AttributeError) as error:
            raise PluginError(f"{path} cannot be loaded ({error})") from error
        if version != VERSION:
            raise PluginError(
                f"{path} has version {version}; needed {VERSION}. Try: pip install . in lmsrun's sources"
            )
        self._declare()
        functions = (calls.set_status, calls.get_code, calls.output_count, calls.outputs)
        self._library.lms_plugin_connect(_Calls(*(ctypes.cast(one, ctypes.c_void_p) for one in functions)))
        self._callback = _CALLBACK(self._handle)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._callback))  # C keeps it longer than Python lives

    def _declare(self) -> None:
        library, pointer = self._library, ctypes.c_void_p
        library.lms_plugin_connect.argtypes = (ctypes.POINTER(_Calls),)
        library.lms_plugin_arm.argtypes = (pointer,)
        library.lms_plugin_reply.argtypes = (pointer, ctypes.c_char_p, ctypes.c_size_t)
        library.lms_plugin_free.argtypes = (pointer,)
        library.lms_plugin_outputs.restype = ctypes.c_int64
        library.lms_plugin_outputs.argtypes = (pointer, ctypes.c_char_p, ctypes.c_int64, pointer, pointer)

    def registered(self) -> set[str]:
        """Return the device types that TensorFlow calls the plug-in for."""
        bits = self._library.lms_plugin_registered()
        return {name for index, name in enumerate(DEVICE_TYPES) if bits >> index & 1}

    def register(self, device_type: str) -> None:
        """Have TensorFlow call the plug-in for graphs with nodes on this device type.

        Raises:
            PluginError: If TensorFlow refuses.
        """
        self._library.lms_plugin_register_next(DEVICE_TYPES.index(device_type))
        with self._tensorflow.status() as status:
            self._tensorflow.load_plugin(os.fsencode(self._path), status)
            failure = self._tensorflow.failure(status)
        if failure or device_type not in self.registered():
            raise PluginError(f"TensorFlow does not take {self._path} for {device_type} ({failure})")

    def arm(self) -> None:
        """Call Python for each graph from now on."""
        self._library.lms_plugin_arm(ctypes.cast(self._callback, ctypes.c_void_p))

    def disarm(self) -> None:
        """Stop calling Python from now on."""
        self._library.lms_plugin_arm(None)

    def inside(self) -> int:
        """Return how many threads are in Python."""
        return int(self._library.lms_plugin_inside())

    def expect_iterations(self, count: int) -> None:
        """Set the iteration of this thread's optimizer in which Python is called."""
        self._library.lms_plugin_expect_iterations(count)

    def read_outputs(self, calls: TensorFlow, properties: int, names: Sequence[str]) -> list[list[Output]]:
        """Read the shapes that TensorFlow inferred; the loop over the nodes runs in C.

        Raises:
            PluginError: If TensorFlow does not tell.
        """
        numbers = ctypes.c_void_p()
        joined = "\0".join([*names, ""]).encode()
        with calls.status() as status:
            length = self._library.lms_plugin_outputs(
                properties, joined, len(names), status, ctypes.byref(numbers)
            )
            if length < 0:
                reason = calls.failure(status) or "they cannot be read"
                raise PluginError(f"TensorFlow does not tell the shapes of a graph: {reason}")
        flat = array.array("q")
        flat.frombytes(ctypes.string_at(numbers, 8 * length) if length else b"")
        self._library.lms_plugin_free(numbers)
        return split_outputs(flat, len(names))

    def _handle(self, device: int, graph: int, length: int, item: int, reply: int) -> None:
        if device == _LOST:
            self._tell(KeyboardInterrupt())
            return
        new = self._edit(DEVICE_TYPES[device], graph, length, item)
        self._library.lms_plugin_reply(reply, new, len(new or b""))


def split_outputs(flat: Sequence[int], nodes: int) -> list[list[Output]]:
    """Split the numbers that ``lms_plugin_outputs`` wrote.

    These are for each node the count of its outputs, then dtype, rank and sizes of each output.
    """
    found: list[list[Output]] = []
    at = 0
    for _ in range(nodes):
        outputs: list[Output] = []
        count = flat[at]
        at += 1
        for _ in range(count):
            dtype, rank = flat[at], flat[at + 1]
            at += 2
            if rank < 0:
                outputs.append(Output(dtype, None))
            else:
                outputs.append(Output(dtype, tuple(flat[at : at + rank])))
                at += rank
        found.append(outputs)
    return found
