import os
import weakref

import numpy as np
import pytest

from offload.errors import CorruptStateError, StorageError
from offload.memory import Arena
from offload.storage.engine import Engine
from offload.storage.faults import Fault, FaultPlan
from offload.storage.spill import SPILL_NAME, Spill

PLACE_BYTES = 8192


@pytest.fixture
def slot():
    arena = Arena(PLACE_BYTES)
    arena.open()
    return arena.take(PLACE_BYTES)


@pytest.fixture
def spill(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    with Engine() as engine:
        spill = Spill(roots, [engine, engine], place_bytes=PLACE_BYTES)
        spill.open()
        yield spill
        spill.close()


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, PLACE_BYTES])
def test_bytes_come_back_from_a_file_without_a_name(spill, slot, tmp_path, num_bytes):
    expected = os.urandom(num_bytes)
    slot[:num_bytes] = expected
    place, ticket = spill.write(slot, num_bytes=num_bytes)
    ticket.wait()
    slot[:] = bytes(PLACE_BYTES)

    spill.read(place, slot, is_needed=True).wait()
    spill.check(place, slot)

    assert slot[:num_bytes] == expected
    assert not list(tmp_path.rglob(SPILL_NAME))


def test_pieces_go_to_every_path_and_places_are_used_again(spill, slot):
    for _ in range(3):
        places = []
        for _ in range(4):
            place, ticket = spill.write(slot, num_bytes=1)
            ticket.wait()
            places.append(place)
        assert {place.path_index for place in places} == {0, 1}
        for place in places:
            spill.release(place)

    assert spill.peak_bytes == 4 * PLACE_BYTES


def test_other_bytes_than_those_written_are_found(spill, slot):
    place, ticket = spill.write(slot, num_bytes=100)
    ticket.wait()
    slot[99] ^= 1

    with pytest.raises(CorruptStateError, match="not those that were written"):
        spill.check(place, slot)
    slot[99] ^= 1
    slot[100] ^= 1  # not in use
    spill.check(place, slot)


class Room:
    def __init__(self, num_bytes):
        self.left = num_bytes

    def try_spill(self, num_bytes):
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True

    def end_spill(self, num_bytes):
        self.left += num_bytes


def test_a_path_without_room_is_left_alone_and_its_room_comes_back_at_the_end(slot, tmp_path):
    rooms = [Room(PLACE_BYTES - 1), Room(2 * PLACE_BYTES)]
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    with Engine() as engine:
        spill = Spill(roots, [engine, engine], place_bytes=PLACE_BYTES, rooms=rooms)
        spill.open()
        for _ in range(2):
            place, ticket = spill.write(slot, num_bytes=1)
            ticket.wait()
            assert place.path_index == 1

        with pytest.raises(StorageError, match=r"tiers\.storage\.capacity"):
            spill.write(slot, num_bytes=1)

        spill.release(place)
        spill.write(slot, num_bytes=1)[1].wait()
        spill.close()
        spill.close()
    assert [room.left for room in rooms] == [PLACE_BYTES - 1, 2 * PLACE_BYTES]


@pytest.mark.parametrize("operation", ["write", "read"])
def test_who_waits_for_all_waits_for_transfers_whose_tickets_are_lost(slot, tmp_path, operation):
    (tmp_path / "a").mkdir()
    faults = FaultPlan(faults=(Fault(operation=operation, delay_s=0.3),))
    with Engine("fault", faults=faults) as engine:
        spill = Spill([tmp_path / "a"], [engine], place_bytes=PLACE_BYTES)
        spill.open()
        memory = np.frombuffer(slot, dtype=np.uint8)
        alive = weakref.ref(memory)
        place, _ = spill.write(memory.data, num_bytes=1)
        if operation == "read":
            spill.wait_idle()
            spill.read(place, memory.data, is_needed=True)
        del memory, _

        was_in_flight = alive() is not None
        spill.wait_idle()

        assert was_in_flight
        assert alive() is None
        spill.close()
