"""Tests of PyTorch's suite that pass for gloo and not for gradwire, each with its reason."""

# Name of the test: why.
REASONS: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        "it wants the backend's name in DDP's log, where torch writes 'custom' for every backend from outside of torch "
        "(ProcessGroup::getBackendName, which asks an enumeration and not the backend). A process group of Python's own says its name, "
        "and does before torch 2.14; but it takes all devices and cannot be split"
    ),
}
# Those of them that pass at times.
SOMETIMES: set[str] = set()
