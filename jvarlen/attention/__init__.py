"""Attention that excludes padding and the other samples of a row.

- `attention`: `attend`, and the choice of an implementation. `blocks`, `dense`: loops over blocks; all pairs at once.
  `triton`, `cudnn`: kernels for NVIDIA GPUs. `splash`: JAX's kernel for TPUs.
- `platforms`: a function for each platform; the compiler's platform decides.
- `masks`: which keys a query sees, as masks, and which blocks meet.
- `zigzag`: attention to the positions of other devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.attention.attention import attend
    from jvarlen.attention.masks import padding_mask, segment_mask

__all__ = ["attend", "padding_mask", "segment_mask"]

__getattr__, __dir__ = lazy_imports(__name__)
