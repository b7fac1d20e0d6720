"""OpenAI's /v1/files and /v1/batches over jobs: `nanovllm serve --batches FOLDER`. See docs/batches.md."""
