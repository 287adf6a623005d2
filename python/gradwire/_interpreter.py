"""How gradwire starts Python: never with modules of the current folder, which may be anybody's, while root runs `gradwire lab up`.

`python -c` and `python -m` look for modules there first, before those of the standard library, and a command's own script does not. Python
3.11 has an option for it (`-P`), and 3.10 has none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

# `sys` is built in. With -P, -I or PYTHONSAFEPATH the folder is not there.
_WITHOUT_THE_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "


def running(code: str, flags: Sequence[str] = ()) -> list[str]:
    """The command that runs this code, as `python -c`; arguments may follow.

    Args:
        code: statements.
        flags: of the interpreter, such as `-u`.
    """
    return [sys.executable, *flags, "-c", _WITHOUT_THE_FOLDER + code]


def running_module(name: str) -> list[str]:
    """The command that runs this module, as `python -m`; arguments may follow."""
    return running(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)")
