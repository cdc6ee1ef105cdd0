"""Pictures of what a step holds on a device."""

from __future__ import annotations

from collections.abc import Mapping

from jvarlen._common.checks import UserError
from jvarlen.parallel.memory import MemoryBill
from jvarlen.reports.figures import colour_of, drawing_settings, new_figure, to_svg

__all__ = ["draw_memory"]

_WIDTH, _ROW, _MARGIN = 7.2, 0.34, 1.1  # inches
_MIB = 2**20


def draw_memory(bills: Mapping[str, MemoryBill]) -> str:
    """Bars of the parts of bills, one below the other.

    Args:
      bills: by name, such as the texts of layouts; at least one.

    Returns:
      An SVG file that suits light and dark surroundings.

    Raises:
      ValueError: there are no bills.

    Example:
      >>> draw_memory({"data4": MemoryBill(2**20, 2**20, 0, 2**21, 0, None)})[:4]
      '<svg'
    """
    if not bills:
        raise UserError("there are no bills to draw")
    with drawing_settings():
        figure, (axis,) = new_figure()
        figure.set_size_inches(_WIDTH, _MARGIN + _ROW * len(bills))
        names = list(bills)
        left = [0.0] * len(names)
        for place, part in enumerate(MemoryBill._fields):
            sizes = [(getattr(bill, part) or 0) / _MIB for bill in bills.values()]
            if any(sizes):
                axis.barh(names, sizes, left=left, height=0.62, color=colour_of(place), alpha=0.75, label=part)
            left = [begin + size for begin, size in zip(left, sizes, strict=True)]
        for place, total in enumerate(left):
            axis.text(total, place, f" {total:,.1f}", va="center", fontsize=8)
        axis.set(xlabel="MiB on a device", xlim=(0, 1.12 * max(left) or 1))
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper right", ncols=6)
        return to_svg(figure)
