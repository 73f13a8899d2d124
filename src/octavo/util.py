"""Small arithmetic and formatting that several rooms share."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for b > 0."""
    return -(-a // b)


def human_bytes(num_bytes: float) -> str:
    """`1572864` -> `1.5 MiB`."""
    size = float(num_bytes)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def flag_name(field: str) -> str:
    """The command line's name of a field: `max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field.replace("_", "-")
