"""Samples from the decoder: prompts in buckets, a compiled program for each bucket, keys and values in a cache.

Letters: B rows, N new tokens, P positions for the beginning of a row, T = P + N − 1 for all inputs
(the last new token is not an input), D width, V values of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from jvarlen._common.checks import UserError, check_at_least_one, is_integer, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen.attention.attention import attend
from jvarlen.batches.batches import Batch
from jvarlen.distributed.placement import LayoutLike
from jvarlen.inference.predict import predict
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.models.decoder import Decoder, DecoderLayer, Rows, graphs_of, window_of
from jvarlen.planning.buckets import Bucket, Buckets, check_buckets
from jvarlen.planning.budget import PlanBudgetFields
from jvarlen.training.train_state import key_of_seed

__all__ = ["generate"]


@check_keywords
def generate(
    params: nnx.State,
    config: DecoderConfig,
    prompts: Sequence[npt.ArrayLike],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    end_token: int | Sequence[int] | None = None,
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]] | None = None,
    max_tokens: int | None = None,
    max_shapes: int | None = None,
    layout: LayoutLike = None,
    progress: bool = True,
) -> list[Int32[np.ndarray, " n"]]:
    """Continues prompts, with everything compiled before the first token and nothing afterwards.

    A prompt's continuation does not depend on the other prompts, on buckets or on devices, up to rounding of logits.
    Programs are kept for later calls with the same model, shapes and options: with prompts of the same lengths, in any
    order, or of any lengths where `buckets` gives the shapes. It is `predict` with this model.

    Args:
      params: the result of `init_params`, trained or not.
      config: the model that they belong to.
      prompts: 1-D integers each, below `config.num_values`. An empty one is a sample from its beginning; models without
        `begins_samples` have none.
      max_new_tokens: N, the most tokens that a prompt is continued by.
      temperature: logits are divided by it. 0: the likeliest token, the first of equals.
      seed: the random number of a token depends on it, and on the index of the prompt and the token's position.
      end_token: a prompt's continuation ends with it, or with the first of several; None: all have N tokens.
      buckets: as for `predict`; a length counts the positions of a prompt and its new tokens, one less without
        `begins_samples`. None: they are chosen from the prompts.
      max_tokens: budget of a microbatch in these positions, padding included, where buckets are chosen; by default
        16,384.
      max_shapes: the most buckets, that is, compiled programs, where they are chosen; by default 4.
      layout: where to run, as for `make_train_step`: rows are spread over data shards.
      progress: whether to show progress bars.

    Returns:
      int32[n] for each prompt: its new tokens, with the end token.

    Raises:
      ValueError: prompts that are not tokens of the model, or alone exceed `max_tokens` or all buckets; or buckets
        that hold no prompt with its new tokens; they are listed. Or arguments that are not as described.

    Example:
      >>> from jvarlen.models import init_params
      >>> config = DecoderConfig(width=16)
      >>> new = generate(init_params(config, 0), config, [[1, 2, 3], []], max_new_tokens=4, progress=False)
      >>> [tokens.shape for tokens in new]
      [(4,), (4,)]
    """
    check_at_least_one(max_new_tokens=max_new_tokens)
    check_temperature(temperature)
    ends = () if end_token is None else tuple(end_token) if isinstance(end_token, Sequence) else (end_token,)
    if wrong := [repr(end) for end in ends if not (is_integer(end) and 0 <= end < config.num_values)]:
        raise UserError(f"end_token must be at least 0 and below {config.num_values}, not {list_first(wrong)}")
    inputs = _first_inputs(prompts, config)
    if not inputs:
        return []
    limits: PlanBudgetFields = {"max_tokens": 16_384, "max_shapes": 4} if buckets is None else {}
    if max_tokens is not None:
        limits["max_tokens"] = max_tokens
    if max_shapes is not None:
        limits["max_shapes"] = max_shapes
    rows = [np.pad(first, (0, max_new_tokens - 1)) for first in inputs]  # with room for what follows
    of_given = [] if buckets is None else [(each.lengths[0], str(each)) for each in check_buckets(buckets).shapes]
    if wrong := [each for length, each in of_given if length < max_new_tokens]:
        raise UserError(
            f"buckets that hold no prompt and {max_new_tokens} new tokens (max_new_tokens): {list_first(wrong)}"
        )
    longest = of_given[-1][0] if of_given else None
    if longest and (wrong := [f"prompt {i}: {len(row)}" for i, row in enumerate(rows) if len(row) > longest]):
        raise UserError(f"prompts need more positions, new tokens included, than {longest}: {list_first(wrong)}")
    new = predict(
        _make_generate(config, max_new_tokens, ends, temperature == 0),
        _State(params, key_of_seed(seed), np.float32(temperature)),
        rows,
        buckets=buckets,
        axes="row",
        layout=layout,
        progress=progress,
        **limits,
    )
    return [tokens[:count] for tokens, count in new]


class _State(NamedTuple):
    """The values that all steps share: the parameters, the key of the seed, and the temperature, float32[]."""

    params: nnx.State
    key: Array
    temperature: np.float32


def _first_inputs(prompts: Sequence[npt.ArrayLike], config: DecoderConfig) -> list[Int32[np.ndarray, " length"]]:
    """Prompts after the begin token, if any; raises ValueError that lists those that are not tokens of the model."""
    begin = np.array([] if config.begin_token is None else [config.begin_token], np.int32)
    arrays, wrong = [], []
    for i, prompt in enumerate(prompts):
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            wrong.append(f"prompt {i}: {tokens.dtype}{list(tokens.shape)}")
        elif (outside := tokens[(tokens < 0) | (tokens >= config.num_values)]).size:
            wrong.append(f"prompt {i}: {list_first(outside.tolist())}")
        elif not begin.size and not tokens.size:
            wrong.append(f"prompt {i}: empty, and the model has no token that begins samples")
        else:
            arrays.append(np.concatenate([begin, tokens.astype(np.int32)]))
    if wrong:
        raise UserError(f"prompts must be 1-D integers from 0 to {config.num_values - 1}: {list_first(wrong, '; ')}")
    return arrays


class _Cache(NamedTuple):
    """Keys, rotated, and values of a layer at T positions; those that a row has not come to yet hold anything."""

    keys: Array
    values: Array


class _Decoding(NamedTuple):
    """The state of decoding: how many tokens are new, and for each row its tokens and whether it has ended."""

    num_new: Array
    tokens: Array
    counts: Array
    is_done: Array
    caches: list[_Cache]


@functools.lru_cache(maxsize=8)  # equal arguments give the same function, and so the same programs
def _make_generate(
    config: DecoderConfig, max_new_tokens: int, ends: tuple[int, ...], is_greedy: bool
) -> Callable[[_State, Batch], tuple[Array, Array]]:
    """A function for `predict`: `(state, rows) -> (new tokens int32[B, N], counts int32[B])`."""
    graphdef = graphs_of(config)[0]

    def generate_step(state: _State, rows: Batch) -> tuple[Array, Array]:
        lengths_B = jnp.maximum(rows.lengths - (max_new_tokens - 1), 0)  # of first inputs

        def append(decoding: _Decoding, logits_BxV: Array) -> _Decoding:
            logits_BxV = logits_BxV[:, : config.num_values]  # what begins samples never follows
            if is_greedy:
                new_B = jnp.argmax(logits_BxV, axis=-1)
            else:  # by a key of its prompt and position
                keys_B = jax.vmap(jax.random.fold_in, (None, 0))(state.key, jnp.maximum(rows.ids, 0))
                keys_B = jax.vmap(jax.random.fold_in)(keys_B, lengths_B + decoding.num_new)
                new_B = jax.vmap(jax.random.categorical)(keys_B, logits_BxV / state.temperature)
            new_B = new_B.astype(jnp.int32)
            return decoding._replace(
                num_new=decoding.num_new + 1,
                tokens=jax.lax.dynamic_update_slice_in_dim(decoding.tokens, new_B[:, None], decoding.num_new, axis=1),
                counts=decoding.counts + ~decoding.is_done,
                is_done=decoding.is_done | jnp.isin(new_B, np.array(ends, np.int32)),
            )

        def is_unfinished(decoding: _Decoding) -> Array:
            return (decoding.num_new < max_new_tokens) & ~jnp.all(decoding.is_done)

        def decode_one(decoding: _Decoding) -> _Decoding:
            model = nnx.merge(graphdef, state.params)
            logits_BxV, caches = _decode(model, decoding, lengths_B)
            return append(decoding._replace(caches=caches), logits_BxV)

        model = nnx.merge(graphdef, state.params)
        logits_BxV, caches = _prefill(model, rows.tokens, lengths_B, max_new_tokens)
        tokens_BxN = jnp.zeros((len(lengths_B), max_new_tokens), jnp.int32)
        counts_B = jnp.zeros_like(lengths_B)
        decoding = append(_Decoding(jnp.int32(0), tokens_BxN, counts_B, ~rows.is_real, caches), logits_BxV)
        decoding = jax.lax.while_loop(is_unfinished, decode_one, decoding)
        return decoding.tokens, decoding.counts

    return generate_step


def _prefill(
    model: Decoder, tokens_BxT: Int32[Array, "B T"], lengths_B: Int32[Array, " B"], max_new_tokens: int
) -> tuple[Float[Array, "B V"], list[_Cache]]:
    """Runs the first inputs: the logits of the first new tokens, and the caches with room for the others."""
    num_slots = tokens_BxT.shape[1]
    x_BxPxD = model.embed_inputs(tokens_BxT[:, : num_slots - max_new_tokens + 1])
    caches = []
    for index, layer in enumerate(model.layers):
        window = window_of(model.config, index)
        x_BxPxD, cache = _prefill_layer(*nnx.split(layer), x_BxPxD, Rows(lengths_B, window=window), num_slots)
        caches.append(cache)
    last_Bx1xD = jnp.take_along_axis(x_BxPxD, jnp.maximum(lengths_B - 1, 0)[:, None, None], axis=1)
    return model.logits(last_Bx1xD)[:, 0], caches


def _decode(
    model: Decoder, decoding: _Decoding, lengths_B: Int32[Array, " B"]
) -> tuple[Float[Array, "B V"], list[_Cache]]:
    """Runs the last new token of each row: the logits of the next one, and the caches with it."""
    last = decoding.num_new - 1
    x_Bx1xD = model.embed_inputs(jax.lax.dynamic_slice_in_dim(decoding.tokens, last, 1, axis=1))
    caches = []
    for index, (layer, cache) in enumerate(zip(model.layers, decoding.caches, strict=True)):
        window = window_of(model.config, index)
        x_Bx1xD, cache = _decode_layer(*nnx.split(layer), x_Bx1xD, cache, lengths_B + last, window)
        caches.append(cache)
    return model.logits(x_Bx1xD)[:, 0], caches


@functools.partial(jax.jit, static_argnums=(0, 4))  # all layers are alike: one of them is traced
def _prefill_layer(
    graphdef: nnx.GraphDef, params: nnx.State, x: Float[Array, "B P D"], rows: Rows, num_slots: int
) -> tuple[Float[Array, "B P D"], _Cache]:
    layer: DecoderLayer = nnx.merge(graphdef, params)
    query, key, value = layer.project(x, None)
    room = ((0, 0), (0, num_slots - x.shape[1]), (0, 0), (0, 0))
    return layer.finish(x, layer.attend(query, key, value, rows)), _Cache(jnp.pad(key, room), jnp.pad(value, room))


@functools.partial(jax.jit, static_argnums=0)
def _decode_layer(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    x: Float[Array, "B 1 D"],
    cache: _Cache,
    positions: Int[Array, " B"],
    window: int | Array | None,
) -> tuple[Float[Array, "B 1 D"], _Cache]:
    layer: DecoderLayer = nnx.merge(graphdef, params)
    query, *new = layer.project(x, positions[:, None], num_positions=cache.keys.shape[1])
    rows = jnp.arange(len(x))
    keys, values = (held.at[rows, positions].set(each[:, 0]) for held, each in zip(cache, new, strict=True))
    attended = attend(query, keys, values, query_offset=positions, window=window)
    return layer.finish(x, attended), _Cache(keys, values)
