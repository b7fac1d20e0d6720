"""`nanovllm bench`: the published benchmark and other workloads, beside what the hardware allows."""
