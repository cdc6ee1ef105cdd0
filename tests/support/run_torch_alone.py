"""Uses everything of an installed torch_ref where nothing else of the environment than NumPy and PyTorch is found."""

import doctest
import importlib
import importlib.util
import json
import pkgutil
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import distributed

import torch_ref


def run_examples():
    """Import every module, and run what the docstrings of functions show."""
    assert not any(
        map(importlib.util.find_spec, ("jax", "jaxtyping", "jvarlen", "numba", "safetensors", "scipy", "tqdm"))
    )
    names = [torch_ref.__name__, *(module.name for module in pkgutil.walk_packages(torch_ref.__path__, "torch_ref."))]
    modules = [importlib.import_module(name) for name in names]
    tests = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    shown = [example.source for test in tests for example in test.examples]
    assert not any(doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed for module in modules)
    used = "".join(shown) + Path(__file__).read_text()
    unused = [name for name in torch_ref.__all__ if name.islower() and not re.search(rf"\b{name}[()]", used)]
    assert not unused, unused
    print(f"{len(modules)} modules, {len(shown)} lines of examples")


def use_the_rest():
    """A plan on disk, its batches, a model, its steps and its weights."""
    lengths = [3, 5, 2, 4, 1, 6]
    budget = torch_ref.Budget(max_tokens=12, max_shapes=2, num_microbatches=2)
    plan = torch_ref.make_plan(lengths, budget, order=torch_ref.Order("shuffle"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.npz"
        plan.save(path)
        assert torch_ref.Plan.load(path).digest == plan.digest
        fields = dict.fromkeys(("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"), 2)
        text = json.dumps({"model_type": "llama", "num_attention_heads": 1, **fields})
        Path(folder, "config.json").write_text(text)
        assert torch_ref.read_config(folder).width == 2
        with suppress(ValueError):  # which names the package that reads such files
            raise AssertionError(torch_ref.load_model(folder))
        distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=0, world_size=1)
        samples = [np.arange(length) for length in lengths]
        model = torch_ref.Decoder(torch_ref.DecoderConfig(width=8, num_layers=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch_ref.to_device(next(iter(torch_ref.load(plan, samples))), "cpu")
        torch_ref.train_step(model, optimizer, batch, loss_fn=torch_ref.loss_sums)
        scheduler = torch_ref.VariableBatchSizeLR(optimizer, plan, 2)
        step = torch_ref.parallel.make_ddp_step(model, optimizer)
        for batch in torch_ref.load(plan, samples):
            assert isinstance(batch, torch_ref.Batch)
            step(batch)
            scheduler.step()
        distributed.destroy_process_group()
    assert len(torch_ref.generate(model, [[1, 2]], 3)[0]) == 3
    compiled = torch_ref.compile_buckets(model, plan, backend="eager")
    assert isinstance(compiled, torch_ref.CompiledBuckets)
    assert isinstance(compiled.rows[0], torch_ref.CompileRow)
    with suppress(ValueError):  # which lists what is missing
        raise AssertionError(torch_ref.load_params(model, {}))
    pairs = torch_ref.make_plan([[1, 2], [2, 2]], [torch_ref.MultiLengthBucket((2, 2, 2))])
    assert isinstance(next(iter(torch_ref.load(pairs, [([1], [1, 2]), ([1, 2], [1, 2])]))), torch_ref.PairBatch)


if __name__ == "__main__":
    run_examples()
    use_the_rest()
