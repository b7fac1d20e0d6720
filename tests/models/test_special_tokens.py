"""End tokens and chat templates come from the checkpoint: with the special tokens of families that differ in them."""

from typing import NamedTuple

import pytest
from checkpoints import edit_json, generate, greedy, make_checkpoint, make_llm, make_tokenizer, needs_family

from nanovllm import SamplingParams

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    model_type: str
    special_tokens: tuple[str, ...]
    template: str
    prompt: tuple[str, ...]  # what the template makes of "Hi", special tokens apart
    eos_token: str  # the tokenizer's
    ends: tuple[str, ...]  # generation_config.json's
    bos_token: str | None = None  # which the tokenizer puts before texts


FAMILIES = {
    "Llama-3.1": Family(
        "llama",
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\nHi", "<|eot_id|>"),
            *("<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"),
        ),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
    ),
    "Qwen3.5": Family(
        "qwen3_5_text",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        CHATML.replace("assistant\n", "assistant\n<think>\n"),  # Thinking is on by default.
        ("<|im_start|>", "user\nHi", "<|im_end|>", "\n", "<|im_start|>", "assistant\n", "<think>", "\n"),
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "Mistral": Family(
        "mistral",
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "[INST]", "Hi", "[/INST]"),
        "</s>",
        ("</s>",),
        "<s>",
    ),
    "Phi-4-mini": Family(
        "phi3",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("<|user|>", "Hi", "<|end|>", "<|assistant|>"),
        "<|endoftext|>",
        ("<|end|>", "<|endoftext|>"),
    ),
    "Gemma-3": Family(
        "gemma3_text",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<start_of_turn>", "user\nHi", "<end_of_turn>", "\n", "<start_of_turn>", "model\n"),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        "<bos>",
    ),
    "gpt-oss": Family(
        "gpt_oss",
        (
            *("<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
            "<|call|>",
        ),
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "user", "<|message|>", "Hi", "<|end|>", "<|start|>", "assistant"),
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "OLMo-2": Family(
        "olmo2",
        ("<|endoftext|>", "<|pad|>"),
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("<|endoftext|>", "<|user|>\nHi\n<|assistant|>\n"),  # Roles are no special tokens.
        "<|endoftext|>",
        ("<|endoftext|>",),
        "<|endoftext|>",
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=needs_family(family.model_type)) for name, family in FAMILIES.items()],
)
def model(request, tmp_path_factory):
    """(a family, an engine over a checkpoint of it)"""
    family = FAMILIES[request.param]
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), family=family.model_type)
    options = {"bos_token": family.bos_token, "chat_template": family.template}
    make_tokenizer(path, family.special_tokens, family.eos_token, **options)
    ends = [family.special_tokens.index(token) for token in family.ends]
    edit_json(path / "generation_config.json", eos_token_id=ends if len(ends) > 1 else ends[0])
    with make_llm(path, skip_tokenizer_init=False) as llm:
        yield family, llm


def token_ids(llm, parts, specials) -> list[int]:
    """Of texts and special tokens."""
    found = []
    for part in parts:
        text = llm.tokenizer(part, add_special_tokens=False)["input_ids"]
        found += [llm.tokenizer.convert_tokens_to_ids(part)] if part in specials else text
    return found


def test_prompts_have_their_special_tokens_once(model):
    """A chat's are the template's, and a text begins as the tokenizer says. Completions are those of the same token
    ids."""
    family, llm = model
    (of_chat,) = llm.chat([{"role": "user", "content": "Hi"}], greedy(4), use_tqdm=False)
    (of_text,) = generate(llm, ["Hi"], greedy(4))
    text = ("Hi",) if family.bos_token is None else (family.bos_token, "Hi")
    for output, parts in ((of_chat, family.prompt), (of_text, text)):
        prompt = token_ids(llm, parts, family.special_tokens)
        assert output["num_prompt_tokens"] == len(prompt)
        assert output["token_ids"] == generate(llm, [prompt], greedy(4))[0]["token_ids"]


def test_a_completion_ends_at_each_end_token_and_at_no_other(model):
    family, llm = model
    ids = {token: i for i, token in enumerate(family.special_tokens)}
    assert llm.config.eos == tuple(sorted({ids[token] for token in (*family.ends, family.eos_token)}))
    params = [SamplingParams(temperature=0, max_tokens=2, logit_bias={i: 100.0}) for i in ids.values()]
    for (token, i), output in zip(ids.items(), generate(llm, ["Hi"] * len(ids), params), strict=True):
        is_end = token in family.ends
        assert (output["finish_reason"], output["token_ids"]) == ("stop", [i]) if is_end else ("length", [i, i])
        assert output["text"] == ""
