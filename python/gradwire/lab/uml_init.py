"""Process 1 of the user-mode-linux switch: loads the queueing modules, then runs the commands that come on its console.

Runs inside the other kernel, on the host's files, with nothing but the standard library. Each line read is a mark, the most seconds
that are waited for it, and a shell command; after it has run, its output and a line `DONE <mark> <exit status>` go out. Nobody knows the
mark before, so no output can be taken for this line.
"""

import ctypes
import os
import signal
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
        mark, seconds, command = line.split(" ", 2)
        output, status = run(command, float(seconds))
        end = "\n" if output and not output.endswith("\n") else ""
        print(f"{output}{end}DONE {mark} {status}", flush=True)


def run(command: str, seconds: float) -> tuple[str, int]:
    """Output and status of a command; of one that, or whose children, do not end in time none, and the status that timeout(1) has."""
    # The console would be a standard input that never ends.
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    arguments = ["sh", "-c", command]
    process = subprocess.Popen(
        arguments, stdin=nothing, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it has not ended after {seconds:g} s", 124
    return output + errors, process.returncode


main()
