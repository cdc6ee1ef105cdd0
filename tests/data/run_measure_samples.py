"""A script that measures samples in two workers that never finish. Argument: a folder for shard files."""

import os
import sys
import time
from pathlib import Path

import jvarlen

NUM_SAMPLES = 2_000
SHARD_SIZE = 20


class Endless:
    """Samples of id plus 1 bytes each; reading one of the second half takes for ever, and tells by which process."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> bytes:
        if index >= NUM_SAMPLES // 2:
            print(os.getpid(), flush=True)
            time.sleep(600)
        return bytes(index + 1)


def main() -> None:
    """Measure until interrupted."""
    os.setpgid(0, 0)  # so that Ctrl-C can reach this process and its workers, and no others
    jvarlen.measure_lengths(Endless(), num_workers=2, progress=False, shards=Path(sys.argv[1]), shard_size=SHARD_SIZE)


if __name__ == "__main__":
    main()
