"""A script that predicts on one of several processes.

Arguments: the number of processes, a rank and a port. Prints the results of all samples, as each process has them.
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import predict
from jvarlen.distributed import initialize_processes
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, init_params
from tests.support.processes import outcome

NUM_VALUES, WIDTH = 50, 8
RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(1, NUM_VALUES, length) for length in RNG.integers(1, 24, 60)]
AXES = {"sum": "row", "scores": "length", "tags": "length"}
PARAMS = {"table": RNG.normal(size=(NUM_VALUES, WIDTH)), "out": RNG.normal(size=(WIDTH, 4))}


def apply_fn(params, batch):
    """For padded and packed rows: a vector of each sample, scores of each position, and the best of them."""
    x_BxTxD = jnp.tanh(params["table"][batch.tokens])
    if hasattr(batch, "segment_ids"):
        is_in_BxTxP = batch.segment_ids[:, :, None] == 1 + jnp.arange(batch.ids.shape[1])
        sums = jnp.einsum("btd,btp->bpd", x_BxTxD, is_in_BxTxP.astype(x_BxTxD.dtype))
    else:
        is_token_BxT = jnp.arange(x_BxTxD.shape[1]) < batch.lengths[:, None]
        sums = jnp.sum(x_BxTxD * is_token_BxT[..., None], axis=1)
    scores_BxTx4 = x_BxTxD @ params["out"]
    return {"sum": sums, "scores": scores_BxTx4, "tags": jnp.argmax(scores_BxTx4, axis=-1).astype(jnp.int32)}


BAD = 7, 11, 20


class Failing(list):
    """Samples of which one raises, one is empty and one cannot be collated."""

    def __getitem__(self, i):
        if i == BAD[0]:
            raise OSError(5, "disk on fire")
        return {BAD[1]: np.zeros(0, int), BAD[2]: np.array([0.5])}.get(i, super().__getitem__(i))


def one_by_one():
    """The same of each sample alone, by NumPy."""
    results = []
    for sample in SAMPLES:
        x_TxD = np.tanh(PARAMS["table"][sample])
        scores = x_TxD @ PARAMS["out"]
        results.append({"sum": x_TxD.sum(axis=0), "scores": scores, "tags": scores.argmax(axis=-1).astype(np.int32)})
    return results


def written(**options):
    """What a decoder writes after the beginnings of some samples."""
    config = DecoderConfig(num_layers=1, width=16, num_heads=2, vocab_size=51)
    params = jax.tree.map(lambda leaf: leaf * 5, init_params(config, seed=1))
    prompts = [sample[:9] for sample in SAMPLES[:7]]
    new = generate(params, config, prompts, max_new_tokens=4, temperature=1.0, progress=False, **options)
    return [tokens.tolist() for tokens in new]


class Interrupting(list):
    """Samples of which the first after many interrupts the process that reads it."""

    is_done = False

    def __getitem__(self, i):
        if i > len(self) // 2 and not self.is_done:
            self.is_done = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(i)


def main():
    num_processes, rank, port = map(int, sys.argv[1:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    layout = f"data{jax.device_count()}"
    options = {"max_tokens": 32, "axes": AXES, "progress": False, "layout": layout}
    with jax.enable_x64(True):
        results = predict(apply_fn, PARAMS, SAMPLES, packing="best_fit", **options)
        without_bad = predict(apply_fn, PARAMS, Failing(SAMPLES), on_bad_sample="skip", **options)

    def interrupted():
        samples = Interrupting(SAMPLES * 20) if rank == 1 else SAMPLES * 20
        predict(apply_fn, PARAMS, samples, lengths=[*map(len, SAMPLES)] * 20, **options)

    print(
        json.dumps(
            {
                "results": jax.tree.map(np.ndarray.tolist, results),
                "without_bad": jax.tree.map(np.ndarray.tolist, without_bad),
                "written": written(layout=layout),
                "interrupted": outcome(interrupted),
            }
        )
    )


if __name__ == "__main__":
    main()
