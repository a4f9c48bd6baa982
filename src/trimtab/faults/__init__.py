"""Numerical faults on purpose, for tests and experiments. Each is seeded, bounded in time, and noted in the record."""

from trimtab.faults.protocol import Fault
from trimtab.faults.stored_copy import StoredCopyBurst, StoredCopyFaults, random_bursts

__all__ = ["Fault", "StoredCopyBurst", "StoredCopyFaults", "random_bursts"]
