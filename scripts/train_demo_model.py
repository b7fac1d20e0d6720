"""Trains the demo model, a small Qwen3 that knows the Python standard library, and writes it with its card.

    python scripts/train_demo_model.py --output assets/demo-model --minutes 5

Needs torch, transformers 4.56 or later, tokenizers, safetensors and no network. The corpus is the standard
library of the Python that runs it. Seeds are fixed; the number of steps depends on the machine's speed.
"""

import argparse
import json
import shlex
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_card import Run, agreeing_tokens, card, load, samples
from demo_corpus import read_standard_library
from demo_tokenizer import END_OF_TEXT, MESSAGE_END, save_tokenizer, train_tokenizer
from demo_tokens import TokenPool, build_texts, encode_pool
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

MAX_FOLDER_BYTES = 10_000_000
MAX_POSITION_EMBEDDINGS = 4096
LONG_EVERY, LONG_FACTOR = 8, 4  # Every 8th step reads sequences 4 times as long, fewer of them.
WARMUP_SHARE = 0.02  # of the training time
LOG_EVERY = 200  # steps

Loss = Callable[[Qwen3ForCausalLM, torch.Tensor, float, float], torch.Tensor]


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A fresh float32 model: 4.6 million parameters with a vocabulary of 3,072."""
    end_of_text, message_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(MESSAGE_END)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=end_of_text,
        eos_token_id=message_end,
        pad_token_id=end_of_text,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        bos_token_id=end_of_text,
        eos_token_id=[message_end, end_of_text],
        pad_token_id=end_of_text,
    )
    return model


def mean_loss(model: Qwen3ForCausalLM, token_ids: torch.Tensor, noise: float = 0.0, hesitation: float = 0.0):
    """Cross-entropy of every next token in `token_ids` [batch_size, length], in nats.

    noise: share of the tokens read (never of those predicted) that are replaced by random ones. A model of this size
    that only ever sees its corpus learns it by heart and is lost outside it.
    hesitation: weight of a penalty on a lead of under one nat of the likeliest token over the second. A near-tie is
    broken by rounding, and two precisions then go different ways; a model made for tests had better make up its mind.
    """
    read, predicted = token_ids[:, :-1], token_ids[:, 1:]
    if noise:
        wrong = torch.rand(read.shape, device=read.device) < noise
        read = torch.where(wrong, torch.randint_like(read, model.config.vocab_size), read)
    # A ready-made mask of None says "causal, nothing padded": scaled_dot_product_attention may use its flash
    # kernel, and a compiled graph is spared the inspection of positions that transformers would do.
    mask = {"full_attention": None}
    hidden = model.model(read, attention_mask=mask, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    logits = logits.flatten(0, 1).float()
    loss = F.cross_entropy(logits, predicted.flatten())
    if hesitation:
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        loss = loss + hesitation * F.relu(1.0 - (first - second)).mean()
    return loss


def compiled_loss(
    model: Qwen3ForCausalLM, token_ids: torch.Tensor, noise: float, hesitation: float, autocast: torch.autocast
) -> Loss:
    """`mean_loss` compiled for the shape of `token_ids`, on which it is tried; plain where that fails."""
    began = time.monotonic()
    loss_of = torch.compile(mean_loss, dynamic=False)
    try:
        with autocast:
            loss = loss_of(model, token_ids, noise, hesitation)
        loss.backward()
    except Exception as error:  # no compiler here, or one too old: training without it is only slower
        print(f"torch.compile failed, training goes on without it: {type(error).__name__}: {error}")
        loss_of = mean_loss
    model.zero_grad(set_to_none=True)
    print(f"compiled in {time.monotonic() - began:.0f} s")
    return loss_of


def learning_rate_share(progress: float) -> float:
    """The share of the peak learning rate after `progress` of the time: a short rise, then a line to 0."""
    return min(progress / WARMUP_SHARE, (1 - progress) / (1 - WARMUP_SHARE), 1.0)


def train(model: Qwen3ForCausalLM, pool: TokenPool, args: argparse.Namespace) -> tuple[int, int, float]:
    """Trains for `args.minutes`, compilation included; returns steps, tokens and the last steps' mean loss."""
    deadline = time.monotonic() + 60 * args.minutes
    device = pool.tokens.device
    generator = torch.Generator(device).manual_seed(args.seed)
    short = (args.batch_size, args.context)
    long = (max(1, args.batch_size // LONG_FACTOR), args.context * LONG_FACTOR)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    loss_of: Loss = mean_loss
    if args.compile:
        loss_of = compiled_loss(
            model, pool.draw(short[0], short[1] + 1, generator), args.noise, args.hesitation, autocast
        )
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
    began, steps, tokens_seen, recent = time.monotonic(), 0, 0, []
    while steps == 0 or time.monotonic() < deadline:
        progress = min(1.0, (time.monotonic() - began) / max(1e-9, deadline - began))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_share(progress)
        is_long = steps % LONG_EVERY == LONG_EVERY - 1
        rows, length = long if is_long else short
        with autocast:  # long sequences are too rare to earn back a second compilation
            loss = (mean_loss if is_long else loss_of)(
                model, pool.draw(rows, length + 1, generator), args.noise, args.hesitation
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps, tokens_seen = steps + 1, tokens_seen + rows * length
        recent = [*recent[-(LOG_EVERY - 1) :], loss.detach()]
        if steps % LOG_EVERY == 0 or steps == 10:
            average, seconds = torch.stack(recent).mean().item(), time.monotonic() - began
            print(f"step {steps:6d} {seconds:5.0f} s  loss {average:.4f}  {tokens_seen / seconds:,.0f} tokens/s")
    return steps, tokens_seen, torch.stack(recent).mean().item()


@torch.inference_mode()
def evaluate(model: Qwen3ForCausalLM, tokens: torch.Tensor, length: int) -> float:
    """The mean loss over `tokens` [num_tokens], cut into sequences of `length` that are read separately."""
    pieces = [piece for piece in tokens.split(length) if len(piece) > 1]
    losses = torch.stack([mean_loss(model, piece[None]) for piece in pieces])
    sizes = torch.tensor([len(piece) - 1.0 for piece in pieces], device=losses.device)
    return (losses * sizes).sum().item() / sizes.sum().item()


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, stdlib: Path, folder: Path) -> None:
    """Writes weights rounded to bfloat16, the configuration and the tokenizer."""
    for parameter in model.parameters():  # not model.to(): that would round the rotary frequencies as well
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, MAX_POSITION_EMBEDDINGS)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # The names that transformers 4 reads; version 5 writes `dtype` and `rope_parameters` and reads both.
    config["torch_dtype"] = "bfloat16"
    config["rope_theta"] = config.get("rope_parameters", config)["rope_theta"]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    licence = stdlib / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, folder / "LICENSE-PSF.txt")
    for path in folder.iterdir():  # safetensors makes its file readable by its owner alone
        path.chmod(0o644)


def build(folder: Path, args: argparse.Namespace) -> None:
    """Everything from the corpus to the card, into the empty `folder`."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    corpus = read_standard_library(args.stdlib, int(args.corpus_mb * 1e6), args.seed)
    texts = build_texts(corpus, args.seed)
    tokenizer = train_tokenizer((text for documents in texts.values() for text in documents), args.vocab_size)
    pool = encode_pool(tokenizer, texts, device)
    model = build_model(tokenizer).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(corpus.sources)} files, {len(pool.tokens):,} tokens, {num_parameters:,} parameters")

    began = time.monotonic()
    steps, tokens_seen, running_loss = train(model, pool, args)
    seconds = time.monotonic() - began
    save(model, tokenizer, args.stdlib, folder)

    rounded = load(folder, device, torch.bfloat16)
    held_out = [encoding.ids for encoding in tokenizer.encode_batch(corpus.held_out, add_special_tokens=False)]
    held_out_tokens = torch.tensor([i for ids in held_out for i in ids], device=device)
    first = {stream: pool.tokens[int(starts[0]) :][: 32 * args.context] for stream, starts in pool.starts.items()}
    run = Run(
        command=shlex.join(["python", *sys.argv]),
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        num_parameters=num_parameters,
        vocab_size=tokenizer.get_vocab_size(),
        num_files=len(corpus.sources),
        corpus_bytes=sum(len(text.encode()) for text in corpus.sources),
        num_dialogues=len(corpus.dialogues),
        corpus_tokens=len(pool.tokens),
        context=args.context,
        long_context=args.context * LONG_FACTOR,
        steps=steps,
        tokens_seen=tokens_seen,
        seconds=seconds,
        running_loss=running_loss,
        train_losses={stream: evaluate(rounded, tokens, args.context) for stream, tokens in first.items()},
        held_out_loss=evaluate(rounded, held_out_tokens, args.context),
    )
    print(run)
    shown = samples(folder, rounded)
    for prompt, text in shown:
        print(f"--- {prompt!r}\n{text}")
    agreement = agreeing_tokens(folder, rounded, load(folder, torch.device("cpu"), torch.float32))
    print(f"leading tokens shared by bfloat16 on {device} and float32 on the CPU: {agreement}")
    file_sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / "README.md").write_text(card(run, shown, agreement, file_sizes), encoding="utf-8")


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write; an older demo model is replaced")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time, compilation included")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens a sequence, at most 1024")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the peak")
    parser.add_argument("--vocab-size", type=int, default=3072)
    parser.add_argument("--noise", type=float, default=0.05, help="share of the tokens read that are random")
    parser.add_argument("--hesitation", type=float, default=0.1, help="weight of the penalty on near-ties")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="sources to learn")
    parser.add_argument("--corpus-mb", type=float, default=100.0, help="megabytes of sources to learn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    args = parser.parse_args()
    if not 16 <= args.context * LONG_FACTOR <= MAX_POSITION_EMBEDDINGS:
        parser.error(f"--context is {args.context}; it must be between 4 and {MAX_POSITION_EMBEDDINGS // LONG_FACTOR}")
    if args.output.exists() and not (args.output / "config.json").exists():
        parser.error(f"--output {args.output} exists and is no model folder; it would be replaced")
    return args


def main() -> None:
    args = parse_args()
    disable_progress_bar()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent, prefix=".demo-model-") as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        build(folder, args)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        if num_bytes > MAX_FOLDER_BYTES:
            raise RuntimeError(f"the folder takes {num_bytes:,} bytes; the limit is {MAX_FOLDER_BYTES:,}")
        if args.output.exists():
            args.output.rename(Path(scratch) / "old")
        folder.rename(args.output)
    print(f"{args.output}: {num_bytes:,} bytes")


if __name__ == "__main__":
    main()
