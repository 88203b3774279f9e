"""Table and plot of the curves of bench/quality.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from time_to_quality import Curve, Metric, Row, time_ratio

GOAL = 1 / 3
"""The fraction of the package's time in which its final value should be reached."""


def format_table(row: Row, curves: Sequence[Curve]) -> str:
    """Format final values and times as a Markdown table, with one number for each seed.

    The time of a side is the CPU time until it reached the package's final value, as a fraction of
    the package's CPU time.
    """
    by_side = group_by_side(curves)
    head = ["", *(f"{side}{' | time' if has_time(row, side) else ''}" for side in by_side)]
    num_columns = sum(cell.count("|") + 1 for cell in head)
    lines = [head, ["---"] * num_columns]
    lines.append(["parameters", *size_cells(row, by_side)])
    for metric in row.metrics:
        lines.append([metric.label, *metric_cells(row, by_side, metric)])
    for metric in row.final_metrics:
        lines.append([metric.label, *final_cells(row, by_side, metric)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def group_by_side(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    by_side: dict[str, list[Curve]] = {}
    for curve in curves:
        by_side.setdefault(curve.side, []).append(curve)
    return by_side


def has_time(row: Row, side: str) -> bool:
    return side != row.package


def size_cells(row: Row, by_side: dict[str, list[Curve]]) -> list[str]:
    cells = []
    for side, curves in by_side.items():
        cells.append(f"{curves[0].info['parameters'] / 1e6:.2f} M")
        cells += [""] if has_time(row, side) else []
    return cells


def metric_cells(row: Row, by_side: dict[str, list[Curve]], metric: Metric) -> list[str]:
    packages = {curve.seed: curve for curve in by_side.get(row.package, [])}
    cells = []
    for side, curves in by_side.items():
        cells.append(join_values(curves, metric))
        if has_time(row, side):
            pairs = [(one, packages[one.seed]) for one in curves if one.seed in packages]
            cells.append(", ".join(format_ratio(time_ratio(*pair, metric)) for pair in pairs))
    return cells


def final_cells(row: Row, by_side: dict[str, list[Curve]], metric: Metric) -> list[str]:
    cells = []
    for side, curves in by_side.items():
        cells.append(join_values(curves, metric))
        cells += [""] if has_time(row, side) else []
    return cells


def join_values(curves: Sequence[Curve], metric: Metric) -> str:
    values = [curve.final.metrics.get(metric.name) for curve in curves]
    return ", ".join(f"{value:.{metric.decimals}f}" for value in values if value is not None)


def format_ratio(ratio: float | None) -> str:
    return "not reached" if ratio is None else f"{ratio:.2f}"


def plot_curves(row: Row, curves: Sequence[Curve], path: Path) -> None:
    """Plot each metric over CPU time: a colour for each side and a line for each seed."""
    from matplotlib.figure import Figure

    columns = 2
    rows = -(-len(row.metrics) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    by_side = group_by_side(curves)
    for panel in panels[len(row.metrics) :]:
        panel.set_visible(False)
    for panel, metric in zip(panels, row.metrics, strict=False):
        for number, (side, own) in enumerate(by_side.items()):
            for curve in own:
                pairs = curve.values(metric.name)
                panel.plot(
                    [cpu_s for cpu_s, _ in pairs],
                    [value for _, value in pairs],
                    color=f"C{number}",
                    marker=".",
                    linewidth=1.3,
                    label=side if curve is own[0] else None,
                )
        mark_package(panel, by_side.get(row.package, []), metric)
        panel.set_title(
            f"{metric.label}, {'higher' if metric.higher_is_better else 'lower'} is better",
            fontsize=10,
        )
        panel.set_xlabel("CPU seconds of training")
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def mark_package(panel: object, packages: Sequence[Curve], metric: Metric) -> None:
    """Draw the package's final value, the mean over seeds, and the time that is the goal."""
    if packages:
        final = sum(one.final.metrics[metric.name] for one in packages) / len(packages)
        panel.axhline(final, color="C0", linestyle="--", linewidth=1)  # type: ignore[attr-defined]
        panel.axvline(  # type: ignore[attr-defined]
            GOAL * packages[0].final.cpu_s, color="gray", linestyle=":", linewidth=1
        )
