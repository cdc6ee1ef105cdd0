"""A training in JAX, and the same one in several processes of PyTorch, which a script runs meanwhile."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jvarlen
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.models.hugging_face import hugging_face_tensors
from jvarlen.parallel import Layout, make_train_step
from jvarlen.training import adamw_by_batch_size
from tests.support import processes

from .run_parallel import BETAS, EPS, RATE, WEIGHT_DECAY, Results


class Trained(NamedTuple):
    """Where processes write results, and the processes, by how many there are in a group."""

    folder: Path
    running: dict[int, processes.Processes]

    def results_of(self, name: str, num_processes: int) -> list[Results]:
        """What each process wrote, once all have ended."""
        self.running[num_processes].succeed(240)
        results = []
        for rank in range(num_processes):
            with np.load(self.folder / f"{name} {rank}.npz") as file:
                results.append(dict(file))
        return results


@contextmanager
def training(
    program: Path, folder: Path, numbers: Iterable[int], dataset: TokenDataset, weights: dict[str, Any]
) -> Iterator[Trained]:
    """Groups of these numbers of processes train on a dataset from given weights."""
    np.savez(folder / "inputs.npz", tokens=dataset.tokens, offsets=dataset.offsets, **weights)
    with processes.all_started(program, numbers, str(folder)) as running:
        yield Trained(folder, running)


def initial_params(config: DecoderConfig) -> Any:
    return jax.tree.map(np.float64, init_params(config, seed=0))


def initial_tensors(config: DecoderConfig) -> Results:
    """The same by torch's names."""
    return hugging_face_tensors(initial_params(config), config)


class TrainedInJax(NamedTuple):
    """Losses and norms of gradients, the final weights by torch's names, and the digest of the plan."""

    losses: np.ndarray
    norms: np.ndarray
    weights: Results
    digest: str


def train_in_jax(
    config: DecoderConfig,
    layout: str,
    plan: Any,
    dataset: TokenDataset,
    *,
    num_steps: int,
    max_norm: float,
    base_batch_size: float | None = None,
) -> TrainedInJax:
    adamw = optax.adamw(RATE, *BETAS, EPS, weight_decay=WEIGHT_DECAY)
    if base_batch_size is not None:
        betas = dict(zip(("b1", "b2"), BETAS, strict=True))
        adamw = adamw_by_batch_size(RATE, base_batch_size, **betas, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer = optax.chain(optax.clip_by_global_norm(max_norm), adamw)
    losses, norms = [], []
    with jax.enable_x64(True):
        train_step = make_train_step(layered(config), optimizer, layout=Layout.parse(layout), norms=True)
        state = train_step.init(initial_params(config))
        step = jax.jit(train_step, donate_argnums=0)
        for batch in itertools.islice(jvarlen.load(plan, dataset, layout=layout), num_steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
            norms.append(float(metrics.grad_norm))
        weights = hugging_face_tensors(train_step.gather_params(state), config)
    assert len(losses) == num_steps
    return TrainedInJax(np.array(losses), np.array(norms), weights, plan.digest)


def assert_same(results: list[Results], expected: TrainedInJax) -> None:
    """Losses of all steps on every process, and final weights, which rank 0 alone has."""
    assert expected.losses[-1] < expected.losses[0]
    first, *others = results
    assert str(first["digest"]) == expected.digest
    np.testing.assert_allclose(first["losses"], expected.losses, rtol=1e-13)
    for key, weight in expected.weights.items():
        np.testing.assert_allclose(first[f"weight {key}"], weight, rtol=0, atol=1e-12, err_msg=key)
    assert sum(key.startswith("weight ") for key in first) == len(expected.weights)
    for other in others:
        np.testing.assert_array_equal(other["losses"], first["losses"])
        assert not any(key.startswith("weight ") for key in other)
