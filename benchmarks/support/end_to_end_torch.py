"""A PyTorch process of the end-to-end benchmark: writes the figures of runs to JSON files.

Eager, as PyTorch runs by default, on all cores. Letters: B rows, T positions, H heads, K head size, D width, V values
of a token.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # torch would import it when it makes the first optimizer
from support.end_to_end_run import (
    MAX_GRADIENT_NORM,
    OPTIMIZER,
    Batch,
    Data,
    Settings,
    Stopwatch,
    answer_all,
    bits_per_byte,
    eval_batches,
)
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import torch_ref
from torch_ref.training import decoder

GROUPING = "transformers.trainer_pt_utils"
NO_LABEL = -100  # what `cross_entropy` leaves out by default


class TorchRun:
    """An eager step on batches that are padded to their own longest sample."""

    num_compiled = 0
    collate: Any = staticmethod(lambda samples: pad_batch(samples))

    def __init__(
        self,
        settings: Settings,
        data: Data,
        watch: Stopwatch,
        batching: Callable[[Settings, list[int]], dict[str, Any]],
    ):
        self._settings = settings
        self.about: dict[str, Any] = {}
        self.model = torch_ref.Decoder(torch_ref.DecoderConfig(**settings.model))
        with np.load(settings.weights) as stored:
            torch_ref.load_params(self.model, stored)
        self.num_params = sum(weight.numel() for weight in self.model.parameters())
        held_out = eval_batches(data.held_out, settings.longest)
        self._held_out = [labelled(torch.from_numpy(tokens), torch.from_numpy(lengths)) for tokens, lengths in held_out]
        self._num_bytes = sum(map(len, data.held_out))
        samples = [torch.from_numpy(sample.astype(np.int64)) for sample in data.train]
        with watch("compile"):  # nothing is compiled
            self._optimizer = torch.optim.AdamW(
                self.model.parameters(),
                betas=(OPTIMIZER["b1"], OPTIMIZER["b2"]),
                weight_decay=OPTIMIZER["weight_decay"],
            )
        with watch("planning"):
            options = batching(settings, list(map(len, samples)))
        with watch("data"):
            self.batches = iter(DataLoader(samples, collate_fn=self.collate, **options))

    def compiles(self, batch: Batch) -> bool:
        """Nothing compiles."""
        return False

    def step(self, batch: Batch, num_tokens_before: int) -> None:
        """Takes an eager step at the rate of the schedule."""
        for group in self._optimizer.param_groups:
            group["lr"] = float(self._settings.schedule(num_tokens_before))
        self._optimizer.zero_grad()
        self.loss(batch.arrays, "mean").backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()

    def wait(self, pending: None) -> None:
        """Returns: a step is done when its call comes back."""

    def evaluate(self) -> float:
        """Bits per byte of all held-out samples."""
        with torch.no_grad():
            return bits_per_byte(lambda batch: self._padded_loss(batch, "sum").item(), self._held_out, self._num_bytes)

    def close(self) -> None:
        """Has nothing to note."""

    def loss(self, arrays: Any, reduction: str) -> torch.Tensor:
        """The loss of a training batch."""
        return self._padded_loss(arrays, reduction)

    def _padded_loss(self, arrays: tuple[torch.Tensor, torch.Tensor], reduction: str) -> torch.Tensor:
        tokens_BxT, labels_BxT = arrays
        inputs_BxT = functional.pad(tokens_BxT[:, :-1], (1, 0), value=self.model.begin_token)
        logits_BxTxV = self.model(inputs_BxT)
        return functional.cross_entropy(logits_BxTxV.flatten(0, 1), labels_BxT.flatten(), reduction=reduction)


class PackedRun(TorchRun):
    """Samples end to end in one row without any padding, and attention sample by sample.

    On a CPU no attention of PyTorch knows where the samples of a row end, but by a mask of T×T.
    """

    collate: Any = staticmethod(lambda samples: join_samples(samples))

    def loss(self, arrays: Any, reduction: str) -> torch.Tensor:
        """The loss of a training batch."""
        inputs_1xT, labels_T, positions_T, lengths = arrays
        trunk = self.model.model
        rows = decoder.rows_of(trunk.config, inputs_1xT[:, : max(lengths)], None, None)
        rows = rows._replace(cos=rows.cos[:, :, positions_T], sin=rows.sin[:, :, positions_T])
        x_1xTxD = trunk.embed_tokens(inputs_1xT)
        with mock.patch.object(functional, "scaled_dot_product_attention", sample_by_sample(lengths)):
            for layer in trunk.layers:
                x_1xTxD = layer(x_1xTxD, rows)
        logits_TxV = self.model.lm_head(trunk.norm(x_1xTxD))[0]
        return functional.cross_entropy(logits_TxV, labels_T, reduction=reduction)


def sample_by_sample(lengths: list[int]) -> Callable[..., torch.Tensor]:
    """Causal attention of heads [1, H, T, K] in a row of samples of these lengths."""
    attend = functional.scaled_dot_product_attention

    def attend_each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        samples = zip(*(heads.split(lengths, dim=2) for heads in (query, key, value)), strict=True)
        return torch.cat([attend(*heads, is_causal=True) for heads in samples], dim=2)

    return attend_each


def labelled(tokens_BxT: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their labels, both int64[B, T]; padding has no label."""
    tokens_BxT = tokens_BxT.to(torch.int64)
    is_token_BxT = torch.arange(tokens_BxT.shape[1]) < lengths_B[:, None]
    return tokens_BxT, tokens_BxT.where(is_token_BxT, NO_LABEL)


def pad_batch(samples: list[torch.Tensor]) -> Batch:
    tokens_BxT = pad_sequence(samples, batch_first=True)
    lengths_B = torch.tensor(list(map(len, samples)))
    shape = (tokens_BxT.shape[0], tokens_BxT.shape[1])
    return Batch(labelled(tokens_BxT, lengths_B), shape, int(lengths_B.sum()))


def join_samples(samples: list[torch.Tensor]) -> Batch:
    """Inputs, labels, positions within samples, and lengths."""
    lengths = list(map(len, samples))
    begin = torch.full((1,), torch_ref.DecoderConfig().begin_token)
    inputs_1xT = torch.cat([part for sample in samples for part in (begin, sample[:-1])])[None]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    return Batch((inputs_1xT, torch.cat(samples), positions_T, lengths), (1, sum(lengths)), sum(lengths))


def group_by_length(settings: Settings, lengths: list[int]) -> dict[str, Any]:
    """The sampler of `TrainingArguments(train_sampling_strategy="group_by_length")`, for a `DataLoader`."""
    generator = torch.Generator().manual_seed(settings.seed)
    sampler = importlib.import_module(GROUPING).LengthGroupedSampler(
        settings.fixed_rows, lengths=lengths, generator=generator
    )
    return {"batch_size": settings.fixed_rows, "sampler": sampler}


def token_batches(settings: Settings, lengths: list[int]) -> dict[str, Any]:
    """Samples sorted by length, cut where rows × longest would exceed the budget; batches shuffled, as fairseq does."""
    batches = torch_ref.batch_by_tokens(lengths, settings.max_tokens, order="length")
    parts = np.split(batches.sample_ids, batches.offsets[1:-1])
    order = np.random.default_rng(settings.seed).permutation(len(parts))
    return {"batch_sampler": [parts[i].tolist() for i in order]}


def whole_samples(settings: Settings, lengths: list[int]) -> dict[str, Any]:
    """Shuffled samples, cut where their tokens would exceed the budget."""
    batches = torch_ref.batch_by_tokens(lengths, settings.max_tokens, order="shuffle", budget="sum", seed=settings.seed)
    return {"batch_sampler": [ids.tolist() for ids in np.split(batches.sample_ids, batches.offsets[1:-1])]}


def train_grouped(settings: Settings, data: Data, watch: Stopwatch) -> TorchRun:
    importlib.import_module(GROUPING)  # before the watch runs
    return TorchRun(settings, data, watch, group_by_length)


def train_on_token_batches(settings: Settings, data: Data, watch: Stopwatch) -> TorchRun:
    return TorchRun(settings, data, watch, token_batches)


def train_packed(settings: Settings, data: Data, watch: Stopwatch) -> TorchRun:
    return PackedRun(settings, data, watch, whole_samples)


WAYS = {"group_by_length": train_grouped, "token_batches": train_on_token_batches, "packed": train_packed}

if __name__ == "__main__":
    answer_all(WAYS, json.loads(sys.argv[1]))
