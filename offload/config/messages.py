"""Turns what is wrong with a configuration into messages that name key, value and remedy."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offload.config.fields import STRIPING_PATTERN
from offload.config.schema import Config
from offload.config.supported import Problem

_LIST_POSITION = re.compile(r"\[\d+\]")
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


def describe_errors(
    error: ValidationError,
    *,
    source: str,
    overrides: Iterable[str] = (),
    schema: type[BaseModel] = Config,
) -> str:
    """Returns one line per wrong key: where, what was expected, what was found, what to do.

    Args:
        error: From the validation.
        source: Where the values come from.
        overrides: Keys that were changed.
        schema: What was validated; unknown keys are explained by its own.
    """
    keys = set(overrides)
    groups = _by_value(error.errors(), schema)
    return "\n".join(_describe(group, source, keys, schema) for group in groups)


def describe_problems(problems: Iterable[Problem], *, source: str, overrides: Iterable[str]) -> str:
    """Returns one line per value that is known but cannot be used."""
    keys = set(overrides)
    return "\n".join(
        f"{_where(problem.key, source, keys)}: expected {problem.expected}, "
        f"found {_found(problem.found)}; change `{problem.key}`"
        for problem in problems
    )


def describe_unknown(
    key: str, *, source: str, overrides: Iterable[str], schema: type[BaseModel] = Config
) -> str:
    """Returns the message for `key`, which the schema does not have, with the nearest it has."""
    near = nearest_key(_LIST_POSITION.sub("", key), schema)
    hint = f"did you mean `{near}`?" if near else "remove it"
    return f"{_where(key, source, set(overrides))}: expected a known key, found `{key}`; {hint}"


def config_keys(schema: type[BaseModel] = Config) -> list[str]:
    """Returns every key of the schema in dotted form, sections included."""
    return list(_keys_of(schema, ""))


def nearest_key(key: str, schema: type[BaseModel] = Config) -> str | None:
    """Returns the known key that `key` most likely stands for, or None."""
    section, _, name = key.rpartition(".")
    known = config_keys(schema)
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    if elsewhere:
        return elsewhere[0]
    siblings = {other.rpartition(".")[2]: other for other in known if _section(other) == section}
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return siblings[near[0]]
    # Across sections only a close match is a hint: names of sections weigh much in it.
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.8)), None)


def _describe(
    group: list[ErrorDetails], source: str, overrides: set[str], schema: type[BaseModel]
) -> str:
    # A member of a union that has the value's type says best what is wrong with it.
    fitting = [e for e in group if not e["type"].endswith(("_type", "literal_error"))]
    details = fitting[0] if len(fitting) == 1 else group[0]
    key = _key(details, schema)
    where = _where(key, source, overrides)
    if details["type"] == "extra_forbidden":
        return describe_unknown(key, source=source, overrides=overrides, schema=schema)
    if details["type"] == "value_error":
        reason = str(details["ctx"]["error"])
        return f"{where}: {reason}; correct it"
    if details["type"] == "missing":
        return f"{where}: expected a value, found none; set `{key}`"
    expected = _expected(details)
    if len(fitting) != 1:
        expected = " or ".join(dict.fromkeys(map(_expected, group)))
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
        case "less_than_equal":
            return f"{context['le']} or less"
        case "string_pattern_mismatch" if context["pattern"] == STRIPING_PATTERN:
            return "`adaptive`, `proportional`, `single`, `modulo` or a ratio as `modulo:2:1`"
        case "too_long":
            return f"a list of {context['max_length']} values"
        case "too_short":
            return f"a list of {context['min_length']} or more"
    return _EXPECTED.get(kind, details["msg"])


def _key(details: ErrorDetails, schema: type[BaseModel]) -> str:
    # Locations also hold list positions, which are written as in `betas[1]`.
    text = ""
    for part in _location(details, schema):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _location(details: ErrorDetails, schema: type[BaseModel]) -> tuple[int | str, ...]:
    """Returns where the value is, without the member of a union that pydantic puts behind it."""
    model: type[BaseModel] | None = schema
    found: list[int | str] = []
    for part in details["loc"]:
        if isinstance(part, str):
            if model is None:  # behind a value: the name of a type, such as `constrained-int`
                continue
            model = _section_at(model, part)
        found.append(part)
    return tuple(found)


def _by_value(errors: Iterable[ErrorDetails], schema: type[BaseModel]) -> list[list[ErrorDetails]]:
    """Returns the errors of each value together: a union has one for each of its members."""
    groups: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for details in errors:
        groups.setdefault(_location(details, schema), []).append(details)
    return list(groups.values())


def _section_at(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    return next(_sections_in(field.annotation), None) if field else None


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
    for name in model.model_fields:
        key = f"{prefix}{name}"
        yield key
        section = _section_at(model, name)
        if section is not None:
            yield from _keys_of(section, f"{key}.")


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yields the sections that a value may be, or a list of, or nothing."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def _section(key: str) -> str:
    return key.rpartition(".")[0]
