"""A rank of a real Horovod job: sums its rank over all, then does what it is told."""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

if sys.argv[1:] == ["leave"] and os.environ["RANK"] == "1":
    # Handlers run backwards, so this is a long end behind Horovod's own.
    atexit.register(time.sleep, 1)
if sys.argv[1:] == ["never comes"] and os.environ["RANK"] == "1":
    time.sleep(600)
hvd.init()
total = float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum))
print(
    f"sum {total:g} rank {hvd.rank()} of {hvd.size()} local {hvd.local_rank()} of {hvd.local_size()}",
    flush=True,
)
if sys.argv[1:] == ["segv"]:
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    # The other rank waits in a collective, as a training does when its peer dies.
    hvd.allreduce(tf.constant(1.0), name="never")
if sys.argv[1:] == ["leave"]:
    if hvd.rank() == 1:
        sys.exit(7)
    hvd.allreduce(tf.constant(1.0), name="never")
if sys.argv[1:] == ["leave early"]:
    if hvd.rank() == 1:
        sys.exit(0)
    hvd.allreduce(tf.constant(1.0), name="never")
if sys.argv[1:] == ["leave without a word"]:
    if hvd.rank() == 1:
        os._exit(0)
    hvd.allreduce(tf.constant(1.0), name="never")
if sys.argv[1:] == ["wait"]:
    Path(os.environ["STUB_FOLDER"], f"ready-{hvd.rank()}").touch()
    while True:
        hvd.allreduce(tf.constant(1.0), name="step")
        time.sleep(0.05)
