"""What is read off a model in training: gradient norms now, and the seam for further monitors."""

from trimtab.monitors.gradient_norms import GradientNorms, NormReading
from trimtab.monitors.protocol import Monitor

__all__ = ["GradientNorms", "Monitor", "NormReading"]
