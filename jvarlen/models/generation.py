"""Samples from the decoder: prompts in buckets, a compiled program a bucket, keys and values in a cache.

Letters: M microbatches, B rows, N new tokens, P positions for what a row begins with, T = P + N − 1 those of all inputs
(the last new token is none), D width, V values of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from jvarlen._common.checks import UserError, check_at_least_one, is_integer, list_first
from jvarlen._common.progress import progress_bar
from jvarlen.attention.attention import attend
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.distributed.mesh import LayoutLike, Placement, placement_of, replicate
from jvarlen.loading.collate import StepSamples
from jvarlen.loading.loader import load
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.models.decoder import Decoder, DecoderLayer, Rows, graphs_of, window_of
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.budget import Budget
from jvarlen.planning.plan import make_plan
from jvarlen.training.train_state import key_of_seed, with_sharding

__all__ = ["generate"]


def generate(
    params: nnx.State,
    config: DecoderConfig,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    end_token: int | Sequence[int] | None = None,
    max_tokens: int = 16_384,
    max_shapes: int = 4,
    layout: LayoutLike = None,
    progress: bool = True,
) -> list[Int32[np.ndarray, " n"]]:
    """Continues prompts, with everything compiled before the first token and nothing afterwards.

    A prompt's continuation does not depend on the other prompts, on buckets or on devices, up to rounding of logits.
    Programs are kept for later calls with the same model, buckets and options.

    Args:
      params: the result of `init_params`, trained or not.
      config: the model that they belong to.
      prompts: 1-D integers each, below `config.num_values`. An empty one is a sample from its beginning; models without
        `begins_samples` have none.
      max_new_tokens: N, the most tokens that a prompt is continued by.
      temperature: logits are divided by it. 0: the likeliest token, the first of equals.
      seed: the random number of a token depends on it, and on the index of the prompt and the token's position.
      end_token: a prompt's continuation ends with it, or with the first of several; None: all have N tokens.
      max_tokens: budget of a microbatch in positions of prompts and new tokens, padding included.
      max_shapes: the most buckets, that is, compiled programs.
      layout: where to run, as for `make_train_step`: rows are spread over data shards.
      progress: whether to show progress bars.

    Returns:
      int32[n] for each prompt: its new tokens, with the end token.

    Raises:
      ValueError: prompts that are no tokens of the model, or alone exceed `max_tokens`; they are listed. Or arguments
        that are not as described, or a layout of several processes.
      RecompileError: something was compiled after the programs of the buckets.

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
    placement = placement_of(layout)
    if placement is not None and placement.mesh.is_multi_process:
        raise UserError("prompts are continued by one process; the layout has devices of several")
    inputs = _first_inputs(prompts, config)
    if not inputs:
        return []
    state = _State(params, key_of_seed(seed), np.float32(temperature))
    # Arrays on the host, such as those of mapped files, are copied here instead of in every step.
    state = jax.device_put(state) if placement is None else replicate(state, placement.mesh)
    lengths = [len(first) + max_new_tokens - 1 for first in inputs]
    num_shards = 1 if placement is None else placement.layout.data
    limits = Budget(max_tokens=max_tokens, max_shapes=max_shapes, microbatches_per_step=num_shards)
    plan = make_plan(lengths, limits, order="length")
    shapes = jax.tree.map(lambda leaf: with_sharding(None if placement is None else leaf.sharding, leaf), state)
    spec, structure = jax.tree.flatten(shapes)
    step = _make_step(config, max_new_tokens, ends, temperature == 0)
    compiled = _compile(step, tuple(spec), structure, plan.buckets, num_shards, placement, progress)
    continued: dict[int, Int32[np.ndarray, " n"]] = {}
    batches = load(plan, inputs, layout=placement, collate=_collate)
    with no_recompiles():
        for batch in progress_bar(batches, desc="generate", unit="step", progress=progress, total=plan.num_steps):
            state, new = compiled(state, batch)
            ids_MxB, tokens_MxBxN, counts_MxB = jax.device_get((batch.ids, *new))
            for row in np.argwhere(ids_MxB >= 0):
                m, b = row.tolist()
                continued[int(ids_MxB[m, b])] = tokens_MxBxN[m, b, : counts_MxB[m, b]]
    return [continued[prompt] for prompt in range(len(inputs))]


@functools.lru_cache(maxsize=8)
def _compile(
    step: Callable[[Any, Any], tuple[Any, Any]],
    spec: tuple[jax.ShapeDtypeStruct, ...],
    structure: jax.tree_util.PyTreeDef,
    buckets: tuple[Bucket, ...],
    num_shards: int,
    placement: Placement | None,
    progress: bool,
) -> CompiledBuckets:
    """The programs of the buckets, which later calls with equal arguments find again."""
    state = jax.tree.unflatten(structure, spec)
    return compile_buckets(
        step,
        state,
        BatchShapes(buckets, microbatches_per_step=num_shards, layout=placement, batch_spec=_prompt_batch_spec),
        progress=progress,
    )


class _State(NamedTuple):
    """What all steps share: the parameters, the key of the seed, and the temperature, float32[]."""

    params: Any
    key: Any
    temperature: Any


class _PromptBatch(NamedTuple):
    """The arrays of one step: first inputs of rows with room for more, how many, and prompts, −1 of padding rows."""

    tokens: Any
    lengths: Any
    ids: Any


def _prompt_batch_spec(bucket: Bucket, microbatches_per_step: int) -> _PromptBatch:
    shape_MxB = (microbatches_per_step, bucket.rows)
    of_row = jax.ShapeDtypeStruct(shape_MxB, np.int32)
    return _PromptBatch(jax.ShapeDtypeStruct((*shape_MxB, bucket.length), np.int32), of_row, of_row)


def _collate(step: StepSamples) -> _PromptBatch:
    ids_MxB = step.ids.astype(np.int32)
    tokens_MxBxT = np.zeros((*ids_MxB.shape, *step.bucket.lengths), np.int32)
    lengths_MxB = np.zeros_like(ids_MxB)
    for m, microbatch in enumerate(step.samples):
        for b, prompt in enumerate(microbatch):
            tokens_MxBxT[m, b, : len(prompt)] = prompt
            lengths_MxB[m, b] = len(prompt)
    return _PromptBatch(tokens_MxBxT, lengths_MxB, ids_MxB)


def _first_inputs(prompts: Sequence[Any], config: DecoderConfig) -> list[Int32[np.ndarray, " length"]]:
    """Prompts after what begins a sample; raises ValueError that lists those which are no tokens of the model."""
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

    keys: Any
    values: Any


class _Decoding(NamedTuple):
    """What decoding carries: how many tokens are new, and of each row the tokens and whether it has ended."""

    num_new: Any
    tokens: Any
    counts: Any
    is_done: Any
    caches: Any


@functools.lru_cache(maxsize=8)  # equal arguments give the same step, by which its programs are found again
def _make_step(
    config: DecoderConfig, max_new_tokens: int, ends: tuple[int, ...], is_greedy: bool
) -> Callable[[_State, _PromptBatch], tuple[_State, tuple[Any, Any]]]:
    """A step for `compile_buckets`: `(state, batch) -> (state, (new tokens int32[M, B, N], counts int32[M, B]))`."""
    graphdef = graphs_of(config)[0]

    def generate_step(state: _State, batch: _PromptBatch) -> tuple[_State, tuple[Any, Any]]:
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

        def appended(decoding: _Decoding, logits_BxV: Array) -> _Decoding:
            logits_BxV = logits_BxV[:, : config.num_values]  # what begins samples never follows
            if is_greedy:
                new_B = jnp.argmax(logits_BxV, axis=-1)
            else:  # by a key of its prompt and position
                keys_B = jax.vmap(jax.random.fold_in, (None, 0))(state.key, jnp.maximum(rows.ids, 0))
                keys_B = jax.vmap(jax.random.fold_in)(keys_B, rows.lengths + decoding.num_new)
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
            logits_BxV, caches = _decode(model, decoding, rows.lengths)
            return appended(decoding._replace(caches=caches), logits_BxV)

        logits_BxV, caches = _prefill(nnx.merge(graphdef, state.params), rows, max_new_tokens)
        counts_B = jnp.zeros_like(rows.lengths)
        tokens_BxN = jnp.zeros((len(rows.ids), max_new_tokens), jnp.int32)
        decoding = appended(_Decoding(jnp.int32(0), tokens_BxN, counts_B, rows.ids < 0, caches), logits_BxV)
        decoding = jax.lax.while_loop(is_unfinished, decode_one, decoding)
        shape_MxB = batch.ids.shape
        return state, (decoding.tokens.reshape(*shape_MxB, -1), decoding.counts.reshape(shape_MxB))

    return generate_step


def _prefill(model: Decoder, rows: _PromptBatch, max_new_tokens: int) -> tuple[Float[Array, "B V"], list[_Cache]]:
    """Runs the first inputs: the logits of the first new tokens, and the caches with room for the others."""
    num_slots = rows.tokens.shape[1]
    x_BxPxD = model.embed_inputs(rows.tokens[:, : num_slots - max_new_tokens + 1])
    caches = []
    for index, layer in enumerate(model.layers):
        window = window_of(model.config, index)
        x_BxPxD, cache = _prefill_layer(*nnx.split(layer), x_BxPxD, Rows(rows.lengths, window=window), num_slots)
        caches.append(cache)
    last_Bx1xD = jnp.take_along_axis(x_BxPxD, jnp.maximum(rows.lengths - 1, 0)[:, None, None], axis=1)
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
    window: Any,
) -> tuple[Float[Array, "B 1 D"], _Cache]:
    layer: DecoderLayer = nnx.merge(graphdef, params)
    query, *new = layer.project(x, positions[:, None], num_positions=cache.keys.shape[1])
    rows = jnp.arange(len(x))
    keys, values = (held.at[rows, positions].set(each[:, 0]) for held, each in zip(cache, new, strict=True))
    attended = attend(query, keys, values, query_offset=positions, window=window)
    return layer.finish(x, attended), _Cache(keys, values)
