"""Splits of operators: the best of all, Megatron's where links are fast, and none where they are slow."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.experimental.operators.choice import Operator, choose_operators, transformer_operators

SIZE = 4
FAST = dataclasses.replace(
    Cluster.named("dgx-h100"), flops_per_second=1e12, efficiency=1.0, link=Link(1e9, 0), host_link=Link(1e9, 0)
)
LAYER = transformer_operators(4096, width=1024, length=1024)
INPUT_BYTES = 2 * 4096 * 1024
FORMS = {  # takes, yields, gradient of the input, gradient that it takes
    "replicated": ("whole", "whole", "whole", "whole"),
    "column": ("whole", "features", "sums", "features"),
    "row": ("features", "sums", "features", "whole"),
    "features": ("features", "features", "features", "features"),
}


def seconds_of(operators, splits, cluster, input_bytes):
    """By the rules, one value after the other."""

    def move(num_bytes, before, after):
        steps = {("features", "whole"): 1, ("sums", "whole"): 2, ("sums", "features"): 1}.get((before, after), 0)
        link = cluster.link
        return steps * (2 * link.latency_s + num_bytes * (SIZE - 1) / SIZE / link.bytes_per_second)

    total = 0
    for each, split in zip(operators, splits, strict=True):
        total += 3 * each.flops / cluster.flops_per_second / (1 if split == "replicated" else SIZE)
    made = {"input": (input_bytes, "whole", "whole")}
    for each, split in zip(operators, splits, strict=True):
        made[each.name] = (each.output_bytes, FORMS[split][1], FORMS[split][3])
    for name, (num_bytes, yields, needed) in made.items():
        readers = [FORMS[split] for each, split in zip(operators, splits, strict=True) if name in each.inputs]
        if name == operators[-1].name:
            readers.append(FORMS["replicated"])
        forms = {reader[0] for reader in readers}
        total += move(num_bytes, yields, "whole" if "whole" in forms else "features")
        total += sum(move(num_bytes, form, needed) for form in {reader[2] for reader in readers})
    return total


@st.composite
def graphs(draw):
    operators = []
    for i in range(draw(st.integers(1, 4))):
        names = ["input", *(each.name for each in operators)]
        taken = {name for each in operators for name in each.inputs}
        inputs = {names[-1], *draw(st.lists(st.sampled_from(names), max_size=2))}
        inputs |= {name for name in names if name not in taken} if draw(st.booleans()) else set()
        kinds = [("replicated", "column", "row"), ("replicated", "features"), ("replicated",)]
        flops, num_bytes = draw(st.integers(0, 10**9)), draw(st.integers(1, 10**6))
        operators.append(Operator(f"o{i}", flops, num_bytes, tuple(sorted(inputs)), draw(st.sampled_from(kinds))))
    return operators


@settings(max_examples=100, deadline=None)
@given(graphs(), st.sampled_from([1e8, 1e9, 1e10]), st.sampled_from([0, 1e-4]), st.integers(1, 10**6))
def test_no_choice_takes_less(operators, bandwidth, latency, input_bytes):
    cluster = dataclasses.replace(FAST, link=Link(bandwidth, latency))
    splits, seconds = choose_operators(operators, SIZE, cluster, input_bytes=input_bytes)
    times = {
        choice: seconds_of(operators, choice, cluster, input_bytes)
        for choice in itertools.product(*(each.splits for each in operators))
    }
    assert seconds == pytest.approx(min(times.values()), rel=1e-9)
    chosen = tuple(splits[each.name] for each in operators)
    assert times[chosen] == pytest.approx(seconds, rel=1e-9)


def test_fast_links_give_megatrons_columns_and_rows():
    splits, seconds = choose_operators(LAYER, SIZE, FAST, input_bytes=INPUT_BYTES)
    assert splits == {
        **dict.fromkeys(("query", "key", "value", "up"), "column"),
        **dict.fromkeys(("out", "down"), "row"),
        "attention": "features",
        "residual": "replicated",
    }
    # Two all-reduces forward and two backward.
    flops = sum(each.flops for each in LAYER)
    assert seconds == pytest.approx(3 * flops / SIZE / 1e12 + 4 * 2 * (SIZE - 1) / SIZE * INPUT_BYTES / 1e9)


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([], "1 to 12, not 0"),
        ([Operator("a", 1, 1), Operator("a", 1, 1, ("a",))], "different names: 'a'"),
        ([Operator("input", 1, 1)], "different names: 'input'"),
        ([Operator("a", 1, 1, ("b", "input")), Operator("b", 1, 1)], "'b' of a"),
        ([Operator("a", 1, 1), Operator("b", 1, 1)], "no operator takes, and are not the last: a"),
        ([Operator("a", float("nan"), 1)], "flops"),
    ],
)
def test_what_is_no_graph_is_refused(operators, message):
    with pytest.raises(ValueError, match=message):
        choose_operators(operators, SIZE, FAST, input_bytes=1)
