"""Keep the state that the ranks of an elastic job share, under TensorFlow 2 and either Keras.

Horovod 0.28's own states cannot take a rank in there: ``TensorFlowState`` broadcasts its variables where it
is made and not in ``sync()``, so a rank that joins waits in the constructor for peers that wait for it in
``sync()``, all of them for ever; ``TensorFlowKerasState`` calls Keras 3's list of optimizer variables.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState

from lms.hvd import check_in_agreement, horovod, tf_variable


class ElasticState(ObjectState):  # type: ignore[misc]
    """Variables and plain values that outlive a rank and reach one that joins; for ``hvd.elastic.run``.

    Making it exchanges nothing. ``commit()`` keeps a copy in host memory, which is what the ranks go back to
    when one of them dies; ``sync()`` gives every rank what rank 0 has. The plain values are its attributes.

    Args:
        variables: TensorFlow's or either Keras's, in the same order on every rank, such as
            ``[*model.variables, *optimizer.variables]`` of an optimizer that has been built.
        values: Plain values by name, such as ``epoch=0``.

    Raises:
        LMSError: If Horovod has not been initialised.
    """

    def __init__(self, variables: Iterable[Any], **values: Any) -> None:
        hvd = horovod()
        self._variables = [tf_variable(variable) for variable in variables]
        self._copies = [variable.numpy() for variable in self._variables]
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **values)

    def save(self) -> None:
        """Keep variables and values as they are now."""
        self._copies = [variable.numpy() for variable in self._variables]
        super().save()

    def restore(self) -> None:
        """Go back to the state that was kept last."""
        for variable, copy in zip(self._variables, self._copies, strict=True):
            variable.assign(copy)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's variables as they are, and the values that it kept last.

        Raises:
            OutOfSyncError: On every rank, if they hold variables of different shapes or types.
        """
        described = [f"{tuple(variable.shape)} {variable.dtype.name}" for variable in self._variables]
        check_in_agreement("variables", described)
        tf.function(self._exchange, autograph=False)()  # one graph: Horovod fuses what it sees at once
        super().sync()
        self._copies = [variable.numpy() for variable in self._variables]

    def _exchange(self) -> None:
        hvd = horovod()
        for index, variable in enumerate(self._variables):
            # Survivors have synchronised before and newcomers have not, so the name counts nothing; its first
            # word is what hvd.elastic.run looks for in the error when a peer has died.
            name = f"HorovodBroadcast.lms.elastic.{index}"
            variable.assign(hvd.broadcast(variable, 0, name=name, ignore_name_scope=True))
