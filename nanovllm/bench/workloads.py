"""What are the workloads of `nanovllm bench`? Number of requests, their lengths, and what they share."""

from dataclasses import dataclass
from random import Random

from nanovllm.engine_options import EngineOptions

VOCABULARY = 10000  # prompts are random ids in 0..10000, as far as the model has them
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Workload:
    """Lengths are drawn uniformly, bounds included."""

    requests: int  # how many
    prompt: tuple[int, int]  # shortest and longest prompt, in tokens, without the shared beginning
    output: tuple[int, int]  # fewest and most tokens to generate
    stresses: str  # what it is there to show
    shared: int = 0  # tokens that all prompts of a pass begin with
    max_num_seqs: int = EngineOptions.max_num_seqs  # how many the engine may run at once

    def draw(self, index: int, vocab_size: int = VOCABULARY + 1) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths of pass `index`, for a model of that vocabulary.

        Lengths are those of seed 0 in every pass, so that passes compare; token ids are fresh in each, so that
        none lives off the prefix cache of the one before. Pass 0 of "bench" is the published benchmark.
        """
        rng, largest = Random(0), min(VOCABULARY, vocab_size - 1)
        prompts = [_ids(rng, rng.randint(*self.prompt), largest) for _ in range(self.requests)]
        outputs = [rng.randint(*self.output) for _ in range(self.requests)]
        if index:
            rng = Random(index)
            prompts = [_ids(rng, len(prompt), largest) for prompt in prompts]
        shared = _ids(rng, self.shared, largest)
        return [shared + prompt for prompt in prompts], outputs


def _ids(rng: Random, count: int, largest: int) -> list[int]:
    return [rng.randint(0, largest) for _ in range(count)]


WORKLOADS = {
    "bench": Workload(256, (100, 1024), (100, 1024), "the published nano-vLLM benchmark"),
    "many": Workload(2048, (32, 128), (32, 128), "scheduling and host overhead"),
    "single": Workload(1, (128, 128), (512, 512), "latency of one stream"),
    "prefix": Workload(256, (64, 64), (64, 64), "the prefix cache", shared=2048),
    "prefill": Workload(128, (2000, 2000), (1, 1), "prompt processing"),
    "long": Workload(128, (2000, 3500), (100, 500), "long contexts"),
    "batch16": Workload(16, (512, 512), (256, 256), "small batches: latency and bandwidth"),
    "queue": Workload(2048, (100, 1024), (100, 1024), "far more requests than run at once"),
    "throughput": Workload(2048, (1000, 1000), (1000, 1000), "as many tokens as possible", max_num_seqs=1024),
    "laptop": Workload(8, (16, 64), (16, 32), "a machine without a GPU, in a minute"),
}
