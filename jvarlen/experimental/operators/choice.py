"""How to split the operators of a layer over devices, after Alpa: compute and communication together. NumPy only.

Letters: n operators, C choices of all of them, D devices.

A value between operators is "whole" on every device, has its "features" spread over devices, or is "sums": parts that
add up to it. Gradients likewise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from jvarlen._common.checks import UserError, check_at_least, check_at_least_one, list_first
from jvarlen.estimates.cluster import Cluster, Kind

__all__ = ["Operator", "OperatorSplit", "choose_operators", "transformer_operators"]

OperatorSplit = Literal["replicated", "column", "row", "features"]

_MOST_OPERATORS = 12
_WHOLE, _FEATURES, _SUMS = range(3)
# What an operator takes and yields; its input's gradient is "sums" where it takes the whole and yields features.
_TAKES = {"replicated": _WHOLE, "column": _WHOLE, "row": _FEATURES, "features": _FEATURES}
_YIELDS = {"replicated": _WHOLE, "column": _FEATURES, "row": _SUMS, "features": _FEATURES}
_OF_INPUT = {"replicated": _WHOLE, "column": _SUMS, "row": _FEATURES, "features": _FEATURES}  # gradients
_OF_OUTPUT = {"replicated": _WHOLE, "column": _FEATURES, "row": _WHOLE, "features": _FEATURES}


class Operator(NamedTuple):
    """A matrix product, or something between products.

    Attributes:
      name: of the operator.
      flops: of its forward pass; backward passes take twice as many.
      output_bytes: of its output.
      inputs: names of earlier operators that it takes, or `"input"`, that of the layer.
      splits: ways to split it. A product may be replicated or split by columns or rows of its kernel, attention by
        heads, which are `"features"`, and a normalization only be replicated.
    """

    name: str
    flops: float
    output_bytes: int
    inputs: tuple[str, ...] = ("input",)
    splits: tuple[OperatorSplit, ...] = ("replicated", "column", "row")


def choose_operators(
    operators: Sequence[Operator], size: int, cluster: Cluster, *, input_bytes: int
) -> tuple[dict[str, OperatorSplit], float]:
    """The split of every operator over `size` neighbouring devices with the least seconds of compute and communication.

    A product by columns takes the whole input and yields features; by rows, it takes features and yields sums.
    Replicated, it takes and yields the whole on every device. Between operators, values and then gradients are
    all-reduced, all-gathered or reduce-scattered to what is needed, once for all operators that need it in one form.
    The input and the output of the layer, and their gradients, are whole. All choices are tried. None splits by
    positions.

    Args:
      operators: in an order in which each follows its inputs; at most 12. The last one's output is that of the layer.
      size: D, at least 1.
      cluster: rate of products, and links.
      input_bytes: of the input of the layer.

    Returns:
      The split of each operator by name, and seconds of a forward and backward pass. If times are equal, the split that
      comes first in `Operator.splits`.

    Raises:
      ValueError: no operators or too many, names that repeat, inputs that are no earlier operators, or outputs that are
        not used.

    Example:
      >>> layer = transformer_operators(8192, width=4096, length=2048)
      >>> splits, seconds = choose_operators(layer, 8, Cluster.named("dgx-h100"), input_bytes=2 * 8192 * 4096)
      >>> [splits[name] for name in ("query", "out", "up", "down")]
      ['column', 'row', 'column', 'row']

    References:
      Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning"; Shoeybi
      et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism".
    """
    check_at_least_one(size=size, input_bytes=input_bytes)
    _check(operators)
    choices = np.array(list(itertools.product(*(range(len(each.splits)) for each in operators))))

    def states(index: int, of: dict[str, int]) -> Int64[np.ndarray, " C"]:
        return np.array([of[split] for split in operators[index].splits])[choices[:, index]]

    rate = cluster.flops_per_second * cluster.efficiency
    seconds = np.zeros(len(choices))
    for i, each in enumerate(operators):
        seconds += 3 * each.flops / rate / np.where(states(i, _YIELDS) == _WHOLE, 1, size)
    whole = np.full(len(choices), _WHOLE)
    for i, name in enumerate(["input", *(each.name for each in operators)], start=-1):
        readers = [k for k, each in enumerate(operators) if name in each.inputs]
        to_seconds = _to_seconds(input_bytes if i < 0 else operators[i].output_bytes, size, cluster)
        is_output = i == len(operators) - 1
        takes = [states(k, _TAKES) for k in readers] + [whole] * is_output
        of_input = [states(k, _OF_INPUT) for k in readers] + [whole] * is_output
        yields, of_output = (whole, whole) if i < 0 else (states(i, _YIELDS), states(i, _OF_OUTPUT))
        # From the whole, features are there: of two forms, the whole is all that is made.
        seconds += to_seconds[yields, np.where(_is_any(takes, _WHOLE), _WHOLE, _FEATURES)]
        for state in (_FEATURES, _SUMS):  # what is whole is anything; of each form, gradients are added first
            seconds += np.where(_is_any(of_input, state), to_seconds[state, of_output], 0)
    best = int((seconds <= seconds.min() * (1 + 1e-12)).argmax())  # rounding decides no tie
    splits = {each.name: each.splits[k] for each, k in zip(operators, choices[best].tolist(), strict=True)}
    return splits, float(seconds[best])


def transformer_operators(num_tokens: int, *, width: int, length: int) -> list[Operator]:
    """The operators of a transformer layer: query, key, value, attention, out, residual, up and down.

    Activations have 2 bytes an element. Between up and down there are four times as many features.

    Args:
      num_tokens: of a microbatch.
      width: of the model.
      length: of a row; each token attends to half of that on average.

    Returns:
      The operators, in an order for `choose_operators`. What follows "out" is normalized, so it is whole.
    """
    check_at_least_one(num_tokens=num_tokens, width=width, length=length)
    square, value_bytes = 2 * num_tokens * width * width, 2 * num_tokens * width
    projections = ("query", "key", "value")
    return [
        *(Operator(name, square, value_bytes) for name in projections),
        Operator("attention", 2 * num_tokens * length * width, value_bytes, projections, ("replicated", "features")),
        Operator("out", square, value_bytes, ("attention",)),
        Operator("residual", 0, value_bytes, ("input", "out"), ("replicated",)),
        Operator("up", 4 * square, 4 * value_bytes, ("residual",)),
        Operator("down", 4 * square, value_bytes, ("up",)),
    ]


def _is_any(values: Sequence[Int64[np.ndarray, " C"]], state: int) -> Bool[np.ndarray, " C"]:
    return np.any(np.array(values) == state, axis=0)


def _to_seconds(num_bytes: int, size: int, cluster: Cluster) -> Float64[np.ndarray, "3 3"]:
    """From a state, the row, to another, the column. Nothing has to become sums."""
    seconds, in_host = np.zeros((3, 3)), cluster.members_in_host(size, 1)
    kinds: dict[tuple[int, int], Kind] = {
        (_FEATURES, _WHOLE): "all_gather",
        (_SUMS, _WHOLE): "all_reduce",
        (_SUMS, _FEATURES): "reduce_scatter",
    }
    for states, kind in kinds.items():
        seconds[states] = cluster.collective_seconds(kind, num_bytes, size, in_host)
    return seconds


def _check(operators: Sequence[Operator]) -> None:
    if not 1 <= len(operators) <= _MOST_OPERATORS:
        raise UserError(f"operators must be 1 to {_MOST_OPERATORS}, not {len(operators)}")
    names = ["input", *(each.name for each in operators)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"operators must have different names: {list_first(map(repr, repeated))}")
    for each in operators:
        check_at_least(each, 0, "flops", "output_bytes")
    later = [
        f"{name!r} of {each.name}"
        for i, each in enumerate(operators, start=1)
        for name in each.inputs or ("",)
        if name not in names[:i]
    ]
    if later:
        raise UserError(f"inputs must be earlier operators: {list_first(later)}")
    taken = {name for each in operators for name in each.inputs}
    if unused := [name for name in names[:-1] if name not in taken]:
        raise UserError(f"outputs that no operator takes, and are not the last: {list_first(unused)}")
