"""How the two ends of a rendezvous show each other that they know the job secret, without saying it.

Each end names random bytes, and each answers with what only the secret makes of both. The key has a label of its own, apart from all
keys of datagrams and records (`security/keys.rs` of the engine): what is shown here is of no use there. It is HKDF-SHA256 (RFC 5869) with
the label as salt, by the standard library alone: ranks meet before there is an engine.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

LABEL = b"gradwire rendezvous"
NONCE_BYTES = 32
# Who shows it: the proof of one end is not that of the other.
BOARD, RANK = b"board", b"rank"


def nonce() -> str:
    """Fresh random bytes, as text."""
    return secrets.token_hex(NONCE_BYTES)


class Challenge:
    """What the board asks of one connection.

    Args:
        secret: of the job.
        rank: who is there; None: it only looks.
        theirs: the random bytes that it named.
    """

    def __init__(self, secret: bytes, rank: int | None, theirs: str) -> None:
        self._ours = nonce()
        self._shown = _proof(secret, BOARD, rank, (theirs, self._ours))
        self._expected = _proof(secret, RANK, rank, (theirs, self._ours))

    def question(self) -> dict[str, Any]:
        """The message to the rank; it shows that the board knows the secret."""
        return {"nonce": self._ours, "proof": self._shown}

    def is_met_by(self, answer: dict[str, Any]) -> bool:
        """Whether it knows the secret too."""
        return _is_equal(answer.get("proof"), self._expected)


def answer_to(question: dict[str, Any], secret: bytes, rank: int | None, ours: str) -> dict[str, Any] | None:
    """A rank's answer to what a board asked, after it named `ours`; None: the board has another secret."""
    nonces = (ours, str(question["nonce"]))
    if not _is_equal(question.get("proof"), _proof(secret, BOARD, rank, nonces)):
        return None
    return {"proof": _proof(secret, RANK, rank, nonces)}


def _proof(secret: bytes, who: bytes, rank: int | None, nonces: tuple[str, str]) -> str:
    """What `who` shows; `nonces`: the rank's and the board's."""
    extracted = hmac.digest(LABEL, secret, hashlib.sha256)
    key = hmac.digest(extracted, who + b"\x01", hashlib.sha256)
    # Lengths stand before the texts, so that no two different greetings are the same bytes.
    parts = [part.encode(errors="replace") for part in (str(rank), *nonces)]
    greeting = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, greeting, hashlib.sha256).hexdigest()


def _is_equal(shown: object, expected: str) -> bool:
    """Takes as long for what is nearly right as for anything else."""
    return isinstance(shown, str) and hmac.compare_digest(shown.encode(errors="replace"), expected.encode())
