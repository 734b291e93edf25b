"""The plug-in without any compiled file: Python itself is called for every graph, and decides to stay idle.

TensorFlow's wheels of 2.15 to 2.21 export the C++ function that registers a plug-in. It returns an
``absl::Status``, which C++ returns through a hidden pointer, as C does for every structure above 16 bytes on
x86-64, aarch64 and ppc64le. So it is declared to return a structure of 24 bytes, of which the status takes 8.
"""

import ctypes
import itertools
import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from lms.optimizer.c_api import (
    ABORTED,
    CREATE,
    DEALLOCATE,
    DESTROY,
    INIT_GRAPH,
    OK,
    OPTIMIZE,
    Buffer,
    Configs,
    Optimizer,
    Params,
    TensorFlow,
    struct_size,
)
from lms.optimizer.compiled_form import Edit, Tell
from lms.optimizer.errors import PluginError
from lms.optimizer.foreign import registered_by_ctypes
from lms.optimizer.grappler_item import Output

INIT_PLUGIN = "_ZN10tensorflow8grappler15InitGraphPluginEPFvP30TP_OptimizerRegistrationParamsP10TSL_StatusE"
"""``tensorflow::grappler::InitGraphPlugin(void (*)(TP_OptimizerRegistrationParams*, TSL_Status*))``."""

SMALLEST_GRAPH = 512
DEFAULT_ITERATIONS = 2
SIGNS = (b"gradient", b"Grad", b"Backprop")
"""As in ``plugin.c``, which says why."""

_GOOD = (0, 1)
"""What ``absl::Status`` holds when all is well: 0 before 2024, 1 since (status.h of Abseil)."""

_FIRST_STATE = 1 << 40
"""Not what a register or a stack happens to hold."""


class _Result(ctypes.Structure):
    _fields_ = (("status", ctypes.c_size_t), ("padding", ctypes.c_size_t * 2))


class _Thread(threading.local):
    expected_iterations = DEFAULT_ITERATIONS
    is_nested = False


class _LateInterrupts:
    """Makes a Ctrl-C wait until TensorFlow has finished a graph.

    Python would raise KeyboardInterrupt at the first instruction of the next call from C, where nothing can
    catch it yet. TensorFlow would take the call for a success, and what it left for the new graph: an empty
    one. Python runs handlers of signals in the main thread alone.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._graphs = 0
        self._handler: Any = None
        self._came: tuple[int, Any] | None = None

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._graphs += 1
        if self._graphs == 1:
            self._handler = signal.getsignal(signal.SIGINT)
            if callable(self._handler):
                signal.signal(signal.SIGINT, self._note)

    def end(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._graphs -= 1
        if self._graphs or not callable(self._handler):
            return
        signal.signal(signal.SIGINT, self._handler)
        came, self._came = self._came, None
        if came:
            try:
                self._handler(*came)
            except BaseException as interrupt:
                self._tell(interrupt)

    def _note(self, number: int, frame: Any) -> None:
        self._came = number, frame


class CtypesForm:
    """A plug-in whose functions are Python's.

    Args:
        calls: TensorFlow's C API.
        edit: What a graph is handed to; it raises nothing.
        tell: What a KeyboardInterrupt is handed to that came while TensorFlow was at work.

    Raises:
        PluginError: If TensorFlow does not export the function that registers a plug-in.
    """

    def __init__(self, calls: TensorFlow, edit: Edit, tell: Tell) -> None:
        self._tensorflow, self._edit, self._tell = calls, edit, tell
        self._interrupts = _LateInterrupts(tell)
        self._init_plugin: Any = calls.find(INIT_PLUGIN)
        if self._init_plugin is None:
            raise PluginError("TensorFlow does not export InitGraphPlugin")
        self._init_plugin.restype, self._init_plugin.argtypes = _Result, (INIT_GRAPH,)
        libc = ctypes.CDLL(None)
        self._malloc, self._free = libc.malloc, ctypes.cast(libc.free, ctypes.c_void_p).value
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        self._thread = _Thread()
        self._armed = False
        self._states = itertools.count(_FIRST_STATE)
        self._iterations: dict[int | None, int] = {}  # of each graph that TensorFlow works on
        self._registered: set[str] = set()

    def registered(self) -> set[str]:
        """Return the device types that TensorFlow calls the plug-in for."""
        return set(self._registered)

    def register(self, device_type: str) -> None:
        """Have TensorFlow call the plug-in for graphs with nodes on this device type.

        Raises:
            PluginError: If TensorFlow refuses.
        """
        name = ctypes.create_string_buffer(device_type.encode())
        optimizer = Optimizer(
            struct_size(Optimizer),
            None,
            CREATE(self._create),
            OPTIMIZE(partial(self._optimize, device_type)),
            DESTROY(self._destroy),
        )
        init = INIT_GRAPH(partial(_fill, name, optimizer))
        for kept in (name, optimizer, init):  # TensorFlow keeps their addresses longer than Python lives
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        if self._init_plugin(init).status not in _GOOD:
            raise PluginError(f"TensorFlow does not take the plug-in for {device_type}")
        self._registered.add(device_type)
        registered_by_ctypes().add(device_type)

    def arm(self) -> None:
        """Hand graphs over from now on."""
        self._armed = True

    def disarm(self) -> None:
        """Leave graphs alone from now on."""
        self._armed = False

    def inside(self) -> int:
        """Return how many graphs TensorFlow works on: with each of them it comes back to Python."""
        return len(self._iterations)

    def expect_iterations(self, count: int) -> None:
        """Set the iteration of this thread's optimizer in which graphs are handed over."""
        self._thread.expected_iterations = count

    def read_outputs(self, calls: TensorFlow, properties: int, names: Sequence[str]) -> list[list[Output]]:
        """Read the shapes that TensorFlow inferred, with the classes of protobuf.

        Raises:
            PluginError: If TensorFlow does not tell.
        """
        with calls.status() as status:
            return [_read_node(calls, properties, name, status) for name in names]

    def _create(self) -> int:
        self._interrupts.begin()
        state = next(self._states)
        self._iterations[state] = 0
        return state

    def _destroy(self, state: int | None) -> None:
        if self._iterations.pop(state, None) is not None:
            self._interrupts.end()

    def _optimize(
        self, device_type: str, state: int | None, graph: int, item: int, edited: int, status: int
    ) -> None:
        self._tensorflow.set_status(status, ABORTED, b"nothing to do")
        if state not in self._iterations:
            self._tell(KeyboardInterrupt())  # it ended _create, whose result was then left to chance
            return
        iteration = self._iterations[state] = self._iterations[state] + 1
        thread, given = self._thread, Buffer.from_address(graph)
        is_last = iteration == thread.expected_iterations
        if not self._armed or not is_last or thread.is_nested or not has_backward_pass(given):
            return
        thread.is_nested = True
        try:
            new = self._edit(device_type, given.data, given.length, item)
        finally:
            thread.is_nested = False
        if new is not None and (data := self._malloc(len(new))):
            ctypes.memmove(data, new, len(new))
            to = Buffer.from_address(edited)
            to.data, to.length, to.data_deallocator = data, len(new), self._free
            self._tensorflow.set_status(status, OK, b"")


def has_backward_pass(graph: Buffer) -> bool:
    """Tell whether a graph is more than a few nodes and has names or ops of gradients (``plugin.c``)."""
    if graph.length < SMALLEST_GRAPH:
        return False
    data = ctypes.string_at(graph.data, graph.length)
    return any(sign in data for sign in SIGNS)


def _fill(name: Any, optimizer: Optimizer, params: Any, status: int) -> None:
    """Fill in the registration, as ``TF_InitGraph`` does."""
    to = params.contents
    to.struct_size = struct_size(Params)
    to.device_type = ctypes.cast(name, ctypes.c_char_p)
    to.optimizer_configs.contents.struct_size = struct_size(Configs)
    to.optimizer[0] = optimizer


def _read_node(calls: TensorFlow, properties: int, name: str, status: int) -> list[Output]:
    count = ctypes.c_int()
    calls.output_count(properties, name.encode(), ctypes.byref(count), status)
    buffers = (Buffer * count.value)()
    addresses = (ctypes.c_void_p * count.value)(*map(ctypes.addressof, buffers))
    try:
        calls.outputs(properties, name.encode(), addresses, count, status)
        if failure := calls.failure(status):
            raise PluginError(f"TensorFlow does not tell the shapes of a graph: {failure}")
        return [parse_properties(ctypes.string_at(one.data or 0, one.length)) for one in buffers]
    finally:
        for one in buffers:
            if one.data_deallocator:
                DEALLOCATE(one.data_deallocator)(one.data, one.length)


def parse_properties(message: bytes) -> Output:
    """Parse an ``OpInfo.TensorProperties``, by the class of protobuf that TensorFlow brings."""
    from tensorflow.core.grappler.costs.op_performance_data_pb2 import OpInfo

    properties = OpInfo.TensorProperties.FromString(message)
    shape = properties.shape
    dims = None if shape.unknown_rank else tuple(max(-1, dim.size) for dim in shape.dim)
    return Output(properties.dtype, dims)
