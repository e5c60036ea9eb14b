from offload.storage.stalls import KERNEL, StallAccount, stalls_between, summed


def test_waits_are_added_up_by_what_they_are_for_and_what_caused_them():
    account = StallAccount()
    account.add("path /a", "fetching a unit", 1.0)
    account.add(KERNEL, "fetching a unit", 5.0)
    account.add("path /a", "fetching a unit", 2.0)
    account.add("path /a", "writing records", 0.5)

    found = [(s.waits_for, s.cause, s.duration_s, s.count) for s in account.stalls()]

    assert found == [
        ("kernel", "fetching a unit", 5.0, 1),
        ("path /a", "fetching a unit", 3.0, 2),
        ("path /a", "writing records", 0.5, 1),
    ]


def test_what_came_between_two_looks_is_told_apart():
    account = StallAccount()
    account.add("path /a", "fetching a unit", 1.0)
    account.add(KERNEL, "updating", 1.0)
    before = account.stalls()
    account.add("path /a", "fetching a unit", 0.25)

    (stall,) = stalls_between(before, account.stalls())

    assert (stall.waits_for, stall.duration_s, stall.count) == ("path /a", 0.25, 1)


def test_accounts_of_several_models_are_one():
    first, second = StallAccount(), StallAccount()
    first.add("path /a", "fetching a unit", 1.0)
    first.add(KERNEL, "updating", 1.5)
    for _ in range(3):
        second.add("path /a", "fetching a unit", 0.5)

    found = [
        (s.waits_for, s.duration_s, s.count) for s in summed([first.stalls(), second.stalls()])
    ]

    assert found == [("path /a", 2.5, 4), ("kernel", 1.5, 1)]
