# nanovllm on NVIDIA GPUs. Built by scripts/docker_images.py, whose context holds the wheel and nothing else.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Triton compiles a small C file for each kernel, against Python's headers. CUDA's own libraries come with torch.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/nanovllm
ENV PATH=/opt/nanovllm/bin:$PATH

ARG VERSION=0.1.0
COPY nanovllm-${VERSION}-py3-none-any.whl /tmp/
RUN pip install --no-cache-dir "/tmp/nanovllm-${VERSION}-py3-none-any.whl[jobs,serve,structured]"

# Models and compiled kernels are kept in .cache: mount a volume there. A new volume has the owner of this folder.
RUN useradd --create-home --uid 10001 nanovllm && install -d -o nanovllm -g nanovllm /home/nanovllm/.cache
USER nanovllm
WORKDIR /home/nanovllm
ENTRYPOINT ["nanovllm"]
CMD ["--help"]
