"""Small schedulers, and the steps of an engine whose model samples what a test says."""

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from invariants import check_scheduler

from nanovllm.engine.cells import NoCells
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.features.windows.windowed_scheduler import WindowedBlockManager, WindowedScheduler
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

SIZE = 4
EOS = 2


def make_scheduler(
    num_blocks: int = 100,
    mixed_step_rows: int = 0,
    make_cells: Callable[..., NoCells] | None = None,
    windows: tuple[int, int] | None = None,
    **changes,
) -> Scheduler:
    """windows: blocks of the layers with a window, and the window, for a model that has such layers; make_cells gets
    these numbers then. changes: options of Config."""
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 1000,
        "supported_model_len": None,
        "hf_config": SimpleNamespace(max_position_embeddings=0),
        "kvcache_block_size": SIZE,
        "num_kvcache_blocks": num_blocks,
        "eos": [EOS],
        "enable_prefix_caching": True,
    }
    config = SimpleNamespace(**options | changes)
    if windows is not None:
        make_cells = partial(make_cells or WindowBlocks, *windows, config.kvcache_block_size)
        return WindowedScheduler(config, mixed_step_rows, make_cells, WindowedBlockManager)
    more = {} if make_cells is None else {"make_cells": make_cells}
    return Scheduler(config, mixed_step_rows, **more)


def add(scheduler: Scheduler, prompt: int | list[int], max_tokens: int = 100, **params) -> Sequence:
    """Queue a prompt; a number stands for that many tokens which no other such prompt has."""
    seq_id = next(seq_ids)
    if isinstance(prompt, int):
        prompt = list(range(1000 * seq_id, 1000 * seq_id + prompt))
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)
    seq = Sequence(prompt, sampling_params, Request(sampling_params, seq_id))
    scheduler.add(seq)
    return seq


seq_ids = itertools.count(1)


def postprocess(scheduler: Scheduler, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
    """Without a step in between: the sequences that finished."""
    return scheduler.postprocess(seqs, token_ids, False)


def step(scheduler: Scheduler, token: int = 900) -> tuple[list[Sequence], bool, list[Sequence]]:
    """One step in which every sequence samples `token`: its sequences, whether it is a prefill, the finished."""
    seqs, is_prefill = scheduler.schedule()
    assert seqs
    finished = postprocess(scheduler, seqs, [token] * len(seqs))
    check_scheduler(scheduler)
    return seqs, is_prefill, finished
