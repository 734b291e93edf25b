"""``make demo``: two bound Horovod ranks learn handwritten digits; at the end their receipts."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "out" / "demo"


def main() -> int:
    """Run the job, show its receipts once more where its output ends; the job's own exit code."""
    # Two ranks are the point here, also where there is only one GPU or core.
    job = ["run", "-np", "2", "--oversubscribe", "--output-dir", str(OUTPUT), "examples/train_digits.py"]
    code = subprocess.run([sys.executable, "-m", "lmsrun", *job], cwd=ROOT, check=False).returncode
    if code == 0:
        from launch.receipts.judge import from_json
        from lmsrun.render.receipts import render_receipts

        document = json.loads((OUTPUT / "latest" / "receipts.json").read_text(encoding="utf-8"))
        print(f"\n{render_receipts(from_json(document))}\n\nreceipts: {OUTPUT / 'latest' / 'receipts.json'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
