"""The names at Hugging Face of the decoder's parameters."""

from __future__ import annotations

__all__ = ["EMBEDDING", "HEAD", "tensor_name"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PARTS = {
    "embed": "embed_tokens", "attention_norm": "input_layernorm", "attention": "self_attn", "out": "o_proj",
    "mlp_norm": "post_attention_layernorm", **{name: f"{name}_proj" for name in ("q", "k", "v", "gate", "up", "down")},
    "head": "lm_head", "kernel": "weight", "scale": "weight", "embedding": "weight",
    "lora_a": "lora_A.weight", "lora_b": "lora_B.weight",
}  # fmt: skip


def tensor_name(parameter: str) -> str:
    """The name at Hugging Face of a parameter such as `layers.0.attention.q.kernel`, or in PEFT, of one of adapters."""
    name = ".".join(_PARTS.get(part, part) for part in parameter.split("."))
    name = name if name == HEAD else f"model.{name}"
    return f"base_model.model.{name}" if parameter.endswith((".lora_a", ".lora_b")) else name
