"""TRL's GRPOTrainer, which learns from completions of an engine in its process: a few steps on tiny models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import assert_idle, make_checkpoint, make_llm

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl", reason="needs TRL: pip install '.[trl]'")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("nanovllm.integrations.trl")

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = ["a block is", "a table names the blocks", "slots"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GROUP = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tied head, which the trainer's model has no parameter for."""
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True, tie_word_embeddings=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def llm(path):
    with make_llm(path, logprobs_mode="processed_logprobs", skip_tokenizer_init=False) as llm:
        yield llm
        assert_idle(llm)


def letters(completions, **columns) -> list[float]:
    """A reward that differs within each group."""
    return [float(len(str(completion))) for completion in completions]


@pytest.fixture
def make_trainer(path, tmp_path):
    def make(rollout_func, prompts, tools=None, **options):
        defaults = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "bf16": False,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 2 * GROUP,
            "num_generations": GROUP,
            "max_completion_length": 12,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        args = trl.GRPOConfig(**defaults | options)
        rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        return trl.GRPOTrainer(
            str(path), reward_funcs=letters, args=args, train_dataset=rows, rollout_func=rollout_func, tools=tools
        )

    return make


class Checked:
    """Rollouts, of which every one must agree with the trainer's model."""

    def __init__(self, rollouts):
        self.rollouts, self.embeddings, self.tokens = rollouts, [], 0

    def __call__(self, prompts, trainer):
        model = trainer.model
        self.embeddings.append(model.get_input_embeddings().weight.detach().clone())
        output = self.rollouts(prompts, trainer)
        differences = integration.logprob_differences(model, output, trainer.temperature, batch_size=3)
        assert [len(each) for each in differences] == [len(ids) for ids in output["completion_ids"]]
        assert max(map(max, differences)) < 1e-4
        ends = trainer.eos_token_ids
        for ids in output["completion_ids"]:
            assert len(ids) == trainer.max_completion_length or ids[-1] in ends
            assert not set(ids[:-1]) & set(ends)
        self.tokens += sum(map(len, differences))
        return output


@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["texts", "conversations"])
@pytest.mark.parametrize("options", [{}, {"sleep": True}], ids=str)
def test_engine_and_trainer_agree_after_every_update(prompts, options, llm, make_trainer):
    checked = Checked(integration.Rollouts(llm, **options))
    trainer = make_trainer(checked, prompts, temperature=0.8)
    trainer.train()
    assert checked.tokens > 3 * 2 * GROUP
    first, *others = checked.embeddings
    assert len(others) == 2
    for after in others:  # An engine that had missed an update would not have agreed.
        assert (after - first).abs().max() > 5e-3
    llm.wake_up()


def test_a_group_has_completions_of_its_own_prompt(path, llm, make_trainer):
    trainer = make_trainer(None, TEXTS)
    prompts = [TEXTS[0]] * 3 + [TEXTS[1]] + [TEXTS[2]] * 2
    output = integration.Rollouts(llm)(prompts, trainer)
    assert output["prompt_ids"] == trainer.processing_class(text=prompts)["input_ids"]
    assert len(output["completion_ids"]) == len(output["logprobs"]) == 6
    assert len(set(map(tuple, output["completion_ids"]))) > 4
    assert max(map(max, integration.logprob_differences(trainer.model, output))) < 1e-4


def test_a_trained_model_answers_with_the_engine_as_it_does_itself(llm, make_trainer):
    trainer = make_trainer(integration.Rollouts(llm), TEXTS, gradient_checkpointing=False)
    trainer.train()
    output = integration.Rollouts(llm, temperature=0)(TEXTS, trainer)
    for prompt, completion in zip(output["prompt_ids"], output["completion_ids"], strict=True):
        ids = torch.tensor([prompt])
        theirs = trainer.model.generate(ids, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(ids))
        assert theirs[0, len(prompt) :].tolist() == completion


def test_an_engine_whose_log_probabilities_are_of_another_distribution(path):
    with make_llm(path) as llm, pytest.raises(ValueError, match="'raw_logprobs': must be 'processed_logprobs'"):
        integration.Rollouts(llm)


def test_options_are_checked_at_once(llm):
    with pytest.raises(TypeError, match="bad_wrds"):
        integration.Rollouts(llm, bad_wrds=["x"])


def test_generation_kwargs_are_not_dropped(llm, make_trainer):
    trainer = make_trainer(integration.Rollouts(llm), TEXTS, generation_kwargs={"typical_p": 0.5})
    with pytest.raises(ValueError, match=r"give them to Rollouts\(llm"):
        trainer.train()


def test_adapters_are_refused(llm, make_trainer):
    trainer = make_trainer(integration.Rollouts(llm), TEXTS)
    trainer.model.peft_config = {"default": None}
    with pytest.raises(ValueError, match="adapters are not supported"):
        integration.Rollouts(llm)(TEXTS, trainer)


def test_weights_that_are_no_numbers_end_the_training(llm, make_trainer):
    trainer = make_trainer(integration.Rollouts(llm), TEXTS)
    trainer.model.get_input_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"step 0: .*NaN"):
        integration.Rollouts(llm)(TEXTS, trainer)


@pytest.mark.parametrize("rollouts", ["nanovllm", pytest.param("transformers", marks=pytest.mark.nightly)])
def test_the_example_runs(rollouts, path):
    sizes = ["--steps", "2", "--completions", "8", "--group", "4", "--batch-size", "4", "--max-tokens", "8", "--cpu"]
    command = [sys.executable, EXAMPLE, path, "--rollouts", rollouts, *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("step ", "reward", "log-prob", "rollouts"))]
    assert len(lines) == (5 if rollouts == "nanovllm" else 4)
    assert lines[1].startswith("step 2: reward")
    assert lines[-1].endswith("(medians)")
