"""Pictures of layouts: the memory of each."""

import re

from jvarlen.estimates.memory import MemoryEstimate
from jvarlen.reports.figures import draw_memory


def words(svg):
    return re.findall(r"<text[^>]*>([^<]+)<", svg)


def test_every_layout_is_a_row_with_its_total():
    estimates = {
        "data4": MemoryEstimate(2**20, 2**20, 0, 2**21, 0, None),
        "zero1": MemoryEstimate(2**20, 0, 0, 2**19, 0, 2**22),
    }
    found = words(draw_memory(estimates))
    assert {"data4: 4", "zero1: 5.5"} <= {*found}
    assert [word for word in found if word in MemoryEstimate._fields] == ["params", "grads", "opt_state", "activations"]
