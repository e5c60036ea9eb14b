"""Results as tables for a reader."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.cli.figures import NONE, format_figure
from offload.cli.output import Result
from offload.sizes import format_size

Rows = list[tuple[str, str]]
"""Labels and texts, one below the other."""

_NUM_STALLS = 4
_LEAST_STALL_S = 0.01
_RUN_FIGURES = (
    ("parameters", "parameters"),
    ("state", "state_bytes"),
    ("validation loss before", "validation_loss_before"),
    ("validation loss after", "validation_loss_after"),
    ("host tier, budget", "host_budget_bytes"),
    ("host tier, peak", "host_peak_bytes"),
    ("device tier, budget", "device_budget_bytes"),
    ("device tier, peak", "device_peak_bytes"),
    ("RSS before the run", "rss_baseline_bytes"),
    ("RSS peak", "rss_peak_bytes"),
    ("activations, peak", "activation_peak_bytes"),
    ("    moved away per step", "activation_offload_bytes_per_step"),
    ("    hit rate", "activation_hit_rate"),
    ("read per step", "read_bytes_per_step"),
    ("    by the formula", "formula_read_bytes_per_step"),
    ("written per step", "write_bytes_per_step"),
    ("    by the formula", "formula_write_bytes_per_step"),
    ("step", "step_s"),
    ("    its bound", "bound_s"),
    ("    achieved/bound", "achieved_over_bound"),
    ("update", "update_s"),
    ("    its bound", "update_bound_s"),
    ("    achieved/bound", "update_achieved_over_bound"),
    ("I/O wait", "io_wait_s"),
    ("prefetch hit rate", "prefetch_hit_rate"),
    ("tokens/s", "tokens_per_s"),
    ("threads of torch", "torch_threads"),
    ("store, planned", "store_planned_bytes"),
    ("store, most after a step", "store_peak_bytes"),
    ("commit", "commit_s"),
    ("lost by a failure", "expected_lost_work_s"),
    ("    best between commits", "best_commit_interval_s"),
    ("    in steps", "best_commit_every"),
    ("written per day", "written_bytes_per_day"),
    ("drive lasts, days", "drive_days"),
    ("state digest", "state_digest"),
)


_RUN_PLACES = (("store", "store"), ("run directory", "run_dir"))
"""What stays of a run, if it does."""


def render_train(console: Console, result: Result) -> None:
    """Prints what a run reached and what it took."""
    from offload.runs.busy import busy_note

    values = result.to_json()
    title = f"{values['steps']} steps done"
    if values.get("stopped_by"):
        title = f"stopped by {values['stopped_by']} after step {values['steps']}"
    rows = [(label, format_figure(key, values.get(key))) for label, key in _RUN_FIGURES]
    note = busy_note(values.get("others_cpu_share"))
    if note is not None:
        rows.append(("busy machine", note))
    rows += [(label, values[key]) for label, key in _RUN_PLACES if values.get(key) is not None]
    rows += [
        (f"waited for {stall['waits_for']}", f"{stall['duration_s']:.2f} s: {stall['cause']}")
        for stall in (values.get("stalls") or [])[:_NUM_STALLS]
        if stall["duration_s"] >= _LEAST_STALL_S
    ]
    _print_facts(console, title, rows)


def render_plan(console: Console, result: Result) -> None:
    """Prints whether a run fits, and bytes per tier."""
    values = result.to_json()
    table = Table("tier", "budget", "planned")
    for name, tier in values["tiers"].items():
        table.add_row(
            name,
            format_figure("budget_bytes", tier["budget_bytes"]),
            format_figure("planned_bytes", tier["planned_bytes"]),
        )
    _print_table(console, "plan", table)
    rows = _fit_rows(values) + _room_rows(values) + _choice_rows(values) + _predicted_rows(values)
    _print_facts(console, "run", rows)


def _fit_rows(values: dict[str, Any]) -> Rows:
    rows = [("fits", "yes" if values["fits"] else "no")]
    rows += [
        (f"store, {key.replace('_', ' ')}", format_figure(key, found))
        for key, found in (values["tiers"]["storage"].get("cut") or {}).items()
    ]
    rows += [("reason", reason) for reason in values["reasons"]]
    if values.get("drive_steps") is not None:
        rows.append(("a drive lasts, steps", format_figure("steps", values["drive_steps"])))
    rows += _figure_rows(values.get("commits") or {})
    rows += [
        (f"in pieces: {each['parameter']}", _describe_pieces(each))
        for each in values.get("in_pieces", [])
    ]
    return rows + [("warning", warning) for warning in values.get("warnings", [])]


def _room_rows(values: dict[str, Any]) -> Rows:
    """Returns the least memory, and what would be given up for less."""
    rows = [
        (f"smallest {key.replace('_', ' ')}", format_figure("smallest_bytes", found))
        for key, found in values["smallest"].items()
    ]
    rows += [
        (
            f"to fit less {saving['tier']}",
            f"{saving['change']}, {saving['why']}: "
            + format_figure("num_bytes", saving["smallest_bytes"]),
        )
        for saving in values.get("give_up", [])
    ]
    if values.get("give_up_note"):
        rows.append(("what else would help", values["give_up_note"]))
    return rows


def _choice_rows(values: dict[str, Any]) -> Rows:
    rows = [(key, format_figure(key, found)) for key, found in values["policy"].items()]
    rows += [
        (each["choice"], f"{each['value']}: {each['why']}") for each in values.get("choices", [])
    ]
    if values.get("suggested"):
        rows.append(("faster by this plan", values["suggested"]["why"]))
    return rows


def _predicted_rows(values: dict[str, Any]) -> Rows:
    rows = [
        ("outside budgets", f"{each['what']}: {format_figure('num_bytes', each['num_bytes'])}")
        for each in values.get("not_covered", [])
    ]
    rows += _figure_rows(values["predicted"])
    return rows + [
        (f"link {key}", format_figure(key, found))
        for key, found in (values.get("link") or {}).items()
    ]


def _figure_rows(figures: dict[str, Any]) -> Rows:
    return [(key, format_figure(key, found)) for key, found in figures.items() if found is not None]


def _describe_pieces(piece: dict[str, Any]) -> str:
    size, tile = format_size(piece["num_bytes"]), format_size(piece["tile_bytes"])
    return (
        f"{size}, more than a slot: {piece['num_tiles']} tiles of at most {tile}, or rows; results "
        "are near those in memory, not equal"
    )


def render_verify(console: Console, result: Result) -> None:
    """Prints the bad blocks of a store, if any, and what was read."""
    values = result.to_json()
    if values["bad"]:
        columns = ("record", "parameter", "path", "file", "offset", "reason")
        table = Table(*columns)
        for bad in values["bad"]:
            table.add_row(*(NONE if bad[key] is None else str(bad[key]) for key in columns))
        _print_table(console, "bad blocks and manifests", table)
    rows = [
        ("records", str(values["records"])),
        ("bytes", format_figure("num_bytes", values["bytes"])),
        ("ok", "yes" if values["ok"] else "no"),
    ]
    _print_facts(console, "store", rows)


def render_doctor(console: Console, result: Result) -> None:
    """Prints each check with what to do where it found something."""
    values = result.to_json()
    table = Table("check", "status", "found", "remedy")
    for check in values["checks"]:
        table.add_row(check["name"], check["status"], check["found"], check["remedy"] or NONE)
    _print_table(console, "doctor", table)


def _print_facts(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table("", "", show_header=False)
    for label, text in rows:
        table.add_row(label, text)
    _print_table(console, title, table)


def _print_table(console: Console, title: str, table: Table) -> None:
    # A table's own title would be wrapped at the table's width.
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)
