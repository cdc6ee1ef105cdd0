"""Sections of the GPU benchmark: a Llama of 1 B, all of it and by adapters; and learning from answers."""

from __future__ import annotations

import dataclasses
import gc
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.gpu_jax import WARM_UPS, Trainer, batches_of, measure_plan, shapes_of, timed
from support.gpu_sizes import SEED, Sizes, lengths_by_kind, pack_options
from support.gpu_worker import Answer, Save, run_section, said, say

import jvarlen
from jvarlen.inference import generate
from jvarlen.models import LoraConfig, add_lora, init_params, layered, stack_layers

LORA = LoraConfig(rank=8, targets="layers.*.kernel")


class Layers(Trainer):
    """Steps of a model whose layers run in a loop; with adapters, their base is in bfloat16 and not trained."""

    def __init__(self, model: Any, lora: LoraConfig | None):
        self._lora = lora
        super().__init__(model)

    def begin(self) -> None:
        """A state of its own, of parameters by layers."""
        self.state = None
        gc.collect()
        config = dataclasses.replace(self.config, lora=self._lora)
        params = init_params(self.config, seed=SEED)
        if self._lora is not None:
            params = add_lora(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), config, seed=SEED)
        self.step_fn = jvarlen.make_train_step(layered(config), optax.adamw(1e-4))
        stacked = stack_layers(params)
        del params
        self.state = self.step_fn.init(stacked)


def measure_llama(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Steps of one packed row of each way."""
    rows = (1, sizes.packed_rows[0][1])
    lengths = lengths_by_kind(sizes)["long-tailed"]
    plan = jvarlen.make_plan(lengths, **pack_options(rows))
    shapes = shapes_of([rows], {rows: plan.samples_per_row[0]})
    ways: dict[str, tuple[LoraConfig | None, int]] = {"all parameters": (None, 6), "LoRA": (LORA, 4)}
    for name, (lora, per_parameter) in ways.items():
        try:
            trainer = Layers(sizes.llama, lora)
            compiled, compile_s = timed(lambda trainer=trainer: trainer.compile(shapes))
            answer[name] = {"compile_s": compile_s, "bytes": compiled.report[0].total_bytes}
            answer[name] |= measure_plan(
                trainer, compiled, plan, lengths, WARM_UPS + sizes.num_steps, per_parameter=per_parameter
            )
        except Exception as error:
            answer[name] = answer.get(name, {}) | {"error": said(error)}
        say(f"llama, {name}: {answer[name]}")
        save()
        trainer = compiled = None
        gc.collect()


def measure_rollouts(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Seconds of drawing answers, and of planning and updating on them, when nothing compiles any more."""
    trainer, rng = Trainer(sizes.model), np.random.default_rng(SEED)
    half, num = sizes.longest // 8, sizes.num_prompts
    rows = sizes.packed_rows[0]
    # Fixed shapes: prompts with room for an answer, packed rows with room for as many samples as were drawn.
    shapes = [(num, half + sizes.num_new_tokens)]
    most = {rows: min(num * num, rows[1])}

    def draw(seed: int) -> list[np.ndarray]:
        prompts = [rng.integers(trainer.config.num_values, size=n) for n in rng.integers(half // 2, half, num)]
        answers = generate(
            trainer.state, trainer.config, prompts, max_new_tokens=sizes.num_new_tokens, samples_per_prompt=num,
            temperature=1.0, seed=seed, buckets=shapes, progress=False,
        )  # fmt: skip
        return [np.concatenate([prompts[i // num], each]) for i, each in enumerate(answers)]

    def plan_of(samples: list[np.ndarray]) -> Any:
        return jvarlen.plan_step([*map(len, samples)], [rows], packing="best_fit", samples_per_row=most[rows])

    _, answer["first_s"] = timed(lambda: draw(0))
    say(f"rollouts: {answer}")
    save()
    samples, answer["draw_s"] = timed(lambda: draw(1))
    answer["num_new_tokens"] = num * num * sizes.num_new_tokens
    plan, answer["plan_s"] = timed(lambda: plan_of(samples))
    compiled = trainer.compile(plan)
    lengths = np.array([*map(len, samples)])
    batches = batches_of(plan, lengths, trainer.config.num_values, 1)
    answer |= {"num_tokens": int(lengths.sum()), "groups": plan.num_groups, "padding": float(plan.padding)}
    answer["update_s"] = trainer.seconds(compiled, batches[0], sizes.repeats)
    say(f"rollouts: {answer}")


SECTIONS = {"llama": measure_llama, "rollouts": measure_rollouts}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
