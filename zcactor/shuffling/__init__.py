"""Shuffles: parts made by some actors, merged by others, and never opened by the program that asks for it.

::

    rounds      `shuffle`: rounds of partitions and merges
    sides       the parts of it that run in the processes of mappers and reducers
"""

from zcactor.shuffling.rounds import shuffle

__all__ = ["shuffle"]
"""The public function; `zcactor` exports it."""
