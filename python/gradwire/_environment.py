"""`GRADWIRE_*` variables that are changed once they have been read: an engine is started once in a process, and never again.

In a notebook, where a cell is run again after `os.environ[..] = ..`, nothing else would say so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from gradwire.config import ENV_PREFIX, ENV_PREFIXES_ELSEWHERE, SECRET_VARIABLE, service_links

logger = logging.getLogger("gradwire")


class Environment:
    """The settings in the environment, as they are now."""

    def __init__(self) -> None:
        self._seen = _settings_in(os.environ)

    def warn_of_changes(self) -> None:
        """Names those that have changed since. Once for each value."""
        now = _settings_in(os.environ)
        names = self._seen.keys() | now.keys()
        if SECRET_VARIABLE not in now:  # who has taken it out, so that children do not see it, has done well
            names -= {SECRET_VARIABLE}
        if changed := sorted(name for name in names if self._seen.get(name) != now.get(name)):
            self._seen = now
            logger.warning(
                "%s changed after the engine had started with the first process group: without effect in this process. Set it before the "
                "first init_process_group of a new one (in a notebook: restart the kernel)",
                ", ".join(changed),
            )


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    others = set(service_links(environ))
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX) and not name.startswith(ENV_PREFIXES_ELSEWHERE) and name not in others
    }
