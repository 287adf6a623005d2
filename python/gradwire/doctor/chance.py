"""Whether so many lost packets of so many show that more than a share is lost, or may be chance.

As if each packet were lost or not by itself: where many are lost together less is shown than it seems.
"""

from __future__ import annotations

import math

MISTAKEN = 1e-4  # how often a way that loses just the allowed share is called worse by one look; a job of 16 ranks has 240 ways
_NEGLIGIBLE = 1e-9  # of a sum whose terms become smaller


def is_more(lost: int, sent: int, share: float) -> bool:
    """Whether more than this share is lost: of a way that loses just so much so many would hardly ever be lost.

    Args:
        lost: packets, of those `sent`.
        sent: packets.
        share: 0 to 1.
    """
    return lost > share * sent and _at_least(lost, sent, share) < MISTAKEN


def is_open(lost: int, sent: int, share: float) -> bool:
    """Whether more seems to be lost than this share, and it may be chance; of more packets it is known."""
    return lost > share * sent and not is_more(lost, sent, share)


def _at_least(lost: int, sent: int, share: float) -> float:
    """How probable it is that at least so many of `sent` are lost; `lost` is beyond the most probable number.

    The binomial distribution's terms from `lost` on, each from the one before. They become smaller from the first on.
    """
    if share <= 0:
        return 0.0
    ways = math.lgamma(sent + 1) - math.lgamma(lost + 1) - math.lgamma(sent - lost + 1)
    term = total = math.exp(ways + lost * math.log(share) + (sent - lost) * math.log1p(-share))
    for number in range(lost, sent):
        term *= (sent - number) / (number + 1) * share / (1 - share)
        total += term
        if term < _NEGLIGIBLE * total:
            break
    return total
