"""A model that `jvarlen` writes and `torch_ref` reads: the same logits and the same tokens; others are refused."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from jvarlen import no_recompiles
from jvarlen.models import Decoder, DecoderConfig, flat_params, generate, init_params, save_params
from jvarlen.models.decoder import Rows

safetensors_numpy = pytest.importorskip("safetensors.numpy")

CONFIG = DecoderConfig(num_layers=2, width=32, num_heads=2, vocab_size=300)
# Larger than at the start of a training, so that what is attended to decides.
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 17))


@functools.cache
def initial_params():
    with jax.enable_x64(False):
        return jax.tree.map(lambda leaf: leaf * 2, init_params(CONFIG, seed=1))


@pytest.fixture
def path(tmp_path):
    save_params(tmp_path / "model.safetensors", initial_params(), CONFIG)
    return tmp_path / "model.safetensors"


def logits_of(params, tokens_BxT):
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    lengths_B = np.full(len(tokens_BxT), tokens_BxT.shape[1])
    inputs_BxT = np.pad(tokens_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=CONFIG.vocab_size)
    logits_fn = jax.jit(lambda params, inputs, lengths: nnx.merge(graphdef, params)(inputs, Rows(lengths=lengths)))
    return np.asarray(logits_fn(params, inputs_BxT, lengths_B))


def test_the_logits_are_those_of_the_model_that_was_written(path):
    model = torch_ref.load_model(path)
    logits_BxTxV = model(torch.from_numpy(TOKENS)).detach().numpy()
    np.testing.assert_allclose(logits_BxTxV, logits_of(initial_params(), TOKENS), rtol=1e-5, atol=1e-5)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(np.float64), initial_params())
        expected_BxTxV = logits_of(params, TOKENS)
    logits_BxTxV = model.double()(torch.from_numpy(TOKENS)).detach().numpy()
    np.testing.assert_allclose(logits_BxTxV, expected_BxTxV, rtol=1e-12, atol=1e-12)


def test_greedy_tokens_of_a_hundred_prompts_are_the_same_and_only_buckets_are_compiled(path):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 300, length) for length in rng.integers(0, 50, 100)]
    with no_recompiles("count") as count:
        tokens = generate(
            initial_params(), CONFIG, prompts, max_new_tokens=8, max_tokens=2048, max_shapes=2, progress=False
        )
    assert count.functions == ["generate_step"] * 2
    expected = torch_ref.generate(torch_ref.load_model(path), prompts, 8)
    assert [new.tolist() for new in tokens] == [new.tolist() for new in expected]
    assert len(set(np.concatenate(tokens).tolist())) > 50, "too few tokens to tell"

    end_token = int(expected[0][3])
    with_end = torch_ref.generate(torch_ref.load_model(path), prompts[:20], 8, end_token=end_token)
    cut = [new[: np.flatnonzero(new == end_token)[:1].sum() + 1] if end_token in new else new for new in expected[:20]]
    assert [new.tolist() for new in with_end] == [new.tolist() for new in cut]


def test_how_the_trained_model_computes_is_no_obstacle(tmp_path):
    config = dataclasses.replace(CONFIG, attention="chunked", packed_attention="xla", compute_dtype="bfloat16")
    save_params(tmp_path / "model.safetensors", initial_params(), config)
    assert torch_ref.load_model(tmp_path / "model.safetensors").embed.weight.dtype == torch.float32


SIZES = {"num_layers": 2, "width": 32, "vocab_size": 300, "num_heads": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "is of another model: its metadata have no config; its tensors are blocks.0.down.kernel, "),
        (SIZES | {"num_kv_heads": 1, "tied": True}, "there is no such setting of the model here: num_kv_heads=1, tied"),
        (SIZES | {"width": "32"}, "its config must have integers as width"),
        ([1], "its config is no JSON object"),
        (SIZES | {"num_heads": 3}, "embed_dim=32 must be an even multiple of num_heads=3"),
        (SIZES | {"num_layers": 1}, "unexpected: blocks.1.down.kernel"),
        (SIZES | {"num_layers": 3}, "missing: blocks.2.norm1.scale"),
        (SIZES | {"vocab_size": 7}, "embed.embedding: shape (301, 32), expected (8, 32)"),
    ],
)
def test_files_of_other_models_are_refused_with_the_names_of_what_differs(tmp_path, config, message):
    path = tmp_path / "model.safetensors"
    metadata = {} if config is None else {"config": json.dumps(config)}
    safetensors_numpy.save_file(flat_params(initial_params()), path, metadata)
    with pytest.raises(ValueError, match=r"model\.safetensors") as raised:
        torch_ref.load_model(path)
    assert message in str(raised.value)


def test_what_is_no_model_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no model file .*model\.safetensors"):
        torch_ref.load_model(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is no readable safetensors file"):
        torch_ref.load_model(tmp_path / "model.safetensors")
