"""How the ranks of one engine find each other, beside whatever else its process does with torch.distributed."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.layers.parallel.peer_memory import make_peers
from nanovllm.layers.parallel.residual_reducer import make_reducer
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

MEET_TIMEOUT = timedelta(seconds=60)  # All ranks are up when they begin to meet.
# A dead rank shows otherwise (see Workers); this must outlast the slowest compilation or load of weights on one rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=20)
ABORT_SECONDS = 10.0  # that giving back a group may take

# If the caller has set none of its own.
_NCCL_SETTINGS = {
    # NCCL's watchdog thread would end the process, which on rank 0 is the caller's, when a peer has gone. Workers
    # reports a dead rank by name, and aborts the communicator.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The ranks are on one host, and NCCL would listen where other hosts can reach it.
    "NCCL_SOCKET_IFNAME": "lo",
}


def open_store(folder: str) -> dist.FileStore:
    """The store through which the ranks find each other. Unlike one that listens on a port, no other user can reach it.
    Rank 0 must not open it before there are workers, which remove the folder if rank 0 is killed."""
    os.makedirs(folder, 0o700, exist_ok=True)
    store = dist.FileStore(os.path.join(folder, "store"))
    store.set_timeout(MEET_TIMEOUT)
    return store


def remove_store(folder: str) -> None:
    """Harmless when called again. A rank that still waits for a key fails within MEET_TIMEOUT."""
    # Renamed first: a thread that still writes to the store would make the file anew while the folder is emptied.
    removed = folder + ".removed"
    with suppress(FileNotFoundError):
        os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def join_group(store: dist.Store, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Meet the other ranks: NCCL between GPUs, gloo on CPUs. No default group is made or touched.

    Returns once all are connected. A rank that dies later breaks a connection.
    """
    prefixed = dist.PrefixStore("tensor_parallel", store)
    is_cuda = device.type == "cuda"
    options: Any
    group: Any
    with torch.cuda.device(device) if is_cuda else nullcontext(), _environment_defaults(_NCCL_SETTINGS):
        if is_cuda:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = COLLECTIVE_TIMEOUT
            group = gloo(prefixed, rank, size, options)
        tp = TensorParallel(rank, size, group, store)
        tp.all_reduce(torch.zeros(1, device=device)).item()  # NCCL connects here, gloo above.
    return tp


def share_memory(tp: TensorParallel, config: Config, device: torch.device) -> TensorParallel:
    """The same place with memory that the GPUs share, if they can. All ranks must call it."""
    peers = make_peers(tp.rank, tp.size, cast(dist.Store, tp.store), device)
    max_tokens = max(config.max_num_batched_tokens, config.max_decode_rows)
    # How it adds depends on the number of tokens. Without it, `RankOrderParallel` adds all sums.
    sizes = max_tokens, config.hf_config.hidden_size, config.dtype
    reducer = None if config.deterministic else make_reducer(peers, *sizes)
    return replace(tp, peers=peers, reducer=reducer)


def abort_group(tp: TensorParallel) -> threading.Thread | None:
    """Make kernels give up waiting for ranks that have gone, from any thread; connections of gloo break by themselves.

    Returns the thread in which NCCL gives back what it holds. It ends when no CUDA graph holds NCCL's kernels any more:
    destroy those before you wait for it.
    """
    if tp.peers is not None:
        tp.peers.abort()
    if not isinstance(tp.group, getattr(dist, "ProcessGroupNCCL", ())):
        return None
    group: Any = tp.group
    thread = threading.Thread(target=group.abort, name="nanovllm-abort", daemon=True)
    thread.start()
    return thread


@contextmanager
def _environment_defaults(settings: dict[str, str]) -> Iterator[None]:
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)  # Another engine that starts at the same time may have removed it.
