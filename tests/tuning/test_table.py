"""The table of measured choices: its files, and what is found in it."""

import json
from itertools import product

import pytest
import torch
from configs import TUNED
from gpus import pretend_gpu
from products import plain

from nanovllm.kernels.attention.decode_plan import SPLIT_UNIT
from nanovllm.layers.backends.decode_constants import DecodeConstants
from nanovllm.layers.matmul import table as table_module
from nanovllm.layers.matmul.step_rows import mixed_step_rows
from nanovllm.layers.matmul.table import (
    Choice,
    Key,
    Row,
    Table,
    load_table,
    package_path,
    package_table,
    read_table,
    user_path,
    write_table,
)
from nanovllm.models.presets import preset_config

H200 = "NVIDIA H200"
KEY = Key("linear", "decode", 4096, 1024, "bfloat16")


def choices(*names: str) -> list[Choice]:
    return [Choice(name) for name in names]


def test_a_count_takes_the_next_bucket_and_larger_ones_the_last():
    row = Row({4: choices("a"), 64: choices("b", "c"), 65: []})
    names = {n: [choice.candidate for choice in row[n]] for n in (1, 4, 5, 64, 65, 1000)}
    assert names == {1: ["a"], 4: ["a"], 5: ["b", "c"], 64: ["b", "c"], 65: [], 1000: []}


def test_a_shape_takes_the_rows_of_the_nearest():
    small, large = Row({1: choices("small")}), Row({1: choices("large")})
    table = Table({KEY: small, KEY._replace(N=6144): large})
    assert table.find(KEY) is small
    assert table.find(KEY._replace(N=4097, K=1023)) is small
    assert table.find(KEY._replace(N=64, K=64)) is small
    assert table.find(KEY._replace(N=6000)) is large
    assert table.find(KEY._replace(N=100_000, K=9000)) is large
    for other in ({"operation": "linear_add"}, {"phase": "prefill"}, {"format": "float32"}):
        assert table.find(KEY._replace(**other)) is None


def test_a_sum_over_ranks_has_the_rows_of_its_own_or_of_a_sum_with_the_residual():
    add, sums = KEY._replace(operation="linear_add"), KEY._replace(operation="linear_sum")
    of_add, of_sum = Row({1: choices("add")}), Row({1: choices("sum")})
    table = Table({add: of_add, sums._replace(N=64): of_sum})
    assert table.find(sums) is of_sum
    assert table.find(add) is of_add
    fp8 = {"format": "float8_e4m3fn"}
    table = Table({add._replace(**fp8): of_add, sums: of_sum})
    assert table.find(sums._replace(N=8, **fp8)) is of_add


def test_both_16_bit_dtypes_share_rows():
    weight = torch.empty(4096, 1024, device="meta", dtype=torch.bfloat16)
    assert Key.of("linear", False, plain(weight)) == KEY
    assert Key.of("linear", False, plain(weight.half())) == KEY
    assert Key.of("linear", True, plain(weight.float())) == KEY._replace(phase="prefill", format="float32")


def test_a_file_holds_all_of_a_table(tmp_path):
    row = Row({1: [Choice("gemv", (4, 1024, 1))], 64: [Choice("quack-kernels", (64, 48, (2, 1), True))], 65: []})
    pair = Choice("quack-experts", ((128, 256, (1, 1), False), (128, 192, (2, 1), True)))
    table = Table({KEY: row, KEY._replace(N=1): Row({1: [pair]})}, {"flash_attn4": {"rows": 256}}, {"torch": "2.11.0"})
    path = tmp_path / "cache" / "table.json"
    write_table(path, "some GPU", table)
    again = read_table(path)
    assert {key: (row.bounds, row.choices) for key, row in again.rows.items()} == {
        key: (row.bounds, row.choices) for key, row in table.rows.items()
    }
    assert (again.settings, again.versions) == (table.settings, table.versions)
    assert json.loads(path.read_text())["gpu"] == "some GPU"
    assert sum("operation" in line for line in path.read_text().splitlines()) == 2, "a line a row"


def test_settings_are_updated_key_by_key():
    table = Table(settings={"mixed_step_rows": {"a": 1, "b": 1}})
    updated = table.updated(Table(settings={"mixed_step_rows": {"b": 2}, "other": {"x": 1}}))
    assert updated.settings == {"mixed_step_rows": {"a": 1, "b": 2}, "other": {"x": 1}}


WRONG_TOKENS = [{}, {"x": []}, {"1": [[]]}, {"1": [[1]]}, {"1": ["gemv"]}, {"1": None}, None]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"rows": [{"operation": "linear"}]}']
    + [json.dumps({"rows": [{**KEY._asdict(), "tokens": tokens}]}) for tokens in WRONG_TOKENS],
)
def test_a_file_that_is_no_table_is_named(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json is no table of `nanovllm tune`"):
        read_table(path)


def test_a_table_of_an_older_release_is_refused(tmp_path):
    path = tmp_path / "table.json"
    row = {"operation": "linear", "phase": "decode", "N": 8, "K": 8, "dtype": "bfloat16", "tokens": {"1": []}}
    path.write_text(json.dumps({"rows": [row]}))
    with pytest.raises(ValueError, match="an older release wrote it; remove it, and run the command again"):
        read_table(path)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Says which GPU there is; the user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def become(name: str) -> torch.device:
        pretend_gpu(monkeypatch, name=name)
        return torch.device("cuda", 0)

    return become


def test_the_users_rows_take_precedence(gpu):
    device = gpu(H200)
    table = load_table(device)
    assert table.find(KEY) is package_table(H200).rows[KEY]
    own = Row({1: choices("cublas")})
    write_table(user_path(H200), H200, Table({KEY: own, KEY._replace(N=8): own}, {"flash_attn4": {"rows": 1}}))
    tuned = load_table(device)
    assert tuned.find(KEY).choices == own.choices
    assert tuned.find(KEY._replace(N=8)).choices == own.choices
    assert len(tuned.rows) == len(table.rows) + 1
    assert tuned.setting("flash_attn4", "rows") == 1
    assert package_table(H200).rows[KEY] is table.rows[KEY], "the package's table has changed"


def test_a_users_table_of_an_older_release_may_have_a_setting_that_nothing_reads(gpu):
    device = gpu(H200)
    padding = {"padding": {"6144x1024 bfloat16": {"16": [], "48": [48, "quack-kernels"], "49": []}}}
    own = Row({1: choices("cublas")})
    write_table(user_path(H200), H200, Table({KEY: own}, padding))
    tuned = load_table(device)
    assert tuned.find(KEY).choices == own.choices
    assert tuned.settings == package_table(H200).settings | padding


def test_a_gpu_takes_from_the_h200s_table_what_its_own_lacks(gpu, monkeypatch, tmp_path):
    assert load_table(gpu("a GPU without a table")).rows == package_table(H200).rows
    assert load_table(torch.device("cpu")).rows == {}
    own = Row({1: choices("cublas")})
    package = {H200: package_path(H200), "small": tmp_path / "small.json"}
    monkeypatch.setattr(table_module, "package_path", package.__getitem__)
    write_table(package["small"], "small", Table({KEY: own}))
    table = package_table("small")
    assert table.rows[KEY].choices == own.choices
    assert table.rows.keys() == package_table(H200).rows.keys()
    assert table.settings == package_table(H200).settings


def test_a_setting_that_is_not_there_is_an_error():
    with pytest.raises(KeyError):
        Table().setting("flash_attn4", "rows")


def published_keys(name: str, size: int) -> list[Key]:
    """Of the decode steps of a model over so many GPUs."""
    config = preset_config(name)
    hidden, intermediate = config.hidden_size, config.intermediate_size // size
    q, kv = (n * config.head_dim // size for n in (config.num_attention_heads, config.num_key_value_heads))
    add = "linear_add" if size == 1 else "linear_sum"
    shapes = [("linear", q + 2 * kv, hidden), (add, hidden, q)]
    if hasattr(config, "num_experts"):
        shapes.append(("linear", config.num_experts, hidden))
    else:
        shapes += [("linear_silu", 2 * intermediate, hidden), (add, hidden, intermediate)]
    keys = [Key(operation, "decode", N, K, "bfloat16") for operation, N, K in shapes]
    if hasattr(config, "num_experts") and size == 1:  # Parts of experts use the row of whole ones.
        keys.append(Key("experts", "decode", 2 * config.moe_intermediate_size, hidden, "bfloat16", config.num_experts))
    return keys


each_table = pytest.mark.parametrize(
    "path", sorted(package_path(H200).parent.glob("*.json")), ids=lambda path: path.stem
)


def test_mixed_steps_of_a_shape_have_the_rows_of_the_nearest():
    table = Table(settings={"mixed_step_rows": {"64x64 bfloat16": 8, "1024x64 bfloat16": 16, "4x64x64 bfloat16": 0}})
    assert mixed_step_rows(table, KEY.with_shape("80x64 bfloat16")) == 8
    assert mixed_step_rows(table, KEY.with_shape("900x70 bfloat16")) == 16
    assert mixed_step_rows(table, KEY.with_shape("8x64x64 bfloat16")) == 0
    assert mixed_step_rows(table, KEY.with_shape("64x64 float32")) == 0
    assert mixed_step_rows(Table(), KEY.with_shape("64x64 bfloat16")) == 0


def decode_constants(table):
    """One for each group of the table."""
    for group in table.settings["decode_attention"]:
        head_dim, dtype = group.split()
        yield DecodeConstants(table, int(head_dim), torch.bfloat16, getattr(torch, dtype))


@each_table
def test_tables_of_the_package(path):
    """A GPU has every size that is tuned on one GPU and on two, and the candidates take the constants."""
    pytest.importorskip("triton")
    from nanovllm.kernels.experts.experts import TileConfig
    from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig
    from nanovllm.kernels.experts.four_bit_experts import FourBitExpertTiles
    from nanovllm.kernels.experts.four_bit_experts_gemv import FourBitExpertsConfig
    from nanovllm.kernels.experts.four_bit_experts_hopper import FourBitExpertsHopperConfig
    from nanovllm.kernels.experts.grouped import GroupedTile
    from nanovllm.kernels.experts.mxfp4_experts_gemv import Mxfp4ExpertsConfig
    from nanovllm.kernels.matmul.four_bit_gemv import FourBitGemvConfig
    from nanovllm.kernels.matmul.four_bit_hopper import FourBitHopperConfig
    from nanovllm.kernels.matmul.four_bit_tiles import FourBitTileConfig
    from nanovllm.kernels.matmul.gemv import GemvConfig
    from nanovllm.kernels.matmul.int4_gemv import Int4GemvConfig
    from nanovllm.kernels.matmul.split_k import SplitKConfig
    from nanovllm.layers.matmul.candidates.quack import Tile
    from nanovllm.layers.matmul.problem import OPERATIONS

    constant_types = {"gemv": GemvConfig, "split-k": SplitKConfig, "quack-kernels": Tile, "fused-silu": tuple}
    constant_types |= {"gemv-int4": Int4GemvConfig, "gemv-4bit": FourBitGemvConfig, "tiles-4bit": FourBitTileConfig}
    constant_types |= {"hopper-4bit": FourBitHopperConfig}
    pairs_of_types = {"experts-gemv": ExpertsGemvConfig, "expert-tiles": TileConfig, "quack-experts": Tile}
    pairs_of_types |= {"experts-gemv-4bit": FourBitExpertsConfig, "expert-tiles-4bit": FourBitExpertTiles}
    pairs_of_types |= {"hopper-experts-4bit": FourBitExpertsHopperConfig}
    pairs_of_types |= {"dequantized": TileConfig, "grouped-experts": GroupedTile}
    pairs_of_types |= {"mxfp4-experts-gemv": Mxfp4ExpertsConfig}
    gpu = json.loads(path.read_text())["gpu"]
    assert path == package_path(gpu)
    table = package_table(gpu)
    assert read_table(path).rows.keys() <= table.rows.keys()
    for name in (*TUNED, "Qwen3-30B-A3B"):
        for size in (1, 2):
            assert set(published_keys(name, size)) <= table.rows.keys()
    for key, row in table.rows.items():
        assert key.operation in OPERATIONS
        for listed in row.choices:
            for name, constants in listed:
                if key.operation == "experts":
                    assert len(constants) == 2
                    assert all(pairs_of_types[name](*each) for each in constants)
                else:
                    constant_types[name](*constants)
    for shape, num_rows in table.settings["mixed_step_rows"].items():
        assert mixed_step_rows(table, KEY.with_shape(shape)) == num_rows != 1
    for constants in decode_constants(table):
        for num_kv_heads in (1, 2, 3, 4, 8, 16):
            num_pieces = [constants.num_pieces(n, num_kv_heads) for n in range(1, 3000)]
            assert num_pieces == sorted(num_pieces), "what is allocated for the largest batch is for all"
    assert {"torch", "triton"} <= table.versions.keys()
    assert "min_layer_work" in table.settings["flash_attn4"]


@each_table
@pytest.mark.parametrize("num_rows", [1, 9, 16, 17, 32, 33, 256, 257, 512, 513, 1536, 1537, 2048, 2049, 8192])
def test_decode_attention_can_be_launched_for_any_heads(path, num_rows):
    """The smallest cards have 99 KiB of shared memory, of which queries and sums want their part."""
    table = package_table(json.loads(path.read_text())["gpu"])
    for head_dim in (8, 16, 64, 80, 96, 112, 128, 160, 192, 256):
        for dtype, cache_dtype in product((torch.bfloat16, torch.float32), (None, torch.float8_e4m3fn)):
            constants = DecodeConstants(table, head_dim, dtype, cache_dtype or dtype)
            itemsize = (cache_dtype or dtype).itemsize
            for tma in {False, dtype.itemsize == 2 and head_dim in (64, 128)}:
                config = constants.config(num_rows, 1, tma)
                assert tma or not config.tma
                assert not (config.tma and config.prefetch)
                assert config.tile in (16, 32, 64)
                assert config.tile <= SPLIT_UNIT
                assert config.num_warps in (1, 2, 4, 8)
                padded_dim = 1 << (max(head_dim, 16) - 1).bit_length()
                numbers = 2 * config.tile * padded_dim  # of keys and values
                tiles = (config.num_stages - 1) * numbers * itemsize
                if (dtype, itemsize) == (torch.float32, 1):
                    tiles += numbers * 4  # Numbers of 16 bits are converted in registers, those of 32 bits not.
                assert 0 < tiles <= 64 * 1024


def test_a_kind_of_keys_has_constants_of_its_own_or_smaller_tiles_of_others():
    """Rows x KV heads select them."""
    spare, tma_configs = {"8": 100, "9": 200}, {"8": [64, 2, 3, False, True]}
    default = {"spare_programs": spare, "configs": {"8": [64, 4, 2], "9": [32, 1, 3]}, "tma_configs": tma_configs}
    own = default | {"spare_programs": {"8": 40}, "configs": {"8": [16, 1, 4]}}
    table = Table(settings={"decode_attention": {"128 bfloat16": default, "256 float8_e4m3fn": own}})
    for dtype, cache_dtype, head_dim, tiles in (
        (torch.bfloat16, torch.bfloat16, 128, (64, 32)),
        (torch.float16, torch.float16, 128, (64, 32)),
        (torch.float16, torch.float8_e4m3fn, 64, (64, 32)),
        (torch.bfloat16, torch.bfloat16, 160, (32, 16)),
        (torch.bfloat16, torch.bfloat16, 256, (32, 16)),
        (torch.float32, torch.float32, 256, (16, 16)),
        (torch.float32, torch.float8_e4m3fn, 256, (16, 16)),
        (torch.bfloat16, torch.float8_e4m3fn, 256, (16, 16)),
    ):
        constants = DecodeConstants(table, head_dim, dtype, cache_dtype)
        assert (constants.config(4, 2, False).tile, constants.config(5, 2, False).tile) == tiles
        assert constants.config(5, 2, True).tma
        is_own = (dtype, cache_dtype, head_dim) == (torch.bfloat16, torch.float8_e4m3fn, 256)
        assert (constants.num_pieces(4, 2), constants.num_pieces(5, 2)) == ((24, 25) if is_own else (54, 105))
