"""Handwritten digits with Horovod Elastic: the job goes on when a rank dies.

    lmsrun -np 2 --min-np 1 --max-np 2 --host-discovery-script ./hosts.sh elastic_digits.py

``hosts.sh`` prints the hosts of the moment, one ``NAME:SLOTS`` a line. ``--die-at EPOCH`` kills rank 1 once,
to see the others carry on from the last state that was committed. A rank that joins takes over what rank 0
has, which Horovod's own ``TensorFlowState`` cannot do under TensorFlow 2.
"""

import argparse
import os
import signal

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from lms.elastic import ElasticState


def main() -> None:
    """Train a softmax regression on what this rank sees of the digits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--die-at", type=int, default=None, help="epoch at which rank 1 kills itself, once")
    options = parser.parse_args()
    hvd.init()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    weights = tf.Variable(tf.zeros([64, 10]))
    bias = tf.Variable(tf.zeros([10]))
    state = ElasticState([weights, bias], epoch=0)

    @hvd.elastic.run
    def train(state: ElasticState) -> None:
        while state.epoch < options.epochs:
            # Ranks come and go, so what a rank sees is cut anew each epoch.
            mine = slice(hvd.rank(), None, hvd.size())
            with tf.GradientTape() as tape:
                logits = images[mine] @ weights + bias
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels[mine], logits=logits)
                )
            for variable, gradient in zip((weights, bias), tape.gradient(loss, [weights, bias]), strict=True):
                variable.assign_sub(0.5 * hvd.allreduce(gradient))
            if options.die_at == state.epoch and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            state.commit()

    train(state)
    right = tf.reduce_mean(tf.cast(tf.argmax(images @ weights + bias, 1) == labels, tf.float32))
    print(f"rank {hvd.rank()} of {hvd.size()}: {state.epoch} epochs, accuracy {float(right):.3f}", flush=True)


if __name__ == "__main__":
    main()
