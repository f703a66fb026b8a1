"""Gradient compression for reducers: the bytes of a gradient that a rank sends, and the sum of all ranks' gradients.

A hook is any object with a generator method `Hook.reduce`. The reducer of a group runs it once a gradient: the
arrays that it yields are exchanged between the ranks, and the array that it returns is the sum over ranks. Five hooks
are here, NumPy only: `BF16`, `Int8`, `FP8`, `TopK` and `PowerSGD`. Each keeps the part of a gradient that it did not
send, and adds it to the next gradient of the same name (error feedback, Seide et al., *1-Bit Stochastic Gradient
Descent*, 2014; Karimireddy et al., *Error Feedback Fixes SignSGD*, 2019).

Fewer bytes may cost more steps: compression pays where computing and exchanging a compressed step, times the steps that
it takes, is less than the same product without it. Between processes of one host nothing is worth compressing, as no
byte is moved there.
"""

from zcactor.hooks.base import Gather, Hook, Sum
from zcactor.hooks.blocks import FP8, Int8
from zcactor.hooks.low_rank import PowerSGD
from zcactor.hooks.rounding import BF16
from zcactor.hooks.sparse import TopK

__all__ = ["BF16", "FP8", "Gather", "Hook", "Int8", "PowerSGD", "Sum", "TopK"]
