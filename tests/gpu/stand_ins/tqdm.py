"""Stands in for tqdm: iterates without a bar."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any


class tqdm:
    """Counts, and knows what those that print for themselves ask it."""

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str = "",
        total: int | None = None,
        initial: int = 0,
        unit: str = "it",
        disable: bool = False,
        **appearance: Any,
    ):
        self.iterable, self.desc, self.total, self.n, self.unit = iterable, desc, total, initial, unit
        self.disable = disable
        self.fp: IO[str] = sys.stderr
        self._start = time.perf_counter()

    @property
    def format_dict(self) -> dict[str, float]:
        return {"elapsed": time.perf_counter() - self._start}

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable or ():
            yield item
            self.update()
        self.close()

    def __enter__(self) -> "tqdm":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        self.n += n

    def set_postfix_str(self, text: str = "", refresh: bool = True) -> None:
        pass

    def close(self) -> None:
        self.disable = True

    @staticmethod
    def write(text: str, file: IO[str] | None = None) -> None:
        print(text, file=file)
