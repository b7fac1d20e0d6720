"""LogitSteps: steps with a request that asks for more than a temperature: first the logits, then the sampling."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.runner.cuda_graphs import StepGraphs, StepKind
from nanovllm.engine.runner.inputs import DecodeInputs, ModelInputs, send_prefill
from nanovllm.engine.runner.sampled_tokens import send_tokens
from nanovllm.engine.sampling.logprobs import prompt_logprobs
from nanovllm.engine.sampling.sampling_pipeline import SamplingPipeline
from nanovllm.engine.step import Step
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import step_context


class LogitSteps:
    """Runs such steps in two halves, `forward` and `sample`. In between, rank 0 may read the tokens of the step before.

    All ranks run the model and gather its logits. Rank 0 alone knows what the requests ask for: it draws the tokens and
    sends them to the others for their next step.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        inputs: DecodeInputs,
        graphs: StepGraphs,
        tp: TensorParallel,
    ):
        """graphs: of the engine, to which those that end at the logits are added as they are needed."""
        self.pipeline: SamplingPipeline | None = None  # rank 0's, from the first step on
        self._config, self._model, self._inputs, self._tp = config, model, inputs, tp
        self._graphs = graphs
        self._draws = tp.rank == 0
        self._num_sampled = 0  # of the step whose tokens are to be drawn

    # -- the first half ------------------------------------------------------------------------------------------

    def forward(self, step: Step) -> None:
        """Model and head, and the log-probabilities of prompts. Only a rank that samples keeps them in the step."""
        self._num_sampled = step.num_sampled
        if step.is_prefill:
            self._prefill(step)
        else:
            self._decode(step)

    def _prefill(self, step: Step) -> None:
        inputs = send_prefill(step, self._inputs.sampled.device)
        if step.prompt_rows:
            context = replace(inputs.context, last_tokens=None)
            hidden_states = self._hidden_states(inputs._replace(context=context))
            step.prompt_logprobs = prompt_logprobs(step, hidden_states, self._full_logits)
            hidden_states = hidden_states[inputs.context.last_tokens]
        else:
            hidden_states = self._hidden_states(inputs)
        logits = self._full_logits(hidden_states)
        if self._draws:
            step.logits = logits
            step.temperatures, step.seeds, step.positions = inputs.temperatures, inputs.seeds, inputs.sample_positions

    def _decode(self, step: Step) -> None:
        n, inputs = step.num_sampled, self._inputs
        logits: Tensor | None
        if step.graph_size:
            self._capture(step.graph_size, step.kind.shares_reads)
            inputs.send(step)
            self._graphs[StepKind(False, step.kind.shares_reads, True)].replay(step.graph_size)
            logits = self._graphs.logits
        else:
            inputs.send(step)
            logits = self._full_logits(self._hidden_states(inputs.for_model(n, step.num_rows, step.kind))[:n])
        if self._draws and logits is not None:
            step.logits, step.fed_tokens = logits[:n], inputs.input_ids[:n]
            names = ("temperatures", "seeds", "positions")
            step.temperatures, step.seeds, step.positions = (inputs.rows[name][:n] for name in names)

    def _hidden_states(self, inputs: ModelInputs) -> Tensor:
        with step_context(inputs.context):
            return self._model(inputs.input_ids, inputs.positions)

    def _full_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [num_rows, hidden_size] -> logits [num_rows, vocab_size]. All ranks must call it."""
        return self._model.gather_logits(self._model.compute_logits(hidden_states))

    def _capture(self, batch_size: int, shares_reads: bool) -> None:
        """Have a graph of this size that ends at the logits. Captured when it is first needed. All ranks come here at
        the same step, and capture together."""
        graphs, sizes = self._graphs[StepKind(False, shares_reads, True)], self._graphs[StepKind()].sizes
        if not graphs.sizes:
            graphs = self._graphs.use_sizes(StepKind(False, shares_reads, True), sizes)
        if self._draws and self._graphs.logits is None:
            dtype, device = self._config.dtype, self._inputs.sampled.device
            self._graphs.logits = torch.empty(sizes[-1], self._config.hf_config.vocab_size, dtype=dtype, device=device)
        options = {"shares_reads": shares_reads}
        graphs.capture(batch_size, partial(self._store_logits, **options), partial(self._run_padding, **options))

    def _run_padding(self, batch_size: int, shares_reads: bool) -> None:
        self._inputs.pad(batch_size, shares_reads)
        self._store_logits(batch_size, shares_reads)

    def _store_logits(self, batch_size: int, shares_reads: bool) -> None:
        hidden_states = self._hidden_states(
            self._inputs.for_model(batch_size, batch_size, StepKind(False, shares_reads))
        )
        out = self._graphs.logits
        if out is not None and self._tp.size == 1:  # A copy of all logits would read and write them once more.
            self._model.compute_logits(hidden_states, out=out[:batch_size])
            return
        logits = self._full_logits(hidden_states)
        if out is not None:
            out[:batch_size] = logits

    # -- the second half -----------------------------------------------------------------------------------------

    def sample(self, step: Step | None) -> None:
        """Draw the tokens of the last `forward`, or on another rank get them: into the inputs' `sampled` on all."""
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
        step.logits = step.temperatures = step.seeds = step.positions = step.fed_tokens = None
