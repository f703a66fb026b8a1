"""Epochs of the cluster's heads: which head's orders a process carries out."""

from __future__ import annotations

from zcactor.errors import ZcactorError

__all__ = ["Deposed", "KnownEpoch"]


class Deposed(ZcactorError):
    """A term is over: another head decides, or this one has resigned.

    Args:
        epoch: of the term that was used.
        known: the greatest epoch that is known where it was used: in the log, or in the process that got an order.
    """

    def __init__(self, epoch: int, known: int) -> None:
        super().__init__(epoch, known)
        self.epoch = epoch
        self.known = known

    def __str__(self) -> str:
        return f"the term with epoch {self.epoch} is over: the log is at epoch {self.known}"


class KnownEpoch:
    """The greatest epoch that a process has heard of; 0 before the first order.

    A process that has carried out an order of one head carries out none of an earlier head, which may have been stopped
    for a while and does not know yet that its term is over.
    """

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, epoch: int) -> None:
        """Take note of an order of the head whose term has `epoch`.

        Raises:
            Deposed: a later head is known; the order must not be carried out.
        """
        if epoch < self.epoch:
            raise Deposed(epoch, self.epoch)
        self.epoch = epoch
