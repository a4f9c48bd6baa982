"""What is read off a model in training: gradient norms, quantizers, and the seam for further monitors."""

from trimtab.monitors.gradient_norms import GradientNorms, NormReading
from trimtab.monitors.protocol import Monitor
from trimtab.monitors.quantizers import QuantizerStats

__all__ = ["GradientNorms", "Monitor", "NormReading", "QuantizerStats"]
