"""A decoder of JAX in PyTorch, and the other way round."""

import dataclasses
from typing import Any

import numpy as np
import torch

import torch_ref
from jvarlen.models import DecoderConfig
from jvarlen.models.hugging_face import hugging_face_tensors


def to_torch_config(config: DecoderConfig) -> torch_ref.DecoderConfig:
    fields = [field.name for field in dataclasses.fields(torch_ref.DecoderConfig)]
    own = {name: getattr(config, name) for name in fields}
    if config.rotary_scaling is not None:
        own["rotary_scaling"] = torch_ref.RotaryScaling(**dataclasses.asdict(config.rotary_scaling))
    return torch_ref.DecoderConfig(**own)


def make_torch_model(
    config: DecoderConfig, params: Any = None, dtype: torch.dtype = torch.float32
) -> torch_ref.Decoder:
    """The decoder in PyTorch, with parameters of JAX if there are any."""
    model = torch_ref.Decoder(to_torch_config(config)).to(dtype)
    if params is not None:
        torch_ref.load_params(model, hugging_face_tensors(params, config))
    return model


def gradients_of(model: torch_ref.Decoder) -> dict[str, np.ndarray]:
    return {name: value.grad.numpy() for name, value in model.named_parameters() if value.grad is not None}
