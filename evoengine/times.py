"""Times in JSON."""

from __future__ import annotations

from datetime import UTC, datetime


def utc(time: datetime | None) -> str | None:
    """Return a time as ISO 8601 in UTC, to the millisecond."""
    return None if time is None else time.astimezone(UTC).isoformat(timespec="milliseconds")
