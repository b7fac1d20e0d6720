"""How long a job takes and what it costs: checked, computed, and in words."""

import math
from typing import Any

from nanovllm.utils.checks import is_number, require


def check_price(price_per_hour: Any) -> None:
    """Raises ValueError if this is no price."""
    is_price = price_per_hour is None or (is_number(price_per_hour) and 0 < price_per_hour < math.inf)
    require("price_per_hour", price_per_hour, is_price, "a positive number")


def price_of(seconds: float, price_per_hour: float) -> float:
    return seconds * price_per_hour / 3600


def price_in_words(price: float) -> str:
    return f"{price:,.2f}" if price >= 1 else f"{price:.4f}"


def time_in_words(seconds: float) -> str:
    """Such as "90 s", "12 min" or "3.5 h"."""
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
