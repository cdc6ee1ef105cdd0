"""Pictures of memory bills: a row for each, with its parts and its total."""

import re

import pytest

from jvarlen.parallel.memory import MemoryBill
from jvarlen.reports.memory_figures import draw_memory


def test_every_bill_is_a_row_with_its_total():
    bills = {"data4": MemoryBill(2**20, 2**20, 0, 2**21, 0, None), "zero1": MemoryBill(2**20, 0, 0, 2**19, 0, 2**22)}
    words = re.findall(r"<text[^>]*>([^<]+)<", draw_memory(bills))
    assert {"data4", "zero1", " 4.0", " 5.5"} <= {*words}
    assert [word for word in words if word in MemoryBill._fields] == ["params", "grads", "opt_state", "activations"]


def test_no_bills_are_refused():
    with pytest.raises(ValueError, match="no bills"):
        draw_memory({})
