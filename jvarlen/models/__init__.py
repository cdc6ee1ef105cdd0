"""A decoder of the Llama family in Flax NNX, and its files at Hugging Face.

- `config`, `decoder`: the decoder, whose small configuration is the demo. `losses`: its loss, log probabilities and
  logits.
- `elementwise`: norms and SwiGLU. `products`, `lora`: its products, and their low-rank adapters. `layers`: the decoder
  by layers, and `stacking`: its parameters so.
- `hugging_face_config`, `hugging_face`: its settings and parameters in files of Hugging Face. `adapter_config`: those
  of adapters, as PEFT has them. `tensor_names`, `tensor_files`: names of tensors there, and safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.models.config import DecoderConfig, LoraConfig, RotaryScaling, WindowSchedule
    from jvarlen.models.decoder import Decoder, init_params, with_window
    from jvarlen.models.hugging_face import (
        from_hugging_face,
        hugging_face_tensors,
        params_from_tensors,
        to_hugging_face,
    )
    from jvarlen.models.hugging_face_config import read_config
    from jvarlen.models.layers import layered
    from jvarlen.models.lora import add_lora, merge_lora
    from jvarlen.models.losses import logits, make_loss_fn, token_log_probs
    from jvarlen.models.stacking import stack_layers, unstack_layers

__all__ = [
    "Decoder", "DecoderConfig", "LoraConfig", "RotaryScaling", "WindowSchedule", "add_lora",
    "from_hugging_face", "hugging_face_tensors", "init_params", "layered", "logits", "make_loss_fn", "merge_lora",
    "params_from_tensors", "read_config", "stack_layers", "to_hugging_face", "token_log_probs", "unstack_layers",
    "with_window",
]  # fmt: skip

__getattr__, __dir__ = lazy_imports(__name__)
