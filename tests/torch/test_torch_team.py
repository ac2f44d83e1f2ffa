"""PyTorch's own threads as helpers: all work is done once, with the same bits; errors get out."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import sparsescan.torch
from sparsescan.execution.threads import lent, share
from sparsescan.torch.calls import team
from sparsescan.torch.calls.prepared import only
from sparsescan.torch.calls.team import pytorchs_threads

if team._team() is None:
    pytest.skip("PyTorch has no GNU OpenMP here", allow_module_level=True)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_part_is_done_once_by_several_threads() -> None:
    done: Counter[int] = Counter()
    threads = set()
    meet = threading.Barrier(2, timeout=60)

    def call(i: int) -> None:
        if i < 2:
            meet.wait()  # two threads, or none gets through
        done[i] += 1
        threads.add(threading.get_ident())

    with pytorchs_threads():
        share(call, 50)
    assert done == Counter(range(50))
    assert len(threads) == 2
    assert threading.get_ident() in threads


def test_errors_are_raised_and_end_the_work() -> None:
    def call(i: int) -> None:
        if i == 3:
            raise KeyError(i)

    with pytorchs_threads(), pytest.raises(KeyError):
        share(call, 1000)
    with pytorchs_threads():
        share(lambda i: None, 10)


def test_threads_are_lent_in_a_block_and_to_one_thread() -> None:
    seen: list[str] = []

    def team(work: object) -> None:
        seen.append(threading.current_thread().name)
        work()  # type: ignore[operator]

    with lent(team):
        with lent(None):
            share(lambda i: None, 4)
        share(lambda i: None, 4)
        other = threading.Thread(target=lambda: share(lambda i: None, 4))
        other.start()
        other.join()
    share(lambda i: None, 4)
    assert seen == [threading.current_thread().name]


def test_the_same_bits_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = sparsescan.torch.LSTM(12, 20, bidirectional=True), torch.randn(300, 16, 12)

    def run() -> list[torch.Tensor]:
        output = net(x)[0]
        return [output.detach(), *torch.autograd.grad(output.square().sum(), net.parameters())]

    results = run()
    monkeypatch.setattr(team, "_home", -1)
    for one, other in zip(results, run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_its_own_helpers() -> None:
    net, x = sparsescan.torch.GRU(12, 20), torch.randn(300, 16, 12)
    with torch.no_grad():
        expected = net(x)[0].numpy()
        child = os.fork()
        if child == 0:
            # PyTorch's own loops would hang here.
            signal.alarm(60)
            os._exit(0 if np.array_equal(net(x)[0].numpy(), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_kernels_have_one_thread_where_pytorch_has() -> None:
    torch.set_num_threads(1)
    threads = set()
    with pytorchs_threads():
        share(lambda i: threads.add(threading.get_ident()), 50)
    assert threads == {threading.get_ident()}
    x = torch.randn(400, 16, 12)
    net = sparsescan.torch.GRU(12, 64)
    begun = threading.active_count()
    with only("sparsescan"), torch.no_grad():
        one = net(x)[0]
        assert threading.active_count() == begun
        torch.set_num_threads(2)
        assert torch.equal(one, net(x)[0])
