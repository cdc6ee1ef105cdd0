"""Samples from the decoder: prompts in buckets, a compiled program for each bucket, keys and values in a cache.

Letters: B rows, N new tokens, P positions for the beginning of a row, T = P + N − 1 for all inputs
(the last new token is not an input), D width, V values of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from jvarlen._common.checks import UserError, check_at_least_one, is_integer, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Params
from jvarlen.attention.attention import attend
from jvarlen.distributed.placement import LayoutLike
from jvarlen.inference.predict import predict
from jvarlen.models.config import DecoderConfig, check_sampling
from jvarlen.models.decoder import Decoder, DecoderLayer, Rows, graphs_of, window_of
from jvarlen.models.stacking import whole_params
from jvarlen.planning.buckets import Bucket, Buckets, check_buckets
from jvarlen.planning.budget import PlanBudgetFields
from jvarlen.training.train_state import TrainState, key_of_seed

__all__ = ["generate"]


@check_keywords
def generate(
    params: Params,
    config: DecoderConfig,
    prompts: Sequence[npt.ArrayLike],
    *,
    max_new_tokens: int,
    samples_per_prompt: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    ids: npt.ArrayLike | None = None,
    end_token: int | Sequence[int] | None = None,
    return_log_probs: bool = False,
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]] | None = None,
    max_tokens: int | None = None,
    max_shapes: int | None = None,
    layout: LayoutLike = None,
    progress: bool = True,
) -> Any:
    """Continues prompts, with everything compiled before the first token and nothing afterwards.

    A prompt's continuation does not depend on the other prompts, on buckets or on devices, up to rounding of logits.
    Programs are kept for later calls with the same model, shapes and options: with prompts of the same lengths, in any
    order, or of any lengths where `buckets` gives the shapes. `temperature`, `top_p`, `seed` and `ids` may differ. It
    is `predict` with this model.

    Args:
      params: the result of `init_params`, trained or not; or a `TrainState` of the model, or its parameters, as they
        lie on any layout, which `predict` takes with this `layout`.
      config: the model that they belong to.
      prompts: 1-D integers each, below `config.num_values`. An empty one is a sample from its beginning; models without
        `begins_samples` have none.
      max_new_tokens: N, the most tokens that a prompt is continued by.
      samples_per_prompt: G, how often each prompt is continued. It is computed once for all of them.
      temperature: logits are divided by it. 0: the likeliest token, the first of equals.
      top_k: only the k likeliest tokens are drawn, and those as likely as the last of these; None: all.
      top_p: only the likeliest tokens are drawn, as few as have this probability together, of those of `top_k`; None:
        all.
      seed: the random number of a token depends on it, on the id of its prompt, the number of the sample and the
        token's position, and on nothing else.
      ids: integers[number of prompts] from 0 to 2³¹ − 1, the ids of the prompts, such as their places in a dataset of
        which this call gets a part; None: their places in `prompts`.
      end_token: a prompt's continuation ends with it, or with the first of several; None: all have N tokens.
      return_log_probs: whether to return the log probabilities of new tokens, too.
      buckets: as for `predict`, a row for each prompt; a length counts the positions of a prompt and its new tokens,
        one less without `begins_samples`. None: they are chosen from the prompts.
      max_tokens: budget of a microbatch in these positions, padding included, of all samples, where buckets are chosen;
        by default 16,384.
      max_shapes: the most buckets, that is, compiled programs, where they are chosen; by default 4.
      layout: where to run, as for `make_train_step`: rows are spread over data shards.
      progress: whether to show progress bars.

    Returns:
      int32[n] for each sample: its new tokens, with the end token. The G samples of a prompt follow each other. With
      `return_log_probs`, this list and one of float32[n]: log probabilities as `token_log_probs` has them, of the
      logits divided by the temperature, or at temperature 0 as they are, before `top_k` and `top_p`.

    Raises:
      ValueError: prompts that are not tokens of the model, or alone exceed `max_tokens` or all buckets; or buckets
        that hold no prompt with its new tokens; they are listed. Or arguments that are not as described, or several
        samples at temperature 0, which would be the same.

    Example:
      >>> from jvarlen.models import init_params
      >>> config = DecoderConfig(width=16)
      >>> new = generate(init_params(config, 0), config, [[1, 2, 3], []], max_new_tokens=4, progress=False)
      >>> [tokens.shape for tokens in new]
      [(4,), (4,)]
    """
    check_at_least_one(max_new_tokens=max_new_tokens)
    check_sampling(temperature=temperature, top_k=top_k, top_p=top_p, samples_per_prompt=samples_per_prompt)
    if top_k is not None and top_k > config.num_values:
        raise UserError(f"top_k ({top_k}) must be at most {config.num_values}, the tokens of the model")
    options = _Options(
        config=config,
        num_new=max_new_tokens,
        num_samples=samples_per_prompt,
        ends=_ends_of(end_token, config),
        top_k=top_k,
        has_log_probs=return_log_probs,
    )
    inputs = _first_inputs(prompts, config)
    ids_of_prompts = _ids_of(ids, len(inputs))
    if not inputs:
        return ([], []) if return_log_probs else []
    rows = [np.pad(first, (0, max_new_tokens - 1)) for first in inputs]  # with room for what follows
    lengths = [*map(len, rows)]
    if buckets is not None:
        _check_buckets(buckets, lengths, max_new_tokens)
    held = params.params if isinstance(params, TrainState) else params
    new = predict(
        _make_generate(options),
        _State(held, key_of_seed(seed), *(None if not value else np.float32(value) for value in (temperature, top_p))),
        [{"tokens": row, "prompt_id": i} for row, i in zip(rows, ids_of_prompts, strict=True)],
        lengths=lengths,
        fields={"tokens": "length", "prompt_id": "row"},
        buckets=buckets,
        axes="row",
        layout=layout,
        progress=progress,
        **_limits(max_tokens, max_shapes, samples_per_prompt, lengths, chooses=buckets is None),
    )
    tokens = [row[:count] for found in new for row, count in zip(found.tokens, found.counts, strict=True)]
    if not return_log_probs:
        return tokens
    return tokens, [row[:count] for found in new for row, count in zip(found.log_probs, found.counts, strict=True)]


class _Options(NamedTuple):
    """What programs depend on."""

    config: DecoderConfig
    num_new: int
    num_samples: int
    ends: tuple[int, ...]
    top_k: int | None
    has_log_probs: bool


class _State(NamedTuple):
    """The values that all steps share: the parameters, the key of the seed, and float32[] to draw by, if given."""

    params: Params
    key: Array
    temperature: Any
    top_p: Any


class _Generated(NamedTuple):
    """New tokens of each row, int32[G, N], their number, int32[G], and log probabilities float32[G, N], or None."""

    tokens: Array
    counts: Array
    log_probs: Array | None


def _ids_of(ids: npt.ArrayLike | None, num_prompts: int) -> Int32[np.ndarray, " prompts"]:
    """The ids of prompts; raises ValueError unless they are 32-bit integers of at least 0, one a prompt."""
    given = np.arange(num_prompts) if ids is None else np.asarray(ids)
    if given.shape != (num_prompts,) or (num_prompts and given.dtype.kind not in "iu"):
        raise UserError(f"ids must be {num_prompts} integers, one a prompt, not {given.dtype}{list(given.shape)}")
    if (wrong := given[(given < 0) | (given >= 2**31)]).size:
        raise UserError(f"ids must be from 0 to {2**31 - 1}, not {list_first(wrong.tolist())}")
    return given.astype(np.int32)


def _ends_of(end_token: int | Sequence[int] | None, config: DecoderConfig) -> tuple[int, ...]:
    """All end tokens; raises ValueError that lists those that are not tokens of the model."""
    ends = () if end_token is None else tuple(end_token) if isinstance(end_token, Sequence) else (end_token,)
    if wrong := [repr(end) for end in ends if not (is_integer(end) and 0 <= end < config.num_values)]:
        raise UserError(
            f"end_token must be a token of the model, from 0 to {config.num_values - 1}, or a list of some, not "
            f"{list_first(wrong)}"
        )
    return ends


def _limits(
    max_tokens: int | None, max_shapes: int | None, num_samples: int, lengths: list[int], *, chooses: bool
) -> PlanBudgetFields:
    """The budget of rows of prompts; raises ValueError that lists prompts whose samples alone exceed it."""
    limits: PlanBudgetFields = {"max_tokens": 16_384, "max_shapes": 4} if chooses else {}
    if max_tokens is not None:
        limits["max_tokens"] = max_tokens
    if max_shapes is not None:
        limits["max_shapes"] = max_shapes
    if num_samples > 1 and "max_tokens" in limits:
        most = limits["max_tokens"] // num_samples
        if wrong := [f"prompt {i}: {length}" for i, length in enumerate(lengths) if length > most]:
            raise UserError(
                f"max_tokens {limits['max_tokens']} leaves {most} positions to each of {num_samples} samples of a "
                f"prompt, new tokens included: give at least {max(lengths) * num_samples}: {list_first(wrong)}"
            )
        limits["max_tokens"] = most
    return limits


def _check_buckets(
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]], lengths: list[int], max_new_tokens: int
) -> None:
    """Raises ValueError that lists buckets without room for new tokens, or prompts that are too long for all."""
    of_given = [(each.lengths[0], str(each)) for each in check_buckets(buckets).shapes]
    if wrong := [each for length, each in of_given if length < max_new_tokens]:
        raise UserError(
            f"buckets that hold no prompt and {max_new_tokens} new tokens (max_new_tokens): {list_first(wrong)}"
        )
    longest = of_given[-1][0]
    if wrong := [f"prompt {i}: {length}" for i, length in enumerate(lengths) if length > longest]:
        raise UserError(f"prompts need more positions, new tokens included, than {longest}: {list_first(wrong)}")


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
    """Decoding so far: how many tokens are new, each sample's and whether it has ended, and whether one has not."""

    num_new: Array
    tokens: Array
    counts: Array
    is_done: Array
    goes_on: Array
    caches: list[_Cache]
    log_probs: Array | None = None


@functools.lru_cache(maxsize=8)  # equal arguments give the same function, and so the same programs
def _make_generate(options: _Options) -> Callable[[_State, dict[str, Array]], _Generated]:
    """A function for `predict` of prompts with room for what follows."""
    config, num_samples, num_new = options.config, options.num_samples, options.num_new
    graphdef = graphs_of(config)[0]

    def generate_step(state: _State, rows: dict[str, Array]) -> _Generated:
        lengths_B = jnp.maximum(rows["lengths"] - (num_new - 1), 0)  # of first inputs
        params = whole_params(state.params, config)
        logits_BxV, of_prompts = _prefill(nnx.merge(graphdef, params), rows["tokens"], lengths_B, num_new)
        begun = logits_BxV, of_prompts, lengths_B, rows["is_real"]
        if num_samples > 1:
            begun = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_samples, axis=0), begun)
        logits_RxV, caches, lengths_R, is_real_R = begun
        keys_R = _keys_of_samples(state.key, rows["prompt_id"], num_samples)

        def append(decoding: _Decoding, logits_RxV: Array) -> _Decoding:
            keys = jax.vmap(jax.random.fold_in)(keys_R, lengths_R + decoding.num_new)
            new_R, log_probs_R = _choose(options, state, keys, logits_RxV)

            def put(new: Array, into: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(into, new[:, None], decoding.num_new, axis=1)

            is_done = decoding.is_done | jnp.isin(new_R, np.array(options.ends, np.int32))
            return decoding._replace(
                num_new=decoding.num_new + 1,
                tokens=put(new_R, decoding.tokens),
                log_probs=jax.tree.map(put, log_probs_R, decoding.log_probs),
                counts=decoding.counts + ~decoding.is_done,
                is_done=is_done,
                goes_on=_on_any_shard(~jnp.all(is_done)),
            )

        def is_unfinished(decoding: _Decoding) -> Array:
            return (decoding.num_new < num_new) & decoding.goes_on

        def decode_one(decoding: _Decoding) -> _Decoding:
            logits_RxV, caches = _decode(nnx.merge(graphdef, params), decoding, lengths_R)
            return append(decoding._replace(caches=caches), logits_RxV)

        tokens_RxN = jnp.zeros((len(lengths_R), num_new), jnp.int32)
        log_probs_RxN = jnp.zeros(tokens_RxN.shape, logits_RxV.dtype) if options.has_log_probs else None
        counts_R, goes_on = jnp.zeros_like(lengths_R), jnp.array(True)
        first = _Decoding(jnp.int32(0), tokens_RxN, counts_R, ~is_real_R, goes_on, caches, log_probs_RxN)
        decoding = jax.lax.while_loop(is_unfinished, decode_one, append(first, logits_RxV))
        found = _Generated(decoding.tokens, decoding.counts, decoding.log_probs)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, num_samples, *leaf.shape[1:]), found)

    return generate_step


def _on_any_shard(flag: Array) -> Array:
    """Whether it holds on a shard of rows. They take as many turns, as devices of "tensor" share what is in a turn."""
    mesh = jax.sharding.get_abstract_mesh()
    shares = any(mesh.shape[name] > 1 for name in {*mesh.axis_names} - {*mesh.manual_axes})
    return jax.lax.pmax(flag.astype(jnp.int32), mesh.manual_axes) > 0 if shares and mesh.manual_axes else flag


def _keys_of_samples(key: Array, ids_B: Int32[Array, " B"], num_samples: int) -> Array:
    """The keys of all samples, R; the first one of a prompt has that of the prompt."""
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, ids_B)
    numbers = (2**32 - np.arange(1, num_samples)).astype(np.uint32)  # which no position has
    others_BxG = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys_B, numbers)
    return jnp.concatenate([keys_B[:, None], others_BxG], axis=1).ravel()


def _choose(
    options: _Options, state: _State, keys_R: Array, logits_RxV: Float[Array, "R V"]
) -> tuple[Int32[Array, " R"], Float[Array, " R"] | None]:
    """The next tokens, and their log probabilities if asked for."""
    is_greedy = state.temperature is None
    logits_RxV = logits_RxV if is_greedy else logits_RxV / state.temperature
    of_tokens = logits_RxV[:, : options.config.num_values]  # what begins samples never follows
    if is_greedy:
        new_R = jnp.argmax(of_tokens, axis=-1)
    else:
        new_R = jax.vmap(jax.random.categorical)(keys_R, _keep_likely(of_tokens, options.top_k, state.top_p))
    log_probs_R = None
    if options.has_log_probs:
        chosen_R = jnp.take_along_axis(logits_RxV, new_R[:, None], axis=-1)[:, 0]
        log_probs_R = chosen_R - jax.nn.logsumexp(logits_RxV, axis=-1)
    return new_R.astype(jnp.int32), log_probs_R


def _keep_likely(logits_RxV: Float[Array, "R V"], top_k: int | None, top_p: Array | None) -> Float[Array, "R V"]:
    """The logits of the k likeliest tokens and, of these, of the fewest with the probability p; −∞ for others."""
    if top_k is None and top_p is None:
        return logits_RxV
    largest = jax.lax.top_k(logits_RxV, top_k or logits_RxV.shape[1])[0]
    num_kept_R = jnp.full(len(largest), largest.shape[1])
    if top_p is not None:
        before = jnp.cumsum(jax.nn.softmax(largest, axis=-1), axis=-1)[:, :-1]  # of each but the likeliest
        num_kept_R = 1 + jnp.sum(before < top_p, axis=-1)
    least_Rx1 = jnp.take_along_axis(largest, num_kept_R[:, None] - 1, axis=-1)
    return jnp.where(logits_RxV < least_Rx1, -jnp.inf, logits_RxV)


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
