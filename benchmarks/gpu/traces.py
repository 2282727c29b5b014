"""A trace as text: the kernels that take longest, and the longest gaps between kernels."""

from typing import Any

_GAP_US, _SHOWN = 10.0, 15  # the shortest gap, and the number of lines of each list


def kernel_summary(work: list[tuple[str, float, float]]) -> tuple[dict[str, Any], list[str]]:
    """Times of kernels by name, and the longest gaps between them. `work`: name, start and duration in us."""
    work = sorted(work, key=lambda one: one[1])
    totals: dict[str, list[float]] = {}
    gaps: list[tuple[float, float, str, str]] = []
    begin = work[0][1] if work else 0.0
    busy, end, last = 0.0, begin, ""
    for name, start, duration in work:
        totals.setdefault(name, []).append(duration)
        if start - end >= _GAP_US:
            gaps.append((start - end, start - begin, last, name))
        busy += max(0.0, start + duration - max(start, end))
        if start + duration > end:
            end, last = start + duration, name
    span = end - begin
    row = {
        "kernels": len(work),
        "span_ms": span / 1e3,
        "busy_ms": busy / 1e3,
        "idle": 1 - busy / span if span else None,
        "gaps": len(gaps),
        "in_gaps_ms": sum(gap[0] for gap in gaps) / 1e3,
    }
    lines = ["   total ms  share  count  kernel"]
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:_SHOWN]:
        total = sum(times)
        lines.append(f"{total / 1e3:>11.3f}  {total / max(busy, 1e-9):>5.1%}  {len(times):>5}  {name[:90]}")
    lines += ["", "     gap us    at ms  between"]
    for length, at, before, after in sorted(gaps, reverse=True)[:_SHOWN]:
        lines.append(f"{length:>11.1f}  {at / 1e3:>7.2f}  {before[:50]} | {after[:50]}")
    return row, lines
