"""Files of others, and files that were damaged: read whole or rejected with their path; nothing in them is run.

See `SECURITY.md` for what is trusted. Damaged plans in both packages: `tests/parity/test_plan_file.py`.
"""

import ast
import dataclasses
import io
import os
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jvarlen
from jvarlen._common.files import load_array
from jvarlen.data.open import open_data
from jvarlen.experimental.large_plans import open_plan, plan_on_disk
from jvarlen.models import DecoderConfig, LoraConfig, add_lora, from_hugging_face, init_params, to_hugging_face
from jvarlen.planning.make_plan import make_plan
from jvarlen.planning.plan import Plan

few = settings(max_examples=30)
LENGTHS = [3, 1, 9, 4, 4, 2, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("untrusted")


@pytest.fixture
def plan_path(tmp_path):
    make_plan(LENGTHS, [(2, 4), (1, 9)], order="length", num_microbatches=2).save(tmp_path / "plan.npz")
    return tmp_path / "plan.npz"


def read_or_refused(read, path):
    """What a reader makes of a file; None where it refuses it, by its name and with a message of some lines at most."""
    try:
        return read(path)
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    assert path.name in said
    assert len(said) < 4000
    return None


@st.composite
def damages(draw):
    """A function that cuts, flips, repeats or inserts bytes at places given as shares of the length."""
    kind = draw(st.sampled_from(["cut", "flip", "drop", "insert", "repeat"]))
    begin, end = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    new = draw(st.binary(min_size=1, max_size=8))

    def damage(content):
        a, b = round(begin * len(content)), round(end * len(content))
        if kind == "flip":
            a = min(a, len(content) - 1)
            return content[:a] + bytes([content[a] ^ (new[0] or 1)]) + content[a + 1 :]
        middle = {"cut": b"", "drop": content[b:], "insert": new + content[a:], "repeat": content[a:b] + content[a:]}
        return content[:a] + middle[kind]

    return damage


# Anything


@few
@given(content=st.binary(max_size=200), ending=st.sampled_from(["txt", "npz", "parquet", "arrow"]))
def test_any_bytes_are_samples_or_refused_by_name(folder, content, ending):
    path = folder / f"data.{ending}"
    path.write_bytes(content)
    assert read_or_refused(Plan.load, path) is None
    dataset = read_or_refused(lambda path: open_data(path, progress=False), path)
    assert dataset is None or dataset.lengths.min() > 0


@few
@given(damage=damages())
def test_a_damaged_plan_on_disk_is_refused_or_the_same(folder, damage):
    path = folder / "plan"
    path.unlink(missing_ok=True)
    plan_on_disk(LENGTHS, [(2, 4), (1, 9)], path, order="length", progress=False)
    before = open_plan(path).digest
    path.write_bytes(damage(path.read_bytes()))
    after = read_or_refused(open_plan, path)
    assert after is None or after.digest == before


def npy(header, data=b""):
    """The bytes of an array file with any header."""
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (268435456,), }", bytes(8)),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }", bytes(8)),
        npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({10**40},), }}"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, -8), }", bytes(64)),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0, -1), }"),
        npy("{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000,), }"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n(S'true'\ntR."),
        npy("{'descr': [('a', '<i8', (268435456,))], 'fortran_order': False, 'shape': (1,), }"),
        npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': {'(' * 4000}1{')' * 4000}, }}"),
        npy("{[]: 1}"),
        npy("{1: 1, 'a': 2}"),
        npy("__import__('os').abort()"),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': ()}", bytes(7)),
        b"\x93NUMPY\x09\x00",
        b"\x93NUM",
        b"",
    ],
    ids=[
        "2 GB", "8 TB", "beyond integers", "negative", "nothing times unknown", "no bytes each", "pickle",
        "2 GB in a field", "nested", "unhashable", "keys of two types", "program", "cut off", "version", "no header",
        "empty",
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(plan_path, content):
    with zipfile.ZipFile(plan_path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(plan_path, "w") as archive:
        for name, data in (members | {"sample_ids.npy": content}).items():
            archive.writestr(name, data)
    assert read_or_refused(Plan.load, plan_path) is None


def test_numbers_of_the_other_byte_order_are_the_same_plan(plan_path):
    fields = dict(np.load(plan_path))
    np.savez(plan_path, **fields | {"sample_ids": fields["sample_ids"].astype(">i8")})
    loaded = Plan.load(plan_path)
    assert loaded.sample_ids.dtype == np.int64
    assert loaded.digest == str(fields["digest"])


# Models


MODEL = DecoderConfig(num_layers=2, width=16, vocab_size=9, windows=(3, 3))


@pytest.fixture(scope="module")
def model(folder):
    shapes = jax.eval_shape(lambda: init_params(MODEL, 0))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    to_hugging_face(folder / "model", params, MODEL, max_shard_bytes=12_000)
    adapted = dataclasses.replace(MODEL, lora=LoraConfig(rank=2))
    to_hugging_face(folder / "adapters", add_lora(params, adapted, 0), adapted, base_model=folder / "model")
    return folder / "model"


FILES = ("config.json", "*.index.json", "*.safetensors", "adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize("pattern", FILES)
@few
@given(damage=damages())
def test_a_damaged_model_is_refused_or_has_the_same_tensors(model, pattern, damage):
    directory = model.with_name("adapters") if pattern.startswith("adapter") else model
    path = min(directory.glob(pattern))
    content = path.read_bytes()
    _, params = from_hugging_face(directory)
    try:
        path.write_bytes(damage(content))
        after = read_or_refused(from_hugging_face, directory)
    finally:
        path.write_bytes(content)
    if after is not None:
        assert jax.tree.map(np.shape, after[1]) == jax.tree.map(np.shape, params)


# Nothing is run


class Payload:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.fixture
def payload(tmp_path):
    yield np.array([Payload(tmp_path / "was-run")], dtype=object)
    assert not (tmp_path / "was-run").exists()


def test_unpickling_the_payload_would_run_it(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(tmp_path / "was-run")], dtype=object))
    buffer.seek(0)
    np.load(buffer, allow_pickle=True)
    assert (tmp_path / "was-run").exists()


def test_a_pickle_in_a_file_is_refused_and_not_run(tmp_path, plan_path, payload):
    plan, data, array = plan_path, tmp_path / "data.npz", tmp_path / "array.npy"
    np.savez(plan, **dict(np.load(plan)) | {"sample_ids": payload})
    np.savez(data, tokens=payload, offsets=np.array([0, 1]))
    np.save(array, payload)
    for path, read in ((plan, Plan.load), (data, open_data), (array, lambda path: load_array(path, "lengths"))):
        assert read_or_refused(read, path) is None


UNPICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# Bytes that a process itself pickled: for its own workers, and what they answer.
MAY_PICKLE = {"workers"}


def test_no_module_that_reads_files_can_unpickle_or_run_what_is_in_them():
    loads, runs, importers = [], [], {}
    for path in sorted(Path(jvarlen.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = set()
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
            for name in names:
                importers.setdefault(name, set()).add(path.stem)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                runs += [f"{path.name}: {called}"] if called in {"eval", "exec", "compile", "__import__"} else []
                allowed = [ast.unparse(word.value) for word in node.keywords if word.arg == "allow_pickle"]
                is_load = called in {"np.load", "np.lib.format.read_array", "np.lib.format.open_memmap"}
                if set(allowed) - {"False"} or (is_load and not allowed):
                    loads.append(f"{path.name}, line {node.lineno}")
    assert not loads
    assert not runs
    for name in UNPICKLING & {name.split(".")[0] for name in importers}:
        assert importers[name] <= MAY_PICKLE
    # JAX unpickles programs: what was compiled in this process, or what it sends to the workers that it started.
    assert importers["jax.experimental.serialize_executable"] == {"programs", "worker"}
