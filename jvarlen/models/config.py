"""Settings of the decoder, read without JAX."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from typing import Annotated, Literal, TypeVar

import numpy as np
from jaxtyping import Int32

from jvarlen._common.checks import (
    UserError,
    check_above,
    check_at_least_one,
    check_counts,
    if_given,
    is_number,
    list_first,
)
from jvarlen._common.keywords import check_keywords
from jvarlen._common.options import HIDDEN
from jvarlen._common.settings import Settings
from jvarlen._common.types import AttentionImplementation

__all__ = [
    "PRODUCTS", "DecoderConfig", "LoraConfig", "RotaryScaling", "WindowSchedule", "check_sampling", "check_temperature",
]  # fmt: skip

_T = TypeVar("_T")
Hidden = Annotated[_T, HIDDEN]
"""Metadata of settings without an option: options vary the demo, and the rest comes from a config.json."""

PRODUCTS = (
    "attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down",
)  # fmt: skip
"""The products of a layer with a kernel, in the order of their initialisation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling(Settings):
    """How Llama 3 lowers the frequencies of the rotary embedding, for longer rows than it was first trained on."""

    factor: float
    """By which low frequencies are divided."""
    low_frequency_factor: float
    """Frequencies of fewer turns than this in `original_length` are low."""
    high_frequency_factor: float
    """Frequencies of more turns than this in `original_length` stay as they are; those between are interpolated."""
    original_length: int
    """Positions of the first training."""

    def __post_init__(self):
        super().__post_init__()
        check_above(self, 0, "factor", "low_frequency_factor", "high_frequency_factor", "original_length")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise UserError(
                f"high_frequency_factor ({self.high_frequency_factor}) must be above low_frequency_factor "
                f"({self.low_frequency_factor})"
            )


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """Low-rank adapters of products, which are trained in place of the kernels.

    An adapted product is `x @ kernel + (alpha / rank) * (dropout(x) @ lora_a) @ lora_b`. At first `lora_b` is zero.

    References:
      Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """

    rank: int = 8
    """Columns of `lora_a` and rows of `lora_b`."""
    alpha: float = 16.0
    """What adapters add is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "layers.*.attention.[qv].kernel"
    """Names of adapted kernels, or patterns of them as for `fnmatch`; a kernel has an adapter in all layers or none."""
    dropout: float = 0.0
    """The probability that an adapter's input is 0 in training, by the keys of the step."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "rank")
        check_above(self, 0, "alpha")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout ({self.dropout}) of lora must be at least 0 and below 1")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The targets, also of a single one."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    @property
    def scale(self) -> float:
        """By which what adapters add is multiplied."""
        return self.alpha / self.rank


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(Settings):
    """The shape of a decoder of the Llama family; the defaults are those of the demo."""

    num_layers: int = 2
    """Number of layers."""
    width: int = 128
    """Size of the residual stream."""
    mlp_width: Hidden[int | None] = None
    """Hidden features of the MLP. None: 8/3 of the width, rounded up to a multiple of 16."""
    num_heads: int = 2
    """Heads of queries."""
    num_kv_heads: Hidden[int | None] = None
    """Heads of keys and values, each for several heads of queries. None: as many as heads of queries."""
    head_size: Hidden[int | None] = None
    """Size of a head, which must be even (rotary positions need pairs). None: width / num_heads."""
    vocab_size: int = 257
    """Size of the vocabulary, that of the data or the tokenizer if it is larger: 256 bytes and the token that begins
    samples."""
    begins_samples: Hidden[bool] = True
    """Whether the last token of the vocabulary is put before every sample, so that its first token is predicted too."""
    tied: Hidden[bool] = False
    """Whether the head is the embedding."""
    qkv_bias: Hidden[bool] = False
    """Whether queries, keys and values have biases."""
    out_bias: Hidden[bool] = False
    """Whether the output projection of attention has a bias."""
    qk_norm: Hidden[bool] = False
    """Whether every head of queries and keys is normalised."""
    windows: Hidden[tuple[int, ...]] = ()
    """For each layer, how many tokens a token sees, itself included; 0 for all before it. Empty: all layers see all."""
    norm_epsilon: Hidden[float] = 1e-6
    """Added to the mean of squares in norms."""
    rotary_base: Hidden[float] = 10_000.0
    """Base of the wavelengths of the rotary embedding."""
    rotary_scaling: Hidden[RotaryScaling | None] = None
    """How they are scaled, if they are."""
    attention: AttentionImplementation = "auto"
    """Implementation of attention, as in `jvarlen.attend`; auto follows the platform.
    Rows that are spread over devices always take auto."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Type of activations and of the factors of products; parameters, sums, softmax and loss stay float32.
    None uses the type of the parameters."""
    lora: Hidden[LoraConfig | None] = None
    """Adapters, which are trained in place of all other parameters; None for none."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(
            self, 1, "num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_size", "vocab_size"
        )
        check_above(self, 0, "norm_epsilon", "rotary_base")
        if self.head_size is None and self.width % (2 * self.num_heads):
            raise UserError(f"width ({self.width}) must be a multiple of 2 * num_heads ({2 * self.num_heads})")
        if self.size_of_head % 2:
            raise UserError(f"head_size ({self.head_size}) must be even: rotary positions need pairs")
        if self.num_heads % self.kv_heads:
            raise UserError(f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})")
        object.__setattr__(self, "windows", self.windows if any(self.windows) else ())
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise UserError(
                f"windows must be {self.num_layers} numbers of at least 0, one a layer, not {list_first(self.windows)}"
            )
        if self.lora is not None:
            _check_targets(self, self.lora)

    @property
    def size_of_head(self) -> int:
        """Features of a head."""
        return self.head_size or self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_features(self) -> int:
        """Hidden features of the MLP."""
        return self.mlp_width or -(-self.width // 6) * 16

    @property
    def begin_token(self) -> int | None:
        """The token that is put before every sample, if any."""
        return self.vocab_size - 1 if self.begins_samples else None

    @property
    def num_values(self) -> int:
        """Tokens of samples are below it."""
        return self.vocab_size - self.begins_samples

    @property
    def one_layer(self) -> DecoderConfig:
        """The same with one layer, for what all layers have alike."""
        targets = tuple(f"layers.0.{product}.kernel" for product in self.adapted)
        lora = None if self.lora is None else dataclasses.replace(self.lora, targets=targets)
        return dataclasses.replace(self, num_layers=1, windows=(), lora=lora)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Those of `PRODUCTS` that have adapters."""
        return () if self.lora is None else _adapted(self.lora.patterns)

    @property
    def trainable(self) -> str | None:
        """What is trained unless `make_train_step` gets other names: with adapters, these alone."""
        return None if self.lora is None else "*.lora_[ab]"

    @property
    def has_dropout(self) -> bool:
        """Whether a training step needs random keys."""
        return self.lora is not None and self.lora.dropout > 0


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSchedule(Settings):
    """A window that grows linearly with the steps of a run, from `first` to `last` tokens, and then stays.

    In step i of S it is first + ⌊(last − first) · min(i, n) / n⌋ tokens, n = max(1, round(share · S)). A token sees so
    many of its sample, itself included, or its layer's own window if that is smaller. Evaluations see all.

    SkyLadder cuts rows into pieces of so many tokens; here the window slides.

    Example:
      >>> WindowSchedule(first=2, last=8, share=0.5).windows(8).tolist()
      [2, 3, 5, 6, 8, 8, 8, 8]
      >>> WindowSchedule.parse("32:1024:0.6")
      WindowSchedule(first=32, last=1024, share=0.6)

    References:
      Zhu et al. 2025, "SkyLadder: Better and Faster Pretraining via Context Window Scheduling", arXiv:2503.15450.
    """

    first: int
    """Tokens that a token sees in the first step, itself included."""
    last: int
    """Tokens that it sees at the end; as many as the longest bucket has: all before it."""
    share: float = 1.0
    """The share of the steps in which the window grows."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "first")
        if not self.first <= self.last < 2**31 or not 0 < self.share <= 1:
            raise UserError(
                f"a window grows from first ({self.first}) to last ({self.last}) tokens, at least as many and "
                f"fewer than 2**31, in a share ({self.share}) of the steps above 0 and at most 1"
            )

    @classmethod
    def parse(cls, text: str) -> WindowSchedule:
        """Reads a schedule.

        Args:
          text: `first:last:share`.

        Returns:
          The schedule.

        Raises:
          ValueError: another text.
        """
        try:
            first, last, share = text.split(":")
            return cls(first=int(first), last=int(last), share=float(share))
        except ValueError as error:
            raise UserError(f"a window schedule is such as 32:1024:0.6, not {text!r}: {error}") from None

    def windows(self, num_steps: int) -> Int32[np.ndarray, " S"]:
        """The window of every step of a run.

        Args:
          num_steps: S, at least 1.

        Returns:
          int32[S], tokens.
        """
        check_at_least_one(num_steps=num_steps)
        num_growing = max(1, round(self.share * num_steps))
        done = np.minimum(np.arange(num_steps, dtype=np.int64), num_growing)
        return (self.first + (self.last - self.first) * done // num_growing).astype(np.int32)


@functools.cache
def _adapted(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The products whose kernels the patterns match, in one layer as in all."""
    names = {product: f"layers.0.{product}.kernel" for product in PRODUCTS}
    return tuple(product for product in PRODUCTS if any(fnmatch.fnmatchcase(names[product], each) for each in patterns))


def _check_targets(config: DecoderConfig, lora: LoraConfig) -> None:
    """Raises ValueError unless targets are kernels of layers, the same in all of them."""
    kernels = [f"layers.{i}.{product}.kernel" for i in range(config.num_layers) for product in PRODUCTS]
    others = _names_without_adapters(config)
    names = [*kernels, *others]
    found = {pattern: {*fnmatch.filter(names, pattern)} for pattern in lora.patterns}
    if not found or (nothing := [repr(pattern) for pattern, matched in found.items() if not matched]):
        listed = list_first(nothing) if found else "()"
        raise UserError(f"targets of lora match no kernel: {listed}; kernels are named {list_first(kernels)}")
    matched = set[str]().union(*found.values())
    if wrong := [name for name in others if name in matched]:
        raise UserError(f"targets of lora match what is no kernel of a layer and has no adapter: {list_first(wrong)}")
    lacking = [name for name in kernels if name not in matched]
    products = {name.split(".", 2)[2] for name in matched}
    if wrong := [name for name in lacking if name.split(".", 2)[2] in products]:
        raise UserError(f"targets of lora match kernels in some layers only, and lack {list_first(wrong)}")


def _names_without_adapters(config: DecoderConfig) -> list[str]:
    """Names of the parameters that are no kernels of layers."""
    of_layer = ["attention_norm.scale", "mlp_norm.scale"]
    of_layer += [f"attention.{name}.bias" for name in "qkv" if config.qkv_bias]
    of_layer += ["attention.out.bias"] if config.out_bias else []
    of_layer += [f"attention.{name}_norm.scale" for name in "qk" if config.qk_norm]
    of_layers = [f"layers.{i}.{name}" for i in range(config.num_layers) for name in of_layer]
    return ["embed.embedding", *of_layers, "norm.scale", *([] if config.tied else ["head.kernel"])]


def check_temperature(temperature: float, *, may_be_zero: bool = True) -> None:
    """Raises ValueError unless it can divide logits in float32, or is 0, for the likeliest token."""
    if not is_number(temperature) or not ((may_be_zero and temperature == 0) or 1e-30 <= temperature <= 1e30):
        zero = "0, or " if may_be_zero else ""
        raise UserError(f"temperature ({temperature!r}) must be {zero}from 1e-30 to 1e30")


def check_sampling(*, temperature: float, top_k: int | None, top_p: float | None, samples_per_prompt: int) -> None:
    """Raises ValueError unless tokens can be drawn so, and samples of a prompt differ."""
    check_temperature(temperature)
    check_at_least_one(samples_per_prompt=samples_per_prompt, **if_given(top_k=top_k))
    if top_p is not None and not (is_number(top_p) and 0 < top_p <= 1):
        raise UserError(f"top_p ({top_p!r}) must be above 0, and at most 1")
    if samples_per_prompt > 1 and temperature == 0:
        raise UserError(
            f"samples_per_prompt ({samples_per_prompt}) are all the same at temperature 0: give a temperature"
        )
