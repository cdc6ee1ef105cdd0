"""Samples: the tokens of whole rows run again, whatever is batched with them; nothing compiled but the buckets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jvarlen
from jvarlen import UserError, make_buckets, make_train_step, no_recompiles
from jvarlen.inference import generate, generation
from jvarlen.models import DecoderConfig, from_hugging_face, init_params, layered, token_log_probs
from jvarlen.models.decoder import Rows, graphs_of
from tests.support.meshes import data_mesh

CONFIG = DecoderConfig(num_layers=1, width=32, num_heads=2, vocab_size=51)
# Larger than at the start of a training, so that what is attended to decides.
PARAMS = jax.tree.map(lambda leaf: leaf * 5, init_params(CONFIG, seed=1))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 50, length) for length in (0, 1, 2, 3, 5, 8, 13, 21, 30, 4, 0)]
NUM_NEW = 9


def continued(prompts=PROMPTS, config=CONFIG, params=PARAMS, **options):
    options = {"max_new_tokens": NUM_NEW, "progress": False} | options
    return [tokens.tolist() for tokens in generate(params, config, prompts, **options)]


@functools.partial(jax.jit, static_argnames="config")
def logits_of_rows(tokens_BxT, lengths_B, config=CONFIG, params=PARAMS):
    """The logits of what follows each position, and of the first token where the model begins samples."""
    if config.begins_samples:
        tokens_BxT = jnp.pad(tokens_BxT, ((0, 0), (1, 0)), constant_values=config.begin_token)
    logits_BxTxV = nnx.merge(graphs_of(config)[0], params)(tokens_BxT, Rows(lengths_B + config.begins_samples))
    return logits_BxTxV[:, :, : config.num_values]


def continued_without_cache(prompts, config=CONFIG, params=PARAMS, num_new=NUM_NEW):
    """The likeliest tokens, with the whole rows run again for each."""
    lengths_B = np.array([len(prompt) for prompt in prompts])
    rows_BxT = np.zeros((len(prompts), max(lengths_B) + num_new), np.int32)
    for row, prompt in zip(rows_BxT, prompts, strict=True):
        row[: len(prompt)] = prompt
    each = np.arange(len(prompts))
    for place_B in np.arange(num_new)[:, None] + lengths_B:
        logits_BxTxV = logits_of_rows(rows_BxT, place_B, config, params)
        last_BxV = np.asarray(logits_BxTxV)[each, place_B - (not config.begins_samples)]
        rows_BxT[each, place_B] = np.argmax(last_BxV, axis=-1)
    return [row[length : length + num_new].tolist() for row, length in zip(rows_BxT, lengths_B, strict=True)]


@pytest.fixture(scope="module")
def of_whole_rows():
    return continued_without_cache(PROMPTS)


def test_greedy_tokens_are_those_of_whole_rows_run_again(of_whole_rows):
    assert continued(max_shapes=2) == of_whole_rows
    assert len({token for tokens in of_whole_rows for token in tokens}) > 10, "too few tokens to tell"


# Every parameter that a family has, and every way in which a token sees others.
FAMILIES = {
    "llama": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 7},
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request):
    """A tiny random model of `transformers`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(request.param, **sizes | FAMILIES[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:  # biases begin as 0, scales of norms as 1
                param.add_(0.3 * torch.randn_like(param))
    return model


def test_greedy_tokens_are_those_of_transformers(reference, tmp_path):
    import torch

    reference.save_pretrained(tmp_path)
    config, params = from_hugging_face(tmp_path)
    prompts = [np.random.default_rng(length).integers(0, 97, length) for length in (1, 11, 40)]
    expected = [
        reference.generate(torch.tensor(prompt)[None], do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert all(len(set(tokens)) > 8 for tokens in expected), "too few tokens to tell"
    assert continued(prompts, config, params, max_new_tokens=24, max_shapes=1) == expected


def test_a_continuation_depends_neither_on_buckets_nor_on_devices():
    options = {"temperature": 1.0, "seed": 3}
    whole = continued(max_shapes=1, **options)
    assert continued(max_tokens=60, max_shapes=2, **options) == whole
    assert continued(layout=data_mesh(4), max_shapes=1, **options) == whole


def test_logits_with_a_cache_are_those_of_whole_rows():
    num_new, prompts = 3, PROMPTS[1:8:3]
    lengths_B = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    rng = np.random.default_rng(1)
    rows = [np.concatenate([prompt, rng.integers(0, 50, num_new)]) for prompt in prompts]
    num_slots = max(map(len, rows)) - 1
    tokens_BxT = np.stack([np.pad(row[:-1], (0, num_slots - len(row) + 1)) for row in rows])
    new_BxN = jnp.stack([row[-num_new:] for row in rows]).astype(jnp.int32)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), PARAMS)
        model = nnx.merge(graphs_of(CONFIG)[0], params)
        logits, caches = generation._prefill(model, jnp.asarray(tokens_BxT, jnp.int32), lengths_B, num_new)
        found = [logits]
        for num in range(1, num_new):
            decoding = generation._Decoding(jnp.int32(num), new_BxN, None, None, None, caches)
            logits, caches = generation._decode(model, decoding, lengths_B)
            found.append(logits)
        whole_BxTxV = model(jnp.asarray(tokens_BxT, jnp.int32), Rows(lengths_B + num_new - 1))
        assert whole_BxTxV.dtype == np.float64
        for b, length in enumerate(lengths_B.tolist()):
            cached_NxV = np.stack([logits[b] for logits in found])
            np.testing.assert_allclose(cached_NxV, whole_BxTxV[b, length - 1 :][:num_new], rtol=1e-12, atol=1e-12)


def test_random_tokens_depend_on_the_seed_and_on_the_index_of_the_prompt():
    drawn = continued([[1, 2, 3]] * 4, temperature=1.0, seed=1)
    assert len({tuple(tokens) for tokens in drawn}) == 4
    assert continued([[1, 2, 3]] * 4, temperature=1.0, seed=1) == drawn
    assert continued([[1, 2, 3]] * 4, temperature=1.0, seed=2) != drawn


def test_random_tokens_have_the_probabilities_of_the_model_at_this_temperature():
    num_draws, temperature = 4000, 0.7
    drawn = continued([[]] * num_draws, temperature=temperature, max_new_tokens=1, max_shapes=1)
    logits_V = logits_of_rows(np.zeros((1, 0), np.int32), np.zeros(1, np.int32))[0, 0]
    expected_V = num_draws * np.asarray(jax.nn.softmax(logits_V / temperature))
    counted_V = np.bincount(np.ravel(drawn), minlength=CONFIG.num_values)
    chi_square = np.sum((counted_V - expected_V) ** 2 / expected_V)
    degrees = CONFIG.num_values - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def test_a_continuation_ends_with_the_first_of_several_end_tokens(of_whole_rows):
    ends = [of_whole_rows[3][2], of_whole_rows[4][5]]
    places = [[place for place, token in enumerate(tokens) if token in ends] for tokens in of_whole_rows]
    cut = [tokens[: min(found, default=NUM_NEW) + 1] for tokens, found in zip(of_whole_rows, places, strict=True)]
    assert {tokens[-1] for tokens in cut} > set(ends)
    assert continued(end_token=ends, max_shapes=1) == cut


def test_a_program_a_bucket_is_compiled_and_nothing_else():
    options = {"max_new_tokens": NUM_NEW - 1, "max_shapes": 2}
    buckets = make_buckets([len(prompt) + NUM_NEW - 1 for prompt in PROMPTS], 16_384, max_shapes=2)
    with no_recompiles("count") as count:
        continued(**options)
    assert count.functions == ["generate_step"] * len(buckets.shapes) == ["generate_step"] * 2
    with no_recompiles():
        continued([prompt[::-1] for prompt in PROMPTS], **options)


def test_given_shapes_are_compiled_once_whatever_the_prompts(of_whole_rows):
    options = {"buckets": [(2, 16), (4, 16), (3, 40)], "max_new_tokens": NUM_NEW}
    with no_recompiles("count") as count:
        continued(PROMPTS[:1], **options)
    assert count.functions == ["generate_step"] * 3
    with no_recompiles():
        assert continued(**options) == of_whole_rows
        assert continued(PROMPTS[3:8], **options) == of_whole_rows[3:8]
    with pytest.raises(UserError, match=r"more positions, new tokens included, than 40: prompt 1: 49$"):
        continued([[1], [1] * 40], **options)
    for longest in (NUM_NEW - 1, NUM_NEW - 2):
        with pytest.raises(UserError, match=rf"hold no prompt and {NUM_NEW} new tokens .*: 4×{longest}$"):
            continued([[1]], buckets=[(4, longest), (2, 40)])
    assert continued([[1]], buckets=[(4, NUM_NEW), (2, 40)]) == continued([[1]])
    with pytest.raises(UserError, match="max_shapes: buckets are given"):
        continued(max_shapes=2, **options)


@pytest.mark.parametrize(("compute_dtype", "dtype"), [("bfloat16", "float32"), (None, "float16")])
def test_in_sixteen_bits_tokens_are_the_likeliest_up_to_rounding(compute_dtype, dtype):
    config = dataclasses.replace(CONFIG, compute_dtype=compute_dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    rows_BxT = np.zeros((len(PROMPTS), 40), np.int32)
    lengths_B = np.array([len(prompt) for prompt in PROMPTS])
    new_BxN = np.array(continued(config=config, params=params, max_shapes=1))
    for row, prompt, new in zip(rows_BxT, PROMPTS, new_BxN, strict=True):
        row[: len(prompt) + NUM_NEW] = [*prompt, *new]
    logits_BxTxV = np.asarray(logits_of_rows(rows_BxT, lengths_B + NUM_NEW, config, params))
    assert logits_BxTxV.dtype == np.float32, "many of 16 bits would be equal"
    logits_BxNxV = logits_BxTxV[np.arange(len(PROMPTS))[:, None], lengths_B[:, None] + np.arange(NUM_NEW)]
    chosen_BxN = np.take_along_axis(logits_BxNxV, new_BxN[..., None], axis=2)[..., 0]
    assert np.max(logits_BxNxV.max(axis=2) - chosen_BxN) < 0.02 * logits_BxNxV.std()


def log_probs_of(prompts, new, temperature, config=CONFIG, params=PARAMS):
    """Those of new tokens, each continuation in a row of its own after its prompt."""
    samples = [np.concatenate([prompt, tokens]).astype(np.int32) for prompt, tokens in zip(prompts, new, strict=True)]

    def of_rows(params, rows):
        return token_log_probs(params, config, rows, temperature=temperature)

    found = jvarlen.predict(of_rows, params, samples, max_tokens=1024, max_shapes=1, progress=False)
    return [log_probs[len(prompt) :] for log_probs, prompt in zip(found, prompts, strict=True)]


DRAWN = {"temperature": 0.75, "top_k": 9, "top_p": 0.8, "samples_per_prompt": 3, "end_token": 5}


@pytest.mark.parametrize(
    ("options", "dtype", "scale", "atol"),
    [({"end_token": [3, 7]}, "float32", 0.4, 1e-5), (DRAWN, "float32", 0.4, 1e-5), (DRAWN, "float64", 1, 1e-12)],
)
def test_log_probabilities_are_those_of_the_tokens_in_their_rows(options, dtype, scale, atol):
    """Whatever is drawn from: all tokens of the vocabulary, also the one that begins samples."""
    options = {"max_new_tokens": NUM_NEW, "max_shapes": 2, "progress": False} | options
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda leaf: scale * leaf.astype(dtype), PARAMS)
        new, log_probs = generate(params, CONFIG, PROMPTS, return_log_probs=True, **options)
        prompts = [prompt for prompt in PROMPTS for _ in range(options.get("samples_per_prompt", 1))]
        expected = log_probs_of(prompts, new, options.get("temperature", 1.0), params=params)
    assert len({len(tokens) for tokens in new}) > 2
    for found, of_rows in zip(log_probs, expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, of_rows, rtol=0, atol=atol)


def test_samples_of_a_prompt_depend_on_seed_id_and_number_alone():
    options = {"temperature": 1.0, "seed": 3}
    alone = continued(max_shapes=1, **options)
    found = continued(samples_per_prompt=3, max_shapes=2, **options)
    assert found[::3] == alone, "the first ones are those of one sample a prompt"
    assert len({*map(tuple, found)}) == len(found)
    assert [continued(samples_per_prompt=2, max_shapes=1, **options)[i] for i in (0, 1, 2)] == [*found[:2], found[3]]
    part = [7, 2, 4]
    prompts = [PROMPTS[i] for i in part]
    for layout in (None, data_mesh(4)):
        of_part = continued(prompts, ids=part, samples_per_prompt=3, max_shapes=1, layout=layout, **options)
        assert of_part == [sample for i in part for sample in found[3 * i : 3 * i + 3]]


def test_a_prompt_is_computed_once_for_all_its_samples(monkeypatch):
    num_rows = {"_prefill_layer": set(), "_decode_layer": set()}
    for name, seen in num_rows.items():
        call = getattr(generation, name)
        monkeypatch.setattr(
            generation, name, lambda *args, call=call, seen=seen: (seen.add(len(args[2])), call(*args))[1]
        )
    config = dataclasses.replace(CONFIG, width=24)  # of no other test
    options = {"config": config, "params": init_params(config, 0), "samples_per_prompt": 5, "temperature": 1.0}
    continued([[1, 2], [3], [4, 5, 6]], buckets=[(4, 16)], **options)
    assert max(num_rows["_prefill_layer"]) * 5 == max(num_rows["_decode_layer"])
    assert {5 * rows for rows in num_rows["_prefill_layer"]} == num_rows["_decode_layer"]


@pytest.mark.parametrize(("top_k", "top_p"), [(4, None), (None, 0.6), (6, 0.5), (1, None), (None, 1e-9), (50, 1.0)])
def test_only_likely_tokens_are_kept(top_k, top_p):
    logits = np.random.default_rng(0).normal(0, 2, (64, 50)).astype(np.float32)
    found = np.isfinite(generation._keep_likely(jnp.asarray(logits), top_k, top_p and jnp.float32(top_p)))
    for row, kept in zip(logits.astype(np.float64), found, strict=True):
        order = np.argsort(-row)[: top_k or 50]
        probabilities = np.exp(row[order]) / np.exp(row[order]).sum()
        num = len(order) if top_p is None else 1 + np.sum(np.cumsum(probabilities)[:-1] < top_p)
        assert {*np.flatnonzero(kept)} == {*order[:num]}


def test_drawn_tokens_have_their_probabilities_among_the_likely_ones():
    num_draws, temperature = 4000, 1.3
    options = {"temperature": temperature, "top_k": 12, "top_p": 0.8, "max_new_tokens": 1, "max_shapes": 1}
    drawn = continued([[]], samples_per_prompt=num_draws, **options)
    logits_V = logits_of_rows(np.zeros((1, 0), np.int32), np.zeros(1, np.int32))[0, 0] / temperature
    likely_V = generation._keep_likely(logits_V[None], 12, jnp.float32(0.8))[0]
    expected_V = num_draws * np.asarray(jax.nn.softmax(likely_V))
    counted_V = np.bincount(np.ravel(drawn), minlength=CONFIG.num_values)
    is_kept = expected_V > 0
    assert 2 < is_kept.sum() < 12
    assert not counted_V[~is_kept].any()
    chi_square = np.sum((counted_V - expected_V)[is_kept] ** 2 / expected_V[is_kept])
    degrees = is_kept.sum() - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)


def test_in_given_shapes_only_values_of_options_may_change_without_compiling():
    options = {"buckets": [(3, 40)], "samples_per_prompt": 2}
    continued(PROMPTS[:2], temperature=0.7, top_p=0.9, **options)
    with no_recompiles():
        first = continued(PROMPTS[2:8], temperature=1.2, top_p=0.5, seed=5, ids=[9, 8, 7, 6, 5, 4], **options)
    assert continued(PROMPTS[2:8], temperature=1.2, top_p=0.5, seed=5, ids=[9, 8, 7, 6, 5, 4], **options) == first


@pytest.mark.parametrize("layout", ["data2.zero3", "data2.tensor2", "data2.stage2.zero1"])
def test_a_state_generates_and_predicts_as_it_lies(layout):
    config = dataclasses.replace(CONFIG, num_layers=2)  # of 51 values, which two devices do not divide
    params = jax.tree.map(lambda leaf: leaf * 5, init_params(config, seed=1))
    options = {"max_shapes": 1, "temperature": 1.0, "samples_per_prompt": 2}
    state = make_train_step(layered(config), optax.adam(1e-3), layout=layout).init(params)
    expected = continued(config=config, params=params, **options)
    assert continued(config=config, params=state, layout=layout, **options) == expected
    with pytest.raises(UserError, match=r"the parameters lie on \d devices: give the layout= of their step"):
        continued(config=config, params=state, **options)
    new = [np.array(tokens) for tokens in expected[::2]]
    expected = log_probs_of(PROMPTS, new, 1.0, config, params)

    def of_rows(state, rows):
        return token_log_probs(state, config, rows)

    samples = [np.concatenate([prompt, tokens]).astype(np.int32) for prompt, tokens in zip(PROMPTS, new, strict=True)]
    found = jvarlen.predict(of_rows, state, samples, max_tokens=512, max_shapes=1, layout=layout, progress=False)
    for log_probs, of_rows, prompt in zip(found, expected, PROMPTS, strict=True):
        np.testing.assert_allclose(log_probs[len(prompt) :], of_rows, rtol=0, atol=1e-4)  # parameters are large


def test_shards_without_prompts_wait_for_those_that_share_products():
    layout, config = "data2.stage2.tensor2", dataclasses.replace(CONFIG, num_layers=2)
    params = init_params(config, seed=1)
    state = make_train_step(layered(config), optax.adam(1e-3), layout=layout).init(params)
    assert continued(PROMPTS[:2], config=config, params=state, layout=layout) == continued(
        PROMPTS[:2], config=config, params=params
    )


def test_what_begins_samples_is_never_written():
    loud = jax.tree.map(lambda leaf: leaf, PARAMS)
    kernel = loud["head"]["kernel"]
    loud["head"]["kernel"] = kernel.at[:, CONFIG.begin_token].multiply(1000)
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_shapes": 1}
        assert continued(params=loud, **options) == continued(**options)


def test_arrays_of_the_host_are_copied_to_devices_once(capfd):
    mapped = jax.tree.map(lambda leaf: np.asarray(leaf.T).T, PARAMS)  # as from mapped files
    transfers = []
    for params in (PARAMS, mapped):
        options = {"params": params, "max_tokens": 100, "max_shapes": 2}
        continued(**options)
        with jax.transfer_guard_host_to_device("log"):  # only what is not asked for
            new = continued(**options)
        transfers.append(capfd.readouterr().err.count("host-to-device transfer"))
    assert new == continued(max_tokens=100, max_shapes=2)
    assert transfers == [1, 1], "the seed"


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [50, -1], [1.5], [[1]]], {}, r"from 0 to 49: prompt 1: 50, -1; prompt 2: float64\[1\]; prompt 3: int64"),
        ([[1], [1] * 60], {"max_tokens": 60}, r"max_tokens 60 leaves no row .* id 1: 69"),
        ([[1]], {"max_new_tokens": 0}, r"max_new_tokens \(0\)"),
        ([[1]], {"temperature": 1e-320}, "temperature .* must be 0, or from 1e-30 to 1e30"),
        ([[1]], {"temperature": -1.0}, "temperature .* must be 0, or from 1e-30 to 1e30"),
        ([[1]], {"temperature": float("nan")}, "temperature .* must be 0, or from 1e-30 to 1e30"),
        ([[1]], {"top_k": 0}, r"top_k \(0\)"),
        ([[1]], {"top_k": 51}, r"top_k \(51\) must be at most 50, the tokens of the model"),
        ([[1]], {"top_p": 0.0}, r"top_p \(0.0\) must be above 0, and at most 1"),
        ([[1]], {"top_p": 1.5}, r"top_p \(1.5\) must be above 0, and at most 1"),
        ([[1]], {"samples_per_prompt": 0}, r"samples_per_prompt \(0\)"),
        ([[1]], {"samples_per_prompt": 2}, "samples_per_prompt .2. are all the same at temperature 0"),
        (
            [[1], [1] * 60],
            {"samples_per_prompt": 4, "temperature": 1.0, "max_tokens": 200},
            "max_tokens 200 leaves 50 positions to each of 4 samples .* included: give at least 276: prompt 1: 69",
        ),
        ([[1], [2]], {"ids": [1]}, r"ids must be 2 integers, one a prompt, not int64\[1\]"),
        ([[1], [2]], {"ids": [-1, 2**31]}, "ids must be from 0 to 2147483647, not -1, 2147483648"),
        ([[1]], {"end_token": 50}, "end_token must be a token of the model, from 0 to 49, or a list of some, not 50"),
        ([[1]], {"end_token": [1, -1, 51]}, "end_token must be a token .* or a list of some, not -1, 51"),
        ([[1]], {"end_token": np.array([1])}, r"end_token must be a token .* or a list of some, not array\(\[1\]\)"),
    ],
)
def test_what_cannot_be_continued_is_listed(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        continued(prompts, **options)


def test_without_a_token_that_begins_samples_empty_prompts_are_listed():
    config = dataclasses.replace(CONFIG, begins_samples=False)
    with pytest.raises(ValueError, match="from 0 to 50: prompt 1: empty, and the model has no token that begins"):
        continued([[50], []], config)
