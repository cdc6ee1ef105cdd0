"""The demo model: a small causal transformer over bytes, or over the ids of a tokenizer."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional

from torch_ref.checks import check_integer
from torch_ref.targets import inputs_of

__all__ = ["NUM_BYTES", "Block", "Transformer", "generate", "load_params", "rows_of"]

# In shapes: B rows, T tokens a row, V values of a token, D width, H heads, d = D / H width of a head.
NUM_BYTES = 256
_ROPE_THETA = 10_000.0
_NORM_EPS = 1e-6
_INIT_STD = 0.02


class Transformer(nn.Module):
    """A decoder: pre-norm blocks of causal attention with rotary positions and a GELU MLP.

    Args:
        embed_dim: D.
        num_layers: the number of blocks.
        num_heads: H; D / H must be an even integer.
        vocab_size: V, 256 for bytes. Token V, which is never predicted, is the input at the beginning of a sample.

    Raises:
        ValueError: if a size is below 1 or the heads do not divide the width evenly.
    """

    def __init__(self, *, embed_dim: int, num_layers: int, num_heads: int, vocab_size: int = NUM_BYTES) -> None:
        """Draw the initial weights from torch's global generator."""
        super().__init__()
        if min(embed_dim, num_layers, num_heads, vocab_size) < 1 or embed_dim % (2 * num_heads):
            raise ValueError(
                f"embed_dim={embed_dim} must be an even multiple of num_heads={num_heads}, num_layers={num_layers} and "
                f"vocab_size={vocab_size} >= 1"
            )
        self.vocab_size = vocab_size
        self.embed = nn.Embedding(vocab_size + 1, embed_dim)
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(embed_dim, eps=_NORM_EPS)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=_INIT_STD)

    def forward(
        self, tokens_BxT: Tensor, *, segment_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Predict each token from those before it.

        Args:
            tokens_BxT: int64[B, T], each in [0, V). What follows a position never changes its output, so padding
                at the end of a row needs no mask.
            segment_ids: int64[B, T], for rows of several samples: a token is predicted from those before it of the
                same id alone. Together with `positions`.
            positions: int64[B, T], the place of each token in its sample.

        Returns:
            Logits [B, T, V] in the parameters' dtype; those at t are for token t.

        Raises:
            ValueError: if only one of `segment_ids` and `positions` is given.
        """
        if (segment_ids is None) != (positions is None):
            raise ValueError("segment_ids and positions go together")
        positions_BxT, mask_Bx1xTxT = rows_of(tokens_BxT, segment_ids, positions)
        hidden_BxTxD = self.embed(inputs_of(tokens_BxT, segment_ids, positions, begin=self.vocab_size))
        for block in self.blocks:
            hidden_BxTxD = block(hidden_BxTxD, positions_BxT, mask_Bx1xTxT)
        logits_BxTxV: Tensor = self.head(self.norm(hidden_BxTxD))
        return logits_BxTxV


class Block(nn.Module):
    """Attention and an MLP, each on a normalised residual stream.

    Args:
        embed_dim: D.
        num_heads: H.

    Attributes:
        num_parts: how many processes share the heads and the MLP's features under tensor parallelism.
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        """Draw the initial weights from torch's global generator."""
        super().__init__()
        self.num_heads, self.num_parts = num_heads, 1
        self.norm1 = nn.RMSNorm(embed_dim, eps=_NORM_EPS)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.norm2 = nn.RMSNorm(embed_dim, eps=_NORM_EPS)
        self.up = nn.Linear(embed_dim, 4 * embed_dim, bias=False)
        self.down = nn.Linear(4 * embed_dim, embed_dim, bias=False)

    def forward(self, x_BxTxD: Tensor, positions_BxT: Tensor, mask_Bx1xTxT: Tensor | None) -> Tensor:
        """Return the residual stream [B, T, D] after the block; positions and mask are those of `rows_of`."""
        x_BxTxD = x_BxTxD + self.out(self._attend(self.norm1(x_BxTxD), positions_BxT, mask_Bx1xTxT))
        mlp_BxTxD: Tensor = self.down(functional.gelu(self.up(self.norm2(x_BxTxD)), approximate="tanh"))
        return x_BxTxD + mlp_BxTxD

    def _attend(self, x_BxTxD: Tensor, positions_BxT: Tensor, mask_Bx1xTxT: Tensor | None) -> Tensor:
        qkv_BxTx3xHxd = self.qkv(x_BxTxD).unflatten(-1, (3, self.num_heads // self.num_parts, -1))
        q, k, v = qkv_BxTx3xHxd.permute(2, 0, 3, 1, 4)  # each [B, H, T, d]
        mixed_BxHxTxd = functional.scaled_dot_product_attention(
            _rotate(q, positions_BxT), _rotate(k, positions_BxT), v, mask_Bx1xTxT, is_causal=mask_Bx1xTxT is None
        )
        return mixed_BxHxTxd.transpose(1, 2).flatten(2)


def rows_of(x_BxTxD: Tensor, segment_ids: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return positions int64[B or 1, T] and, for packed rows, which tokens see which, bool[B, 1, T, T].

    Args:
        x_BxTxD: [B, T, D], or tokens [B, T].
        segment_ids: int64[B, T] of packed rows; None where a row is a sample.
        positions: int64[B, T] of packed rows; None where a row is a sample.
    """
    if segment_ids is None or positions is None:
        return torch.arange(x_BxTxD.shape[1], device=x_BxTxD.device)[None], None
    same_BxTxT = segment_ids[:, :, None] == segment_ids[:, None, :]
    # Padding sees padding: a row of the mask without any True would give NaN.
    return positions, same_BxTxT.tril()[:, None]


def _rotate(x_BxHxTxd: Tensor, positions_BxT: Tensor) -> Tensor:
    """Turn each pair (i, i + d/2) of a head by an angle that grows with the position, int64[B or 1, T]."""
    half = x_BxHxTxd.shape[-1] // 2
    # float64: in float32 the angles of late positions would carry an error of their own.
    exponents = torch.arange(half, dtype=torch.float64, device=x_BxHxTxd.device) / half
    angles_Bx1xTxh = positions_BxT[:, None, :, None].to(torch.float64) * _ROPE_THETA**-exponents
    cos, sin = angles_Bx1xTxh.cos().to(x_BxHxTxd.dtype), angles_Bx1xTxh.sin().to(x_BxHxTxd.dtype)
    first, second = x_BxHxTxd.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def generate(
    model: Transformer, prompts: Iterable[ArrayLike], max_new_tokens: int, *, end_token: int | None = None
) -> list[NDArray[np.int64]]:
    """Continue prompts by the likeliest token, one after the other and each from its beginning: slow and plain.

    Args:
        model: gives the logits.
        prompts: 1-D integers each, in [0, V); one may be empty.
        max_new_tokens: the most tokens that a prompt is continued by.
        end_token: a continuation ends with it; None for no such token.

    Returns:
        int64[n] for each prompt, its new tokens.

    Raises:
        ValueError: if `max_new_tokens` is no integer of at least 1.
    """
    check_integer("max_new_tokens", max_new_tokens)
    continuations: list[NDArray[np.int64]] = []
    for prompt in prompts:
        tokens: list[int] = np.asarray(prompt).tolist()
        new: list[int] = []
        while len(new) < max_new_tokens and (not new or new[-1] != end_token):
            row_1xT = torch.tensor([[*tokens, *new, 0]])  # the logits at the last place do not depend on what is there
            new.append(int(model(row_1xT.to(model.embed.weight.device))[0, -1].argmax()))
        continuations.append(np.array(new, np.int64))
    return continuations


def load_params(model: nn.Module, params: Mapping[str, ArrayLike]) -> None:
    """Copy weights into a model.

    Args:
        model: a `Transformer`.
        params: arrays by name: `embed.embedding` [V + 1, D], `blocks.{i}.qkv.kernel` [D, 3D] and so on, `*.scale` [D].
            Kernels are [in, out], y = x @ kernel; values are cast to the model's dtype.

    Raises:
        ValueError: if names are missing or unexpected, or shapes differ; all of them are listed and nothing is copied.
    """
    targets = dict(_named_targets(model))
    arrays = {name: np.array(value) for name, value in params.items()}
    problems = [f"missing: {name}" for name in targets if name not in arrays]
    problems += [f"unexpected: {name}" for name in arrays if name not in targets]
    problems += [
        f"{name}: shape {arrays[name].shape}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in arrays and arrays[name].shape != tuple(target.shape)
    ]
    if problems:
        raise ValueError("the weights do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(torch.from_numpy(arrays[name]))


def _named_targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight under its carried-over name, as a view of the carried-over shape."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{name}.kernel", module.weight.T
        elif isinstance(module, nn.Embedding):
            yield f"{name}.embedding", module.weight
        elif isinstance(module, nn.RMSNorm):
            yield f"{name}.scale", module.weight
