"""For all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and children inherit it: those that a test interrupts would not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
