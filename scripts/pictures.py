"""Make the pictures of README.md: a plan for an AC922, and the memory of a step before and after.

``--check`` compares them with what is there instead, and writes nothing.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
MIB = 1 << 20
BASE, LIMIT = 200 * MIB, 700 * MIB
"""What lies on the device before the step, and what the device has."""
STAGES = ((3, 64), (4, 32), (6, 16), (3, 8))
"""Layers of each stage of the net, and the MiB that one of them makes, as in a ResNet-50 of batch 64."""


def draw_plan() -> str:
    """Draw the plan that README.md shows as a table."""
    from lmsrun.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        path = Path(folder, "plan.svg")
        topology = str(ROOT / "examples" / "ac922.json")
        argv = ["plan", "--framework", "horovod", "-np", "6", "--topology", topology, "--svg", str(path)]
        if main([*argv, "train.py"], {"PATH": os.defpath}):
            raise SystemExit("pictures: lmsrun plan has failed")
        return path.read_text(encoding="utf-8")


def draw_memory() -> str:
    """Draw the memory of a step of a small net, planned for a device that it does not fit."""
    from lms.config import LMSConfig
    from lms.ir.graph import GraphBuilder
    from lms.page.step_chart import draw_step
    from lms.planner.hybrid import decide
    from lms.report.stats import Planned
    from lms.report.step_document import describe_step
    from lms.simulate.cost_model import V100

    build = GraphBuilder()
    (value,) = build.add("images", "Placeholder", outputs=[36 * MIB])
    made = []
    for stage, (layers, mib) in enumerate(STAGES):
        for layer in range(layers):
            name = f"resnet/stage_{stage}/block_{layer}"
            (conv,) = build.add(
                f"{name}/Conv2D",
                "Conv2D",
                inputs=[value],
                outputs=[mib * MIB],
                workspace_bytes=8 * MIB,
                flops=2.4e10,
            )
            (value,) = build.add(f"{name}/Relu", "Relu", inputs=[conv], outputs=[mib * MIB])
            made.append((name, conv, value, mib))
    (slope,) = build.add("loss/mean", "Mean", inputs=[value], outputs=[1024])
    for name, conv, value, mib in reversed(made):
        (slope,) = build.add(
            f"gradients/{name}/ReluGrad", "ReluGrad", inputs=[slope, value], outputs=[mib * MIB]
        )
        (change,) = build.add(
            f"gradients/{name}/Filter", "Conv2DBackpropFilter", inputs=[conv, slope], outputs=[4 * MIB]
        )
        build.add(f"train/{name}", "ResourceApplyAdam", inputs=[change], outputs=[])
        (slope,) = build.add(
            f"gradients/{name}/Input",
            "Conv2DBackpropInput",
            inputs=[conv, slope],
            outputs=[mib * MIB],
            flops=4.8e10,
        )
    graph = build.build()
    decided = decide(graph, LMSConfig(enabled=True, recompute="auto"), "GPU", LIMIT - BASE, V100)
    planned = Planned("a step", decided.graph, decided.plan, BASE, None, graph, V100)
    step = json.loads(json.dumps(describe_step(planned, LIMIT, None)))
    return draw_step(step, "memory", alone=True) + "\n"


PICTURES = {"ac922-plan.svg": draw_plan, "memory.svg": draw_memory}


def main(argv: list[str]) -> int:
    """Write the pictures, or with ``--check`` say which are not current."""
    stale = []
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / name, draw()
        if "--check" not in argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            stale.append(name)
    if stale:
        print(f"pictures: {', '.join(stale)} not current; try: make pictures", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
