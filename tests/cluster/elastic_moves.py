"""A rank of an elastic job that writes down where it runs: ``elastic_moves.py OUT``.

The rank on host 127.0.0.1 kills itself; the others then ask for a third rank on their own host (the discovery
script looks for ``OUT/grown``) and end when they are three again.
"""

import json
import os
import signal
import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf

out = sys.argv[1]
grown = os.path.join(out, "grown")
looks = 0


def look() -> None:
    """Write down what the kernel says of every thread of this process."""
    global looks
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    record = {
        "pid": os.getpid(),
        "horovod": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()],
        "environ": [int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "cpus": sorted({tuple(sorted(mask)) for mask in threads}),
        "threads": len(threads),
        "epoch": int(state.epoch),
    }
    with open(os.path.join(out, f"look-{os.getpid()}-{looks}.json"), "w") as file:
        json.dump(record, file)
    looks += 1


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowState) -> None:
    """Add one a step; steps that were lost with a rank are done again."""
    look()
    while state.epoch < 8:
        weights.assign_add(hvd.allreduce(tf.ones([4]), name="ones"))
        if state.epoch == 2 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.size() == 2 and hvd.rank() == 0 and not os.path.exists(grown):
            open(grown, "w").close()
        state.epoch += 1 if hvd.size() == 3 else 0
        time.sleep(0.1)
        state.commit()


hvd.init()
weights = tf.Variable(tf.zeros([4]))
state = hvd.elastic.TensorFlowState([weights], epoch=0)
train(state)
print(f"rank {hvd.rank()} of {hvd.size()} is done", flush=True)
