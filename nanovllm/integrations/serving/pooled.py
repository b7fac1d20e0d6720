"""One call for vectors, classes or ranks: from its body to a submission, and from the engine's results to an answer."""

from typing import Any

from nanovllm import LLM, read_sentence_facts
from nanovllm.integrations.serving.calls import FailedAnswer
from nanovllm.integrations.serving.engine_loop import Submission
from nanovllm.integrations.serving.metrics import CallRecord
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.openai_format.pooled_calls import EmbeddingCall, PooledCall, RankCall
from nanovllm.openai_format.request_names import Row

MAX_INPUTS = 2048  # of a call, as OpenAI has it: the engine's thread tokenizes them between two steps


class PooledSubmission(Submission):
    """The inputs of a call. Whether the model can serve them is seen when the engine gets them."""

    def __init__(self, call: PooledCall):
        """Raises ValueError or TypeError for options that no model has."""
        super().__init__(call.inputs, call.params, None)
        self._call = call

    def encoded(self, llm: LLM) -> list[Any]:
        call = self._call
        if isinstance(call, RankCall):
            documents = [document for _, document in call.inputs]
            return list(llm.rank_prompts(call.inputs[0][0], documents, call.instruction))
        if isinstance(call, EmbeddingCall):
            before = read_sentence_facts(llm.config.model).text_before(call.prompt_name)
            if call.prompt_name is not None and any(isinstance(each, list) for each in call.inputs):
                raise ValueError("input: is token ids: prompt_name puts a text before texts")
            return [before + each if isinstance(each, str) else each for each in call.inputs]
        return call.inputs


class PooledServerCall:
    """A call whose body can be served, as far as one knows without the model. Attributes are Call's."""

    streams = False

    def __init__(self, kind: type[PooledCall], body: Row):
        """Raises ValueError or TypeError with what cannot be served."""
        self._call = kind.read(body)
        if (num := len(self._call.inputs)) > MAX_INPUTS:
            raise ValueError(
                f"{num} texts in one call: must be at most {MAX_INPUTS}; divide them, or run a job on a file"
            )
        self.submission = PooledSubmission(self._call)
        self.record = CallRecord()

    def end(self) -> None:
        """Called when nobody waits for the answer."""
        self.record.end(self.submission.num_choices)

    async def answer(self, responder: Responder) -> Row:
        """The whole body. Raises ValueError or TypeError if the engine refuses an input, EngineDied, FailedAnswer."""
        events = self.submission.events
        self.record.num_prompt_tokens = _checked(await events.get())
        outputs: list[Any] = [None] * self.submission.num_choices
        for _ in outputs:
            index, delta = _checked(await events.get())
            self.record.add(delta)
            output = delta.get("output")
            if delta["finish_reason"] != "stop" or output is None:
                raise FailedAnswer(delta.get("error") or f"input {index} has no result: {delta['finish_reason']}")
            outputs[index] = output
        return self._call.answer(outputs, responder.model)


def _checked(event: Any) -> Any:
    if isinstance(event, Exception):
        raise event
    return event
