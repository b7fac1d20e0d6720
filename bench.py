"""`nanovllm bench` from a clone of the repository: `python bench.py --help`."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
