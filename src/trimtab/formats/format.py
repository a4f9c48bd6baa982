"""What a number format is: one record of data, and the table of the known ones.

An integer format is the first binade of a floating format with its subnormals, so one description and one rounding
serve all eight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trimtab.errors import ConfigError, nearest_names
from trimtab.formats import codes, rounding, torch_rounding

__all__ = ["FORMATS", "Format", "get"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A signed grid of numbers and the codes that name them.

    The grid: 0, and in the binade [2**e, 2**(e+1)) the multiples of 2**(e - mantissa_bits), from e = min_exponent up to
    ``max_value``. Below 2**min_exponent the spacing stays that of the first binade (subnormals). Mirrored in sign.

    float16, bfloat16, float32 and float64 hold every grid value of every format exactly, so no rounded value is
    rounded a second time on its way back to the caller's dtype.

    Args:
        name: Name by which ``get`` finds it.
        bits: Storage bits of a code.
        mantissa_bits: log2 of the number of steps in a binade.
        min_exponent: Exponent of the smallest normal binade.
        max_value: Largest finite value.
        layout: ``"integer"``, two's complement in int8, or ``"float"``, sign, exponent and mantissa in uint8.
        specials: Which codes are no finite number: ``"none"``; ``"nan"``, the all-ones code of either sign; ``"ieee"``,
            the largest exponent is infinity and the NaNs.

    Source: OCP Microscaling Formats (MX) v1.0, section 5.3, and OCP 8-bit Floating Point (OFP8) v1.0 for the floating
        ones. The integers leave out the most negative code, so that a sign flip of the input is one of the output.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_value: float
    layout: Literal["integer", "float"]
    specials: Literal["none", "nan", "ieee"] = "none"

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: *emax* of the MX specification."""
        return math.frexp(self.max_value)[1] - 1

    @property
    def smallest_step(self) -> float:
        """The spacing around zero, which is the smallest positive value."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def round(self, array: Any, noise: Any = None) -> Any:
        """Round onto the unscaled grid: to nearest with ties to even, or stochastically; saturating.

        A value that is not finite comes back as NaN, never as a number. The sign of a zero is kept. Rounding is one
        rounding of the exact input in each dtype. Torch tensors take a faster way to the same bits.

        Args:
            array: float16, bfloat16, float32 or float64 array of NumPy, torch or any array-API library, any shape.
            noise: None for rounding to nearest, or numbers uniform on [0, 1) of ``array``'s shape: the neighbour
                further from zero is taken with the probability that makes the mean right, up to the noise's own
                resolution (prefer float32 noise; bfloat16 noise has 256 values).

        Returns: An array of the same shape, library and dtype, whose values are grid points or NaN.
        Raises: ConfigError: when the dtype is none of the four, or ``noise`` has another shape.
        Source: the specification is ``trimtab.formats.scalar.round_scalar``.

        Example:
            >>> import numpy as np
            >>> get("e2m1").round(np.array([0.25, 2.5, 5.0, -99.0, float("inf")])).tolist()
            [0.0, 2.0, 4.0, -6.0, nan]
        """
        if isinstance(array, torch.Tensor):
            return torch_rounding.round_values(self, array, noise)
        return rounding.round_values(self, array, noise)

    def encode(self, array: Any, noise: Any = None) -> Any:
        """Round and name the grid points by their codes.

        A NaN (or an infinity, which rounds to NaN) gets the NaN code of the format. A format without one has no code
        to show it: the code is that of zero. ``quantize`` keeps it visible in the scale.

        Args:
            array: As for ``round``.
            noise: As for ``round``.

        Returns: An array of the same shape: int8 for the integers, uint8 otherwise, unused high bits zero.

        Example:
            >>> import numpy as np
            >>> get("e2m1").encode(np.array([0.5, -0.0, 6.0])).tolist(), get("int4").encode(np.array([-9.0])).tolist()
            ([1, 8, 7], [-7])
        """
        return codes.encode_grid(self, self.round(array, noise))

    def decode(self, array: Any, dtype: Any = None) -> Any:
        """The numbers that codes name; the infinities and NaNs of ``specials`` too.

        Args:
            array: Codes as ``encode`` or ``unpack`` give them; every bit pattern of ``bits`` bits has a meaning.
            dtype: A floating dtype of the codes' library; float32 when None.

        Returns: An array of the same shape.

        Example:
            >>> import numpy as np
            >>> get("e5m2").decode(np.array([0x01, 0x7B, 0x7C], dtype=np.uint8)).tolist()
            [1.52587890625e-05, 57344.0, inf]
        """
        return codes.decode(self, array, dtype)


def _integer(bits: int) -> Format:
    """The symmetric two's-complement format of ``bits`` bits."""
    largest = float((1 << (bits - 1)) - 1)
    return Format(
        name=f"int{bits}",
        bits=bits,
        mantissa_bits=bits - 2,
        min_exponent=bits - 2,
        max_value=largest,
        layout="integer",
    )


def _float(
    exponent_bits: int, mantissa_bits: int, max_value: float, specials: Literal["none", "nan", "ieee"] = "none"
) -> Format:
    """The floating format of these field widths, its exponent bias the IEEE one."""
    return Format(
        name=f"e{exponent_bits}m{mantissa_bits}",
        bits=1 + exponent_bits + mantissa_bits,
        mantissa_bits=mantissa_bits,
        min_exponent=2 - (1 << (exponent_bits - 1)),
        max_value=max_value,
        layout="float",
        specials=specials,
    )


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        _integer(2),
        _integer(4),
        _integer(8),
        _float(2, 1, 6.0),
        _float(2, 3, 7.5),
        _float(3, 2, 28.0),
        _float(4, 3, 448.0, "nan"),
        _float(5, 2, 57344.0, "ieee"),
    )
}
"""Every known format by name."""


def get(name: str) -> Format:
    """The format called ``name``.

    Raises: ConfigError: when there is no such format.
    """
    if not isinstance(name, str) or name not in FORMATS:
        near = nearest_names(str(name), FORMATS) or sorted(FORMATS)
        raise ConfigError("format", name, f"the formats are {', '.join(FORMATS)}.", f"Use {near[0]!r}.")
    return FORMATS[name]
