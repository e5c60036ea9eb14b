"""What a ticket says of its transfers, one on each path."""

from offload.storage.extents import Move
from offload.storage.tickets import StoreTicket


class Part:
    """A transfer that is over once somebody has waited for it."""

    def __init__(self):
        self.is_over = False

    def done(self):
        return self.is_over

    def wait(self, timeout_s=None):
        self.is_over = True

    def notify(self, event_fd):
        return True


def ticket_over(parts):
    moves = [
        Move(path_index=index, offset=0, start=0, num_bytes=1, first_block=0, bytes_in_use=1)
        for index, _ in enumerate(parts)
    ]
    return StoreTicket(moves, parts, outcome=lambda *_: None, settle=lambda *_: None)


def test_it_is_waited_for_path_by_path_and_says_which():
    parts = [Part(), Part(), Part()]
    parts[1].is_over = True
    ticket = ticket_over(parts)

    waits_for = [ticket.waits_for()]
    while ticket.wait_part():
        waits_for.append(ticket.waits_for())

    assert waits_for == [0, 2, None]
    assert ticket.done()
