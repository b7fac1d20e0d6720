"""LogitSteps: steps with a request that asks for more than a temperature: first the logits, then the sampling."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.features.logits.logprobs import prompt_logprobs, prompt_rows
from nanovllm.engine.features.logits.sampling_pipeline import SamplingPipeline
from nanovllm.engine.inputs import DecodeInputs, ModelInputs
from nanovllm.engine.runner.cuda_graphs import StepGraphs
from nanovllm.engine.runner.sampled_tokens import send_tokens
from nanovllm.engine.step import Step, StepLogits
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import step_context

if TYPE_CHECKING:
    from nanovllm.models.loader import LoadedModel


class LogitSteps:
    """Runs such steps in two halves, `take` and `sample`. In between, rank 0 may read the tokens of the step before.

    All ranks run the model and gather its logits. Rank 0 alone knows what the requests ask for: it draws the tokens and
    sends them to the others for their next step.
    """

    def __init__(
        self, config: Config, model: "LoadedModel", inputs: DecodeInputs, graphs: StepGraphs, tp: TensorParallel
    ):
        """graphs: of the engine."""
        self.pipeline: SamplingPipeline | None = None  # rank 0's, from the first step on
        self._config, self._model, self._inputs, self._tp = config, model, inputs, tp
        self._graphs = graphs
        self._draws = tp.rank == 0
        self._num_sampled = 0  # of the step whose tokens are to be drawn

    def rows_of_prompts(self, step: Step) -> dict[str, Any]:
        """What all ranks must know of the step's prompts, for `Step.extras`: the rows whose hidden states are needed
        beside those of the last tokens."""
        return {"prompt rows": prompt_rows(step.seqs) if step.is_prefill else []}

    # -- the first half ------------------------------------------------------------------------------------------

    def take(self, step: Step, inputs: ModelInputs | None) -> None:
        """The logits of a step, and the log-probabilities of its prompts. Only a rank that samples keeps them in the
        step. inputs: None where a graph has left the logits in `StepGraphs.logits`."""
        n = self._num_sampled = step.num_sampled
        if inputs is None:
            self._keep(step, inputs, self._graphs.logits)
        elif step.extras.get("prompt rows"):
            context = replace(inputs.context, last_tokens=None)
            hidden_states = self._hidden_states(inputs._replace(context=context))
            self.take_logits(step, inputs, hidden_states, hidden_states[inputs.context.last_tokens])
        else:
            hidden_states = self._hidden_states(inputs)[:n]
            self.take_logits(step, inputs, hidden_states, hidden_states)

    def take_logits(self, step: Step, inputs: ModelInputs, hidden_states: Tensor, sampled: Tensor) -> None:
        """The logits of a step whose hidden states are known: those that tokens are sampled from, and with
        "prompt rows" those of all rows."""
        if step.extras.get("prompt rows"):
            step.prompt_logprobs = prompt_logprobs(step, hidden_states, self._full_logits)
        self._keep(step, inputs, self._full_logits(sampled))

    def _keep(self, step: Step, inputs: ModelInputs | None, logits: Tensor | None) -> None:
        """Let rank 0 sample from the logits later."""
        if self._draws:
            n = step.num_sampled
            columns = self._inputs.rows if inputs is None or not step.is_prefill else inputs.columns
            names = ("temperatures", "seeds", "sample_positions" if step.is_prefill else "positions")
            fed_tokens = None if step.is_prefill else self._inputs.input_ids[:n]
            temperatures, seeds, positions = (columns[name][:n] for name in names)
            step.logits = StepLogits(cast(Tensor, logits)[:n], temperatures, seeds, positions, fed_tokens, columns)

    def _hidden_states(self, inputs: ModelInputs) -> Tensor:
        with step_context(inputs.context):
            return self._model(inputs.input_ids, inputs.positions)

    def _full_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden_size] -> logits [num_rows, vocab_size]. All ranks must call it."""
        return self._model.gather_logits(self._model.compute_logits(hidden_states))

    def store_logits(self, inputs: ModelInputs) -> None:
        """Compute a step for a graph that gives logits, into `StepGraphs.logits`. Call it once before the capture."""
        n, graphs = len(inputs.temperatures), self._graphs
        if self._draws and graphs.logits is None:
            most = max(each.sizes[-1] for each in graphs.values() if each.sizes)
            shape = most, self._config.hf_config.vocab_size
            graphs.logits = torch.empty(shape, dtype=self._config.dtype, device=inputs.temperatures.device)
        hidden_states, out = self._hidden_states(inputs)[:n], graphs.logits
        # On one GPU the head writes there itself: a copy of all logits would read and write them once more.
        if out is not None and out.is_cuda and self._tp.size == 1:
            self._model.compute_logits(hidden_states, out=out[:n])
            return
        logits = self._full_logits(hidden_states)
        if out is not None:
            out[:n] = logits

    # -- the second half -----------------------------------------------------------------------------------------

    def sample(self, step: Step | None) -> None:
        """Draw the tokens of the last `take`, or on another rank get them: into the inputs' `sampled` on all."""
        sampled = self._inputs.sampled[: self._num_sampled]
        if step is None or not self._draws:
            self._tp.broadcast(sampled)
            return
        if self.pipeline is None:
            self.pipeline = SamplingPipeline(self._config, sampled.device)
        tokens, logprobs = self.pipeline.draw(step)
        sampled.copy_(tokens)
        self._tp.broadcast(sampled)
        send_tokens(step, tokens, self._inputs.tokens_on_host(self._num_sampled), logprobs, step.prompt_logprobs)
        step.logits = None
