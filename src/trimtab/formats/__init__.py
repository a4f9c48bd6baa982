"""Number formats as data: their grids, rounding onto them, their codes, packed storage, and scales.

``get("e2m1").round(array)`` rounds onto a format's unscaled grid, ``encode`` and ``decode`` name grid points by codes,
``pack`` and ``unpack`` store codes densely, ``quantize`` and ``fake_quantize`` give each block of an array a scale.
"""

from trimtab.formats.fake_quantization import (
    QuantizationStats,
    channel_error,
    fake_quantize,
    fake_quantize_with_stats,
)
from trimtab.formats.format import FORMATS, Format, get
from trimtab.formats.granularity import Granularity, per_block, per_group, per_tensor, per_tile, per_token
from trimtab.formats.packing import pack, packed_size, unpack
from trimtab.formats.scaling import Quantized, ScaleKind, dequantize, encode_e8m0, quantize

__all__ = [
    "FORMATS",
    "Format",
    "Granularity",
    "QuantizationStats",
    "Quantized",
    "ScaleKind",
    "channel_error",
    "dequantize",
    "encode_e8m0",
    "fake_quantize",
    "fake_quantize_with_stats",
    "get",
    "pack",
    "packed_size",
    "per_block",
    "per_group",
    "per_tensor",
    "per_tile",
    "per_token",
    "quantize",
    "unpack",
]
