"""``lmsrun build-horovod`` out of a checkout, before lmsrun is installed: for set-up and images.

Run it with the interpreter that shall get Horovod: ``.venv/bin/python scripts/build_horovod.py``.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lmsrun.wheels.build_horovod import BuildError as BuildError
from lmsrun.wheels.build_horovod import cache_folder as cache_folder
from lmsrun.wheels.build_horovod import locked as locked
from lmsrun.wheels.build_horovod import main
from lmsrun.wheels.build_horovod import run_logged as run_logged

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
