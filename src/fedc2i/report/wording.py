"""Numbers as people write them."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """``25 %``, and small shares with a digit more: ``1.5 %``."""
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def decimals(clients: int) -> int:
    """Decimal places of a share of λ: equal shares of many clients are small."""
    return 3 if clients > 50 else 2


def size(count: int) -> str:
    """Bytes: ``86.1 kB``, ``1.7 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
