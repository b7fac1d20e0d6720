"""The tuner, with functions that stand for the time on a GPU."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from checkpoints import needs_family

from nanovllm.engine.batch_sizes import MAX_GRAPH_BATCH_SIZE
from nanovllm.layers.matmul.candidates import ALL
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table, package_table, read_table
from nanovllm.tuning import tune_model
from nanovllm.tuning.tune_model import keys_and_top_k, layer_problems, meta_layers, with_new_products
from nanovllm.tuning.tuner import DECODE_TOKENS, PREFILL_TOKENS, Tuner

KEYS = [
    Key("linear", "decode", 4096, 1024, "bfloat16"),
    Key("linear_add", "decode", 1024, 2048, "bfloat16"),
    Key("linear_silu", "decode", 6144, 1024, "bfloat16"),
    Key("linear_add", "decode", 1024, 3072, "bfloat16"),
]
QKV, GATE_UP = KEYS[0], KEYS[2]
NAMES = {each.name for each in ALL}
CUBLAS = Choice("cublas")
H200 = 132


def tuner(table: Table | None = None, available: set[str] = NAMES) -> Tuner:
    return Tuner(KEYS, table or Table(), [each for each in ALL if each.name in available], H200)


def in_phase(key: Key, phase: str) -> Key:
    return key._replace(phase=phase)


def challengers(key: Key, phase: str, num_tokens: int, top_k: int = 1) -> list[Choice]:
    """Of all candidates, the default first."""
    found = Tuner([key], Table(), ALL, H200, top_k=top_k).trials(phase, num_tokens)
    return found[0]


def by_candidate(**costs: float) -> Callable:
    """A product takes cuBLAS 25 us, and the others what is said, gemv for gemv and so on; None: it does not work."""

    def time_layer(phase, num_tokens, picks):
        micros = [25.0 if pick == CUBLAS else costs.get(pick.candidate.replace("-", "_"), 99.0) for pick in picks]
        return None if None in micros else sum(micros)

    return time_layer


def names(choices: list[Choice]) -> list[str]:
    return [choice.candidate for choice in choices]


def test_the_fastest_become_the_choices_with_others_to_stand_in():
    result = tuner().measure("decode", 64, by_candidate(split_k=20, quack_kernels=18))
    assert result.is_new
    assert result.micros == 4 * 18
    assert [names(choices) for choices in result.choices] == [["quack-kernels", "split-k"]] * 4
    result = tuner(available={"cublas", "split-k"}).measure("decode", 64, by_candidate(split_k=20))
    assert [names(choices) for choices in result.choices] == [["split-k"]] * 4


@pytest.mark.parametrize(("micros", "wins"), [(24.4, True), (24.6, False)])
def test_a_challenger_must_win_by_two_percent(micros, wins):
    result = tuner().measure("decode", 4, by_candidate(gemv=micros))
    assert result.is_new == wins
    assert [names(choices) for choices in result.choices] == [["gemv"] if wins else []] * 4


def test_a_challenger_must_win_twice():
    calls = []

    def time_layer(phase, num_tokens, picks):
        calls.append(picks)
        is_second_run = len(calls) > 1 and all(pick.candidate == "gemv" for pick in picks) and picks in calls[:-1]
        return 100.0 if is_second_run else by_candidate(gemv=20)(phase, num_tokens, picks)

    assert not tuner().measure("decode", 4, time_layer).is_new


def test_what_the_table_has_is_what_is_to_be_beaten():
    choice = Choice("gemv", (4, 512, 1))
    table = Table({in_phase(shape, "decode"): Row({16: [Choice("other"), choice], 17: []}) for shape in KEYS})
    assert tuner(table).present("decode", 4) == (choice,) * 4
    assert tuner(table).present("decode", 17) == (CUBLAS,) * 4
    assert tuner(table, {"cublas"}).present("decode", 4) == (CUBLAS,) * 4

    def time_layer(phase, num_tokens, picks):
        return sum({choice: 20.0, CUBLAS: 25.0}.get(pick, 19.9) for pick in picks)

    result = tuner(table).measure("decode", 4, time_layer)
    assert not result.is_new
    assert [choices[0] for choices in result.choices] == [choice] * 4


def test_a_candidate_that_is_the_fastest_for_all_products_together_is_found():
    """Alone between others its launches wait for theirs."""

    def time_layer(phase, num_tokens, picks):
        own = [pick.candidate == "quack-kernels" for pick in picks]
        others = sum(25.0 if pick == CUBLAS else 99.0 for pick, is_own in zip(picks, own, strict=True) if not is_own)
        return others + sum(18.0 if all(own) else 26.0 for is_own in own if is_own)

    result = tuner().measure("decode", 64, time_layer)
    assert result.is_new
    assert result.micros == 4 * 18
    assert [choices[0].candidate for choices in result.choices] == ["quack-kernels"] * 4


def test_what_does_not_work_is_never_chosen():
    result = tuner().measure("decode", 64, by_candidate(split_k=None, quack_kernels=18))
    assert [names(choices) for choices in result.choices] == [["quack-kernels"]] * 4
    table = Table({in_phase(shape, "decode"): Row({1: [Choice("split-k", (1,))]}) for shape in KEYS})
    result = tuner(table).measure("decode", 64, by_candidate(split_k=None, quack_kernels=None))
    assert [names(choices) for choices in result.choices] == [[]] * 4


def test_rows_are_merged_and_end_with_cublas():
    lines = []
    time_layer = by_candidate(gemv=20, quack_kernels=30, split_k=30)
    table = tuner().tune(time_layer, {"decode": (1, 2, 4, 32, 64), "prefill": (2048, 8192)}, lines.append)
    row = table.rows[in_phase(QKV, "decode")]
    assert [names(row[n]) for n in (1, 2, 4, 16, 32, 64, 65, 999)] == [["gemv"]] * 3 + [[]] * 5
    assert len(row.bounds) <= 4
    assert all(row[n] == () for n in (16, 64, 999))
    prefill = table.rows[in_phase(GATE_UP, "prefill")]
    assert (prefill[1], prefill[100_000]) == ((), ())
    assert len(lines) == 7
    assert "decode" in lines[0]
    assert "prefill" in lines[-1]


def test_a_prefill_takes_what_was_measured_and_a_short_one_cublas():
    table = tuner().tune(by_candidate(fused_silu=20), {"prefill": PREFILL_TOKENS}, lambda line: None)
    row = table.rows[in_phase(GATE_UP, "prefill")]
    assert [names(row[n]) for n in (1, 2047, 2048, 16384, 99999)] == [[], [], *[["fused-silu"]] * 3]


def test_more_tokens_than_are_measured_keep_their_choices():
    decode, prefill = in_phase(QKV, "decode"), in_phase(QKV, "prefill")
    split_k, quack = [Choice("split-k", (32, 128, 1, 6, 0))], [Choice("quack-kernels")]
    before = Table({decode: Row({16: quack, 512: split_k, 513: []}), prefill: Row({2047: [], 16384: quack})})
    table = tuner(before).tune(by_candidate(gemv=20), {"decode": (1, 64), "prefill": (2048,)}, print)
    assert [names(list(table.rows[decode][n])) for n in (1, 64, 65, 512, 513)] == [
        ["gemv"],
        [],
        ["split-k"],
        ["split-k"],
        [],
    ]
    assert [names(list(table.rows[prefill][n])) for n in (1, 2048, 2049)] == [[], [], ["quack-kernels"]]


def test_a_short_prefill_of_4_bits_takes_what_decode_steps_do():
    """It would be too short for dequantizing the weights."""
    keys = [key._replace(format="int4") for key in KEYS]
    four_bits = Tuner(keys, Table(), ALL, H200)
    micros = {"tiles-4bit": 20.0, "dequantized": 25.0}

    def time_layer(phase, num_tokens, picks):
        return sum(micros["dequantized"] if num_tokens > 2000 else micros.get(pick.candidate, 99.0) for pick in picks)

    table = four_bits.tune(time_layer, {"decode": (1, 256), "prefill": (2048, 4096)}, print)
    prefill = table.rows[in_phase(keys[0], "prefill")]
    assert [names(list(prefill[n])) for n in (1, 256, 257, 9000)] == [["tiles-4bit"], ["tiles-4bit"], [], []]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("num_tokens", [1, 64, 1024, 4096])
def test_layers_are_timed_no_more_often_than_said(phase, num_tokens):
    """By a timer that finds each choice better than the one before, and so has all tried. None is timed twice until the
    best ones are compared with what was there."""
    timed = []

    def time_layer(phase, num_tokens, picks):
        timed.append(picks)
        return 1000.0 / len(timed)

    tuner_ = tuner()
    tuner_.measure(phase, num_tokens, time_layer)
    assert len(timed) <= tuner_.most_timings(phase, num_tokens)
    assert len(timed) - len(set(timed)) <= 4


def test_what_is_known_is_not_measured():
    counts = {"decode": (1, 64), "prefill": (2048,)}
    time_layer, kept = by_candidate(gemv=20, split_k=22), {}
    table = tuner().tune(time_layer, counts, print, keep=lambda phase, n, result: kept.update({(phase, n): result}))
    assert list(kept) == [("decode", 1), ("decode", 64), ("prefill", 2048)]
    again = tuner().tune(lambda *step: pytest.fail(f"{step} is measured"), counts, print, known=kept)
    assert {key: row.choices for key, row in again.rows.items()} == {
        key: row.choices for key, row in table.rows.items()
    }


def test_settled_products_keep_their_choices():
    """Those of a layer of another kind, which were measured there."""
    found, seen = [Choice("gemv", (4, 512, 1))], set()
    table = Table({in_phase(key, "decode"): Row({64: found}) for key in KEYS[2:]})
    each = Tuner(KEYS, table, ALL, H200, settled=KEYS[2:])

    def time_layer(phase, num_tokens, picks):
        seen.add(picks[2:])
        return sum({"quack-kernels": 18.0, "gemv": 20.0}.get(pick.candidate, 25.0) for pick in picks)

    rows = each.tune(time_layer, {"decode": (64,)}, print).rows
    assert seen == {(found[0], found[0])}
    assert set(rows) == {in_phase(key, "decode") for key in KEYS[:2]}
    assert all(row[64][0].candidate == "quack-kernels" for row in rows.values())
    assert each.most_timings("decode", 64) < Tuner(KEYS, table, ALL, H200).most_timings("decode", 64)


def test_choices_are_cut_to_what_fits_the_gpu():
    def fitted(i, choice):
        return choice if choice.candidate != "gemv" or i == 0 else None

    found = Tuner(KEYS, Table(), ALL, H200, fitted).trials("decode", 1)
    assert ["gemv" in names(trials) for trials in found] == [True, False, False, False]
    table = Table(
        {in_phase(shape, "decode"): Row({1: [Choice("gemv", (1,)), Choice("split-k", (2,))]}) for shape in KEYS}
    )
    present = Tuner(KEYS, table, ALL, H200, fitted).present("decode", 1)
    assert names(present) == ["gemv", "split-k", "split-k", "split-k"]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_challengers_are_few_and_launchable(phase):
    pytest.importorskip("triton")
    from nanovllm.kernels.matmul.gemv import MAX_TOKENS, GemvConfig
    from nanovllm.kernels.matmul.split_k import SplitKConfig
    from nanovllm.layers.matmul.candidates.quack import Tile

    for key in package_table("NVIDIA H200").rows:
        if key.operation == "experts" or key.format in ("int4", "mxfp4"):  # tests/layers/test_four_bit_candidates.py
            continue
        for num_tokens in DECODE_TOKENS if phase == "decode" else PREFILL_TOKENS:
            found = challengers(key, phase, num_tokens)
            in_fp8 = key.format.startswith("float8")
            assert found[0] == Choice("scaled-mm" if in_fp8 else "cublas")
            assert len(found) < 60
            if phase == "decode" and in_fp8:
                assert 3 <= [name for name, _ in found].count("split-k") <= 14
            for name, constants in found[1:]:
                if name == "gemv":
                    assert num_tokens <= MAX_TOKENS
                    assert GemvConfig(*constants).k_tile >= 16
                elif name == "split-k":
                    config = SplitKConfig(*constants)
                    itemsize = 1 if in_fp8 else 2
                    stage = itemsize * config.tile_k * (config.tile_rows + config.tile_tokens)
                    assert config.num_stages * stage <= 227 * 1024
                    assert itemsize == 2 or config.tile_rows >= 64
                elif name == "quack-kernels":
                    tile = Tile(*constants)
                    assert key.operation != "linear_silu" or tile.columns % 32 == 0
                    assert (key.operation, tile.tokens) != ("linear_silu", 192) or tile.columns <= 128
                    assert tile.tokens < 2 * num_tokens
                    assert tile.tokens * tile.columns <= 256 * 192, "the sums of two warp groups fill the registers"
                else:
                    assert (name, constants) == ("fused-silu", ())


@pytest.mark.parametrize(
    "sizes",
    [(1536, 2048, "bfloat16", 128, 8), (96, 40, "bfloat16", 4, 2), (1536, 2048, "float8_e4m3fn-128x128", 128, 8)],
    ids=str,
)
def test_challengers_for_experts_are_few_and_launchable(sizes):
    for phase, counts in (("decode", DECODE_TOKENS), ("prefill", PREFILL_TOKENS)):
        for num_tokens in counts:
            *key, top_k = sizes
            found = challengers(Key("experts", "decode", *key), phase, num_tokens, top_k)
            assert found[0] == Choice("expert-tiles")
            assert 1 < len(found) < 30
            for name, constants in found[1:]:
                assert name != "experts-gemv" or num_tokens <= 16
                if name == "expert-tiles":
                    itemsize = 2 if sizes[2] == "bfloat16" else 1
                    for num_weights, (tokens, columns, k, _, num_stages) in zip((2, 1), constants, strict=True):
                        stage = k * itemsize * (tokens + num_weights * columns)
                        assert num_stages * stage <= 227 * 1024
                        assert itemsize == 2 or k <= 128


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", (6, 4)), ("float8_e4m3fn-128x128", (0, 0))])
@pytest.mark.parametrize("operation", ["linear", "linear_silu", "linear_add"])
def test_fp8_tiles_are_few_because_each_is_compiled(operation, dtype, most):
    """None where our own kernels multiply, or for blocks, whose scales a tile cannot apply at its end."""
    key = Key(operation, "decode", 6144, 4096, dtype)
    for phase, counts in (("decode", DECODE_TOKENS), ("prefill", PREFILL_TOKENS)):
        for num_tokens in counts:
            found = names(challengers(key, phase, num_tokens)).count("quack-kernels")
            num = most[0] if phase == "decode" and num_tokens <= MAX_GRAPH_BATCH_SIZE else most[1]
            assert found == (num if num_tokens >= 48 else 0)


def test_a_layer_with_experts_is_tuned():
    shapes = [("linear", 5120, 2048), ("linear_add", 2048, 4096), ("linear", 128, 2048)]
    keys = [Key(operation, "decode", N, K, "bfloat16") for operation, N, K in shapes]
    keys.append(Key("experts", "decode", 1536, 2048, "bfloat16", 128))
    candidates = [each for each in ALL if each.name in ("cublas", "expert-tiles", "experts-gemv")]
    tuner = Tuner(keys, Table(), candidates, H200, top_k=8)

    def time_layer(phase, num_tokens, picks):
        is_best = picks[3].candidate == ("experts-gemv" if num_tokens <= 4 else "expert-tiles") and picks[3].constants
        return 100.0 - 20 * bool(is_best)

    table = tuner.tune(time_layer, {"decode": (1, 4, 64), "prefill": (2048,)}, print)
    for phase in ("decode", "prefill"):  # Short prefills are computed as decode steps of as many tokens.
        row = table.rows[Key("experts", phase, 1536, 2048, "bfloat16", 128)]
        assert [row[n][0].candidate for n in (1, 4, 5, 64, 2048)] == ["experts-gemv"] * 2 + ["expert-tiles"] * 3


@pytest.mark.parametrize(
    "model",
    [
        "Llama-3.2-1B",
        "Phi-4-mini-instruct",
        "OLMo-2-1124-7B",  # norms after the blocks
        "gemma-3-4b",  # and GELU
        "Qwen3-30B-A3B",
        pytest.param("gemma-4-26B-A4B", marks=needs_family("gemma4_text")),  # experts beside an MLP
        pytest.param("Qwen3.5-35B-A3B", marks=needs_family("qwen3_5_moe_text")),  # a shared expert
    ],
)
def test_rows_of_every_kind_of_layer(model):
    keys, top_k = keys_and_top_k(layer_problems(meta_layers(model)[0]))
    tuner = Tuner(keys, Table(), ALL, H200, top_k=top_k)
    table = tuner.tune(lambda phase, num_tokens, picks: 100.0, {"decode": (1, 64), "prefill": (2048,)}, print)
    assert set(table.rows) == {in_phase(shape, phase) for shape in keys for phase in ("decode", "prefill")}


@needs_family("qwen3_5_moe_text")
def test_every_product_of_a_layer_is_measured():
    """In fp8 linear attention's gates have a projection of their own; the shared expert has two products."""
    layer = meta_layers("Qwen3.5-35B-A3B", quantization="fp8")[0]
    shapes = [(problem.key.operation, problem.key.N, problem.key.K) for problem in layer_problems(layer)]
    assert [shape for shape in shapes if shape[0] != "experts"] == [
        *(("linear", 12288, 2048), ("linear_add", 2048, 4096), ("linear", 264, 2048), ("linear", 64, 2048)),
        *(("linear_silu", 1024, 2048), ("linear_add", 2048, 512)),
    ]
    assert ("experts", 1024, 2048) in shapes


@needs_family("qwen3_5_text")
def test_both_kinds_of_layers_of_a_hybrid():
    linear, attention = ({problem.key.N for problem in layer_problems(layer)} for layer in meta_layers("Qwen3.5-9B"))
    assert linear - attention == {2 * 2048 + 2 * 4096 + 2 * 32}
    assert attention - linear == {2 * 4096 + 2 * 1024}


@pytest.mark.parametrize(
    ("model", "new"),
    [
        # q, k and v of both kinds of attention, and what follows it.
        pytest.param("gemma-4-12B", [{8192, 3840, 30720}, {9216, 3840}], marks=needs_family("gemma4_text")),
        # Kinds that differ by their positions alone.
        pytest.param("SmolLM3-3B", [{3072, 2048, 22016}], marks=needs_family("smollm3")),
    ],
)
def test_each_product_is_measured_in_the_first_layer_that_has_it(model, new):
    found = [
        {problem.key.N for problem in layer_problems(layer) if problem.key not in settled}
        for layer, settled in with_new_products(meta_layers(model))
    ]
    assert found == new


@needs_family("gemma4_text")
def test_a_stopped_run_goes_on_at_any_kind_of_layer(monkeypatch, tmp_path):
    """A kind's journal stays until all kinds are measured: the run that goes on finds it."""
    stops, removed = True, []

    class Kept:
        def __init__(self, keys):
            self.keys = keys

        def remove(self):
            removed.append(self.keys)

    def measure(layer, settled, shape, present, counts):
        assert all(present.find(key) for key in settled), "a choice of the kinds before"
        keys = {problem.key for problem in layer_problems(layer)} - settled
        if stops and settled:
            raise KeyboardInterrupt
        return Table({key: Row({64: [CUBLAS]}) for key in keys}), Kept(keys)

    monkeypatch.setattr(tune_model, "_gpu", torch.device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(tune_model, "_tune_layer", measure)
    output = tmp_path / "table.json"

    def run():
        options = {"num_gpus": 1, "quantization": None, "device": "cpu", "into_package": False, "dry_run": False}
        tune_model.tune_model("gemma-4-12B", output=output, **options)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert removed == []
    assert {key.N for key in read_table(output).rows} == {8192, 3840, 30720}
    stops = False
    run()
    assert len(removed) == 2
    assert set.union(*removed) == set(read_table(output).rows)
    assert {key.N for key in read_table(output).rows} == {8192, 9216, 3840, 30720}
