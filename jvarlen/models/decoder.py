"""A decoder of the Llama family in Flax NNX: Llama 3, Qwen 2.5 and 3, Mistral, and, small, the demo.

Letters: B rows, T positions (of rows that are spread over a mesh axis, those of this device), S those of this device
under sequence parallelism, D width, F outputs of a product, H heads of queries, N of keys and values, K head size, V
values of a token.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.types import Batch, Microbatch
from jvarlen.attention.attention import attend
from jvarlen.batches.batches import StepBatch, arrays_by_name, sample_positions
from jvarlen.batches.fields import ATTENTION_WINDOW
from jvarlen.models.config import DecoderConfig, RotaryScaling
from jvarlen.models.elementwise import rms_norm, swiglu
from jvarlen.models.products import Dropout, Linear, multiply, rngs_of
from jvarlen.parallel.layers import Axes, axes_of
from jvarlen.parallel.tensor import enter_tensor_parallel, gather_heads, sum_backward, vocabulary_embedding
from jvarlen.training.train_state import key_of_seed
from jvarlen.training.trainable import names_of

__all__ = [
    "Decoder", "DecoderLayer", "Rows", "check_names", "graphs_of", "init_params", "num_positions_of", "param_shapes",
    "rows_of", "run_layer", "window_of", "with_window",
]  # fmt: skip

_UNSPLIT = Axes()
# Compiled once for a shape, so that initializing takes no longer with more layers.
_NORMAL = jax.jit(jax.nn.initializers.normal(0.02), static_argnums=(1, 2))


class Rows(NamedTuple):
    """Where samples begin and end in the rows, for attention, and how far back a token sees.

    Attributes:
      lengths: int[B], tokens of a row that holds one sample; None for packed rows.
      segment_ids: int[B, T], the sample of each position of packed rows; None for rows that are not packed.
      positions: int[B, T], the place of each position in its sample; None if that is its place in the row.
      window: an int or int[], how many tokens a token sees, itself included; None, or below 1, for all before it.
      answer_ids: int[B, T], of samples whose answers share a prompt, as `attend` takes them; None for others.
      samples_per_row: the most samples of a packed row, as `attend` takes it; None where it is unknown.

    If rows are spread over a mesh axis, segments and positions are those at `axes.positions`.
    """

    lengths: Array | None = None
    segment_ids: Array | None = None
    positions: Array | None = None
    window: int | Array | None = None
    answer_ids: Array | None = None
    samples_per_row: int | None = None


class _RMSNorm(nnx.Module):
    """Root mean square normalisation in float32 at least (Zhang and Sennrich 2019)."""

    def __init__(self, config: DecoderConfig, num_features: int):
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones(num_features, jnp.float32))

    def __call__(
        self, x: Float[Array, "*batch D"], axes: Axes = _UNSPLIT, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch D"]:
        """Normalises x, in a type; with a tensor axis in `axes`, this device's heads of x."""
        scale = self.scale[...]
        if axes.tensor is not None and not axes.sequence_parallel:  # each device has the gradient of its heads
            scale = sum_backward(scale, axes.tensor)
        dtype = jnp.dtype(jnp.promote_types(x.dtype, scale.dtype) if dtype is None else dtype)
        return rms_norm(x, scale, epsilon=self.epsilon, dtype=dtype)


class _Attention(nnx.Module):
    """Grouped-query attention with a rotary embedding."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, size = config.width, config.size_of_head
        self.q, self.k, self.v = (
            Linear(config, width, num_heads * size, f"attention.{name}", has_bias=config.qkv_bias, rngs=rngs)
            for name, num_heads in (("q", config.num_heads), ("k", config.kv_heads), ("v", config.kv_heads))
        )
        self.q_norm, self.k_norm = (_RMSNorm(config, size) if config.qk_norm else None for _ in range(2))
        num_in, has_bias = config.num_heads * size, config.out_bias
        self.out = Linear(config, num_in, width, "attention.out", has_bias=has_bias, splits_inputs=True, rngs=rngs)


class _MLP(nnx.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config, config.width, config.mlp_features, "mlp.gate", rngs=rngs)
        self.up = Linear(config, config.width, config.mlp_features, "mlp.up", rngs=rngs)
        self.down = Linear(config, config.mlp_features, config.width, "mlp.down", splits_inputs=True, rngs=rngs)


class DecoderLayer(nnx.Module):
    """Attention and an MLP, each on a normalised residual stream.

    Its parameters decide the heads and features: under tensor parallelism, those of one device.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = _RMSNorm(config, config.width)
        self.attention = _Attention(config, rngs=rngs)
        self.mlp_norm = _RMSNorm(config, config.width)
        self.mlp = _MLP(config, rngs=rngs)

    def __call__(
        self, x_BxTxD: Float[Array, "B S D"], rows: Rows, axes: Axes = _UNSPLIT, num_positions: int | None = None
    ) -> Float[Array, "B S D"]:
        """The residual stream after the layer."""
        dropout = self.dropout(x_BxTxD, axes, num_positions)
        qkv = self.project(x_BxTxD, rows.positions, num_positions, axes, dropout)
        return self.finish(x_BxTxD, self.attend(*qkv, rows, axes), axes, dropout)

    def dropout(self, x_BxTxD: Float[Array, "B S D"], axes: Axes, num_positions: int | None) -> Dropout | None:
        """That of inputs of adapters, where there is any: in training, by the key in `axes`."""
        lora = self.config.lora
        if lora is None or not lora.dropout or axes.key is None:
            return None
        return Dropout(rate=lora.dropout, axes=axes, num_rows=len(x_BxTxD), num_positions=num_positions)

    def attend(
        self,
        query: Float[Array, "B T H K"],
        key: Float[Array, "B T N K"],
        value: Float[Array, "B T N K"],
        rows: Rows,
        axes: Axes = _UNSPLIT,
    ) -> Float[Array, "B T H K"]:
        """The values that each position gets from those that it sees."""
        of_rows: Any = {"lengths": rows.lengths, "segment_ids": rows.segment_ids, "window": rows.window}
        if axes.context is not None:
            from jvarlen.parallel.context import attend_over_axis  # loaded where rows are spread

            return attend_over_axis(query, key, value, axes=axes, **of_rows)
        of_rows |= {"answer_ids": rows.answer_ids, "samples_per_row": rows.samples_per_row}
        return attend(query, key, value, **of_rows, implementation=self.config.attention)

    def project(
        self,
        x_BxTxD: Float[Array, "B S D"],
        positions: Int[Array, "B T"] | None,
        num_positions: int | None = None,
        axes: Axes = _UNSPLIT,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T N K"], Float[Array, "B T N K"]]:
        """Queries and keys, rotated by their positions, and values; `num_positions` as in `_rotate_positions`."""
        attention, config = self.attention, self.config
        entered = self._enter(self.attention_norm, x_BxTxD, axes)
        rows = entered.reshape(-1, config.width)  # once, so that they are kept once for the backward pass
        products = attention.q, attention.k, attention.v
        num_groups = max(attention.k.kernel.shape[1] // config.size_of_head, 1)  # a device may have part of a head
        of_heads = zip(
            Linear.together(rows, products, axes, dropout, num_groups=num_groups),
            (config.num_heads, config.kv_heads, config.kv_heads),
            strict=True,
        )
        q, k, v = (
            gather_heads(product, num_heads, axes=axes).reshape(*entered.shape[:2], -1, config.size_of_head)
            for product, num_heads in of_heads
        )
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = attention.q_norm(q, axes), attention.k_norm(k, axes)
        q, k = (_rotate_positions(x, positions, config, num_positions) for x in (q, k))
        query, key, value = (x.astype(x_BxTxD.dtype) for x in (q, k, v))
        return checkpoint_name(query, "query"), checkpoint_name(key, "key"), checkpoint_name(value, "value")

    def finish(
        self,
        x_BxTxD: Float[Array, "B S D"],
        attended: Float[Array, "B T H K"],
        axes: Axes = _UNSPLIT,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B S D"]:
        """The residual stream after the layer, from the one before it and the heads' outputs."""
        dtype, mlp = x_BxTxD.dtype, self.mlp
        attended_BxTxF = checkpoint_name(attended.reshape(*attended.shape[:2], -1), "attention")
        projected_BxTxD = self.attention.out(attended_BxTxF, axes, dropout)
        x_BxTxD = (x_BxTxD + checkpoint_name(projected_BxTxD.astype(dtype), "projection")).astype(dtype)
        entered = self._enter(self.mlp_norm, x_BxTxD, axes)
        # Two thirds of what a layer keeps: `remat_selective` computes it again.
        products = Linear.together(entered.reshape(-1, self.config.width), (mlp.gate, mlp.up), axes, dropout)
        gate, up = (product.astype(dtype) for product in products)
        hidden_BxTxF = swiglu(gate, up).reshape(*entered.shape[:2], -1)
        return (x_BxTxD + mlp.down(hidden_BxTxF, axes, dropout)).astype(dtype)

    def _enter(self, norm: _RMSNorm, x_BxTxD: Float[Array, "B S D"], axes: Axes) -> Float[Array, "B T D"]:
        """What products take: in their type, but where devices gather it or sum its gradient."""
        normalised = norm(x_BxTxD, dtype=self.config.compute_dtype if axes.tensor is None else None)
        return enter_tensor_parallel(normalised, axes=axes)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))  # all layers are alike: one of them is traced
def run_layer(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    x_BxTxD: jax.Array,
    rows: Rows,
    axes: Axes = _UNSPLIT,  # without arrays
    num_positions: int | None = None,  # of whole rows, if these are some of their positions
    key: Array | None = None,  # of `axes`
    places: Array | None = None,  # its positions
) -> jax.Array:
    """The residual stream after a layer with these parameters."""
    return nnx.merge(graphdef, params)(x_BxTxD, rows, axes._replace(key=key, positions=places), num_positions)


class Decoder(nnx.Module):
    """A decoder that predicts every token from the tokens before it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.width, embedding_init=_NORMAL, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _RMSNorm(config, config.width)
        self.head = None if config.tied else Linear(config, config.width, config.vocab_size, init=_NORMAL, rngs=rngs)

    def __call__(self, inputs_BxT: Int[Array, "B T"], rows: Rows) -> Float[Array, "B T V"]:
        """Logits of the token after every input, at least float32; meaningless at positions without a token."""
        return self.logits(self.run_layers(self.embed_inputs(inputs_BxT), rows))

    def run_layers(self, x_BxTxD: Float[Array, "B T D"], rows: Rows, key: Array | None = None) -> Float[Array, "B T D"]:
        """The output of the last layer; `key` is that of the microbatch."""
        for index, layer in enumerate(self.layers):
            of_layer = rows._replace(window=window_of(self.config, index, rows.window))
            x_BxTxD = run_layer(*nnx.split(layer), x_BxTxD, of_layer, key=axes_of(key, index).key)
        return x_BxTxD

    def embed_inputs(self, inputs_BxT: Int[Array, "B T"], axes: Axes = _UNSPLIT) -> Float[Array, "B S D"]:
        """Embeddings of the inputs of positions, in the compute type."""
        # Calling `embed` would round parameters to the type it began with.
        x_BxTxD = vocabulary_embedding(self.embed.embedding[...], inputs_BxT, axes=axes)
        return x_BxTxD if self.config.compute_dtype is None else x_BxTxD.astype(self.config.compute_dtype)

    def logits(self, x_BxTxD: Float[Array, "B S D"], axes: Axes = _UNSPLIT) -> Float[Array, "B T V"]:
        """Logits of every token from the output of the last layer, at least float32."""
        entered, kernel = enter_tensor_parallel(self.norm(x_BxTxD), axes=axes), self.head_kernel
        wide_BxTxD = entered.astype(jnp.promote_types(entered.dtype, jnp.float32))
        in_bfloat16 = self.config.compute_dtype is not None or entered.dtype == jnp.bfloat16
        return multiply(wide_BxTxD, kernel, in_bfloat16=in_bfloat16)

    @property
    def head_kernel(self) -> Float[Array, "D V"]:
        """The kernel of the head, which may be the embedding."""
        return self.embed.embedding[...].T if self.head is None else self.head.kernel[...]


@functools.cache
def graphs_of(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.GraphDef, nnx.GraphDef]:
    """The graphs of the decoder, of its ends alone, and of a layer, which goes with any number of them."""

    def split() -> tuple[nnx.GraphDef, nnx.GraphDef, nnx.GraphDef]:
        model = Decoder(config, rngs=nnx.Rngs(0))
        whole, layer = nnx.split(model)[0], nnx.split(model.layers[0])[0]
        model.layers = nnx.List([])
        return whole, nnx.split(model)[0], layer

    return nnx.eval_shape(split)


def window_of(config: DecoderConfig, layer: Any, of_step: Any = None) -> Any:
    """How many tokens a token sees in a layer, and in this step; None, or below 1, for all before it."""
    own: Any = None  # the layer may be traced
    if any(config.windows):
        is_known = isinstance(layer, int) or len({*config.windows}) == 1  # kernels skip by windows that are known
        own = _Static(config.windows[layer if isinstance(layer, int) else 0]) if is_known else None
        if own is None:
            own = jnp.take(jnp.asarray(config.windows, jnp.int32), layer)
    if of_step is None or own is None:
        return own if of_step is None else of_step
    # One below 1 is the largest as an unsigned number less 1.
    least = jnp.minimum(*(jnp.asarray(window, jnp.int32).astype(jnp.uint32) - 1 for window in (own, of_step)))
    return (least + 1).astype(jnp.int32)


@jax.tree_util.register_static
class _Static(int):
    """A number of `Rows` that is part of the program."""


def _rotate_positions(
    x_BxTxHxK: Float[Array, "B T H K"],
    positions: Int[Array, "B T"] | None,
    config: DecoderConfig,
    num_positions: int | None = None,
) -> Float[Array, "B T H K"]:
    """Rotary position embedding (Su et al. 2021), first half of the head against the second."""
    _, seq_length, _, head_size = x_BxTxHxK.shape
    half = head_size // 2
    # Constants of the program, computed in float64: at late positions float32 angles are off by more than their sines.
    frequencies = config.rotary_base ** (-np.arange(half) / half)
    if config.rotary_scaling is not None:
        frequencies = _scale_frequencies(frequencies, config.rotary_scaling)
    angles_Tx1xK = np.arange(num_positions or seq_length)[:, None, None] * frequencies
    wide = jnp.promote_types(x_BxTxHxK.dtype, jnp.float32)
    cos, sin = (jnp.asarray(f(angles_Tx1xK), wide) for f in (np.cos, np.sin))
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    x1, x2 = jnp.split(x_BxTxHxK.astype(wide), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def _scale_frequencies(frequencies: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """The frequencies of Llama 3: low ones are divided, high ones kept, and those between interpolated."""
    turns = scaling.original_length * frequencies / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)


def init_params(config: DecoderConfig, seed: int) -> nnx.State:
    """The initial parameters of a model.

    Args:
      config: the sizes of the model.
      seed: equal seeds give equal parameters.

    Returns:
      A pytree of float32 arrays, whose names are such as `layers.0.attention.q.kernel`; kernels are [inputs, outputs].
    """
    return _init_params(config, key_of_seed(seed))


def _init_params(config: DecoderConfig, key: Array) -> nnx.State:
    return nnx.split(Decoder(config, rngs=rngs_of(key)))[1]


@functools.cache
def param_shapes(config: DecoderConfig) -> nnx.State:
    """The result of `init_params` as `jax.ShapeDtypeStruct`; only one layer is traced."""
    # With the key as an argument, `jax.ensure_compile_time_eval` of a caller makes no arrays.
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(_init_params, config.one_layer), key).raw_mapping
    return nnx.State({**shapes, "layers": dict.fromkeys(range(config.num_layers), shapes["layers"][0])})


def check_names(params: nnx.State, config: DecoderConfig) -> None:
    """Raises ValueError unless parameters have the names of those of the config."""
    given, own = {*names_of(params)}, {*names_of(param_shapes(config))}
    sides = {"in the parameters alone": given - own, "in the config alone": own - given}
    if found := [f"{side}: {list_first(sorted(names))}" for side, names in sides.items() if names]:
        raise UserError(
            f"the parameters are not those of this config; {'; '.join(found)}. add_lora adds adapters to parameters, "
            "and merge_lora merges them"
        )


def rows_of(microbatch: Microbatch, axes: Axes = _UNSPLIT) -> Rows:
    """The `Rows` of a microbatch of whole rows, at the positions of this device or slice."""
    arrays = arrays_by_name(microbatch) or {}
    window = arrays.get(ATTENTION_WINDOW)
    if "answer_ids" in arrays:
        if axes.positions is not None:
            raise UserError(
                "positions of rows whose answers share a prompt cannot be spread over devices or slices: take a layout "
                "without a context axis, or samples of one answer each, without answer_ids"
            )
        lengths, segment_ids = arrays.get("lengths"), arrays.get("segment_ids")
        return Rows(lengths, segment_ids, sample_positions(microbatch), window, arrays["answer_ids"])
    if "segment_ids" in arrays:
        ids = arrays.get("ids")
        most = None if ids is None or ids.ndim != 2 else _Static(ids.shape[1])
        rows = Rows(segment_ids=arrays["segment_ids"], positions=arrays["positions"], samples_per_row=most)
        rows = rows if axes.positions is None else jax.tree.map(lambda leaf: leaf[:, axes.positions], rows)
        return rows._replace(window=window)
    if "lengths" not in arrays:
        raise UserError("the decoder takes samples of one length: a Batch, a PackedBatch, or named fields with tokens")
    if axes.positions is None:
        return Rows(lengths=arrays["lengths"], window=window)
    return Rows(
        lengths=arrays["lengths"],
        positions=jnp.broadcast_to(axes.positions, (len(arrays["lengths"]), len(axes.positions))),
        window=window,
    )


def with_window(batch: Batch, window: int | np.integer | Array) -> Batch:
    """The batch of a training step in which the decoder's tokens see no further than a window.

    Losses of `jvarlen.models` take it, on every layout. It is data: other windows compile nothing. A layer with a
    window of its own takes the smaller one. In batches without it, such as those of evaluations, tokens see all.

    Args:
      batch: of `load`, or a `StepBatch`, or one of shapes, in `jax.eval_shape`.
      window: int32[] or an int, how many tokens a token sees, itself included; below 1: all before it.

    Returns:
      Named fields: a dict of the arrays of the batch and `attention_window`; for a `StepBatch`, in each of its groups.

    Raises:
      ValueError: a batch of another type.

    Example:
      >>> from jvarlen.batches import token_batch_spec
      >>> from jvarlen import Bucket
      >>> spec = jax.eval_shape(lambda batch: with_window(batch, 0), token_batch_spec(Bucket(2, 4), 1))
      >>> spec["attention_window"]
      ShapeDtypeStruct(shape=(), dtype=int32)
    """
    if isinstance(batch, StepBatch):
        return batch._replace(groups=tuple(with_window(group, window) for group in batch.groups))
    if (arrays := arrays_by_name(batch)) is None:
        raise UserError(f"with_window takes a batch of load, not a {type(batch).__name__}")
    return {**arrays, ATTENTION_WINDOW: window if isinstance(window, jax.Array) else np.int32(window)}


def num_positions_of(microbatch: Microbatch) -> int:
    """T of whole rows."""
    return (arrays_by_name(microbatch) or {})["weights"].shape[1]
