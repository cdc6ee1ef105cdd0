"""Plan files: what one package saves, every package loads; every change in a file is detected and named."""

import importlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import PACKAGES, in_both
from .inputs import few, make_plan, many, plan_arguments, steps_of

FIELDS = {
    "format_version": np.int64,
    "microbatches_per_step": np.int64,
    "buckets": np.int64,
    "step_bucket": np.int32,
    "step_offsets": np.int64,
    "sample_ids": np.int64,
    "num_tokens": np.int64,
    "num_dropped": np.int64,
    "num_truncated": np.int64,
    "overlong": None,
    "digest": None,
    "checksum": None,
}
LENGTHS = [3, 1, 9, 4, 4, 2, 7, 12]


@pytest.fixture(scope="session", params=PACKAGES)
def reader(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def saved(package, tmp_path):
    path = tmp_path / "epoch.npz"
    package.make_plan(LENGTHS, [(2, 4), (1, 9)], order="length", microbatches_per_step=2, overlong="truncate").save(
        path
    )
    return path


def read_fields(path):
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def changed(name, value):
    """Return a valid-looking other value of a field, of the same dtype and shape."""
    if value.dtype.kind == "U":
        return np.array("drop") if name == "overlong" else np.array(str(value)[::-1])
    other = value.copy()
    other.reshape(-1)[-1] += 1
    return other


@few
@given(arguments=plan_arguments())
def test_a_plan_saved_by_one_package_loads_in_the_other(package, reader, folder, arguments):
    """Every attribute survives, with its dtype."""
    plan = make_plan(package, arguments)
    path = folder / "plan.npz"
    plan.save(path)
    loaded = reader.Plan.load(str(path))
    assert isinstance(loaded, reader.Plan)
    assert loaded.digest == plan.digest
    assert steps_of(loaded) == steps_of(plan)
    assert [tuple(bucket) for bucket in loaded.buckets.shapes] == [tuple(bucket) for bucket in plan.buckets.shapes]
    for name in ("step_bucket", "step_offsets", "sample_ids", "num_tokens", "num_sequences"):
        assert getattr(loaded, name).dtype == getattr(plan, name).dtype
        assert np.array_equal(getattr(loaded, name), getattr(plan, name))
    for name in ("microbatches_per_step", "overlong", "num_dropped", "num_truncated", "num_samples", "padding"):
        assert getattr(loaded, name) == getattr(plan, name)
    assert np.array_equal(loaded.rows(0), plan.rows(0))


@few
@given(arguments=plan_arguments())
def test_both_write_the_format_field_by_field(folder, arguments):
    """Names, dtypes and values, read with NumPy alone."""
    path = folder / "plan.npz"

    def written(package):
        plan = make_plan(package, arguments)
        plan.save(path)
        fields = read_fields(path)
        assert fields.keys() == FIELDS.keys()
        assert all(fields[name].dtype == dtype for name, dtype in FIELDS.items() if dtype is not None)
        assert str(fields["digest"]) == plan.digest
        return fields

    one, other = in_both(written)
    assert one["format_version"] == 2
    assert all(np.array_equal(one[name], other[name]) for name in FIELDS)


def test_saving_replaces_the_file_and_leaves_nothing_else(package, saved):
    """Written beside it, then moved into place."""
    before = package.Plan.load(saved)
    package.make_plan([1, 2, 3], [(1, 3)], order="length").save(saved)
    assert package.Plan.load(saved).digest != before.digest
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_failed_save_leaves_the_old_file(package, tmp_path):
    """Where the folder is missing nothing is made."""
    with pytest.raises(FileNotFoundError):
        package.make_plan([1, 2, 3], [(1, 3)], order="length").save(tmp_path / "missing" / "plan.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_is_refused(package, saved, name):
    """Every field is covered by the digest, the checksum or the version."""
    fields = read_fields(saved)
    np.savez(saved, **fields | {name: changed(name, fields[name])})
    with pytest.raises(ValueError, match=saved.name):
        package.Plan.load(saved)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_refused(package, saved, name):
    """The message names the file and the field."""
    fields = read_fields(saved)
    del fields[name]
    np.savez(saved, **fields)
    with pytest.raises(ValueError, match=saved.name) as caught:
        package.Plan.load(saved)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [name for name, dtype in FIELDS.items() if dtype is not None])
def test_a_field_of_another_dtype_or_shape_is_refused(package, saved, name):
    """Floats, and one dimension too many."""
    fields = read_fields(saved)
    for other in (fields[name].astype(np.float64), fields[name][..., None]):
        np.savez(saved, **fields | {name: other})
        with pytest.raises(ValueError, match=saved.name):
            package.Plan.load(saved)


def test_another_format_version_is_named(package, saved):
    """A later format says so, even where its fields differ."""
    for version, reader in ((1, "jvarlen 0.1.0"), (71, "another version")):
        np.savez(saved, format_version=np.int64(version), something_else=np.arange(3))
        with pytest.raises(ValueError, match=rf"{saved.name}.* {version}, which {reader} reads; this version reads"):
            package.Plan.load(saved)


@many
@given(data=st.data())
def test_a_file_cut_short_is_refused(package, folder, data):
    """At whatever byte."""
    path = folder / "cut.npz"
    package.make_plan(LENGTHS, [(2, 4), (1, 12)], order="length").save(path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ValueError, match=path.name):
        package.Plan.load(path)


@many
@given(data=st.data())
def test_a_flipped_byte_is_refused_or_harmless(package, folder, data):
    """Either an error that names the file, or the same plan (bytes of the archive that mean nothing)."""
    path = folder / "flipped.npz"
    plan = package.make_plan(LENGTHS, [(2, 4), (1, 12)], order="length")
    plan.save(path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = package.Plan.load(path)
    except ValueError as error:
        assert path.name in str(error)  # noqa: PT017 (either outcome is right)
    else:
        assert loaded.digest == plan.digest
        assert loaded.num_tokens.tolist() == plan.num_tokens.tolist()


def write_npy(path):
    with open(path, "wb") as file:
        np.save(file, np.arange(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("shape,samples\n8x128,3\n"),
        lambda path: path.write_bytes(bytes(range(256)) * 5),
        lambda path: np.savez(path, weights=np.ones(3)),
        lambda path: np.savez(path, format_version=np.array([1, None], dtype=object)),
        write_npy,
    ],
    ids=["empty", "text", "binary", "other_archive", "pickled", "npy"],
)
def test_a_foreign_file_is_refused(package, tmp_path, write):
    """By name, whatever it is."""
    path = tmp_path / "foreign.npz"
    write(path)
    with pytest.raises(ValueError, match=path.name):
        package.Plan.load(path)


def test_a_pipe_is_refused_before_it_is_read(package, tmp_path):
    path = tmp_path / "plan.npz"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, b"PK\x03\x04" * 2_000)  # or reading it would block
    with pytest.raises(ValueError, match=r"plan\.npz.* not a regular file"):
        package.Plan.load(path)
    os.close(pipe)


def test_a_missing_file_is_a_file_not_found_error(package, tmp_path):
    """The error that callers expect for it, with the name."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        package.Plan.load(tmp_path / "nowhere.npz")


def test_rows_of_a_plan_from_a_file_have_room_for_as_many_samples(package, reader, tmp_path):
    """As many as those of other epochs may have, under the checksum."""
    path = tmp_path / "plan.npz"
    plan = package.make_plan([5, 1, 1, 4, 2], [(1, 6), (1, 12)], packing="best_fit", order="length")
    plan.save(path)
    loaded = reader.Plan.load(path)
    assert (loaded.digest, loaded.samples_per_row) == (plan.digest, (3, 4))
    fields = read_fields(path)
    np.savez(path, **fields | {"samples_per_row": np.array([3, 5])})
    with pytest.raises(ValueError, match=path.name):
        reader.Plan.load(path)
    del fields["samples_per_row"]
    np.savez(path, **fields)
    with pytest.raises(ValueError, match=f"{path.name}.*samples_per_row"):
        reader.Plan.load(path)


def test_a_plan_that_would_unpack_to_much_more_is_refused(package, saved):
    """Compressed zeros, of which a small file can hold as many as there is memory."""
    np.savez_compressed(saved, **read_fields(saved))
    with pytest.raises(ValueError, match=f"{saved.name}.*compressed"):
        package.Plan.load(saved)


def test_steps_whose_ids_cannot_be_laid_out_are_not_planned(package):
    """Also where rows times microbatches would wrap around."""
    for rows, num_microbatches in ((1, 2**31), (2**40, 2**40)):
        with pytest.raises(ValueError, match=r"16777216|16,777,216"):
            package.make_plan([1, 2], [(rows, 2)], microbatches_per_step=num_microbatches)
