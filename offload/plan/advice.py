"""What to do where a budget is too small."""

from offload.sizes import MIB


def how_to_fit(
    tier: str, smallest_bytes: int, *, beside_bytes: int = 0, is_part: bool = False
) -> str:
    """Returns which figure to raise, and to what, for a model that needs `smallest_bytes`.

    Args:
        tier: `host` or `device`.
        smallest_bytes: The smallest budget with which the model runs.
        beside_bytes: Of the tier, that other models of the session have.
        is_part: Whether the model was given a part of the tier.
    """
    own_mib, others_mib = _mib(smallest_bytes), _mib(beside_bytes)
    whole = f'`tiers.{tier}.memory` to "{own_mib + others_mib}MiB"'
    if beside_bytes:  # without a part these would take what is added
        whole += (
            f" and keep the session's other models to {others_mib} MiB of it, as "
            f"`wrap(model, {tier}_memory=...)`"
        )
    if is_part:
        part = f'`wrap(model, {tier}_memory="{own_mib}MiB")`'
        return f"give it more, as {part}, and if that is more than is left raise {whole}"
    if beside_bytes:
        whole += ", or give these less in the same way"
    return f"raise {whole}"


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // MIB)
