"""Fault injection as it is written down: `loss=1%,tail=10%,corrupt=1%,duplicate=1%,delay=2ms,seed=7`."""

from __future__ import annotations

import re
from dataclasses import dataclass

SHARE_MAX = 0.9
DELAY_MAX_S = 10.0
SEED_MAX = (1 << 64) - 1
ALLOWED = (
    "loss, tail, corrupt and duplicate of 0% to 90%, delay of 0ms to 10s, seed of 0 to 2^64 - 1, separated by commas: "
    "loss=1%,tail=10%,delay=2ms,seed=7"
)
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Chaos:
    """Faults that are done to the datagrams that this process receives, before the protocol sees them.

    Attributes:
        loss: share of all datagrams that is lost at random.
        tail: share of each transfer that may lose something, at its end, whose data packets are lost when they come for the
            first time: a burst.
        corrupt: share of all datagrams in which a bit is flipped: what is encrypted does not open then, what is not is lost,
            as the checksum of UDP sees to on a real wire.
        duplicate: share of all datagrams that come twice.
        delay_s: how long every datagram is held back, seconds.
        seed: of the chances. The same seed loses the same packets of the same ranks.
    """

    loss: float = 0.0
    tail: float = 0.0
    delay_s: float = 0.0
    seed: int = 0
    corrupt: float = 0.0
    duplicate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Chaos:
        """From its written form; each part may be left out.

        Raises:
            ValueError: not a part that exists, a part twice, or a value out of range; the message names it.
        """
        values: dict[str, float | int] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in _PARSERS:
                raise ValueError(f"{part.strip()!r} is none of {', '.join(_PARSERS)}, with = and a value")
            field, parse = _PARSERS[name]
            if field in values:
                raise ValueError(f"{name} is there twice")
            values[field] = parse(name, value)
        return cls(**values)  # type: ignore[arg-type]

    def numbers(self) -> tuple[float, float, float, float, float, int]:
        """As the engine takes it."""
        return self.loss, self.tail, self.corrupt, self.duplicate, self.delay_s, self.seed


def _share(name: str, text: str) -> float:
    match = re.fullmatch(_NUMBER + r"(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0.0 <= value <= SHARE_MAX:
        raise ValueError(f"{name}={text} is not a share of 0% to 90%")
    return value


def _time(name: str, text: str) -> float:
    match = re.fullmatch(_NUMBER + r"(us|ms|s)", text)
    value = float(match[1]) / _PER_SECOND[match[2]] if match else -1.0
    if not 0.0 <= value <= DELAY_MAX_S:
        raise ValueError(f"{name}={text} is not a time of 0ms to 10s with its unit")
    return value


def _whole(name: str, text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= SEED_MAX:
        raise ValueError(f"{name}={text} is not a whole number of 0 to 2^64 - 1")
    return value


_PARSERS = {
    "loss": ("loss", _share),
    "tail": ("tail", _share),
    "corrupt": ("corrupt", _share),
    "duplicate": ("duplicate", _share),
    "delay": ("delay_s", _time),
    "seed": ("seed", _whole),
}
