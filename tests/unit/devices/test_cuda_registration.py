"""Host memory is registered in pieces, all or none; tried with a registrar that is no GPU."""

import pytest

from offload.devices.cuda import PIECE_BYTES, HostRegistration
from offload.errors import BudgetError, ConfigError
from offload.sizes import GIB

BASE = 1 << 40


class FakeRegistrar:
    """Notes what is registered, and fails at one call."""

    def __init__(self, *, fails_at=None):
        self.live = {}
        self.calls = 0
        self.fails_at = fails_at

    def register(self, address, num_bytes):
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("error 2")
        assert address not in self.live
        self.live[address] = num_bytes

    def unregister(self, address):
        del self.live[address]


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (1, [1]),
        (PIECE_BYTES - 1, [PIECE_BYTES - 1]),
        (PIECE_BYTES, [PIECE_BYTES]),
        (PIECE_BYTES + 1, [PIECE_BYTES, 1]),
        (200 * GIB, [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES, 8 * GIB]),
    ],
)
def test_no_piece_is_larger_than_64_gib_and_all_bytes_are_registered(num_bytes, sizes):
    registrar = FakeRegistrar()
    registration = HostRegistration(registrar)

    registration.register(BASE, num_bytes)

    assert list(registrar.live.values()) == sizes
    assert list(registrar.live) == [BASE + sum(sizes[:i]) for i in range(len(sizes))]
    assert registration.registered_bytes == num_bytes
    registration.unregister(BASE)
    assert registrar.live == {}
    assert registration.registered_bytes == 0


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_when_a_piece_fails_none_stays_registered(fails_at):
    registrar = FakeRegistrar(fails_at=fails_at)
    registration = HostRegistration(registrar)

    with pytest.raises(BudgetError, match=rf"piece {fails_at} of 4 .*error 2; nothing stays"):
        registration.register(BASE, 200 * GIB)

    assert registrar.live == {}
    assert registration.registered_bytes == 0


def test_a_failure_leaves_what_was_registered_before():
    registrar = FakeRegistrar(fails_at=3)
    registration = HostRegistration(registrar)
    registration.register(BASE, 100)

    with pytest.raises(BudgetError):
        registration.register(2 * BASE, 65 * GIB)

    assert registrar.live == {BASE: 100}
    registration.unregister_all()
    assert registrar.live == {}


def test_a_piece_that_stays_locked_is_told_and_keeps_no_other_from_being_unlocked(
    monkeypatch, caplog
):
    registrar = FakeRegistrar(fails_at=4)
    unregister = registrar.unregister

    def refuse(address):
        if address == BASE + PIECE_BYTES:
            raise OSError("error 1")
        unregister(address)

    monkeypatch.setattr(registrar, "unregister", refuse)
    registration = HostRegistration(registrar)

    with pytest.raises(BudgetError, match="piece 4 of 4"):
        registration.register(BASE, 200 * GIB)

    assert list(registrar.live) == [BASE + PIECE_BYTES]
    assert "64 GiB of host memory" in caplog.text


def test_a_transfer_is_cut_where_one_registration_ends():
    registration = HostRegistration(FakeRegistrar(), piece_bytes=4096)
    registration.register(BASE, 3 * 4096)

    assert list(registration.cut(BASE, 4096)) == [(0, 4096)]
    assert list(registration.cut(BASE + 4000, 200)) == [(0, 96), (96, 104)]
    assert list(registration.cut(BASE + 1, 3 * 4096 - 1)) == [(0, 4095), (4095, 4096), (8191, 4096)]
    assert list(registration.cut(7, 100)) == [(0, 100)]


def test_without_a_gpu_the_device_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    from offload.devices.cuda import CudaDevice

    with pytest.raises(ConfigError, match=r"expected a CUDA device, found none.*choose `cpu`"):
        CudaDevice()
