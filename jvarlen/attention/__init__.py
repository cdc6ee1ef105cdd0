"""Attention that excludes padding and the other samples of a row.

- `masks`: which position may attend to which.
- `attention`: attention by lengths or by segments, in several implementations.
- `zigzag`: attention to the positions of other devices.
"""

from jvarlen.attention.attention import attend, attend_within_segments
from jvarlen.attention.masks import attention_mask, padding_mask, segment_mask

__all__ = ["attend", "attend_within_segments", "attention_mask", "padding_mask", "segment_mask"]
