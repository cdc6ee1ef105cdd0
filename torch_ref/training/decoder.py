"""The decoder: the Llama family as Hugging Face names its parts, whole samples or packed rows."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional

from torch_ref.checks import MAX_LISTED, check_bool, check_integer, check_number, known_keywords

__all__ = ["Decoder", "DecoderConfig", "Layer", "RotaryScaling", "Rows", "generate", "load_params", "rows_of"]

# In shapes: B rows, T tokens a row, V values of a token, D width, H heads, K head size.
_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How Llama 3 stretches rotary positions: long wavelengths by `factor`, short ones not, between them gradually.

    Attributes:
        factor: by which wavelengths are multiplied.
        low_frequency_factor: wavelengths above `original_length` / this are multiplied by all of `factor`.
        high_frequency_factor: wavelengths below `original_length` / this stay as they are.
        original_length: tokens of the samples before stretching.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("factor", "low_frequency_factor", "high_frequency_factor"):
            check_number(name, getattr(self, name), above=0)
        check_integer("original_length", self.original_length)
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be above low_frequency_factor "
                f"({self.low_frequency_factor})"
            )


@known_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder; the fields and their defaults are those of `jvarlen.models.DecoderConfig`.

    Attributes:
        num_layers: layers of attention and an MLP.
        width: D.
        mlp_width: hidden features of the MLP; None: 8/3 of the width, rounded up to a multiple of 16.
        num_heads: H.
        num_kv_heads: heads of keys and values, each for H / `num_kv_heads` heads; None: H.
        head_size: K, even; None: D / H.
        vocab_size: V.
        begins_samples: whether token V - 1 is put before each sample, so that its first token is predicted too.
        tied: whether the embedding is the head as well.
        qkv_bias: whether queries, keys and values have biases.
        out_bias: whether attention's output has a bias.
        qk_norm: whether the queries and keys of each head are normalised.
        windows: for each layer how many tokens, itself among them, a token sees at most, 0 for all of those before it;
            empty: all layers see all.
        norm_epsilon: added to the mean of squares in norms.
        rotary_base: of the wavelengths of rotary positions.
        rotary_scaling: of Llama 3.

    Raises:
        ValueError: if a number is out of its range or numbers do not go together.
    """

    num_layers: int = 2
    width: int = 128
    mlp_width: int | None = None
    num_heads: int = 2
    num_kv_heads: int | None = None
    head_size: int | None = None
    vocab_size: int = 257
    begins_samples: bool = True
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_size", "vocab_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        for name in ("begins_samples", "tied", "qkv_bias", "out_bias", "qk_norm"):
            check_bool(name, getattr(self, name))
        check_integer("vocab_size", self.vocab_size, minimum=1 + self.begins_samples)
        for name in ("norm_epsilon", "rotary_base"):
            check_number(name, getattr(self, name), above=0)
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads ({self.kv_heads}) must divide num_heads ({self.num_heads})")
        if self.head_size is None and self.width % (2 * self.num_heads):
            raise ValueError(f"width ({self.width}) must be an even multiple of num_heads ({self.num_heads})")
        if self.size_of_head % 2:
            raise ValueError(f"head_size ({self.head_size}) must be even")
        windows = tuple(check_integer("windows", window, minimum=0) for window in self.windows)
        if len(windows) not in (0, self.num_layers):
            raise ValueError(f"windows must be one a layer: got {len(windows)} for {self.num_layers} layers")
        object.__setattr__(self, "windows", windows if any(windows) else ())

    @property
    def mlp_features(self) -> int:
        """Hidden features of the MLP."""
        return -(-self.width // 6) * 16 if self.mlp_width is None else self.mlp_width

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """K."""
        return self.width // self.num_heads if self.head_size is None else self.head_size

    @property
    def begin_token(self) -> int | None:
        """The token before each sample, or None."""
        return self.vocab_size - 1 if self.begins_samples else None

    @property
    def num_values(self) -> int:
        """How many values tokens of samples have."""
        return self.vocab_size - self.begins_samples


class Decoder(nn.Module):
    """A decoder of the Llama family: rotary positions, RMSNorm, grouped heads and SwiGLU.

    Parameters have the names and shapes that they have in a Hugging Face checkpoint, `model.embed_tokens.weight` [V, D]
    and `model.layers.0.self_attn.q_proj.weight` [H K, D] for example. A tied head is the embedding's parameter.

    Args:
        config: its shape.

    Attributes:
        config: likewise.
        begin_token: the input before each sample, which `loss_sums` puts there; None where samples have no such token.
    """

    def __init__(self, config: DecoderConfig) -> None:
        """Draw the initial weights from torch's global generator."""
        super().__init__()
        self.config, self.begin_token = config, config.begin_token
        self.model = _Trunk(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=_INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.tie()

    def tie(self) -> None:
        """Let the head be the embedding's parameter, if the two are tied."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, inputs_BxT: Tensor, *, segment_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Predict what follows each input.

        Args:
            inputs_BxT: int64[B, T], each in [0, V): the tokens, or those of `next_token_targets` with `begin_token`.
                What follows a position never changes its output, so padding at the end of a row needs no mask.
            segment_ids: int64[B, T], for rows of several samples: an input sees those before it of the same id alone.
                Together with `positions`.
            positions: int64[B, T], the place of each input in its sample.

        Returns:
            Logits [B, T, V] in the parameters' dtype; those at t are for what follows input t.

        Raises:
            ValueError: if only one of `segment_ids` and `positions` is given.
        """
        logits_BxTxV: Tensor = self.lm_head(self.model(inputs_BxT, segment_ids, positions))
        return logits_BxTxV


class _Trunk(nn.Module):
    """All but the head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        windows = config.windows or (0,) * config.num_layers
        self.layers = nn.ModuleList(Layer(config, window) for window in windows)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)

    def forward(self, inputs_BxT: Tensor, segment_ids: Tensor | None, positions: Tensor | None) -> Tensor:
        rows = rows_of(self.config, inputs_BxT, segment_ids, positions)
        x_BxTxD = self.embed_tokens(inputs_BxT)
        for layer in self.layers:
            x_BxTxD = layer(x_BxTxD, rows)
        normed_BxTxD: Tensor = self.norm(x_BxTxD)
        return normed_BxTxD


class Rows(NamedTuple):
    """What attention needs to know of the rows.

    Attributes:
        cos: float64[B or 1, 1, T, K / 2], of the angles by which queries and keys are turned.
        sin: likewise.
        masks: for each window of the layers which inputs see which, bool[B or 1, 1, T, T]; None where all see all
            before them.
    """

    cos: Tensor
    sin: Tensor
    masks: dict[int, Tensor | None]


def rows_of(config: DecoderConfig, x_BxTxD: Tensor, segment_ids: Tensor | None, positions: Tensor | None) -> Rows:
    """Return what attention needs to know of rows, from x [B, T, D] or inputs [B, T].

    Raises:
        ValueError: if only one of `segment_ids` and `positions` is given.
    """
    if (segment_ids is None) != (positions is None):
        raise ValueError("segment_ids and positions go together")
    places_T = torch.arange(x_BxTxD.shape[1], device=x_BxTxD.device)
    back_TxT = places_T[:, None] - places_T[None, :]
    masks: dict[int, Tensor | None] = {}
    for window in set(config.windows) or {0}:
        # Padding sees padding: a row of the mask without any True would give NaN.
        seen_BxTxT = (back_TxT >= 0)[None]
        if window:
            seen_BxTxT = seen_BxTxT & (back_TxT < window)
        if segment_ids is not None:
            seen_BxTxT = seen_BxTxT & (segment_ids[:, :, None] == segment_ids[:, None, :])
        masks[window] = None if window == 0 and segment_ids is None else seen_BxTxT[:, None]
    # float64: in float32 the angles of late positions would be off by more than rounding.
    positions_BxT = places_T[None] if positions is None else positions
    angles_Bx1xTxh = positions_BxT[:, None, :, None].to(torch.float64) * _frequencies(config, x_BxTxD.device)
    return Rows(angles_Bx1xTxh.cos(), angles_Bx1xTxh.sin(), masks)


def _frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Return the angle a position of each pair, float64[K / 2]."""
    half = config.size_of_head // 2
    frequencies = config.rotary_base ** -(torch.arange(half, dtype=torch.float64, device=device) / half)
    scaling = config.rotary_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_length * frequencies / (2 * torch.pi)  # in the length before stretching
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Layer(nn.Module):
    """Attention and an MLP, each on a normalised residual stream; `window` as in `DecoderConfig.windows`."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        """Draw the initial weights from torch's global generator."""
        super().__init__()
        # In the order of the forward pass, in which gradient buckets are filled.
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.self_attn = _Attention(config, window)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = _MLP(config)

    def forward(self, x_BxTxD: Tensor, rows: Rows) -> Tensor:
        """Return the residual stream [B, T, D] after the layer."""
        x_BxTxD = x_BxTxD + self.self_attn(self.input_layernorm(x_BxTxD), rows)
        mlp_BxTxD: Tensor = self.mlp(self.post_attention_layernorm(x_BxTxD))
        return x_BxTxD + mlp_BxTxD


class _Attention(nn.Module):
    """Causal attention of grouped heads."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__()
        self.window, self.head_size = window, config.size_of_head
        size, size_kv = config.num_heads * self.head_size, config.kv_heads * self.head_size
        self.q_proj = nn.Linear(config.width, size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, size_kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, size_kv, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_size, eps=config.norm_epsilon)
            self.k_norm = nn.RMSNorm(self.head_size, eps=config.norm_epsilon)
        self.has_norms = config.qk_norm
        self.o_proj = nn.Linear(size, config.width, bias=config.out_bias)

    def forward(self, x_BxTxD: Tensor, rows: Rows) -> Tensor:
        # Under tensor parallelism a process has some of the heads: only their size is certain.
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x_BxTxD).unflatten(-1, (-1, self.head_size)) for layer in projections)  # [B, T, H, K]
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        q, k = _rotate(q, rows), _rotate(k, rows)
        if k.shape[1] < q.shape[1]:
            k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
        mask_Bx1xTxT = rows.masks[self.window]
        mixed_BxHxTxK = functional.scaled_dot_product_attention(q, k, v, mask_Bx1xTxT, is_causal=mask_Bx1xTxT is None)
        mixed_BxTxD: Tensor = self.o_proj(mixed_BxHxTxK.transpose(1, 2).flatten(2))
        return mixed_BxTxD


class _MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_features, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_features, bias=False)
        self.down_proj = nn.Linear(config.mlp_features, config.width, bias=False)

    def forward(self, x_BxTxD: Tensor) -> Tensor:
        down_BxTxD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BxTxD)) * self.up_proj(x_BxTxD))
        return down_BxTxD


def _rotate(x_BxHxTxK: Tensor, rows: Rows) -> Tensor:
    """Turn each pair (i, i + K/2) of a head by the angle of its position."""
    cos, sin = rows.cos.to(x_BxHxTxK.dtype), rows.sin.to(x_BxHxTxK.dtype)
    first, second = x_BxHxTxK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@known_keywords
@torch.no_grad()
def generate(
    model: Decoder, prompts: Iterable[ArrayLike], max_new_tokens: int, *, end_token: int | None = None
) -> list[NDArray[np.int64]]:
    """Continue prompts by the likeliest token, one after the other and each from its beginning: slow and plain.

    Args:
        model: gives the logits.
        prompts: 1-D integers each, below `config.num_values`; one may be empty if the model has a `begin_token`.
        max_new_tokens: the most tokens that a prompt is continued by.
        end_token: a continuation ends with it; None for no such token.

    Returns:
        int64[n] for each prompt, its new tokens, none of them the `begin_token`.

    Raises:
        ValueError: if `max_new_tokens` is no integer of at least 1, a prompt is empty and nothing begins it, or one
            holds something else than tokens of samples.
    """
    check_integer("max_new_tokens", max_new_tokens)
    continuations: list[NDArray[np.int64]] = []
    begin, num_values = [] if model.begin_token is None else [model.begin_token], model.config.num_values
    for number, prompt in enumerate(prompts):
        tokens: list[int] = [*begin, *np.asarray(prompt).tolist()]
        if not tokens:
            raise ValueError(f"prompt {number} is empty, and no token begins the samples of this model")
        if wrong := [token for token in tokens[len(begin) :] if not 0 <= token < num_values]:
            raise ValueError(
                f"prompt {number} holds tokens that are not from 0 to {num_values - 1}: {wrong[:MAX_LISTED]}"
            )
        new: list[int] = []
        while len(new) < max_new_tokens and (not new or new[-1] != end_token):
            row_1xT = torch.tensor([[*tokens, *new]], device=model.lm_head.weight.device)
            new.append(int(model(row_1xT)[0, -1, :num_values].argmax()))
        continuations.append(np.array(new, np.int64))
    return continuations


@known_keywords
def load_params(model: nn.Module, params: Mapping[str, ArrayLike | Tensor]) -> None:
    """Copy parameters into a model.

    Args:
        model: a `Decoder`, or any other.
        params: arrays or tensors by the names of `model.named_parameters()`; values are cast to the model's dtype.

    Raises:
        ValueError: if names are missing or unexpected, or shapes differ; all of them are listed and nothing is copied.
    """
    targets = dict(model.named_parameters())
    given = {
        name: value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        for name, value in params.items()
    }
    problems = [f"missing: {name}" for name in targets if name not in given]
    problems += [f"unexpected: {name}" for name in given if name not in targets]
    problems += [
        f"{name}: shape {tuple(given[name].shape)}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in given and given[name].shape != target.shape
    ]
    if problems:
        raise ValueError("the parameters do not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(given[name])
