"""How commands write figures."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(num_bytes: int) -> str:
    """Bytes as text, in the units of the settings and of the console."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while round(value, 1) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{num_bytes} bytes" if units[0] == "bytes" else f"{value:,.1f} {units[0]}"


def mebibytes(used_bytes: int, budget_bytes: int) -> str:
    """A tier's memory as text; a tier without a budget is off."""
    if not budget_bytes:
        return "off"
    return f"{used_bytes / 2**20:,.1f} of {budget_bytes / 2**20:,.0f} MiB"
