"""TRL: the completions that GRPOTrainer learns from, from an engine in its process. See docs/integrations.md."""

from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer

from nanovllm import LLM, SamplingParams

Rollout = dict[str, list[list[Any]]]  # prompt_ids, completion_ids and logprobs, for each completion a list


class Rollouts:
    """A `rollout_func` of GRPOTrainer: `GRPOTrainer(..., rollout_func=Rollouts(llm))`.

    Each call first gives the engine the trainer's weights. The trainer's sampling options apply: temperature, top_p,
    top_k, min_p, repetition_penalty and max_completion_length.
    """

    def __init__(self, llm: LLM, sleep: bool = False, **options: Any):
        """
        Args:
            llm: an engine of the trainer's model, with `logprobs_mode="processed_logprobs"`: the trainer's
                log-probabilities are those after temperature.
            sleep: give the memory of the KV cache and of CUDA graphs to the trainer between rollouts.
            options: others of SamplingParams, such as bad_words.

        Raises ValueError for another logprobs_mode, and as SamplingParams.
        """
        SamplingParams(**options)
        mode = llm.config.logprobs_mode
        if mode != "processed_logprobs":
            raise ValueError(f"logprobs_mode={mode!r}: must be 'processed_logprobs' for a trainer")
        self.llm = llm
        self._sleep = sleep
        self._options = options
        if sleep:
            llm.sleep()

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> Rollout:
        """One completion for each prompt, which the trainer has repeated: a group's copies stand side by side.

        Raises:
            ValueError: the trainer has tools, an adapter, sharded weights or generation_kwargs; a prompt is too long.
            RuntimeError: logits are not numbers.
        """
        _check(trainer)
        self.llm.update_weights(trainer.model.named_parameters())
        prompt_ids = _token_ids(prompts, trainer)
        groups = [(ids, len(list(copies))) for ids, copies in groupby(prompt_ids)]
        params = [SamplingParams(**_sampling_options(trainer) | self._options, n=n) for _, n in groups]
        if self._sleep:
            self.llm.wake_up()
        outputs = self.llm.generate([ids for ids, _ in groups], params, use_tqdm=False)
        if self._sleep:
            self.llm.sleep()
        samples = [sample for output in outputs for sample in output.get("samples", [output])]
        for sample in samples:
            if sample["finish_reason"] == "error":
                raise RuntimeError(f"step {trainer.state.global_step}: {sample['error']}")
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample["token_ids"] for sample in samples],
            "logprobs": [[next(iter(token.values())) for token in sample["logprobs"] or []] for sample in samples],
        }


def _check(trainer: GRPOTrainer) -> None:
    """Raises ValueError for what would be left out silently, or fail with a message that does not say why."""
    if trainer.tools:
        raise ValueError("tools: are not supported by this rollout_func, which answers in one turn")
    if trainer.args.generation_kwargs:
        raise ValueError("generation_kwargs: give them to Rollouts(llm, ...), by the names of SamplingParams")
    if hasattr(trainer.model, "peft_config"):
        raise ValueError("peft_config: adapters are not supported: the engine needs the whole weights")


def _sampling_options(trainer: GRPOTrainer) -> dict[str, Any]:
    return {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        # The trainer may know more ends than the checkpoint's generation_config.json.
        "stop_token_ids": trainer.eos_token_ids,
        "logprobs": 0,
    }


def _token_ids(prompts: list[Any], trainer: GRPOTrainer) -> list[list[int]]:
    """Of texts, or of conversations by the trainer's template."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    options |= {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
    return tokenizer.apply_chat_template(prompts, **options)["input_ids"]


@torch.no_grad()
def logprob_differences(
    model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0, batch_size: int = 8
) -> list[list[float]]:
    """How far a rollout's log-probabilities are from the model's: the absolute difference for each completion token.

    Args:
        model: the trainer's, with the weights that the rollout was made with.
        rollout: what Rollouts returns. Options that leave tokens out, such as top_p and bad_words, make a difference.
        temperature: that they were drawn with.
        batch_size: sequences in one forward pass.
    """
    differences: list[list[float]] = []
    pairs = list(zip(rollout["prompt_ids"], rollout["completion_ids"], rollout["logprobs"], strict=True))
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        rows = [torch.tensor(prompt + completion) for prompt, completion, _ in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        mask = torch.arange(ids.shape[1], device=model.device) < lengths[:, None]
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        for row, (prompt, completion, logprobs) in enumerate(batch):
            at = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)  # A token's logits are at the one before it.
            theirs = (logits[row, at].float() / temperature).log_softmax(-1)
            chosen = theirs.gather(1, torch.tensor(completion, device=model.device)[:, None])[:, 0]
            differences.append((chosen.cpu() - torch.tensor(logprobs)).abs().tolist())
    return differences
