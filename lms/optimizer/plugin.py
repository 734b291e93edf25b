"""Load the plug-in, and hand it the editor of graphs.

TensorFlow cannot forget a plug-in: it is loaded once and idle until it is armed. TensorFlow calls it in the
thread that runs a step for the first time, after its own passes.
"""

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from lms.errors import BuildError
from lms.native.build import build_library, cache_root
from lms.native.prebuilt import find_prebuilt
from lms.optimizer.c_api import DEVICE_TYPES, TensorFlow, find_tensorflow
from lms.optimizer.compiled_form import SOURCE, CompiledForm
from lms.optimizer.ctypes_form import CtypesForm
from lms.optimizer.errors import PluginError as PluginError
from lms.optimizer.foreign import require_no_other
from lms.optimizer.grappler_item import GrapplerItem, Output

FORM_VARIABLE = "LMS_PLUGIN"
"""Asks for one form of the plug-in; for tests."""

Form = Literal["prebuilt", "compiled", "ctypes"]
FORMS: tuple[Form, ...] = get_args(Form)
"""In the order they are tried."""


@dataclass(frozen=True)
class Request:
    """A graph that TensorFlow's own optimizer has finished."""

    device_type: str
    """The type of device whose plug-in was called, ``CPU`` or ``GPU``; a graph on both comes twice."""
    graph: bytes
    """A serialized GraphDef; the bodies of its functions are stubs."""
    item: GrapplerItem
    """What TensorFlow knows about it; valid inside the editor alone."""


Editor = Callable[[Request], bytes | None]
"""Gives the edited GraphDef, or ``None`` to leave the graph as it is."""
OnFault = Callable[[BaseException], None]

_EXIT_WAIT_S = 10.0
"""Seconds that the end of the interpreter waits for editors; the largest graphs take one."""


class _LoadedForm(Protocol):
    """The methods that both forms of the plug-in have."""

    def registered(self) -> set[str]: ...
    def register(self, device_type: str) -> None: ...
    def arm(self) -> None: ...
    def disarm(self) -> None: ...
    def inside(self) -> int: ...
    def expect_iterations(self, count: int) -> None: ...
    def read_outputs(
        self, calls: TensorFlow, properties: int, names: Sequence[str]
    ) -> list[list[Output]]: ...


def wanted_forms(environ: Mapping[str, str]) -> Sequence[Form]:
    """Return the forms of the plug-in to try, in this order.

    Raises:
        PluginError: If ``LMS_PLUGIN`` names none.
    """
    asked = environ.get(FORM_VARIABLE)
    if not asked:
        return FORMS
    found = [form for form in FORMS if form == asked]
    if not found:
        raise PluginError(f"{FORM_VARIABLE}={asked!r}; needed one of {', '.join(FORMS)}, or nothing")
    return found


def prebuilt_plugin(source: Path = SOURCE) -> Path:
    """Find the plug-in that was built with the package from ``source``.

    Raises:
        PluginError: If it was installed without.
    """
    if (path := next(find_prebuilt(source), None)) is None:
        raise PluginError("no file beside plugin.c; lmsrun was installed without a C compiler")
    return path


class _Plugin:
    """The one plug-in of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._form: tuple[Form, _LoadedForm] | None = None
        self._arming: tuple[Editor, OnFault | None] | None = None

    def load(self, device_types: Sequence[str], environ: Mapping[str, str]) -> Form:
        if unknown := sorted(set(device_types) - set(DEVICE_TYPES)):
            raise PluginError(f"no plug-in for {', '.join(unknown)}; needed one of {', '.join(DEVICE_TYPES)}")
        with self._lock:
            name, form = self._form or self._open(environ)
            if missing := sorted(set(device_types) - form.registered()):
                require_no_other(missing, find_tensorflow())
            for device_type in missing:
                form.register(device_type)
                self._keep(name, form)
            self._keep(name, form)
            return name

    def _keep(self, name: Form, form: _LoadedForm) -> None:
        """Remember the form, from its first registration on: TensorFlow cannot forget it."""
        if self._form is None:
            self._form = name, form
            atexit.register(self._leave)

    def arm(self, editor: Editor, on_fault: OnFault | None) -> None:
        form = self._loaded()
        self._arming = editor, on_fault
        form.arm()

    def disarm(self) -> None:
        if self._form is not None:
            self._form[1].disarm()
        self._arming = None

    def expect_iterations(self, count: int) -> None:
        if count not in (1, 2):
            raise PluginError(f"{count} iterations of TensorFlow's optimizer; needed 1 or 2")
        self._loaded().expect_iterations(count)

    def _loaded(self) -> _LoadedForm:
        if self._form is None:
            raise PluginError("the plug-in is not loaded; needed load() before")
        return self._form[1]

    def _open(self, environ: Mapping[str, str]) -> tuple[Form, _LoadedForm]:
        """Open the first form that can be; nothing is registered with TensorFlow yet."""
        import tensorflow  # noqa: F401 - the plug-in is loaded into its libraries

        calls, reasons = find_tensorflow(), []
        for name in wanted_forms(environ):
            try:
                return name, self._open_form(name, calls, environ)
            except (BuildError, PluginError) as error:
                reasons.append(f"{name}: {error}")
        raise PluginError(f"the plug-in for TensorFlow cannot be loaded; {'; '.join(reasons)}")

    def _open_form(self, name: Form, calls: TensorFlow, environ: Mapping[str, str]) -> _LoadedForm:
        if name == "ctypes":
            return CtypesForm(calls, self._edit, self._tell)
        path = (
            prebuilt_plugin()
            if name == "prebuilt"
            else build_library(SOURCE, "", (), (), cache_root(environ))
        )
        return CompiledForm(path, calls, self._edit, self._tell)

    def _leave(self) -> None:
        """Keep Python's end from meeting an editor at work: a callback after it would end in a crash."""
        self.disarm()
        ends = time.monotonic() + _EXIT_WAIT_S
        while self._loaded().inside() and time.monotonic() < ends:
            time.sleep(0.01)

    def _edit(self, device_type: str, graph: int, length: int, item_address: int) -> bytes | None:
        """Ask the editor, and catch whatever it raises, for nothing may be raised through C."""
        arming = self._arming
        if arming is None:
            return None
        try:
            item = GrapplerItem(find_tensorflow(), item_address, self._loaded().read_outputs)
            try:
                new = arming[0](Request(device_type, ctypes.string_at(graph, length), item))
            finally:
                item.close()
            return _require_graph(new)
        except BaseException as fault:
            self._tell(fault)
            return None

    def _tell(self, fault: BaseException) -> None:
        arming = self._arming
        if arming is not None and arming[1] is not None:
            with suppress(BaseException):
                arming[1](fault)


def _require_graph(new: object) -> bytes | None:
    """Refuse what is no graph: TensorFlow would take ``b""`` for an empty graph."""
    if new is None or (isinstance(new, bytes) and new):
        return new
    raise TypeError(f"the editor gave {repr(new)[:80]}; needed the bytes of a GraphDef, or None")


_plugin = _Plugin()


def load(device_types: Sequence[str], environ: Mapping[str, str]) -> Form:
    """Load the plug-in and register it; a second call registers only what is missing.

    Args:
        device_types: ``CPU`` and ``GPU``, or one of them.
        environ: Where ``LMS_PLUGIN`` may ask for one form, and where the cache of built files is looked up.

    Returns:
        Which form was loaded.

    Raises:
        PluginError: If no form can be loaded, or another plug-in serves one of the device types.
    """
    return _plugin.load(device_types, environ)


def arm(editor: Editor, on_fault: OnFault | None = None) -> None:
    """Hand the graphs of training steps to the editor from now on.

    Args:
        editor: Is called in the thread that runs the step, in the last iteration of TensorFlow's optimizer.
            Graphs that TensorFlow optimizes because of the editor's own work are not handed to it.
        on_fault: Is told what the editor raised; the graph then stays as it is.

    Raises:
        PluginError: If the plug-in is not loaded.
    """
    _plugin.arm(editor, on_fault)


def disarm() -> None:
    """Leave graphs alone from now on; an editor at work in another thread still ends its graph."""
    _plugin.disarm()


def expect_iterations(count: int) -> None:
    """Set how often TensorFlow optimizes each graph of this thread; the editor gets the last result.

    Args:
        count: This thread's ``meta_optimizer_iterations``, 1 or 2; 2 until it is said.

    Raises:
        PluginError: If the count is another one, or the plug-in is not loaded.
    """
    _plugin.expect_iterations(count)
