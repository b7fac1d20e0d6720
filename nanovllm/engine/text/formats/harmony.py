"""Harmony, the format of gpt-oss's answers (https://github.com/openai/harmony): messages in channels.

    <|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>

What the model thinks is in the channel analysis. Its answer is in final, and what it says before it calls a tool in
commentary. A message to a tool has its name in the header: `<|channel|>commentary to=functions.sum`.
"""

from nanovllm.engine.text.formats.format import ConversationFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL_END = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"


class Harmony(ConversationFormat):
    name = "harmony"
    thinking = (f"{CHANNEL}analysis{MESSAGE}", END)
    answer = f"{START}assistant{CHANNEL}final{MESSAGE}"
    ends = (RETURN, CALL_END)
    tags = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL_END)

    def is_named_by(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {CHANNEL, MESSAGE} <= tokens
