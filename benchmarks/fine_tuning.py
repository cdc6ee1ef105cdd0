"""How many tokens a second does fine-tuning on chats train, against transformers with batches grouped by length?

All parameters, and adapters alone (LoRA, rank 8 on queries and values) against PEFT. Chats have lengths like those of
GSM8K, and the loss is of answers. Here, rows of 1,024 tokens are packed; there, `Trainer` takes batches of 4 chats.
Both read the same directory, compute in float32, and take turns, each in a process of its own. `--model` names the
directory; without it, the weights are random, in the shape of SmolLM2-135M.

Run `python benchmarks/fine_tuning.py [--quick] [--model DIR]`. Prints a table and writes it, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from support.timing import report, table, versions_and_hardware

ROW_LENGTH, RANK, RATE = 1024, 8, 1e-5
SMOLLM = {
    "num_layers": 30, "width": 576, "mlp_width": 1536, "num_heads": 9, "num_kv_heads": 3, "vocab_size": 49152,
    "begins_samples": False, "tied": True, "norm_epsilon": 1e-5, "rotary_base": 100_000.0,
}  # fmt: skip
TINY = SMOLLM | {"num_layers": 2, "width": 48, "mlp_width": 64, "num_heads": 3, "vocab_size": 256}


@dataclasses.dataclass(frozen=True)
class Work:
    """What both sides train: the model, chats as tokens and the length of their prompt, and which parameters."""

    model: Path
    chats: list[tuple[np.ndarray, int]]
    lora: bool


class Turns:
    """A side of the comparison: its loop calls `step` around every step, and waits for its turns in it."""

    def __init__(self, pipe: Connection):
        self._pipe, self._left = pipe, 0
        self._started = 0.0
        self._to_first: float | None = None
        self._begun = (0.0, 0.0)
        self._num_tokens = 0

    def start(self) -> None:
        """After imports."""
        self._started = time.perf_counter()

    def before(self) -> None:
        """Before a step: its first one is part of no turn."""
        if self._to_first is None:
            self._to_first = time.perf_counter() - self._started

    def after(self, num_tokens: int) -> bool:
        """After a step of so many tokens without padding: whether there is another one."""
        self._num_tokens += num_tokens
        self._left -= 1
        if self._left <= 0:
            seconds = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
            self._pipe.send((self._to_first, self._num_tokens, *seconds))
            self._left, self._num_tokens = self._pipe.recv(), 0
            self._begun = time.perf_counter(), time.process_time()
        return self._left > 0


def train_here(work: Work, turns: Turns) -> None:
    """The loop of this library."""
    import jax
    import optax

    import jvarlen
    from jvarlen.data import WeightedTokens
    from jvarlen.distributed.launch import keep_memory_of_steps
    from jvarlen.models import LoraConfig, add_lora, from_hugging_face, layered, stack_layers

    turns.start()
    keep_memory_of_steps()  # as `jvarlen train` does
    config, params = from_hugging_face(work.model, progress=False)
    if work.lora:
        config = dataclasses.replace(config, lora=LoraConfig(rank=RANK))
        params = add_lora(params, config, seed=0)
    samples = [WeightedTokens(tokens, np.arange(len(tokens)) >= num_prompt) for tokens, num_prompt in work.chats]
    plan = jvarlen.make_plan([*map(len, samples)], max_tokens=ROW_LENGTH, packing="best_fit", row_lengths=(ROW_LENGTH,))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.0))
    step = jvarlen.make_train_step(layered(config), optimizer)
    state = step.init(stack_layers(params))  # compiles in the time of one layer
    del params
    cold = jvarlen.CompileOptions(cache_dir=None)
    compiled = jvarlen.compile_buckets(step, state, plan, options=cold, progress=False)
    epoch = 0
    while True:
        for batch in jvarlen.load(plan.of_epoch(epoch), samples):
            turns.before()
            state, _ = jax.block_until_ready(compiled(state, batch))
            if not turns.after(int((batch.segment_ids > 0).sum())):
                return
        epoch += 1


def train_there(work: Work, turns: Turns) -> None:
    """The loop of transformers, with PEFT's adapters for LoRA."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    turns.start()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    if work.lora:
        import peft

        names = ["q_proj", "v_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=names))
    num_tokens: list[int] = []

    def collate(chats: list[dict[str, list[int]]]) -> dict[str, Any]:
        lengths = [len(chat["input_ids"]) for chat in chats]
        num_tokens.append(sum(lengths))

        def pad(name: str, value: int) -> Any:
            rows = [chat[name] + [value] * (max(lengths) - len(chat[name])) for chat in chats]
            return torch.tensor(rows)

        return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": pad("mask", 0)}

    class InTurns(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            turns.before()

        def on_step_end(self, _: object, __: object, control: Any, **___: object) -> None:
            control.should_training_stop = not turns.after(num_tokens.pop(0))

    dataset = [
        {
            "input_ids": tokens.tolist(),
            "labels": [-100] * num_prompt + tokens[num_prompt:].tolist(),
            "mask": [1] * len(tokens),
        }
        for tokens, num_prompt in work.chats
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            train_sampling_strategy="group_by_length",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=10_000,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        transformers.Trainer(
            model, settings, train_dataset=dataset, data_collator=collate, callbacks=[InTurns()]
        ).train()


def serve(train: Callable[[Work, Turns], None], work: Work, pipe: Connection) -> None:
    """Runs a side in a process."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(work, Turns(pipe))


@contextlib.contextmanager
def process(train: Callable[[Work, Turns], None], work: Work) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    pipe, its_pipe = context.Pipe()
    worker = context.Process(target=serve, args=(train, work, its_pipe))
    worker.start()
    its_pipe.close()  # so that receiving from a process that failed raises
    yield pipe
    pipe.send(0)
    worker.join()


def compare(work: Work, num_turns: int, steps_per_turn: int) -> list[list[str]]:
    """A row of each side, and one of their ratios."""
    sides = {"this library": train_here, "PEFT" if work.lora else "transformers": train_there}
    with contextlib.ExitStack() as held:
        pipes, to_first = [], []
        for train in sides.values():  # one after the other, so that each has all cores
            pipes.append(held.enter_context(process(train, work)))
            to_first.append(pipes[-1].recv()[0])
        sums = np.zeros((2, 3))  # tokens, seconds, seconds of CPU
        for turn in range(num_turns + 1):
            for side in (0, 1) if turn % 2 else (1, 0):
                pipes[side].send(steps_per_turn)
                measured = pipes[side].recv()[1:]
                sums[side] += np.array(measured) * (turn > 0)  # one to warm up
    rates = sums[:, :1] / sums[:, 1:]  # tokens a second, and a second of CPU
    trained = "adapters" if work.lora else "all"
    rows = [
        [trained, name, f"{sums[i, 0]:,.0f}", *(f"{rate:.1f}" for rate in rates[i]), f"{to_first[i]:.1f}"]
        for i, name in enumerate(sides)
    ]
    return [*rows, [trained, "ratio", "", *(f"{ratio:.2f}" for ratio in rates[0] / rates[1]), ""]]


def make_chats(num_chats: int, vocab_size: int) -> list[tuple[np.ndarray, int]]:
    """Random tokens, prompts and answers of lengths like those of GSM8K with a system prompt."""
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(np.log(85), 0.35, num_chats).clip(40, 300).astype(int)
    answers = rng.lognormal(np.log(115), 0.45, num_chats).clip(25, 500).astype(int)
    return [
        (rng.integers(3, vocab_size, prompt + answer), int(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Writes a model with random weights. It imports JAX, which processes of its own must not inherit."""
    from jvarlen.models import DecoderConfig, init_params, to_hugging_face

    config = DecoderConfig(**sizes)
    to_hugging_face(folder, init_params(config, seed=0), config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, and no report")
    parser.add_argument("--model", type=Path, help="a directory as transformers writes it, in place of random weights")
    options = parser.parse_args()
    sizes = TINY if options.quick else SMOLLM
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = Path(folder, "model")
            write_model(model, sizes)
        chats = make_chats(40 if options.quick else 400, sizes["vocab_size"])
        turns = (1, 1) if options.quick else (5, 2)
        rows = [row for lora in (False, True) for row in compare(Work(model, chats, lora), *turns)]
    lengths = [len(tokens) for tokens, _ in chats]
    report(
        "fine-tuning",
        [
            f"# Fine-tuning on chats, {datetime.date.today()}",
            "",
            f"{len(chats)} chats of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.0f} on average, of "
            f"which {sum(n for _, n in chats) / sum(lengths):.0%} are prompts, float32. "
            f"{'Weights of a directory' if options.model else 'Random weights'}, {sizes['num_layers']} layers of width "
            f"{sizes['width']}. Tokens are without padding. {turns[0]} turns of {turns[1]} steps each, after one to "
            "warm up. The seconds to the first step are those of reading weights, planning and compiling.",
            "",
            *table(
                "trained|by|tokens|tokens a second|tokens a second of CPU|seconds to the first step",
                rows,
            ),
            "",
            versions_and_hardware("jax", "optax", "torch", "transformers", "peft"),
        ],
        write=not options.quick,
    )


if __name__ == "__main__":
    main()
