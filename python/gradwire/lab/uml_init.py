"""Process 1 of the user-mode-linux switch: loads the queueing modules, then runs the commands that come on its console.

Runs inside the other kernel, on the host's files, with nothing but the standard library. Each line read is a shell command;
after it has run, its output and a line `DONE <exit status>` go out.
"""

import ctypes
import os
import subprocess

MODULES = ("sch_tbf", "sch_netem", "sch_prio", "sch_red", "sch_ingress", "cls_u32", "cls_matchall", "act_gact")


def load(module: str) -> None:
    """Loads a module of the running kernel (what `insmod` does, which need not be installed)."""
    path = f"/usr/lib/uml/modules/{os.uname().release}/kernel/net/sched/{module}.ko"
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY)
    if libc.syscall(313, file, b"", 0) != 0:  # finit_module
        print(f"{module}: {os.strerror(ctypes.get_errno())}")
    os.close(file)


def main() -> None:
    """Serves the console until it is closed."""
    libc = ctypes.CDLL(None)
    libc.mount(b"proc", b"/proc", b"proc", 0, None)
    libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    for module in MODULES:
        load(module)
    print("READY", flush=True)
    while line := os.read(0, 65536).decode():
        result = subprocess.run(["sh", "-c", line], check=False, capture_output=True, text=True)
        print(f"{result.stdout}{result.stderr}DONE {result.returncode}", flush=True)


main()
