"""A script that measures samples in two workers that never finish."""

import os
import time

import jvarlen

NUM_SAMPLES = 2_000


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
    jvarlen.measure_lengths(Endless(), num_workers=2, progress=False)


if __name__ == "__main__":
    main()
