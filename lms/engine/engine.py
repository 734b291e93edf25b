"""Plan each training step that TensorFlow is about to run, and report what was done."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tensorflow.core.framework import graph_pb2

from lms.config import LMSConfig
from lms.device.device import Device, read_devices
from lms.device.horovod_fusion_buffer import FusionBuffer
from lms.device.memory_pool import PoolClaim, load_filler
from lms.engine.books import Books
from lms.engine.editing import Editing
from lms.engine.estimating import STOPPED, Traced, told_to, trace
from lms.engine.lifecycle import Lifecycle
from lms.engine.measuring import profiles_of
from lms.engine.observer import Guest
from lms.engine.steps import Steps
from lms.engine.work import Task
from lms.errors import BuildError, LMSArgumentError, LMSError, LMSWarning
from lms.intercept.edit_guards import collector_paused, level_of_user
from lms.intercept.optimizer_options import OptimizerOptions, doubtful_options
from lms.ir.graph import GraphError
from lms.ir.name_filters import has_filters
from lms.optimizer.plugin import Request
from lms.process_state import tensorflow_is_initialised
from lms.profiling.store import Profiles
from lms.report.document import build_document
from lms.report.stats import Report
from lms.rewriter.stopped import stopped
from lms.transports.base import Transport
from lms.transports.choose import choose_transport, require_store
from lms.variables.host_values import HostValues, host_values
from lms.variables.on_host import HostVariables, require_host_variables

logger = logging.getLogger("lms")


class Engine:
    """Large Model Support in this process.

    Args:
        config: What to do.
        environ: The process's variables.

    Raises:
        PlaceError: If a file, folder or device that ``config`` names cannot be used.
    """

    def __init__(self, config: LMSConfig, environ: Mapping[str, str]) -> None:
        require_store(config)
        require_host_variables(config, environ)
        self.config, self._environ = config, environ
        self.state = Lifecycle.PAUSED
        self.guest: Guest | None = None
        self.traced = told_to(environ)
        """Is told of the first training step, or why it cannot be read; the step is not run then."""
        self.books = Books(config, self.warn)
        self.options = OptimizerOptions(config.arithmetic_optimization)
        self.pool = PoolClaim(environ)
        self.fusion = FusionBuffer(environ, self.pool.leaves_growing, late=tensorflow_is_initialised())
        self.host = HostVariables(config, self._host_values)
        self.steps = Steps(self, environ)
        self._devices: tuple[Device, ...] = ()
        self._assumed_limit: int | None = None
        self._transport: Transport | None = None
        self._values: HostValues | None = None
        self._profiles: Profiles | None = None
        self._fills: bool | None = None
        """Whether plans may have fillers, once that was asked."""
        self._warned: set[str] = set()
        self._editing = Editing(self, environ)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices whose memory is planned, read when they are first needed."""
        if not self._devices:
            self._devices = read_devices(self._environ)
        if self._assumed_limit is not None:
            return tuple(replace(device, limit_bytes=self._assumed_limit) for device in self._devices)
        return self._devices

    def profiles(self) -> Profiles:
        """Return the measured times of steps on this machine."""
        if self._profiles is None:
            self._profiles = profiles_of(self.devices[0], self._environ, self.warn)
        return self._profiles

    def load_fillers(self) -> bool:
        """Load the op of fillers, compiled when it is first needed; tell whether plans may have them.

        With several devices they may not: a buffer may be allocated on one at the point of an op of another.
        """
        if self._fills is None:
            self._fills = len(self.devices) == 1
            try:
                if self._fills:
                    load_filler(self._environ)
            except BuildError as error:
                logger.info("plans without fillers: %s", error)
                self._fills = False
        return self._fills

    def transport(self) -> Transport:
        """Return the transport that moves swapped bytes; choose it when it is first needed."""
        if self._transport is None:
            self._transport = choose_transport(self.config, self.devices[0].type, self._environ)
            if self._transport.note:
                self.warn(self._transport.note)
        return self._transport

    def _host_values(self) -> HostValues:
        """Return the way to have variables in host memory; choose it when it is first needed."""
        if self._values is None:
            self._values = host_values(self.transport(), self._environ)
        return self._values

    @property
    def active_transport(self) -> Transport | None:
        """The transport, once something has been swapped."""
        return self._transport

    def assume_limit(self, limit_bytes: int | None) -> None:
        """Plan for a device of ``limit_bytes`` in place of the real size; None: for the real one again."""
        self._assumed_limit = limit_bytes

    def report(self, *, settled: bool = True) -> Report:
        """Report what was done so far; ``settled``: also the figures of steps that fit without a plan."""
        found = self.books.collector.report(self.devices[0], self._transport, settled=settled)
        return replace(found, document=self._document)

    def _document(self, report: Report) -> dict[str, Any]:
        steps = self.books.collector.planned.values()
        planned = max(steps, key=lambda one: len(one.graph.ops), default=None)
        return build_document(report, self.config, planned, self.steps.history, self._environ)

    def warn(self, text: str, remedy: str = "") -> None:
        """Warn once in the process of ``text``, or once of all texts that share a ``remedy``."""
        told = remedy or text
        if told not in self._warned:
            self._warned.add(told)
            self.books.collector.warnings.append(text)
            warnings.warn(text, LMSWarning, stacklevel=level_of_user())

    def edit(self, request: Request) -> bytes | None:
        """Plan a graph that TensorFlow has optimized; called by the plug-in, in the thread that runs it.

        Returns:
            The edited graph; ``None`` where it stays as it is.
        """
        if self.traced is not None:
            with collector_paused():
                return self._estimated(request, self.traced)
        if request.device_type != self.devices[0].type:
            return None
        try:
            with collector_paused():
                return self._edit(request)
        except LMSWarning as warning:  # the program has made errors of warnings
            self.steps.note(warning)
            return None

    def fault(self, fault: BaseException) -> None:
        """Warn that an edit failed by a fault of LMS: the step runs as TensorFlow has optimized it."""
        if not isinstance(fault, Exception):
            self.steps.note(fault)
            return
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        try:
            self.warn(
                f"a step stays as it is: LMS has a fault here ({text}); debug=True (LMS_DEBUG=1) shows where"
            )
        except LMSWarning as warning:
            self.steps.note(warning)
        if self.config.debug:
            logger.error("a step stays as it is", exc_info=fault)

    def _edit(self, request: Request) -> bytes | None:
        task = self.steps.task(request)
        if task is None:
            return None
        try:
            return self._edited(task)
        except (GraphError, LMSError) as error:
            if getattr(error, "ends_rank", False) or isinstance(error, LMSArgumentError):
                self.steps.note(error)
            else:
                self.books.leave(task.name, str(error), 0)
            return None

    def _estimated(self, request: Request, traced: Traced) -> bytes | None:
        """Hand a training step to whoever wants a forecast of it; whatever fails here, it does not run."""
        graph_def = graph_pb2.GraphDef.FromString(request.graph)
        try:
            task = self.steps.task(request) if request.device_type == self.devices[0].type else None
            found = None if task is None else trace(task, graph_def, self.devices[0])
            if task is None or found is None:
                return None
            traced(task.name, *found)
        except Exception as fault:
            if self.config.debug:
                logger.exception("a step cannot be forecast")
            traced("", fault)
        except BaseException as fault:
            self.steps.note(fault)
        return stopped(graph_def, STOPPED)

    def _edited(self, task: Task) -> bytes | None:
        edit = self._editing.edit(task)
        for work in edit.works:
            stats = self.books.record(work, task.guest or self.guest)
            if stats is not None:
                self.steps.planned(work, stats)
                work.device.reset_peak()
        if edit.is_whole:
            self.steps.left_whole(edit.works)
        return edit.graph

    def refusal(self) -> str | None:
        """Return why no step may be planned now; ``None`` where steps may."""
        if self.guest is not None and self.guest.is_over():
            self.guest.leave()
        if not self.state.edits:
            return "the training that LMS was on for is over"
        return (self.guest.refusal or None) if self.guest is not None else None

    def may_postpone(self, task: Task) -> bool:
        """Tell whether the figures of a step that stays as it is can wait until somebody asks for them."""
        return not (self.config.debug or self.guest or task.guest or has_filters(self.config))

    def tell_of_options(self) -> None:
        """Warn of TensorFlow's current options that work against a plan."""
        for text in doubtful_options(self._environ):
            self.warn(text)
