"""Arrays and numbers as JSON that is short and exact."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

VALUES = Path(__file__).parent / "values"
_IN_CLEAR = 12  # values; longer arrays are held by their SHA-256


def exact(values: Any) -> Any:
    """Integers as they are, floats as hexadecimal; of long arrays the shape, and the SHA-256 of int64 or float64."""
    array = np.asarray(values)
    kind = "<f8" if array.dtype.kind == "f" else "<i8"
    if array.size <= _IN_CLEAR:
        return [value.hex() for value in array.ravel().tolist()] if kind == "<f8" else array.tolist()
    sha = hashlib.sha256(np.ascontiguousarray(array, kind).tobytes()).hexdigest()
    return f"{list(array.shape)} {sha[:24]}"


def as_json(values: Any) -> Any:
    """The values as they come back from a file."""
    return json.loads(json.dumps(values))


def read(name: str) -> dict[str, Any]:
    return json.loads((VALUES / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, values: dict[str, Any]) -> None:
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    VALUES.mkdir(exist_ok=True)
    (VALUES / f"{name}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
