"""Sessions for tests of parity: small records, small budgets."""

import offload

PLACEMENTS = [("host", "host"), ("storage", "host"), ("host", "storage"), ("storage", "storage")]
"""Tiers of parameters and of optimizer state."""
SMALL_RECORD_ELEMENTS = 4096


DEVICE = "cpu"
"""Where sessions compute unless they name another device; the fixture `device` sets it."""


def open_session(
    tmp_path,
    placement=("storage", "storage"),
    *,
    budget_bytes=1 << 20,
    prefetch=2,
    order="resident",
    overlap="forward",
    **options,
):
    parameters, optimizer = placement
    policy = {
        "parameters": parameters,
        "optimizer": optimizer,
        "prefetch": prefetch,
        "order": order,
        "overlap": overlap,
    }
    options.setdefault("device", DEVICE)
    store = tmp_path / f"{parameters}-{optimizer}"
    return offload.Session(host_memory=budget_bytes, store=store, policy=policy, **options)


def use_small_records(monkeypatch):
    """Cuts flat shards into many subgroups, as those of large models are."""
    monkeypatch.setattr("offload.plan.record_size.SIZES", (SMALL_RECORD_ELEMENTS,))
