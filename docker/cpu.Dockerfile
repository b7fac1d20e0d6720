# nanovllm without a GPU. Built by scripts/docker_images.py, whose context holds the wheel and nothing else.
FROM python:3.12-slim-bookworm

RUN python -m venv /opt/nanovllm
ENV PATH=/opt/nanovllm/bin:$PATH

# torch's CPU build first: otherwise its dependencies are gigabytes of CUDA libraries that nothing here can use.
RUN pip install --no-cache-dir uv && uv pip install --no-cache torch --torch-backend=cpu

ARG VERSION=0.1.0
COPY nanovllm-${VERSION}-py3-none-any.whl /tmp/
RUN pip install --no-cache-dir "/tmp/nanovllm-${VERSION}-py3-none-any.whl[jobs,serve,structured]"

# Models are kept in .cache: mount a volume there. A new volume has the owner of this folder.
RUN useradd --create-home --uid 10001 nanovllm && install -d -o nanovllm -g nanovllm /home/nanovllm/.cache
USER nanovllm
WORKDIR /home/nanovllm
ENTRYPOINT ["nanovllm"]
CMD ["--help"]
