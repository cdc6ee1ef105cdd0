"""Both models in bfloat16, each in its framework's way: losses as near as the roundings let them be."""

import os
from pathlib import Path

import jax
import numpy as np
import torch

import torch_ref
from benchmarks.support.bfloat16_on_cpu import environment_for_bfloat16
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.models.hugging_face import hugging_face_tensors
from tests.support.hand_made import batch_of

from .twin import gradients_of, make_torch_model

CPU = Path("/proc/cpuinfo")
if not CPU.exists() or "amx" in CPU.read_text():  # what some machines announce and trap
    os.environ.update(environment_for_bfloat16())  # here: once a test has multiplied anything, it is too late

CONFIG = DecoderConfig(num_layers=2, width=32, num_heads=2, compute_dtype="bfloat16")


def test_bfloat16_gives_the_loss_and_gradient_that_autocast_gives():
    params = init_params(CONFIG, seed=1)
    model = make_torch_model(CONFIG, params)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 48))
    lengths = np.array([48, 1, 30, 7])
    weights = (np.arange(48) < lengths[:, None]).astype(np.float32)
    batch = batch_of(tokens.astype(np.int32), lengths.astype(np.int32), weights, np.float32(4))
    (loss, _), grads = jax.jit(jax.value_and_grad(make_loss_fn(CONFIG), has_aux=True))(params, batch)
    torch_batch = torch_ref.Batch(torch.from_numpy(tokens), torch.from_numpy(lengths), torch.from_numpy(weights), 4.0)
    with torch.autocast("cpu", torch.bfloat16):
        reference, _ = torch_ref.loss_sums(model, torch_batch)
    reference.backward()
    np.testing.assert_allclose(float(loss), float(reference.detach()), rtol=1e-3)
    found, references = hugging_face_tensors(grads, CONFIG), gradients_of(model)
    assert found.keys() == references.keys()
    for name, expected in references.items():
        # Each is up to 0.035 from the gradient in float32.
        assert np.linalg.norm(found[name] - expected) < 0.05 * np.linalg.norm(expected), name
