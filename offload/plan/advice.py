"""What to do where a budget is too small."""

from offload.sizes import MIB, format_size


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
    whole = f'`tiers.{tier}.memory` to "{_mib(smallest_bytes + beside_bytes)}"'
    if beside_bytes:
        whole += f", {format_size(beside_bytes)} of it for the session's other models"
    if is_part:
        part = f'`wrap(model, {tier}_memory="{_mib(smallest_bytes)}")`'
        return f"give it more, as {part}, and if that is more than is left raise {whole}"
    if beside_bytes:
        whole += f", or give these less, as `wrap(model, {tier}_memory=...)`"
    return f"raise {whole}"


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB)}MiB"
