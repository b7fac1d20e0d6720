"""Tiny random checkpoints, engines over them, and transformers as the reference that they are held to."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.registry import model_class

# Models this small run ten times faster on one thread than on two that wait for each other.
torch.set_num_threads(1)

VOCAB_SIZE = 320
EOS = "<|im_end|>"


def has_transformers(version: str) -> bool:
    """Whether the installed transformers is this release or a later one."""
    return Version(transformers.__version__) >= Version(version)


def needs_transformers(version: str):
    """A mark that skips a test where transformers is older than this release."""
    reason = f"needs transformers {version}, here is {transformers.__version__}"
    return pytest.mark.skipif(not has_transformers(version), reason=reason)


def needs_family(family: str):
    """A mark that skips a test where transformers is older than the family."""
    return pytest.mark.skipif(family not in CONFIG_MAPPING, reason=_without(family))


def skip_unless_known(family: str) -> None:
    """The same for a test that finds out while it runs."""
    if family not in CONFIG_MAPPING:
        pytest.skip(_without(family))


def _without(family: str) -> str:
    return f"transformers {transformers.__version__} does not know {family}"


def make_checkpoint(
    directory: str | Path,
    family: str = "qwen3",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    rope_theta: float = 10000.0,
    rope_scaling: dict | None = None,
    tokenizer: bool = False,
    **overrides,
) -> Path:
    """Save a random model whose layers all matter to its logits; returns the directory.

    Biases are not zero and norms not one, so that leaving one out shows. `family` is transformers' model_type.
    `rope_scaling` takes the field names of transformers 4 and is translated for 5; `overrides` are fields of the
    configuration.
    """
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    if family == "qwen3":
        fields["head_dim"] = 32
    if family.startswith(("qwen3_5", "qwen3_next")):  # Of their own defaults a layer has 32 heads of 128.
        fields |= {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        fields |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 2}
    if not family.startswith("qwen"):  # Their defaults are of a larger vocabulary.
        fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if family.startswith("gemma4"):
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": rope_theta}}
        rope["full_attention"] = rope_scaling or {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        rope["full_attention"] = {"rope_theta": 4 * rope_theta, **rope["full_attention"]}
        fields |= {"head_dim": 32, "global_head_dim": 64, "rope_parameters": rope, "tie_word_embeddings": True}
        fields |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        if family == "gemma4_text":
            fields["hidden_size_per_layer_input"] = 0
    # The settings of these differ by the kind of layer, and both releases read the old spelling.
    elif has_transformers("5") and family not in ("gemma3_text", "olmo3"):
        scaling = rope_scaling or {"rope_type": "default"}
        fields["rope_parameters"] = {"rope_theta": rope_theta, **scaling}
    else:
        fields |= {"rope_theta": rope_theta, "rope_scaling": rope_scaling}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields | overrides))
    randomize(model, seed)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer(directory)
    return Path(directory)


def make_ascii_checkpoint(directory: str | Path) -> Path:
    """One with a tokenizer that says little but ASCII, so that there is text to stop at."""
    path = make_checkpoint(directory, tokenizer=True)
    texts = AutoTokenizer.from_pretrained(path).batch_decode([[i] for i in range(VOCAB_SIZE)])
    silent = [i for i, text in enumerate(texts) if not text.isascii() or not text.isprintable()]
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].index_fill_(0, torch.tensor(silent), 0.0))
    return path


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Matrices and biases N(0, 0.15^2), norms N(1, 0.1^2), whatever the architecture calls them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "expert_scale"))
        parameter.data.normal_(float(is_norm), 0.1 if is_norm else 0.15, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)


def make_tokenizer(
    directory: str | Path, special_tokens: Iterable[str] = ("<|endoftext|>", EOS), eos_token: str = EOS, **options
) -> None:
    """A byte-level BPE of at most VOCAB_SIZE tokens, any text round trips; eos_token ends a sequence. A bos_token among
    the options begins each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["a block is a row of slots, and a table names the blocks of a sequence"] * 2, trainer
    )
    bos = options.get("bos_token")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    options = {"eos_token": eos_token, "clean_up_tokenization_spaces": False, **options}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(directory)


def make_usual(directory: str | Path, tags: Iterable[str]) -> None:
    """Make these special tokens of a tokenizer usual ones, which texts have, as Qwen's tags are."""
    file, of_transformers_4 = Path(directory, "tokenizer.json"), Path(directory, "tokenizer_config.json")
    added = json.loads(file.read_text())["added_tokens"]
    edit_json(
        file, added_tokens=[token | {"special": token["special"] and token["content"] not in tags} for token in added]
    )
    settings = json.loads(of_transformers_4.read_text()).get("added_tokens_decoder")
    for token in (settings or {}).values():
        token["special"] = token["special"] and token["content"] not in tags
    edit_json(of_transformers_4, added_tokens_decoder=settings)


def edit_json(file: str | Path, **changes) -> None:
    """Set fields of a JSON object in a file, which is made where there is none; None removes a field."""
    file = Path(file)
    content = (json.loads(file.read_text()) if file.is_file() else {}) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def edit_tensors(directory: str | Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors after `edit` has changed its {name: tensor} in place."""
    file = Path(directory, "model.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def make_llm(path: str | Path, **options) -> LLM:
    """A small float32 engine on the CPU for prompts of token ids, unless options say otherwise."""
    defaults = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "kvcache_block_size": 16,
        "num_kvcache_blocks": 128,
        "max_num_seqs": 32,
        "max_model_len": 1024,
    }
    return LLM(str(path), **defaults | options)


def poisoned_model(path, dtype=torch.float32):
    """The model of a checkpoint's configuration, all NaN."""
    config = AutoConfig.from_pretrained(path)
    model = model_class(config)(config, 64, TorchBackend(), TensorParallel(), Matmul()).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def both_ways(**options):
    """The fixture `shared_llm` of a file whose tests run twice: with steps that overlap, and one by one."""
    options = {"skip_tokenizer_init": False, "max_model_len": 200} | options

    @pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "one by one"])
    def shared_llm(request, path):
        with make_llm(path, overlap_steps=request.param, **options) as llm:
            yield llm

    return shared_llm


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def generate(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    """Results of generate, without a progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)


def complete(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Token ids of generate, without a progress bar."""
    return [output["token_ids"] for output in generate(llm, prompts, params)]


def complete_by_steps(llm: LLM, prompts: list, params: SamplingParams) -> tuple[list[list[int]], list[int]]:
    """The same through add_request and step, and what each step says about its number of tokens."""
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    done, num_tokens = {}, []
    while not llm.is_finished():
        finished, num = llm.step()
        done |= dict(finished)
        num_tokens.append(num)
    return [done[i] for i in ids], num_tokens


def assert_idle(llm: LLM) -> None:
    """Nothing is queued, and every block of the KV cache is free."""
    manager = llm.scheduler.block_manager
    assert llm.is_finished()
    assert not manager.used_block_ids
    assert len(manager.free_block_ids) == len(manager.blocks)
    assert not any(block.ref_count for block in manager.blocks)
    if isinstance(cells := manager.cells, Cells):
        assert sorted([*cells._free, *cells._snapshots.values()]) == list(range(cells.num_cells))
    if isinstance(cells, WindowBlocks):
        assert sorted(cells.free_block_ids) == list(range(cells.num_blocks))
        assert not cells.used_block_ids


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)


class Reference:
    """The checkpoint in transformers, float32 on the CPU, one prompt at a time."""

    def __init__(self, path: str | Path):
        self.model = AutoModelForCausalLM.from_pretrained(path).float().eval()
        self._known: dict[tuple, tuple[list[int], float]] = {}
        self._logits: dict[tuple, torch.Tensor] = {}

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        """The greedy completion, and the smallest margin by which a token of it won."""
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                # The caches of transformers 4.51 change what layers with a window see.
                use_cache=has_transformers("5"),
                output_logits=True,
                return_dict_in_generate=True,
            )
            first, second = torch.cat(out.logits).topk(2).values.unbind(-1)
            self._known[key] = out.sequences[0, len(prompt) :].tolist(), (first - second).min().item()
        return self._known[key]

    def greedy(self, prompts: Iterable[list[int]], max_tokens: int) -> list[list[int]]:
        return [self.generate(prompt, max_tokens)[0] for prompt in prompts]

    def draw_prompts(
        self, lengths: Iterable[int], max_tokens: int, seed: int = 0, prefix: Iterable[int] = (), margin: float = 1e-3
    ) -> list[list[int]]:
        """Random prompts of these lengths, the prefix included, whose greedy completion is never won by less than
        `margin`: far more than float32 sums can differ by, so that equality is token for token."""
        rng = random.Random(seed)
        prefix = list(prefix)
        vocab_size = self.model.config.vocab_size
        prompts = []
        for length in lengths:
            while True:
                prompt = prefix + rng.choices(range(vocab_size), k=length - len(prefix))
                if self.generate(prompt, max_tokens)[1] >= margin:
                    break
            prompts.append(prompt)
        return prompts

    @torch.inference_mode()
    def logits(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """float32 [len(completion), vocab_size]: what each token of the completion was chosen from."""
        key = (tuple(prompt), tuple(completion))
        if key not in self._logits:
            self._logits[key] = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        return self._logits[key]

    def logprobs(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """float32 [len(completion)]: of the completion's tokens."""
        return self.logits(prompt, completion).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]

    def rounding(self, prompt: list[int], completion: list[int]) -> float:
        """What the order of float32's sums may change of a logit.

        A sum of K products changes by K * 2^-24 of its size at most. A layer has twelve results, one after the other,
        whose errors are independent. The largest of some thousand numbers is four times as large as the usual one.
        """
        longest = max(parameter.shape[1] for parameter in self.model.parameters() if parameter.dim() == 2)
        relative = longest * 2**-24 * (12 * self.model.config.num_hidden_layers) ** 0.5
        return 4 * relative * self.logits(prompt, completion).std().item()

    def regret(self, prompt: list[int], completion: list[int]) -> float:
        """How far below the best logit, of the same beginning, the completion's worst choice lies; 0 is greedy."""
        logits = self.logits(prompt, completion)
        chosen = logits.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        return (logits.max(dim=1).values - chosen).max().item()


def record_logits(llm: LLM, rows: list[torch.Tensor]) -> None:
    """Collect what the head of an engine with one rank computes from now on, in float32 on the CPU."""
    head = llm.model_runner.model.lm_head
    compute = head.shard_logits

    def record(*args):
        logits = compute(*args)
        rows.append(logits.float().cpu().clone())
        return logits

    head.shard_logits = record
