"""When it is news that the kernel refuses datagrams: a pure decision."""

import errno

from gradwire.observe.refusals import RefusalWatch


class Counters:
    """Those of an engine."""

    def __init__(self) -> None:
        self.sent, self.refused, self.errno = 1_000, 0, 0

    def grown(self, sent: int, refused: int = 0, number: int = errno.EMSGSIZE) -> dict[str, int]:
        self.sent += sent
        self.refused += refused
        self.errno = number if refused else self.errno
        return {"datagrams_sent": self.sent, "send_refused": self.refused, "send_refused_errno": self.errno}


def test_what_the_kernel_refuses_is_told_once_with_its_error_and_so_is_the_end() -> None:
    watch, engine = RefusalWatch(), Counters()
    assert watch.update(0.0, engine.grown(10_000), 0.0) is None
    assert watch.update(1.0, engine.grown(20, 40), 1.2) == (
        "40 datagrams in 1.0 s, 20 were taken: Message too long (EMSGSIZE): has the MTU of an interface become smaller? "
        "Groups that are formed from now on fit it"
    )
    assert watch.update(2.0, engine.grown(20, 40), 2.2) is None
    assert watch.update(3.0, engine.grown(5_000), 0.0) == ""
    assert watch.update(4.0, engine.grown(5_000), 0.0) is None
    assert "does a firewall" in (watch.update(5.0, engine.grown(0, 12, errno.EPERM), 1.1) or "")


def test_few_of_many_and_what_nobody_waits_for_is_no_news() -> None:
    watch, engine = RefusalWatch(), Counters()
    assert watch.update(0.0, engine.grown(0), 5.0) is None
    assert watch.update(1.0, engine.grown(5_000, 40), 5.0) is None, "few of many"
    assert watch.update(2.0, engine.grown(0, 4), 5.0) is None, "tries of a path that is gone"
    assert watch.update(3.0, engine.grown(0, 400), 0.1) is None, "addresses without a route while a group is formed"
    assert watch.update(3.9, engine.grown(0, 4), 5.0) is None, "not yet a second"
    assert watch.update(4.0, engine.grown(0, 400, 0), 5.0) is None, "a socket that takes nothing was given up"


def test_the_seconds_before_the_first_look_count_for_nothing() -> None:
    assert RefusalWatch().update(9.0, Counters().grown(0, 10_000), 5.0) is None
