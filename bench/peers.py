"""Large Model Support beside other ways to save memory: the largest batch under one limit, time, and bits.

Five models (``peers_models.py``) train on the CPU device with a hard limit: with nothing, with
``tf.recompute_grad`` by hand, in ``keras.RematScope``, with the recomputing of TensorFlow's own memory
optimizer, and with Large Model Support that swaps, recomputes, does both, and keeps all variables on the
host. *Bits* are those of all weights after the steps, at the largest batch that fits with nothing; Large
Model Support runs there under 0.7 of the limit, so that it has to do something.

    python bench/peers.py --out peers.json                      # goes on where it stopped; an hour
    python bench/peers.py --out peers.json --models wide        # a part of it
    python bench/peers.py --out peers.json --what table         # only the table
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from lms_case import Case  # noqa: E402
from lms_children import CaseError, Found, NothingFitsError, Runner, largest, say, table  # noqa: E402
from lms_document import read_document, write_part  # noqa: E402
from peers_models import PEERS  # noqa: E402

PART = "peers"
STEPS = 6
FIRST_GUESS = 16
TOLERANCE = 0.12
SHARE = 0.7
"""Of the limit, for the bits of Large Model Support."""
NOTHING = "nothing"
WAYS = {
    NOTHING: Case("peers", ""),
    "tf.recompute_grad by hand": Case("peers-by-hand", ""),
    "keras.RematScope": Case("peers", "", peer="RematScope"),
    "Grappler's memory optimizer": Case("peers", "", peer="Grappler"),
    "LMS swaps": Case("peers", "", policy="auto", recompute="off"),
    "LMS recomputes": Case("peers", "", policy="auto", recompute="only"),
    "LMS does both": Case("peers", "", policy="auto", recompute="auto"),
    "LMS does both, variables on the host": Case("peers", "", policy="auto", recompute="auto", state="host"),
}


@dataclass(frozen=True)
class Bench:
    """One model under its limit, with Adam."""

    runner: Runner
    model: str

    def case(self, way: str, units: int) -> Case:
        """Describe the training of so many units."""
        limit_mb = PEERS[self.model].limit_mb
        case = replace(WAYS[way], model=self.model, units=units, limit_mb=limit_mb, steps=STEPS)
        return replace(case, optimizer="adam")

    def measure(self, way: str, entry: Found) -> Found:
        """Find the largest batch of a way, and its bits at the largest batch with nothing."""
        try:
            return self._measured(way, entry.get(NOTHING, {}).get("units", 0))
        except NothingFitsError:
            return {"units": 0}
        except CaseError as error:
            lines = str(error).strip().splitlines()
            return {"failed": next((line for line in reversed(lines) if "Error" in line), lines[-1])}

    def _measured(self, way: str, base: int) -> Found:
        guess = 2 * base or FIRST_GUESS
        found = largest(lambda units: self.runner.run(self.case(way, units)), guess, TOLERANCE)
        seen = {"units": found["units"], "peak_bytes": found["peak_bytes"]}
        seen["unit_s"] = median(found["steps_s"][2:]) / found["units"]
        if way == NOTHING:
            return seen | {"digest": found["digest"]}
        return seen | {"digest": self._digest(way, base)} if base else seen

    def _digest(self, way: str, units: int) -> str:
        case = self.case(way, units)
        if case.policy != "off":
            case = replace(case, limit_mb=int(SHARE * case.limit_mb))
        found = self.runner.run(case)
        return found["digest"] if found else ""


def main() -> int:
    """Measure what is asked for and not there yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--what", choices=("run", "table"), default="run")
    parser.add_argument("--case-seconds", type=float, default=900.0, help="most that a training may take")
    parser.add_argument("--out", help="file of the JSON document; it is added to")
    options = parser.parse_args()
    path = Path(options.out) if options.out else None
    entries: Found = (read_document(path).get(PART) if path else None) or {}
    for model in options.models if options.what == "run" else ():
        entry = entries.setdefault(model, {})
        bench = Bench(Runner(timeout_s=options.case_seconds), model)
        for way in options.ways:
            if way not in entry:
                entry[way] = bench.measure(way, entry)
                say(f"{model}: {way}: {entry[way]}")
                if path:
                    write_part(path, PART, entries)
    print(render(entries))
    return 0


def render(entries: Found) -> str:
    """Render a table: one row a model and way."""
    rows: list[Sequence[str]] = [("model", "limit", "way", "largest batch", "multiple", "time", "bits")]
    for model, entry in entries.items():
        limit = f"{PEERS[model].limit_mb} MiB"
        rows += [(model, limit, way, *_cells(found, entry.get(NOTHING, {}))) for way, found in entry.items()]
    return table(rows)


def _cells(found: Found, nothing: Found) -> tuple[str, str, str, str]:
    """Write batch, its multiple, time per unit and bits, the last three against training with nothing."""
    if "failed" in found:
        return f"fails: {found['failed'][:60]}", "", "", ""
    units = found["units"]
    if not units or not nothing.get("units"):
        return str(units), "", "", ""
    if found is nothing:
        return str(units), "1", "1", ""
    bits = {"": "does not fit", nothing["digest"]: "same"}.get(found["digest"], "others")
    return str(units), f"{units / nothing['units']:.1f}", f"{found['unit_s'] / nothing['unit_s']:.2f}", bits


if __name__ == "__main__":
    sys.exit(main())
