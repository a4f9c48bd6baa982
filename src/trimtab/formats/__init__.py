"""Number formats as data: their grids, rounding onto them, and packed storage of their codes.

``get("int4").round(array)`` rounds onto a format's unscaled grid; ``pack`` and ``unpack`` store codes densely.
"""

from trimtab.formats.integer import FORMATS, IntegerFormat, get
from trimtab.formats.packing import pack, packed_size, unpack

__all__ = ["FORMATS", "IntegerFormat", "get", "pack", "packed_size", "unpack"]
