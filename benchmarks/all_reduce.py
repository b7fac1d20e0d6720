"""How long does the sum over GPUs after a layer take, by NCCL and by our kernels?

    python benchmarks/all_reduce.py --hidden 5120 --json out.json
    python benchmarks/all_reduce.py --gpus 2                        two GPUs of a machine that has more
    python benchmarks/all_reduce.py --programs 256 512 1024 2048    two shots by at most so many programs

Checks our sums, then prints rank 0's microseconds a call in a CUDA graph. NCCL's figure is that of all_reduce, an
addition to the residual and the norm; our kernels do all three in one launch. `messages` sums few tokens (see
nanovllm/kernels/parallel/posted_sums.py), and `one shot` and `two shots` are those of all_reduce.py beside it.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing
from graph_timing import time_graph
from required_gpus import require_gpus

from nanovllm.engine.ranks.process_group import abort_group, join_group, open_store
from nanovllm.kernels.parallel import all_reduce as kernels
from nanovllm.kernels.parallel.posted_sums import MAX_TOKENS, Inboxes, push_add_norm
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.parallel.peer_memory import Peers, make_peers
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EPS = 1e-6
DTYPE = torch.bfloat16


class Sums:
    """One rank's sums of `part`, which `run` adds to a residual again and again."""

    def __init__(self, tp: TensorParallel, peers: Peers, hidden: int, programs: list[int]):
        self._tp, self._peers, self._programs = tp, peers, programs
        self._weight = torch.ones(hidden, dtype=DTYPE, device=peers.device)
        # Two shots need one buffer, and one shot two that take turns.
        self._buffers = [peers.share(f"buffer {i}", (max(TOKENS), hidden), DTYPE) for i in range(2)]
        self._pull_flags = peers.share("pull flags", (kernels.MAX_PULL_PROGRAMS, peers.size), torch.int32)
        self._two_shot_flags = peers.share("two shot flags", (max(programs), peers.size), torch.int32)
        self._messages = peers.share("inboxes", (2, peers.size, MAX_TOKENS, hidden // 2), torch.int64)
        step = torch.ones(1, dtype=torch.int32, device=peers.device)
        table = self._messages.address_table
        self._inboxes = Inboxes(self._messages.tensor, table, step, peers.abort_flag, peers.rank)

    def ways(self, num_tokens: int) -> dict[str, Callable]:
        """run(part, residual, num_calls) of each way that sums this many tokens. Returns the last norm."""
        ways = {"nccl": self._nccl} | ({"messages": self._push} if num_tokens <= MAX_TOKENS else {})
        ways["one shot"] = self._one_shot
        for number in self._programs:
            name = "two shots" if len(self._programs) == 1 else f"two shots, {number}"
            ways[name] = partial(self._two_shots, number)
        return ways

    def _nccl(self, part, residual, num_calls):
        for _ in range(num_calls):
            y = rms_norm(residual.add_(self._tp.all_reduce(part)), self._weight, EPS)
        return y

    def _push(self, part, residual, num_calls):
        self._inboxes.step.add_(num_calls)
        for i in range(num_calls):
            y = push_add_norm(self._inboxes, i - num_calls, part, residual, self._weight, EPS)
        return y

    def _one_shot(self, part, residual, num_calls):
        for i in range(num_calls):
            y = self._in_buffer(kernels.pull_add_norm, self._buffers[i % 2], self._pull_flags, part, residual)
        return y

    def _two_shots(self, number, part, residual, num_calls):
        kernels.MAX_TWO_SHOT_PROGRAMS = number
        for _ in range(num_calls):
            y = self._in_buffer(kernels.two_shot_add_norm, self._buffers[0], self._two_shot_flags, part, residual)
        return y

    def _in_buffer(self, add_norm, buffer, flags, part, residual):
        if part is not None:  # Otherwise a product has written it there.
            buffer.tensor[: len(residual)].copy_(part)
        tables = buffer.address_table, flags.address_table
        return add_norm(*tables, self._peers.abort_flag, self._peers.rank, residual, self._weight, EPS)

    def clear(self) -> None:
        """So that the buffers hold zeros on all ranks."""
        for buffer in self._buffers:
            buffer.tensor.zero_()
        self._tp.all_reduce(self._weight.new_zeros(1))

    def check(self, num_tokens: int) -> None:
        """Two sums of random numbers in each way, held to a sum in float32 by NCCL. Raises AssertionError."""
        hidden, device = len(self._weight), self._peers.device
        for name, run in self.ways(num_tokens).items():
            if name == "nccl":
                continue
            part = torch.randn(num_tokens, hidden, device=device).to(DTYPE)
            residual = self._tp.broadcast(torch.randn(num_tokens, hidden, device=device).to(DTYPE))
            # Each sum is rounded.
            expected, total = residual.float(), self._tp.all_reduce(part.float())
            for _ in range(2):
                expected = expected.add_(total).to(DTYPE).float()
            y = run(part, residual, 2)
            where = f"{num_tokens} tokens, {name}: "
            close = {"rtol": 2**-6, "atol": 2**-6, "msg": where.__add__}
            torch.testing.assert_close(residual.float(), expected, **close)
            torch.testing.assert_close(y, rms_norm(residual, self._weight, EPS), **close)
            of_ranks = self._tp.all_gather(residual)
            assert all(torch.equal(each, residual) for each in of_ranks), where + "the ranks differ"


def measure(index: int, size: int, store_folder: str, hidden: int, programs: list[int], results: list) -> None:
    """One rank's part; rank 0 fills `results`."""
    rank, device = index, torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    store = open_store(store_folder)
    tp = join_group(store, rank, size, device)
    peers = make_peers(rank, size, store, device)
    if peers is None:
        raise SystemExit("the GPUs cannot map each other's memory")
    sums = Sums(tp, peers, hidden, programs)
    names = list(sums.ways(1))
    if rank == 0:
        print("tokens", *(f"{name:>16s}" for name in names), flush=True)
    for num_tokens in TOKENS:
        sums.check(num_tokens)
        # Zeros stay zeros, however often they are added up.
        residual, zeros = torch.zeros(2, num_tokens, hidden, dtype=DTYPE, device=device)
        num_calls = 20 if num_tokens < 4096 else 4  # Even: two buffers take turns.
        row: dict[str, float] = {"tokens": num_tokens}
        for name, run in sums.ways(num_tokens).items():
            if name not in ("nccl", "messages"):
                sums.clear()
            part = zeros if name in ("nccl", "messages") else None
            # The clocks take a while to rise, and the ranks to fall into step.
            call = partial(run, part, residual, num_calls)
            row[name] = time_graph(call, num_calls, num_replays=9, num_warm_replays=20)
        if rank == 0:
            results.append(row)
            cells = (f"{row[name]:13.1f} us" if name in row else " " * 16 for name in names)
            print(f"{num_tokens:6d}", *cells, flush=True)
    leave(tp, device)


def leave(tp: TensorParallel, device: torch.device) -> None:
    """Give back what NCCL holds, once no rank needs another one any more."""
    torch.cuda.synchronize(device)
    tp.store.set(f"done {tp.rank}", "")
    tp.store.wait([f"done {rank}" for rank in range(tp.size)])
    abort_group(tp).join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="4096 is Qwen3-8B's, 5120 Qwen3-32B's")
    parser.add_argument("--gpus", type=int, help="how many of the machine's, from the first on; default: all")
    help_of_programs = "the most programs of two shots, a column each; default: what engines use"
    default = [kernels.MAX_TWO_SHOT_PROGRAMS]
    parser.add_argument("--programs", type=int, nargs="+", default=default, help=help_of_programs)
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser, max(2, args.gpus or 0))
    size = args.gpus or torch.cuda.device_count()
    with torch.multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as store_folder:
        results = manager.list()
        arguments = (size, store_folder, args.hidden, args.programs, results)
        torch.multiprocessing.spawn(measure, arguments, nprocs=size)
        if args.json:
            facts = {"card": torch.cuda.get_device_name(), "gpus": size, "hidden": args.hidden}
            Path(args.json).write_text(json.dumps({**facts, "rows": list(results)}))


if __name__ == "__main__":
    main()
