"""Turns what is wrong with a configuration into messages that name key, value and remedy."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offload.config.schema import Config
from offload.config.supported import Problem

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "`true` or `false`",
    "string_type": "text in quotes",
    "tuple_type": "a list",
    "model_type": "a table",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "`module:callable`",
    "string_too_short": "text that is not empty",
}


def describe_errors(error: ValidationError, *, source: str, overrides: Iterable[str]) -> str:
    """Returns one line per wrong key: where, what was expected, what was found, what to do."""
    return "\n".join(_describe(details, source, set(overrides)) for details in error.errors())


def describe_problems(problems: Iterable[Problem], *, source: str, overrides: Iterable[str]) -> str:
    """Returns one line per value that is known but cannot be used."""
    keys = set(overrides)
    return "\n".join(
        f"{_where(problem.key, source, keys)}: expected {problem.expected}, "
        f"found {_found(problem.found)}; change `{problem.key}`"
        for problem in problems
    )


def describe_unknown(key: str, *, source: str, overrides: Iterable[str]) -> str:
    """Returns the message for `key`, which the schema does not have, with the nearest it has."""
    near = nearest_key(key)
    hint = f"did you mean `{near}`?" if near else "remove it"
    return f"{_where(key, source, set(overrides))}: expected a known key, found `{key}`; {hint}"


def config_keys() -> list[str]:
    """Returns every key of the schema in dotted form, sections included."""
    return list(_keys_of(Config, ""))


def nearest_key(key: str) -> str | None:
    """Returns the known key that `key` most likely stands for, or None."""
    section, _, name = key.rpartition(".")
    known = config_keys()
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere[0]
    siblings = {other.rpartition(".")[2]: other for other in known if _section(other) == section}
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return siblings[near[0]]
    # Across sections only a close match is a hint: names of sections weigh much in it.
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)


def _describe(details: ErrorDetails, source: str, overrides: set[str]) -> str:
    key = _key(details)
    where = _where(key, source, overrides)
    if details["type"] == "extra_forbidden":
        return describe_unknown(key, source=source, overrides=overrides)
    if details["type"] == "value_error":
        reason = str(details["ctx"]["error"])
        return f"{where}: {reason}; correct it"
    if details["type"] == "missing":
        return f"{where}: expected a value, found none; set `{key}`"
    expected = _expected(details)
    return f"{where}: expected {expected}, found {_found(details['input'])}; change `{key}`"


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    match kind:
        case "literal_error":
            return str(context["expected"]).replace("'", "`")
        case "greater_than":
            return f"more than {context['gt']}"
        case "greater_than_equal":
            return f"{context['ge']} or more"
        case "less_than":
            return f"less than {context['lt']}"
        case "too_long" | "too_short":
            return f"a list of {context.get('max_length', context.get('min_length'))} values"
    return _EXPECTED.get(kind, details["msg"])


def _key(details: ErrorDetails) -> str:
    # Locations also hold list positions, which are written as in `betas[1]`.
    text = ""
    for part in details["loc"]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _where(key: str, source: str, overrides: set[str]) -> str:
    plain = f"{key.partition('[')[0]}."
    is_override = any(
        plain.startswith(f"{other}.") or f"{other}.".startswith(plain) for other in overrides
    )
    place = f"an override of {source}" if is_override else source
    return f"{place}, key `{key}`" if key else place


def _found(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, Mapping | BaseModel):
        return "a table"
    return f"`{value}`"


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _keys_of(annotation, f"{key}.")


def _section(key: str) -> str:
    return key.rpartition(".")[0]
