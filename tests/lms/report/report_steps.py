"""A planned step of a known net, for the report."""

from lms.config import LMSConfig
from lms.device.device import Device
from lms.ir.graph import Graph, GraphBuilder
from lms.planner.hybrid import decide
from lms.report.history import History, Step
from lms.report.stats import GraphStats, Planned, Report
from lms.simulate.cost_model import V100
from lms.transports.base import StoreStats

MIB = 1 << 20
BASE = 40 * MIB


def net(layers: int) -> Graph:
    """A chain of convolutions, with its backward pass and its updates."""
    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[4 * MIB])
    made = []
    for number in range(layers):
        name = f"model/block_{number // 6}/layer_{number % 6}"
        size = (16 if number % 6 < 3 else 6) * MIB
        (conv,) = build.add(
            f"{name}/Conv2D", "Conv2D", inputs=[value], outputs=[size], workspace_bytes=3 * MIB
        )
        (value,) = build.add(f"{name}/Relu", "Relu", inputs=[conv], outputs=[size])
        made.append((name, conv, value, size))
    (slope,) = build.add("loss/mean", "Mean", inputs=[value], outputs=[1024])
    for name, conv, value, size in reversed(made):
        (slope,) = build.add(f"gradients/{name}/ReluGrad", "ReluGrad", inputs=[slope, value], outputs=[size])
        (change,) = build.add(
            f"gradients/{name}/Conv2DBackpropFilter",
            "Conv2DBackpropFilter",
            inputs=[conv, slope],
            outputs=[2 * MIB],
            workspace_bytes=MIB,
        )
        build.add(f"train/{name}/update", "ResourceApplyAdam", inputs=[change], outputs=[])
        (slope,) = build.add(
            f"gradients/{name}/Conv2DBackpropInput",
            "Conv2DBackpropInput",
            inputs=[conv, slope],
            outputs=[size],
        )
    return build.build()


def plan_step(layers: int, limit_bytes: int, config: LMSConfig) -> tuple[Planned, Report, History]:
    """Plan it, as the engine would, and let forty steps have run."""
    graph = net(layers)
    made = decide(graph, config, "GPU", limit_bytes - BASE, V100)
    shapes = {graph.tensor_name(tensor.id): "float32 32x56x56x64" for tensor in graph.tensors}
    planned = Planned("train_step", made.graph, made.plan, BASE, None, graph, V100, "GPU", shapes)
    peak = BASE + made.peak_bytes
    stats = GraphStats.of("train_step", made.plan, None, BASE, peak)
    moved = StoreStats(bytes_out=930 * MIB, bytes_in=930 * MIB, peak_bytes=120 * MIB)
    report = Report(Device("GPU:0", limit_bytes), "host", (stats,), peak + 3 * MIB, moved, 0, ("a warning",))
    history = History(lambda: None)
    history.count = 40
    history.steps = [
        Step(number, 0.2 + 0.01 * (number % 7) + (2 if not number else 0), peak - (9 - min(number, 9)) * MIB)
        for number in range(40)
    ]
    return planned, report, history
