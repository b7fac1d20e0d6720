"""How the ranks of one engine find each other, beside whatever else its process does with torch.distributed."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.peer_memory import make_peers
from nanovllm.utils.residual_reducer import make_reducer

HOST = "127.0.0.1"
MEET_TIMEOUT = timedelta(seconds=60)  # All ranks are up when they begin to meet.
# A dead rank shows otherwise (see Workers); this must outlast the slowest compilation or load of weights on one rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=20)
ABORT_SECONDS = 10.0  # that giving back a group may take

# NCCL's watchdog thread would end the process, which on rank 0 is the caller's, when a peer has gone, and would tell
# about it at length. Workers reports a dead rank, by name, and aborts the communicator. Settings of the caller's own
# are left alone.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def open_store() -> dist.TCPStore:
    """Rank 0's: a store on a free port of the loopback interface, and nowhere else; its `port` says which."""
    server = socket.create_server((HOST, 0))
    port = server.getsockname()[1]
    return dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, timeout=MEET_TIMEOUT, master_listen_fd=server.detach()
    )


def connect_store(port: int) -> dist.TCPStore:
    """A worker's: the store that rank 0 opened."""
    return dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=MEET_TIMEOUT)


def join_group(store: dist.Store, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Meet the other ranks: NCCL between GPUs, gloo on CPUs. No default group is made, and none is touched.

    Returns once all are connected, so that a rank that dies later breaks a connection, and is not waited for.
    """
    prefixed = dist.PrefixStore("tensor_parallel", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        with torch.cuda.device(device), _environment_defaults(_NCCL_SETTINGS):
            group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    else:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = COLLECTIVE_TIMEOUT
        group = dist.ProcessGroupGloo(prefixed, rank, size, options)
    tp = TensorParallel(rank, size, group, store)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        tp.all_reduce(torch.zeros(1, device=device)).item()
    return tp


def share_memory(tp: TensorParallel, config: Config, device: torch.device) -> TensorParallel:
    """The same place with memory that the GPUs share, where they can. All ranks must call it."""
    peers = make_peers(tp.rank, tp.size, tp.store, device)
    max_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    reducer = make_reducer(peers, max_tokens, config.hf_config.hidden_size, config.dtype)
    return replace(tp, peers=peers, reducer=reducer)


def abort_group(tp: TensorParallel) -> threading.Thread | None:
    """Make kernels give up waiting for ranks that have gone, from any thread; connections of gloo break by themselves.
    The group is of no use after it.

    Returns the thread in which NCCL gives back what it holds, which lasts until no CUDA graph holds its kernels any
    more: destroy those before you wait for it.
    """
    if tp.peers is not None:
        tp.peers.abort()
    if not isinstance(tp.group, getattr(dist, "ProcessGroupNCCL", ())):
        return None
    thread = threading.Thread(target=tp.group.abort, name="nanovllm-abort", daemon=True)
    thread.start()
    return thread


@contextmanager
def _environment_defaults(settings: dict[str, str]) -> Iterator[None]:
    """Environment variables for the block, where they are not set."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
