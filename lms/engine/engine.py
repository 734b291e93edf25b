"""Plan each training step that TensorFlow is about to run, and report what was done."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager import context

from lms.calls.steps import Steps
from lms.config import LMSConfig
from lms.device.device import Device
from lms.engine.editing import Editing
from lms.engine.lifecycle import Lifecycle
from lms.engine.tracing import STOPPED, trace
from lms.errors import LMSArgumentError, LMSError, LMSWarning
from lms.estimates.estimating import Traced, told_to
from lms.intercept.edit_guards import collector_paused
from lms.intercept.optimizer_options import OptimizerOptions, doubtful_options
from lms.ir.graph import GraphError
from lms.ir.name_filters import has_filters
from lms.optimizer.plugin import Request
from lms.optimizer.stopped import NOT_PLANNED, stopped
from lms.passes.work import Task
from lms.process.books import Books
from lms.process.resources import Resources
from lms.report.document import build_document
from lms.report.guest import Guest
from lms.report.stats import Report
from lms.transports.choose import require_store
from lms.variables.on_host import require_host_variables

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
        self.books = Books(config)
        self.options = OptimizerOptions(config.arithmetic_optimization, fuses=config.xla != "auto")
        self.resources = Resources(config, environ, self.books.warn)
        self.steps = Steps(self, environ)
        self._editing = Editing(self, environ)

    def report(self, *, settled: bool = True) -> Report:
        """Report what was done so far; ``settled``: also the figures of steps that fit without a plan."""
        used = self.resources
        found = self.books.collector.report(self.fullest_device, used.active_transport, settled=settled)
        functions = {graph.function for graph in found.graphs if graph.function}
        gone = frozenset(name for name in functions if not context.context().has_function(name))
        return replace(found, gone=gone, document=self._document)

    @property
    def fullest_device(self) -> Device:
        """The device with the largest planned peak, whose memory is told; before any plan the first one."""
        devices, name = self.resources.devices, self.books.collector.fullest_device
        return next((device for device in devices if device.name == name), devices[0])

    def _document(self, report: Report) -> dict[str, Any]:
        planned = self.books.collector.largest
        return build_document(report, self.config, planned, self.steps.attempts.history, self._environ)

    def refuse_unseen(self, text: str) -> None:
        """Tell whoever wants a forecast, if anybody does, why a training step cannot be seen."""
        if self.traced is not None:
            self.traced("", LMSError(text))

    def edit(self, request: Request) -> bytes | None:
        """Plan a graph that TensorFlow has optimized; called by the plug-in, in the thread that runs it.

        Returns:
            The edited graph; ``None`` where it stays as it is.
        """
        if self.traced is not None:
            with collector_paused():
                return self._estimated(request, self.traced)
        if request.device_type != self.resources.devices[0].type:
            return None
        with collector_paused():
            return self._edit(request)

    def fault(self, fault: BaseException) -> None:
        """Warn that an edit failed by a fault of LMS: the step runs as TensorFlow has optimized it."""
        if not isinstance(fault, Exception):
            self.steps.fail(fault, is_body=False)
            return
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        try:
            self.books.warn(
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
            if not (getattr(error, "ends_rank", False) or isinstance(error, LMSArgumentError)):
                self.books.leave(task.name, str(error), 0)
                return None
            told: BaseException = error
        except LMSWarning as warning:  # the program has made errors of warnings
            told = warning
        except Exception:
            raise
        except BaseException as interrupt:
            told = interrupt
        may_stop = self.steps.fail(told, is_body=task.is_body)
        return stopped(graph_pb2.GraphDef.FromString(request.graph), NOT_PLANNED) if may_stop else None

    def _estimated(self, request: Request, traced: Traced) -> bytes | None:
        """Hand a training step to whoever wants a forecast of it; whatever fails here, it does not run."""
        graph_def = graph_pb2.GraphDef.FromString(request.graph)
        try:
            task = self.steps.task(request) if request.device_type == self.resources.devices[0].type else None
            found = None if task is None else trace(task, graph_def, self.resources.devices[0])
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
                self.books.collector.measure(stats, work.device)
        if edit.is_whole:
            self.steps.compiled.left_whole(edit.works)
        return None if edit.graph is None else self.steps.apart(edit.works, edit.graph)

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
            self.books.warn(text)
