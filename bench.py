"""`nanovllm bench` from a clone of the repository: `python bench.py --help`."""

from nanovllm.bench.run import main

if __name__ == "__main__":
    main()
