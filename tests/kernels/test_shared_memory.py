"""Constants that were measured on one card, on cards with less shared memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from products import plain

pytest.importorskip("triton")

from gpus import CPU as CPU_FACTS
from gpus import pretend_gpu
from kernel_harness import nightly

from nanovllm.kernels.experts.experts import TileConfig
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table

KIB = 1024
SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_for_cards.py"
CPU = torch.device("cpu")


@pytest.fixture
def card(monkeypatch):
    """card(KiB, is_hopper): the shared memory of every device from now on."""

    def have(kibibytes: int, is_hopper: bool) -> None:
        pretend_gpu(monkeypatch, CPU_FACTS, shared_bytes=kibibytes * KIB, capability=(9 if is_hopper else 8, 0))

    return have


@pytest.mark.parametrize(
    ("kibibytes", "is_hopper", "stages"),
    [(227, True, 4), (99, True, 2), (163, False, 4), (99, False, 3), (60, True, 0), (60, False, 2), (40, False, 0)],
)
def test_stages_are_as_many_as_fit(card, kibibytes, is_hopper, stages):
    card(kibibytes, is_hopper)
    assert fitting_stages(48 * KIB, 4, CPU) == stages


@pytest.mark.parametrize(("kibibytes", "stages"), [(227, 3), (99, 0)])
def test_stages_leave_room_for_what_else_a_program_holds(card, kibibytes, stages):
    card(kibibytes, True)
    assert fitting_stages(48 * KIB, 4, CPU, other_bytes=40 * KIB) == stages


@pytest.mark.parametrize(("kibibytes", "itemsize", "fits"), [(99, 2, True), (99, 4, False), (163, 4, True)])
def test_the_result_of_a_tile_has_to_fit_too(card, kibibytes, itemsize, fits):
    """In float32 that of 128 x 256 is larger than a stage."""
    card(kibibytes, False)
    assert (TileConfig(128, 256, 32, 8, 2).fitted(1, itemsize, CPU) is not None) == fits


@pytest.mark.parametrize(
    ("kibibytes", "is_hopper", "stages"),
    [(227, True, (4, 4)), (163, False, (4, 4)), (99, False, (3, 3)), (40, True, None)],
)
def test_a_table_offers_a_card_what_fits_it(card, kibibytes, is_hopper, stages):
    """A step's choice is the measured one with fewer stages, or, where not even two fit, the next one."""
    card(kibibytes, is_hopper)
    tiles = (128, 128, 64, 8), (128, 256, 64, 8)  # 48 KiB a stage in bfloat16
    key = Key("experts", "decode", 512, 256, "bfloat16", 4)
    table = Table({key: Row({64: [Choice("expert-tiles", tuple((*each, 4) for each in tiles)), Choice("other")]})})
    found = Matmul(table).row(key, plain(torch.empty(4, 512, 256, dtype=torch.bfloat16, device="meta")))[8]
    assert [type(candidate) for candidate, _ in found] == [ExpertTiles] * (1 if stages is None else 2)
    assert found[-1][1] == (), "the default"
    if stages is not None:
        assert found[0][1] == tuple((*each, n) for each, n in zip(tiles, stages, strict=True))


@pytest.mark.timeout(1800)  # Beside other tests, a card may take minutes.
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there are other GPUs")
@pytest.mark.parametrize(
    ("cards", "options"), [("89", "--quick"), *nightly(("80 90", "--quick"), ("80 89 100", ""), ("90 120", ""))]
)
def test_what_engines_launch_fits_every_card(cards, options):
    """By default the card with the least memory, and what is cut to it. At night other cards and every family, for
    every kind of code: see the script. Triton's interpreter must be off for it. sm_86 has the code and the memory of
    sm_89, which has fp8 too."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, "--cards", *cards.split(), *options.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for card in cards.split():
        assert re.search(rf"^sm_{card}: .* 0 errors", done.stdout, re.MULTILINE)
