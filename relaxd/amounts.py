"""Byte amounts in readable form."""

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def byte_amount(count: float) -> str:
    """Format a number of bytes with three digits, such as "1.07 GB"."""
    for factor, unit in UNITS:
        if count >= 0.9995 * factor:  # 0.9995 rounds to 1.00
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
