"""Inputs, targets and weights of a loss that predicts the next token."""

import torch
from torch import Tensor

from torch_ref.checks import check_integer, known_keywords
from torch_ref.loading.batch import Batch, PairBatch, values_of

__all__ = ["next_token_targets"]


@known_keywords
def next_token_targets(
    microbatch: Batch | PairBatch | dict[str, Tensor], *, begin_token: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input of each position, the token that it predicts, and the loss weight of that token.

    Input and target always belong to the same sample, in padded and in packed rows. All three have the shape of the
    tokens. The first token of a sample is no target, so that a sample of l tokens has l - 1, unless a `begin_token` is
    put before it: then a sample has l. Tokens of pairs are those of the target.

    Args:
        microbatch: `tokens` int64[..., T] and the rest of a batch, or of a microbatch of it. Named fields of one length
            have a field `tokens`, those of two lengths a field `target_tokens`.
        begin_token: the input at the first position of every sample; None: inputs are the tokens themselves.

    Returns:
        Inputs int64[..., T], targets int64[..., T] and weights float32[..., T]. Weights are 0 where there is no
        target; the targets there are any tokens of the row.

    Raises:
        ValueError: if `begin_token` is not an integer of at least 0, or if a batch has no such tokens, or not one loss
            weight for each.

    Example:
        >>> tokens, weights = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4)
        >>> segments, positions = torch.tensor([[1, 1, 2, 2]]), torch.tensor([[0, 1, 0, 1]])
        >>> packed = Batch(tokens, torch.tensor([4]), weights, 2.0, segments, positions)
        >>> [array.tolist() for array in next_token_targets(packed)]
        [[[5, 6, 7, 8]], [[6, 7, 8, 5]], [[1.0, 0.0, 1.0, 0.0]]]
    """
    held = values_of(microbatch)
    side = "target_" if "target_lengths" in held or "target_segment_ids" in held else ""
    if not {f"{side}tokens", "weights"} <= held.keys():
        raise ValueError(f"next_token_targets takes {side}tokens and weights, this batch has {', '.join(held)}")
    tokens, weights = held[f"{side}tokens"], held["weights"]
    if tokens.shape != weights.shape:
        raise ValueError(f"{side}tokens are {list(tokens.shape)}, but the loss weights {list(weights.shape)}")
    is_first = _is_first(tokens, held.get(f"{side}segment_ids"), held.get(f"{side}positions"))
    if begin_token is not None:
        begin = check_integer("begin_token", begin_token, minimum=0)
        return tokens.roll(1, -1).masked_fill(is_first, begin), tokens, weights
    return tokens, tokens.roll(-1, -1), weights.masked_fill(is_first, 0.0).roll(-1, -1)


def _is_first(tokens: Tensor, segment_ids: Tensor | None, positions: Tensor | None) -> Tensor:
    """Return where a sample begins: the token before is of another segment, or not at the place before."""
    is_first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
    if segment_ids is None or positions is None:
        return is_first
    return is_first | (segment_ids != segment_ids.roll(1, -1)) | (positions != positions.roll(1, -1) + 1)
