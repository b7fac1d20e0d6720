"""The tuner: times the ways to compute a layer's products, and writes the best into a table.

It times a whole layer, because launches overlap. First it replaces the table's present choice for one product by each
challenger. Then it combines the winners, or takes one candidate for all products if that is faster, and tries the best
few challengers again beside those. The result becomes the table's rows if it takes 2 % less time than the present
choices, in two runs.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table

DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 1024)
PREFILL_TOKENS = (2048, 4096, 8192, 16384)
_MIN_GAIN = 0.02
_NUM_FINALISTS = 4  # of each product
_NUM_RUNS = 2


Picks = tuple[Choice, ...]
# (phase, number of tokens, a choice for each product) -> microseconds a layer, or None if one of them does not work.
TimeLayer = Callable[[str, int, Picks], float | None]


class Result(NamedTuple):
    """What was found for one number of tokens."""

    choices: list[list[Choice]]  # for each product, the best first; none for the default
    micros: float  # microseconds for a layer, with the best choices
    is_new: bool  # whether these are not the table's


class Tuner:
    """Measures one model's layer."""

    def __init__(
        self,
        keys: Sequence[Key],
        table: Table,
        candidates: Iterable[Candidate | type[Candidate]],
        num_multiprocessors: int,
        fitted: Callable[[int, Choice], Choice | None] = lambda i, choice: choice,
        top_k: int = 1,
        settled: Collection[Key] = (),
    ):
        """keys: of a layer's products (`layer_facts.layer_products`), in any phase. table: has the present choices.
        fitted: of a product's index and a choice, the choice as the GPU's shared memory allows it; None if it does not.
        top_k: experts of a token. settled: those of the keys whose present choices stay, without rows in the result."""
        self.keys, self.table, self.top_k = tuple(keys), table, top_k
        self._is_open = [key not in settled for key in keys]
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.num_multiprocessors, self._fitted = num_multiprocessors, fitted
        of_key = [[each for each in self.candidates.values() if each.is_default and each.is_for(key)] for key in keys]
        self.defaults = tuple(Choice(each[0].name) for each in of_key)  # what computes a product without a row

    def present(self, phase: str, num_tokens: int) -> Picks:
        rows = (self.table.find(key._replace(phase=phase)) for key in self.keys)
        found = (self._usable(i, row[num_tokens] if row else ()) for i, row in enumerate(rows))
        return tuple(next(iter(choices), default) for choices, default in zip(found, self.defaults, strict=True))

    def _usable(self, i: int, choices: Iterable[Choice]) -> list[Choice]:
        """Those of a product's choices that are installed, each once, as they fit the GPU."""
        installed = (choice for choice in choices if choice.candidate in self.candidates)
        fitted = (self._fitted(i, choice) for choice in installed)
        return list(dict.fromkeys(choice for choice in fitted if choice is not None))

    def trials(self, phase: str, num_tokens: int) -> list[list[Choice]]:
        """The challengers for each product, the default first; none if it is settled."""
        sizes = num_tokens, self.top_k, self.num_multiprocessors
        found = [
            [
                Choice(name, tuple(constants))
                for name, candidate in self.candidates.items()
                for constants in candidate.challengers(key._replace(phase=phase), *sizes)
            ]
            for key in self.keys
        ]
        return [
            self._usable(i, (default, *found[i])) if self._is_open[i] else [] for i, default in enumerate(self.defaults)
        ]

    def measure(self, phase: str, num_tokens: int, time_layer: TimeLayer) -> Result:
        """The best choices for one number of tokens."""

        times_of: dict[Picks, float | None] = {}

        def time_anew(picks: Picks) -> float | None:
            return time_layer(phase, num_tokens, picks)

        def time(picks: Picks) -> float | None:
            if picks not in times_of:
                times_of[picks] = time_anew(picks)
            return times_of[picks]

        present = self.present(phase, num_tokens)
        micros = time(present)
        if micros is None:  # The rows of another shape may not suit this one.
            present = self.defaults
            micros = time(present)
            if micros is None:
                raise RuntimeError(f"a layer of {num_tokens} tokens cannot be computed by the default candidates")
        times = []
        for i, trials in enumerate(self.trials(phase, num_tokens)):
            tried = {choice: time(_replaced(present, i, choice)) for choice in trials}
            tried[present[i]] = micros
            times.append({choice: micros for choice, micros in tried.items() if micros is not None})
        best = self._combined(times, time)
        is_new = best != present
        for _ in range(_NUM_RUNS if is_new else 0):
            before, after = time_anew(present), time_anew(best)
            if before is None or after is None or after > (1 - _MIN_GAIN) * before:
                is_new = False
                break
            micros = after
        picks = best if is_new else present
        ranked = [_ranked(*each) for each in zip(picks, times, self.defaults, strict=True)]
        return Result(ranked, micros, is_new)

    def most_timings(self, phase: str, num_tokens: int) -> int:
        """How often `tune` times a layer of this many tokens at most."""
        trials = self.trials(phase, num_tokens)
        alone = 2 + sum(map(len, trials))
        together = 1 + len(self.candidates) + sum(self._is_open) * (_NUM_FINALISTS + 1)
        return alone + together + 2 * _NUM_RUNS

    def _combined(self, times: Sequence[Mapping[Choice, float]], time: Callable[[Picks], float | None]) -> Picks:
        """The best choices together. times: for each product, microseconds of a layer with this choice for it."""
        # Launches of one candidate overlap, so it may be the best for all products where it is for none alone.
        starts = {tuple(min(each, key=each.__getitem__) for each in times)}
        for name in sorted(self.candidates):
            own = [{choice: each[choice] for choice in each if choice.candidate == name} for each in times]
            if all(own):
                starts.add(tuple(min(each, key=each.__getitem__) for each in own))
        measured = {picks: micros for picks in starts if (micros := time(picks)) is not None}
        best = min(measured, key=measured.__getitem__, default=next(iter(starts)))
        micros = measured.get(best, math.inf)
        for i, each in enumerate(times):
            if not self._is_open[i]:
                continue
            for choice in dict.fromkeys((*sorted(each, key=each.__getitem__)[:_NUM_FINALISTS], self.defaults[i])):
                picks = _replaced(best, i, choice)
                found = micros if picks == best else time(picks)
                if found is not None and found < micros:
                    best, micros = picks, found
        return best

    def tune(
        self,
        time_layer: TimeLayer,
        counts: Mapping[str, Sequence[int]],
        tell: Callable[[str], None],
        known: Mapping[tuple[str, int], Result] | None = None,
        keep: Callable[[str, int, Result], None] | None = None,
    ) -> Table:
        """Rows of the products that are not settled, for these numbers of tokens in each phase.

        tell: called with a line of text for each number of tokens. known: by phase and number of tokens, results that
        need no measurement. keep: called with each further one.
        """
        rows: dict[Key, Row] = {}
        of_steps: list[dict[int, list[Choice]]] = [{} for _ in self.keys]
        known = known or {}
        for phase, tokens in counts.items():
            results: dict[int, Result] = {}
            for num_tokens in sorted(tokens):
                if (phase, num_tokens) in known:
                    results[num_tokens] = known[phase, num_tokens]
                    continue
                results[num_tokens] = result = self.measure(phase, num_tokens, time_layer)
                if keep is not None:
                    keep(phase, num_tokens, result)
                names = ", ".join(pick.candidate for pick in self._picks(result))
                new = "new" if result.is_new else "as before"
                tell(f"{phase} {num_tokens:6} tokens {result.micros:9.1f} us a layer  {new:9}  {names}")
            for i, key in enumerate(self.keys):
                if not self._is_open[i]:
                    continue
                choices = {n: result.choices[i] for n, result in results.items()}
                # Short prefills may launch the same kernels as decode steps, so these are measured first.
                of_steps[i] |= choices
                default = self.candidates[self.defaults[i].candidate]
                is_shared = phase == "prefill" and not default.suits_short_prefills
                in_phase = key._replace(phase=phase)
                later = _later(self.table.rows.get(in_phase), max(choices))
                if key.operation == "experts" or is_shared:
                    rows[in_phase] = Row(_merged(of_steps[i] | later))
                else:
                    rows[in_phase] = _row(phase, choices, later)
        return Table(rows)

    def _picks(self, result: Result) -> Picks:
        return tuple(
            choices[0] if choices else default for choices, default in zip(result.choices, self.defaults, strict=True)
        )


def _replaced(picks: Picks, i: int, choice: Choice) -> Picks:
    return (*picks[:i], choice, *picks[i + 1 :])


def _ranked(pick: Choice, times: Mapping[Choice, float], default: Choice) -> list[Choice]:
    """The pick, then the best of each other candidate, in case the first is not installed; none after the default."""
    ranked = [pick]
    for choice in sorted(times, key=times.__getitem__):
        if choice.candidate not in {each.candidate for each in ranked}:
            ranked.append(choice)
    return ranked[: ranked.index(default)] if default in ranked else ranked


def _later(row: Row | None, num_tokens: int) -> dict[int, list[Choice]]:
    """What a row has for more tokens than were measured now, where those are a part of all."""
    buckets = zip(row.bounds, row.choices, strict=True) if row else ()
    return {bound: list(choices) for bound, choices in buckets if bound > num_tokens}


def _row(phase: str, choices: Mapping[int, list[Choice]], later: Mapping[int, list[Choice]]) -> Row:
    """The default computes decode steps of more tokens than were ever measured, and shorter prefills, where the other
    candidates' launches would take the host too long."""
    if phase == "decode":
        return Row(_merged({**choices, **(later or {max(choices) + 1: []})}))
    return Row(_merged({min(choices) - 1: [], **choices, **later}))


def _merged(buckets: Mapping[int, list]) -> dict[int, list]:
    """The row without buckets that are equal to the next one."""
    bounds = sorted(buckets)
    return {
        bound: buckets[bound]
        for bound, following in zip(bounds, [*bounds[1:], None], strict=True)
        if following is None or buckets[bound] != buckets[following]
    }
