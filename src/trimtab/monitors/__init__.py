"""What is read off a model in training, what raises an alarm, and what the alarms amount to.

Words:
    monitor: Reads values of one mechanism off a model: where it reads, what it returns, which rules it has.
    place: One entry of a value: a layer, a head; the model itself is "".
    reading: The values of one metric at one step, a value a place.
    rule: What raises an alarm on a metric: a detector, a sentence, how many places it takes.
    episode: From when enough places give alarm until none does any more. One episode is one alarm.
    mechanism: What an alarm is a sign of; ``diagnose`` reads these.
    action: What is done about an alarm, if it is asked for.
"""

from trimtab.monitors.actions import RaiseRisk, StopTraining
from trimtab.monitors.alarms import Alarm, AlarmRule
from trimtab.monitors.attention_keys import watch_keys
from trimtab.monitors.attention_spectrum import AttentionSpectrum
from trimtab.monitors.calibrate import CalibratedRule, Calibration, calibrate
from trimtab.monitors.detectors import Above, AnyOf, Cusum, Detector, Floor, PeakDrop
from trimtab.monitors.diagnosis import Diagnosis, diagnose
from trimtab.monitors.gradient_norms import GradientNorms, NormReading
from trimtab.monitors.layouts import HeadLayout, HeadLayouts, find_head_layouts
from trimtab.monitors.protocol import BaseMonitor, Monitor, MonitorContext
from trimtab.monitors.quantizers import QuantizerStats
from trimtab.monitors.residual_stream import ResidualNorm
from trimtab.monitors.router import Router
from trimtab.monitors.routing import router_conditioning, router_similarity, routing_entropy, similarity_bound
from trimtab.monitors.shift_residual import ShiftResidual, shift_residual
from trimtab.monitors.spectrum import effective_rank, frobenius_norm, qk_increment, spectral_entropy, stable_rank
from trimtab.monitors.usual_signals import UsualSignals

__all__ = [
    "Above",
    "Alarm",
    "AlarmRule",
    "AnyOf",
    "AttentionSpectrum",
    "BaseMonitor",
    "CalibratedRule",
    "Calibration",
    "Cusum",
    "Detector",
    "Diagnosis",
    "Floor",
    "GradientNorms",
    "HeadLayout",
    "HeadLayouts",
    "Monitor",
    "MonitorContext",
    "NormReading",
    "PeakDrop",
    "QuantizerStats",
    "RaiseRisk",
    "ResidualNorm",
    "Router",
    "ShiftResidual",
    "StopTraining",
    "UsualSignals",
    "calibrate",
    "diagnose",
    "effective_rank",
    "find_head_layouts",
    "frobenius_norm",
    "qk_increment",
    "router_conditioning",
    "router_similarity",
    "routing_entropy",
    "shift_residual",
    "similarity_bound",
    "spectral_entropy",
    "stable_rank",
    "watch_keys",
]
