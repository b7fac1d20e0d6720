"""quack-kernels' products against float32, alone and in engines, on a Hopper GPU that has the package."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, random_prompt
from gpu_engines import REGRET, gpu_llm

from nanovllm.kernels import decode_linear_kernel
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers import product, quack_tiles
from nanovllm.layers.quack import Quack, Tile, load_quack
from nanovllm.layers.quack_tiles import Kind, decode_tile, prefill_tile

pytestmark = pytest.mark.gpu

H200_MULTIPROCESSORS = 132
# Weights [N, K] of Qwen3-0.6B, 1.7B, 4B and 8B.
SHAPES = {
    Kind.LINEAR: [(4096, 1024), (4096, 2048), (6144, 2560), (6144, 4096)],
    Kind.SILU: [(6144, 1024), (12288, 2048), (19456, 2560), (24576, 4096)],
    Kind.ADD: [(1024, 2048), (1024, 3072), (2048, 2048), (2560, 9728), (4096, 12288)],
}


@pytest.fixture
def quack() -> Quack:
    quack = load_quack(torch.bfloat16, torch.device("cuda", 0), decodes=True)
    if quack is None:
        pytest.skip("quack-kernels is not installed, or this is no Hopper GPU")
    return quack


def tiles() -> list[tuple[Kind, int, tuple[int, int], Tile]]:
    """Every tile that these weights take, at the batch sizes where it begins and ends."""
    found: dict[tuple[Kind, Tile], list[tuple[int, tuple[int, int]]]] = {}
    for kind, shapes in SHAPES.items():
        for N, K in shapes:
            for num_tokens in range(1, 513):
                tile = decode_tile(kind, num_tokens, N, K, H200_MULTIPROCESSORS)
                if tile is not None:
                    found.setdefault((kind, tile), []).append((num_tokens, (N, K)))
    for kind, shape in itertools.product((Kind.LINEAR, Kind.SILU), ((6144, 1024), (6144, 4096))):
        for num_tokens in (9001, 16384):
            found.setdefault((kind, prefill_tile(kind, num_tokens, *shape)), []).append((num_tokens, shape))
    return [(kind, *case, tile) for (kind, tile), cases in found.items() for case in sorted({cases[0], cases[-1]})]


def launch(quack: Quack, kind: Kind, tile: Tile, x, weight, residual) -> torch.Tensor:
    if kind is Kind.ADD:
        return quack.linear_add(x, weight, residual, tile)
    return (quack.linear_silu if kind is Kind.SILU else quack.linear)(x, weight, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "num_tokens", "shape", "tile"), tiles())
def test_products_are_right_and_captured(quack, kind, num_tokens, shape, tile, dtype):
    torch.manual_seed(num_tokens)
    N, K = shape
    x = torch.randn(num_tokens, K + 64, device="cuda", dtype=dtype)[:, :K]
    weight = torch.randn(N, K, device="cuda", dtype=dtype) * K**-0.5
    before = torch.randn(num_tokens, N, device="cuda", dtype=dtype)
    expected = exact = F.linear(x.float(), weight.float())
    if kind is Kind.SILU:
        gate, up = exact.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    elif kind is Kind.ADD:
        expected = exact + before.float()
    residual = before.clone()
    assert quack.takes(x, weight)
    y = launch(quack, kind, tile, x, weight, residual).clone()
    # Each rounding is off by half an ulp at most: a result's, of a sum the product's too. Float32 sums in another order
    # differ by the rest.
    rounded = expected.abs() + exact.abs() if kind is Kind.ADD else expected.abs()
    assert ((y.float() - expected).abs() <= torch.finfo(dtype).eps / 2 * rounded + 1e-3).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = launch(quack, kind, tile, x, weight, residual)
    residual.copy_(before)
    graph.replay()
    assert torch.equal(again, y)


@pytest.mark.parametrize("num_tokens", [64, 128, 192, 256, 384, 512])
def test_launches_that_depend_on_each_other_give_the_bits_of_one_at_a_time(quack, num_tokens):
    """Six layers of Qwen3-0.6B without their attention: norms, q, k and v, SwiGLU, sums."""
    torch.manual_seed(num_tokens)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    layers = [[torch.randn(N, K, **half) * K**-0.5 for N, K in shapes] for _ in range(6)]
    scale, start = 1 + 0.1 * torch.randn(1024, **half), torch.randn(num_tokens, 1024, **half)
    residual, counters = start.clone(), [decode_linear_kernel.make_arrivals("cuda") for _ in layers]

    def run(wait=lambda: None) -> None:
        for (qkv, out, gate_up, down), arrivals in zip(layers, counters, strict=True):
            y = rms_norm(residual, scale, 1e-6)
            wait()
            y = product.product(y, qkv, arrivals=arrivals, quack=quack)
            wait()
            product.add_product(residual, y[:, :2048], out, arrivals=arrivals, quack=quack)
            wait()
            y = rms_norm(residual, scale, 1e-6)
            wait()
            y = product.product_silu(y, gate_up, arrivals, quack)
            wait()
            product.add_product(residual, y, down, arrivals=arrivals, quack=quack)
            wait()

    run(torch.cuda.synchronize)
    assert quack.works
    expected = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual.copy_(start)
        run()
    for _ in range(100):
        graph.replay()
        assert torch.equal(residual, expected)


def test_products_let_the_next_kernel_in_early(quack):
    """The package is still extended as `quack_early` does it; otherwise nothing but a layer's time would tell."""
    assert quack._gemm_act.__module__ == "nanovllm.layers.quack_early"


def test_tensors_that_it_does_not_take(quack):
    x, weight = (torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert quack.takes(x, weight)
    assert quack.takes(x[:, 64:], weight[:, 64:]), "rows further apart than they are long"
    assert not quack.takes(x.half(), weight), "dtypes differ"
    assert not quack.takes(x.float(), weight.float())
    assert not quack.takes(x[:, :100].contiguous(), weight[:, :100]), "100 columns"
    assert not quack.takes(x, weight[:100]), "100 rows"
    wide = torch.zeros(128, 200, device="cuda", dtype=torch.bfloat16)
    assert not quack.takes(wide[:, :128], weight), "rows 200 elements apart"
    assert not quack.takes(wide.view(-1)[1 : 1 + 128 * 128].view(128, 128), weight), "an odd address"
    assert not quack.takes(x.t(), weight), "columns packed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 1024}
    path = make_checkpoint(tmp_path_factory.mktemp("quack"), dtype=torch.bfloat16, **sizes)
    return path, Reference(path)


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, int]]:
    """What is launched of quack-kernels from now on: (name, number of tokens)."""
    launches = []

    def record(name: str):
        launch = getattr(Quack, name)

        def recorded(self, x, *args):
            launches.append((name, len(x)))
            return launch(self, x, *args)

        return recorded

    for name in ("linear", "linear_silu", "linear_add"):
        monkeypatch.setattr(Quack, name, record(name))
    return launches


@pytest.mark.parametrize("eager", [False, True])
def test_engines(quack, checkpoint, launches, monkeypatch, eager):
    """Long prefills; decode steps of a hundred sequences, which the layers get as 128, tokens drawn in the graph and
    after it."""
    monkeypatch.setattr(quack_tiles, "_MIN_PREFILL_WORK", 0)
    path, reference = checkpoint
    prompts = [random_prompt(21 + i % 9, seed=i) for i in range(100)]
    options = {"dtype": "bfloat16", "num_kvcache_blocks": 128, "max_num_seqs": 100, "max_num_batched_tokens": 4096}
    with gpu_llm(path, enforce_eager=eager, **options) as llm:
        # Without graphs it prefills alone.
        decoded = {num_tokens for _, num_tokens in launches if num_tokens < 2048}
        assert decoded == (set() if eager else {64, 128})
        launches.clear()
        for batch in (prompts, prompts[:70], prompts[::-1]):
            outputs = complete(llm, batch, greedy(6))
            assert max(map(reference.regret, batch, outputs)) < REGRET["bfloat16"]
        num_new = sum(map(len, prompts))
        assert {("linear", num_new), ("linear_silu", num_new)} <= set(launches)
        launches.clear()
        params = replace(greedy(6), logprobs=1)
        outputs = [output["token_ids"] for output in llm.generate(prompts[:90], params, use_tqdm=False)]
        assert max(map(reference.regret, prompts[:90], outputs)) < REGRET["bfloat16"]
        assert {n for _, n in launches if n < 2048} == decoded - {64}, "graphs that end at the logits"
        assert_idle(llm)
