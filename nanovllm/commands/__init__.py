"""What the commands of `nanovllm` share, and those with a file of their own. `nanovllm/cli.py` puts them together."""
