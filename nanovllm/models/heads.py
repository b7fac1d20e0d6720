"""What is behind a decoder's final norm: a head of the vocabulary, one that classifies, or none."""

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from nanovllm.layers.formats.all_formats import get_unquantized_format
from nanovllm.layers.linear import ReplicatedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Head = Literal["vocabulary", "classes", "none"]

_CLASSIFIES, _HEADLESS, _GENERATES = "ForSequenceClassification", "Model", "ForCausalLM"
_ATTRIBUTE = "nanovllm_head"  # of a configuration whose model is to have no head
_BIAS = "nanovllm_score_bias"  # of one whose checkpoint has a bias of its classes


def generating_name(architecture: str) -> str:
    """The architecture that generates with the same decoder."""
    for ending in (_CLASSIFIES, f"Text{_HEADLESS}", _HEADLESS):  # TextModel: where others see and hear
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + _GENERATES
    return architecture


def head_of(hf_config: "PreTrainedConfig") -> Head:
    """The head of a configuration's model."""
    name = (getattr(hf_config, "architectures", None) or [""])[0]
    if name.endswith(_CLASSIFIES):
        return "classes"
    return "none" if name.endswith(_HEADLESS) or getattr(hf_config, _ATTRIBUTE, "") == "none" else "vocabulary"


def leave_out_head(hf_config: "PreTrainedConfig") -> None:
    """Let the configuration's model have no head."""
    setattr(hf_config, _ATTRIBUTE, "none")


def note_score_bias(hf_config: "PreTrainedConfig") -> None:
    """Let the head that classifies have a bias."""
    setattr(hf_config, _BIAS, True)


def labels_of(hf_config: "PreTrainedConfig") -> tuple[str, ...]:
    """The names of a classification head's labels, in order. (Workers have a configuration's plain attributes alone,
    and num_labels is none.)"""
    names: dict[Any, Any] = getattr(hf_config, "id2label", None) or dict.fromkeys(range(2))
    named = {int(key): name for key, name in names.items()}
    return tuple(str(named.get(i) or f"LABEL_{i}") for i in range(len(names)))


class NoVocabulary:
    """`compute_logits` and `gather_logits` of a model without a head of the vocabulary."""

    def __init__(self, score: nn.Module | None):
        """score: the head that classifies, if there is one."""
        self._score = score

    def compute(self, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states [num_rows, hidden_size] -> logits [num_rows, num_labels], or without labels the hidden states
        themselves, on every rank."""
        return hidden_states if self._score is None else self._score(hidden_states)

    def gather(self, logits: Tensor) -> Tensor:
        """All ranks have them already."""
        return logits


def make_score(hf_config: "PreTrainedConfig") -> nn.Module | None:
    """The head that classifies, [num_labels, hidden_size]; None if the model does not."""
    if head_of(hf_config) != "classes":
        return None
    sizes, has_bias = (hf_config.hidden_size, len(labels_of(hf_config))), getattr(hf_config, _BIAS, False)
    format = get_unquantized_format()
    if format.is_batch_invariant:
        return ReplicatedLinear(*sizes, has_bias, format=format)
    return nn.Linear(*sizes, bias=has_bias)
