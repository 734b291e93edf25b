"""A rank of an elastic job that writes down where it runs: ``elastic_moves.py OUT``.

Three ranks, two of them on ``localhost``, become four (``localhost`` gets a third), then three again, and two
when the one on ``127.0.0.1`` has killed itself. ``OUT/hosts`` is what the discovery script prints.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from lms.elastic import ElasticState
from lms.hvd import DistributedOptimizer, check_in_sync

STAGES = ((3, "localhost:3\n127.0.0.1:1\n"), (4, "localhost:2\n127.0.0.1:1\n"), (3, ""), (2, ""))
"""Ranks in all, and the hosts to ask for then."""
out = Path(sys.argv[1])
looks = 0


def look(stage: int) -> None:
    """Write down what the kernel says of every thread of this process."""
    global looks
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    record = {
        "pid": os.getpid(),
        "stage": stage,
        "horovod": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()],
        "environ": [int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "cpus": sorted({tuple(sorted(mask)) for mask in threads}),
        "threads": len(threads),
    }
    (out / f"look-{os.getpid()}-{looks}.json").write_text(json.dumps(record))
    looks += 1


@tf.function
def step() -> None:
    """Move the weights to the mean of the ranks' targets; a constant gradient would be folded away."""
    optimizer.apply_gradients([(weights - target, weights)])


@hvd.elastic.run
def train(state: ElasticState) -> None:
    """Step for as long as the job is to change, and a few steps more."""
    while STAGES[state.stage][0] != hvd.size():
        state.stage += 1
    if state.stage:
        # From here on nobody has to import TensorFlow first, and what a death leaves waiting ends soon.
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "30"
    look(state.stage)
    check_in_sync([weights])
    hosts = STAGES[state.stage][1]
    for number in range(3):
        if number == 1 and state.stage == 2 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.commit()
    if hosts and hvd.rank() == 0:
        (out / "hosts.new").write_text(hosts)
        (out / "hosts.new").rename(out / "hosts")
    while hosts:
        step()
        time.sleep(0.1)
        state.commit()


hvd.init()
weights, target = keras.Variable(tf.zeros([4])), tf.Variable(float(hvd.rank()))
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.125))
optimizer.build([weights])
state = ElasticState([weights, *optimizer.variables], stage=0)
train(state)
check_in_sync([weights])
print(f"rank {hvd.rank()} of {hvd.size()} is done", flush=True)
