"""URLs in settings and messages: whether a text is one, and what of it others may see."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def is_url(text: str) -> bool:
    """Whether it is one of HTTP, with a host."""
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return has_port and parts.scheme in ("http", "https") and bool(parts.hostname) and not re.search(r"\s", text)


def without_user(text: str) -> str:
    """A URL, or what was meant as one, without what stands before its last `@`: a user and a password, whatever is in them."""
    return re.sub(r"(?s)^([A-Za-z]+:)?(/*).*@", r"\1\2***@", text)
