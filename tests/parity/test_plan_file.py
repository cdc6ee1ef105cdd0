"""Plan files: what one package saves, every package loads; every change in a file is detected and named."""

import importlib
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen.planning import plan_file

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
    package.make_plan(LENGTHS, [(2, 4), (1, 9)], order="length", num_microbatches=2, overlong="truncate").save(path)
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
    for name in ("num_microbatches", "overlong", "num_dropped", "num_truncated", "num_samples", "padding"):
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


PLANS = {
    "padded": lambda package: package.make_plan(LENGTHS, [(2, 4), (1, 12)], order="length", num_microbatches=2),
    "pairs": lambda package: package.make_plan(np.array([LENGTHS, LENGTHS[::-1]]).T, [(4, 12, 12)], order="length"),
    "packed": lambda package: package.make_plan(LENGTHS, [(2, 12)], packing="best_fit", order="length"),
    "split": lambda package: package.make_plan(
        LENGTHS, [(2, 6)], packing="best_fit", overlong="split", order="length", num_microbatches=2
    ),
    "cut": lambda package: package.make_plan(LENGTHS, [(2, 4), (1, 6)], overlong="truncate_start", order="length"),
}
WRONG_CONTENT = {
    ("all", "microbatches_per_step"): [0, -1, 2**24, 2**40, 2**62],
    ("all", "buckets"): [0, -1, 2**62],
    ("all", "step_bucket"): [-1, 2, 2**31 - 1],
    ("all", "step_offsets"): [-1, 2**24, 2**62],
    ("all", "sample_ids"): [-1],
    ("all", "num_tokens"): [-1, 0, 2**62],
    ("all", "num_dropped"): [-1],
    ("all", "num_truncated"): [-1],
    ("packed", "row_offsets"): [-1, 2**24, 2**62],
    ("packed", "samples_per_row"): [-1, 0, 1, 13, 2**62],
    ("split", "piece_starts"): [-1],
    ("cut", "piece_starts"): [-1],
}


def write_sealed(path, fields):
    """Write fields with the digest and the checksum that they have, whatever they say."""
    digest = plan_file.plan_digest(fields, plan_file.chunk_digests(fields["sample_ids"]))
    fields = fields | {"digest": np.array(digest)}
    np.savez(path, **fields | {"checksum": np.array(plan_file.plan_checksum(fields))})


def wrong_contents(fields, kind):
    """Fields of which one is wrong: its first or last number, or an array that repeats, is cut or turned."""
    for (of_kind, name), values in WRONG_CONTENT.items():
        if name not in fields or of_kind not in ("all", kind):
            continue
        for place in (0, -1):
            for value in values:
                wrong = fields[name].copy()
                wrong.reshape(-1)[place] = value
                yield fields | {name: wrong}
        if fields[name].ndim == 1:
            yield fields | {name: fields[name][:-1]}
            if name != "step_offsets":  # of which a digest cannot be made
                yield fields | {name: fields[name][:0]}
            yield fields | {name: np.append(fields[name], fields[name][-1:])}
    twice = fields["sample_ids"].copy()
    twice[-1] = twice[0]
    if str(fields["overlong"]) != "split":
        yield fields | {"sample_ids": twice}
        yield fields | {"sample_ids": twice * 2**40}  # too far apart for a table
    else:
        starts = fields["piece_starts"].copy()
        starts[-1] = starts[0]
        yield fields | {"sample_ids": twice, "piece_starts": starts}
    many_rows = fields["buckets"].copy()
    many_rows[0, 0] = 2**40
    yield fields | {"buckets": many_rows}
    yield fields | {"step_offsets": fields["step_offsets"][::-1].copy()}
    yield fields | {"overlong": np.array("bogus")}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_that_is_none_of_make_plan_is_refused_whatever_its_digest(package, kind, tmp_path):
    """418 of 465 such files were loaded: samples came twice or never, or 48 TiB were asked for."""
    path = tmp_path / "plan.npz"
    PLANS[kind](package).save(path)
    fields = read_fields(path)
    write_sealed(path, fields)
    assert package.Plan.load(path).digest == str(fields["digest"])
    num_files = 0
    for wrong in wrong_contents(fields, kind):
        write_sealed(path, wrong)
        with pytest.raises(ValueError, match=r"plan\.npz"):
            package.Plan.load(path)
        num_files += 1
    assert num_files > 50


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
            package.make_plan([1, 2], [(rows, 2)], num_microbatches=num_microbatches)
