"""Conversion of units."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["nats_to_bits"]


def nats_to_bits(nats: Any) -> Any:
    """Bits of a number or an array of nats."""
    return nats / math.log(2)
