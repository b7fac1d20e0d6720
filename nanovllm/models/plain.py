"""placeholder until the plain layers land"""

from typing import Any


class PlainQwen3:
    num_layer_params: int
    lm_head: Any

    def make_stores(self, *args: Any) -> Any: ...


def make_plain_decoder(*args: Any) -> Any: ...
