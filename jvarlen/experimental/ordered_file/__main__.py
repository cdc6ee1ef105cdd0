"""`python -m jvarlen.experimental.ordered_file lengths.npy --out order.npy`: sorts a file of lengths or other keys."""

import sys

from jvarlen.cli import run_command

if __name__ == "__main__":
    module = "experimental.ordered_file.command"
    sys.exit(run_command(module, "SortCommand", sys.argv[1:], prog="python -m jvarlen.experimental.ordered_file"))
