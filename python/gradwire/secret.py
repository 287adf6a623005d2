"""The job secret, from the environment or a file. It is no field of `Config`: what is a field is printed and published."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from gradwire.config import SECRET_VARIABLE, Config
from gradwire.errors import ConfigError

SECRET_BYTES_MIN = 16
LINE_END = b"\r\n"
HOW = "make one with: openssl rand -hex 32"


def job_secret(config: Config, environ: Mapping[str, str] | None = None) -> bytes | None:
    """What all ranks share and nobody else has; None: nothing is configured, or `security` is `off`.

    Args:
        config: its `secret_file` is read.
        environ: None means `os.environ`.

    A line end at the end of the variable or the file does not count: a Kubernetes secret made from a file has it in both.

    Raises:
        ConfigError: both are set, the secret is shorter than 16 bytes, or the file cannot be read or is open to others.
    """
    if config.security == "off":
        return None
    value = (os.environ if environ is None else environ).get(SECRET_VARIABLE)
    if value is not None and config.secret_file is not None:
        text = f"{SECRET_VARIABLE} and secret_file = {config.secret_file!r} are both set: leave one of them out"
        raise ConfigError(text, field="secret_file", value=config.secret_file)
    if value is not None:
        return _checked(os.fsencode(value).rstrip(LINE_END), SECRET_VARIABLE)  # bytes that are no text are a secret too
    if config.secret_file is not None:
        return _checked(_read(config.secret_file).rstrip(LINE_END), f"the secret in {config.secret_file}")
    return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                text = (
                    f"secret_file = {path!r} can be read by others (mode {mode:04o}): chmod 600 {path}, or where that cannot be done, as "
                    f"in a Kubernetes volume with fsGroup, set {SECRET_VARIABLE} instead"
                )
                raise ConfigError(text, field="secret_file", value=path, allowed="a file of mode 0600 or 0400")
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"secret_file = {path!r} cannot be read: {error.strerror}", field="secret_file", value=path
        ) from None


def _checked(secret: bytes, name: str) -> bytes:
    if len(secret) < SECRET_BYTES_MIN:
        text = f"{name} has {len(secret)} bytes, at least {SECRET_BYTES_MIN} are needed; {HOW}"
        raise ConfigError(text, field="secret", allowed=f"at least {SECRET_BYTES_MIN} bytes")
    return secret
