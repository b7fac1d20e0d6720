"""quack-kernels' products against float32, alone and in engines, on a Hopper GPU that has the package."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, random_prompt
from gpu_engines import REGRET, assert_replays_repeat, gpu_llm, keys_of, use_table
from products import FP8, dequantized, experts_sum, problem
from products import run as run_product

from nanovllm.kernels.experts.experts import route_torch
from nanovllm.kernels.matmul.fp8 import dequantize_torch
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidates import make_candidates, quack_experts
from nanovllm.layers.matmul.candidates.quack import Quack, Tile, load_quack
from nanovllm.layers.matmul.candidates.quack_experts import QuackExperts
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table, package_table

pytestmark = pytest.mark.gpu

H200 = "NVIDIA H200"


@pytest.fixture
def quack() -> Quack:
    quack = load_quack(torch.bfloat16, torch.device("cuda", 0), decodes=True)
    if quack is None:
        pytest.skip("quack-kernels is not installed, or this is no Hopper GPU")
    return quack


def tiles() -> list[tuple[str, int, tuple[int, int], Tile]]:
    """Every tile of the H200's table for 16-bit weights, at the batch sizes where it begins and ends. A prefill has no
    end: then at 9,001 tokens and at 16,384."""
    found: dict[tuple[str, Tile], list[tuple[int, tuple[int, int]]]] = {}
    for key, row in package_table(H200).rows.items():
        if key.format == Fp8.name:
            continue
        for first, last, choices in zip([0, *row.bounds], row.bounds, row.choices, strict=False):
            for name, constants in choices:
                if name == Quack.name:
                    counts = (9001, 16384) if key.phase == "prefill" else (first + 1, last)
                    cases = found.setdefault((key.operation, Tile(*constants)), [])
                    cases.extend((count, (key.N, key.K)) for count in counts)
    return [
        (operation, *case, tile)
        for (operation, tile), cases in found.items()
        for case in sorted({min(cases), max(cases)})
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("operation", "num_tokens", "shape", "tile"), tiles())
def test_products_are_right_and_captured(quack, operation, num_tokens, shape, tile, dtype):
    torch.manual_seed(num_tokens)
    N, K = shape
    x = torch.randn(num_tokens, K + 64, device="cuda", dtype=dtype)[:, :K]
    weight = torch.randn(N, K, device="cuda", dtype=dtype) * K**-0.5
    before = torch.randn(num_tokens, N, device="cuda", dtype=dtype)
    expected = exact = F.linear(x.float(), weight.float())
    if operation == "linear_silu":
        gate, up = exact.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    elif operation == "linear_add":
        expected = exact + before.float()
    residual = before.clone()
    asked = problem(operation, x, weight, out=residual if operation == "linear_add" else None)
    assert quack.supports(asked.key, asked.weight)
    y = quack.launch(asked, tile).clone()
    # Each rounding is off by half an ulp at most: a result's, of a sum the product's too. Float32 sums in another order
    # differ by the rest.
    rounded = expected.abs() + exact.abs() if operation == "linear_add" else expected.abs()
    assert ((y.float() - expected).abs() <= torch.finfo(dtype).eps / 2 * rounded + 1e-3).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = quack.launch(asked, tile)
    residual.copy_(before)
    graph.replay()
    assert torch.equal(again, y)


def make_fp8_weight(N: int, K: int, in_blocks: bool = False) -> Weight:
    """Its rows are of different lengths."""
    weight = torch.randn(N, K, device="cuda") * K**-0.5 * (0.5 + torch.rand(N, 1, device="cuda"))
    return FP8[in_blocks].quantize(weight, torch.bfloat16)


def fp8_tiles() -> list[tuple[str, int, tuple[int, int], Tile]]:
    """What the tuner tries for Qwen3-8B, and what it has found for fp8."""
    found = {}
    for operation, N, K in (("linear", 6144, 4096), ("linear_silu", 24576, 4096), ("linear_add", 4096, 12288)):
        for num_tokens, phase in ((200, "decode"), (512, "decode"), (4096, "prefill")):
            tiles = Quack.challengers(Key(operation, phase, N, K, Fp8.name), num_tokens, 1, 132)
            found |= {(operation, num_tokens, (N, K), Choice(Quack.name, tile)): None for tile in tiles}
    for key, row in package_table(H200).rows.items():
        if key.format == Fp8.name:
            for bound, choices in zip(row.bounds, row.choices, strict=True):
                found |= {(key.operation, bound, (key.N, key.K), choice): None for choice in choices}
    return [(*case, Tile(*choice.constants)) for *case, choice in found if choice.candidate == Quack.name]


@pytest.mark.parametrize(("operation", "num_tokens", "shape", "tile"), fp8_tiles())
def test_products_in_fp8_are_right_and_captured(quack, operation, num_tokens, shape, tile):
    torch.manual_seed(num_tokens)
    N, K = shape
    weight = make_fp8_weight(N, K)
    x = torch.randn(num_tokens, K, device="cuda") * (0.5 + torch.rand(num_tokens, 1, device="cuda"))
    x = x.bfloat16()
    before = 0.1 * torch.randn(num_tokens, N, device="cuda", dtype=torch.bfloat16)
    values, scale = weight.format.quantize_input(x)
    expected = dequantize_torch(values, scale) @ dequantized(weight).t()
    if operation == "linear_silu":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    elif operation == "linear_add":
        expected += before
    residual = before.clone()
    asked = problem(operation, x, weight, out=residual if operation == "linear_add" else None)
    assert quack.supports(asked.key, asked.weight)
    y = quack.launch(asked, tile).clone()
    # Every row and column, because each has a scale of its own. Tensor cores drop bits of fp8 sums.
    for dim in (0, 1):
        assert ((y - expected).norm(dim=dim) <= 0.03 * expected.norm(dim=dim)).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = quack.launch(asked, tile)
    residual.copy_(before)
    graph.replay()
    assert torch.equal(again, y)


@pytest.mark.parametrize("num_tokens", [64, 200, 512])
def test_launches_in_fp8_that_depend_on_each_other_give_the_bits_of_one_at_a_time(quack, monkeypatch, num_tokens):
    """Six layers of Qwen3-0.6B without their attention: every product's input is quantized with its norm, or alone."""
    torch.manual_seed(num_tokens)
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    layers = [[make_fp8_weight(*shape) for shape in shapes] for _ in range(6)]
    norm = RMSNorm(1024).to(device="cuda", dtype=torch.bfloat16)
    start = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    residual = start.clone()

    def run(wait=lambda: None) -> None:
        for qkv, out, gate_up, down in layers:
            y = quack.launch(problem("linear", Normed(residual, norm), qkv), Tile(128, 64))
            wait()
            quack.launch(problem("linear_add", y[:, :2048], out, out=residual), Tile(64, 64))
            wait()
            y = quack.launch(problem("linear_silu", Normed(residual, norm), gate_up), Tile(128, 128))
            wait()
            quack.launch(problem("linear_add", y, down, out=residual), Tile(64, 64))
            wait()

    quantize_input = Fp8.quantize_input

    def quantized(*args):
        found = quantize_input(*args)
        torch.cuda.synchronize()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Fp8, "quantize_input", quantized)
        run(torch.cuda.synchronize)
    assert quack.works
    assert_replays_repeat(run, residual, start, 100)


@pytest.mark.parametrize("num_tokens", [64, 128, 192, 256, 384, 512])
def test_launches_that_depend_on_each_other_give_the_bits_of_one_at_a_time(quack, num_tokens):
    """Six layers of Qwen3-0.6B without their attention: norms, q, k and v, SwiGLU, sums."""
    torch.manual_seed(num_tokens)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    layers = [[torch.randn(N, K, **half) * K**-0.5 for N, K in shapes] for _ in range(6)]
    scale, start = 1 + 0.1 * torch.randn(1024, **half), torch.randn(num_tokens, 1024, **half)
    residual = start.clone()
    matmul = Matmul(package_table(H200), make_candidates(torch.device("cuda", 0), quack))

    def run(wait=lambda: None) -> None:
        for qkv, out, gate_up, down in layers:
            y = rms_norm(residual, scale, 1e-6)
            wait()
            y = run_product(matmul, "linear", y, qkv)
            wait()
            run_product(matmul, "linear_add", y[:, :2048], out, out=residual)
            wait()
            y = rms_norm(residual, scale, 1e-6)
            wait()
            y = run_product(matmul, "linear_silu", y, gate_up)
            wait()
            run_product(matmul, "linear_add", y, down, out=residual)
            wait()

    run(torch.cuda.synchronize)
    assert quack.works
    assert_replays_repeat(run, residual, start, 100)


EXPERTS, TOP_K = Key("experts", "prefill", 1536, 2048, "bfloat16", 16), 4
EXPERT_CONSTANTS = list(QuackExperts.challengers(EXPERTS, 4096, TOP_K, 132))


def make_experts(dtype: torch.dtype, in_fp8: bool) -> list[Weight]:
    """Gate and up, and down, in the sizes of Qwen3-30B-A3B but fewer."""
    weights = []
    for N, K in ((EXPERTS.N, EXPERTS.K), (EXPERTS.K, EXPERTS.N // 2)):
        weight = torch.randn(EXPERTS.experts, N, K, device="cuda", dtype=dtype) * K**-0.5
        if in_fp8:  # with rows of different lengths
            weight *= 0.5 + torch.rand(EXPERTS.experts, N, 1, device="cuda", dtype=dtype)
        weights.append((FP8[False] if in_fp8 else Unquantized()).quantize(weight, dtype))
    return weights


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("constants", EXPERT_CONSTANTS)
@pytest.mark.parametrize("num_tokens", [1, 300, 5000])
def test_grouped_products_equal_the_twin(quack, num_tokens, constants, in_fp8):
    """With experts that no token has, and rows of padding, which stay as they are."""
    torch.manual_seed(num_tokens)
    dtype = torch.bfloat16 if in_fp8 or num_tokens == 300 else torch.float16
    gate_up, down = make_experts(dtype, in_fp8)
    x = torch.randn(num_tokens, EXPERTS.K, device="cuda", dtype=dtype)
    out = 0.1 * torch.randn_like(x)
    logits = torch.randn(num_tokens, EXPERTS.experts, device="cuda", dtype=dtype)
    logits[:, [0, 5, 6, 15]] -= 30
    lens = (torch.arange(1, num_tokens + 1, device="cuda") % 9).int()
    total = experts_sum(x, route_torch(logits, TOP_K, True, lens), gate_up, down)
    key = Key.of("experts", True, gate_up)
    asked = ExpertsProblem(key, x, logits, gate_up, down, TOP_K, True, out.clone(), True, lens)
    candidate = QuackExperts(quack)
    assert candidate.supports(key, gate_up)
    found = candidate.launch(asked, constants)
    assert torch.equal(found[lens == 0], out[lens == 0])
    differences = (found.float() - out.float() - total).norm(dim=1)[lens > 0]
    # A bfloat16 has 8 bits, and the sum with `out` is rounded too. In fp8 a rounding may move the scale of a row.
    assert (differences <= (0.04 if in_fp8 else 0.01) * total.norm(dim=1)[lens > 0]).all()


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("num_tokens", [64, 2048])
def test_experts_that_depend_on_each_other_give_the_bits_of_one_at_a_time(quack, monkeypatch, num_tokens, in_fp8):
    """Three layers, whose launches overlap."""
    torch.manual_seed(num_tokens)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    layers = [(torch.randn(16, 2048, **half) * 0.03, *make_experts(torch.bfloat16, in_fp8)) for _ in range(3)]
    norm = RMSNorm(2048).to(**half)
    start = torch.randn(num_tokens, 2048, **half)
    residual = start.clone()
    candidate = QuackExperts(quack)

    def run() -> None:
        for router, gate_up, down in layers:
            logits = F.linear(norm(residual), router)
            tensors = Key.of("experts", True, gate_up), Normed(residual, norm), logits, gate_up, down
            candidate.launch(ExpertsProblem(*tensors, TOP_K, True, residual, True), EXPERT_CONSTANTS[0])

    def alone(function):
        def call(*args, **options):
            result = function(*args, **options)
            torch.cuda.synchronize()
            return result

        return call

    with monkeypatch.context() as patched:
        for module, name in (
            *((quack_experts, name) for name in ("route", "sort_by_expert", "add_pairs")),
            *((quack, "_gemm_act"), (Fp8, "quantize_input")),
        ):
            patched.setattr(module, name, alone(getattr(module, name)))
        run()
    assert quack.works
    assert_replays_repeat(run, residual, start, 100)


def test_tensors_that_it_does_not_take(quack):
    def takes(x, weight):
        asked = problem("linear", x, weight)
        return quack.supports(asked.key, asked.weight) and quack._takes_rows(x, asked.weight)

    x, weight = (torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert takes(x, weight)
    assert takes(x[:, 64:], weight[:, 64:]), "rows further apart than they are long"
    assert not takes(x.half(), weight), "dtypes differ"
    assert not takes(x.float(), weight.float())
    assert not takes(x[:, :100].contiguous(), weight[:, :100]), "100 columns"
    assert not takes(x, weight[:100]), "100 rows"
    wide = torch.zeros(128, 200, device="cuda", dtype=torch.bfloat16)
    assert not takes(wide[:, :128], weight), "rows 200 elements apart"
    assert not takes(wide.view(-1)[1 : 1 + 128 * 128].view(128, 128), weight), "an odd address"
    assert not takes(x.t(), weight), "columns packed"
    assert takes(x[:, 1:65], make_fp8_weight(128, 64)), "what is quantized first"
    assert not takes(x[:, :100], make_fp8_weight(128, 100)), "100 columns"
    assert not takes(x, make_fp8_weight(128, 128, in_blocks=True)), "blocks"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 1024}
    path = make_checkpoint(tmp_path_factory.mktemp("quack"), dtype=torch.bfloat16, **sizes)
    return path, Reference(path)


@pytest.fixture
def launches(monkeypatch) -> list[tuple[str, int]]:
    """What is launched of quack-kernels from now on: (operation, number of tokens)."""
    launches, launch = [], Quack.launch

    def recorded(self, problem, tile):
        launches.append((problem.key.operation, len(problem.x)))
        return launch(self, problem, tile)

    monkeypatch.setattr(Quack, "launch", recorded)
    return launches


def make_table(path) -> Table:
    """For the checkpoint: the package in decode steps of 17 to 128 tokens and in prefills of 2,048 and more."""

    def row(key: Key) -> Row:
        if key.phase == "prefill":
            tile = Tile(128, 128, (1, 2), pingpong=True)
            return Row({2047: [], 2048: [] if key.operation == "linear_add" else [Choice(Quack.name, tuple(tile))]})
        columns = 32 if key.operation == "linear_add" else 64
        decode = {n: [Choice(Quack.name, (n if columns > 32 else 64, columns))] for n in (64, 128)}
        return Row({16: [], 129: [], **decode})

    return Table({key: row(key) for key in keys_of(path)})


@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_with_quack_kernels_gives_the_references_tokens(quack, checkpoint, launches, monkeypatch, eager):
    """Long prefills; decode steps of a hundred sequences, tokens drawn in the graph and after it."""
    path, reference = checkpoint
    use_table(monkeypatch, make_table(path))
    prompts = [random_prompt(21 + i % 9, seed=i) for i in range(100)]
    options = {"dtype": "bfloat16", "num_kvcache_blocks": 128, "max_num_seqs": 100, "max_num_batched_tokens": 4096}
    with gpu_llm(path, enforce_eager=eager, **options) as llm:
        # Without graphs it prefills alone.
        decoded = {num_tokens for _, num_tokens in launches if num_tokens < 2048}
        assert decoded == (set() if eager else {*range(32, 97, 16), 100})
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
        assert {n for _, n in launches if n < 2048} == (set() if eager else {96}), "graphs that end at the logits"
        assert_idle(llm)
