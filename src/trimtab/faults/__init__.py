"""Numerical faults on purpose, for tests and experiments. Each is seeded, bounded in time, and noted in the record."""

from trimtab.faults.attention_backward import BiasedAttentionBackward, biased_attention_backward
from trimtab.faults.broken_numbers import BitFlips, NonFiniteGradient
from trimtab.faults.learning_rate import LargeLearningRate
from trimtab.faults.outliers import OutlierChannels, OutlierFaults, random_outliers
from trimtab.faults.protocol import Fault
from trimtab.faults.routers import RouterFault
from trimtab.faults.small_batch import SmallBatch
from trimtab.faults.stored_copy import StoredCopyBurst, StoredCopyFaults, random_bursts
from trimtab.faults.window import WindowFault

__all__ = [
    "BiasedAttentionBackward",
    "BitFlips",
    "Fault",
    "LargeLearningRate",
    "NonFiniteGradient",
    "OutlierChannels",
    "OutlierFaults",
    "RouterFault",
    "SmallBatch",
    "StoredCopyBurst",
    "StoredCopyFaults",
    "WindowFault",
    "biased_attention_backward",
    "random_bursts",
    "random_outliers",
]
