"""Define trait types for the package's settings, and the parsers behind them.

``policy.policy`` uses the trait types. ``policy.profiles`` uses :func:`parse_size` for the values of profiles and
requests, so that sizes have one syntax everywhere.
"""

from __future__ import annotations

import math
import re
from typing import Any

from traitlets import List, TraitError, TraitType

from jupyter_agentbox.egress import presets, rules
from jupyter_agentbox.errors import InvalidRequest

_UNITS = ("", "k", "m", "g", "t")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?:([kmgt])i?)?b?", re.IGNORECASE)
_MAX_SIZE = 2**62


def parse_size(value: object, least: int = 1) -> int:
    """Parse a size in bytes.

    Parameters
    ----------
    value : int, float or str
        Bytes, or a number with a unit: ``"512 MiB"``, ``"4g"``, ``"1.5 GB"``. Units are powers of 1024, with or without
        the ``i``, as in Docker and systemd.
    least : int
        The smallest allowed value.

    Returns
    -------
    int
        At least `least`.

    Raises
    ------
    ValueError
        The message explains the syntax.
    """
    size: float | None = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match:
            size = float(match[1]) * 1024 ** _UNITS.index((match[2] or "").lower())
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        size = value
    if size is None or not least <= size <= _MAX_SIZE:
        raise ValueError(f"{value!r} is not a size: use bytes, or a number with a unit such as '512 MiB' or '4g'")
    return int(size)


class ByteSize(TraitType[int, Any]):
    """Trait for a size in bytes, as a number or as text such as ``"512 MiB"``."""

    default_value = 0
    info_text = "a size in bytes, or text such as '512 MiB' or '4g'"

    def __init__(self, default_value: Any = 0, *, least: int = 1, **kwargs: Any) -> None:
        super().__init__(default_value=default_value, **kwargs)
        self.least = least

    def validate(self, obj: Any, value: Any) -> int:
        """Convert a value to bytes."""
        try:
            return parse_size(value, self.least)
        except ValueError as error:
            raise TraitError(f"{type(obj).__name__}.{self.name}: {error}") from None

    def from_string(self, s: str) -> int:
        """Parse a value from the command line."""
        return parse_size(s, self.least)


class HostPatterns(List[str]):
    """Trait for a list of the egress gate's host patterns, and of names of presets if `has_presets` is set.

    With `has_any_port`, the port of a pattern may be ``*``.

    Patterns are validated when they are configured, so that a typo is reported at start-up, not at the first refusal.
    """

    info_text = "a list of host patterns such as 'example.org' or '*.example.org:8443'"

    def __init__(
        self, default_value: Any = (), *, has_presets: bool = True, has_any_port: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(default_value=None if default_value is None else list(default_value), **kwargs)
        self.has_presets = has_presets
        self.has_any_port = has_any_port

    def from_string(self, s: str) -> list[str]:
        """Parse a value from the command line: a list as in Python, or patterns separated by commas."""
        if s.lstrip().startswith("["):
            return super().from_string(s) or []
        return [pattern.strip() for pattern in s.split(",") if pattern.strip()]

    def validate(self, obj: Any, value: Any) -> list[str]:
        """Validate each pattern."""
        setting = f"{type(obj).__name__}.{self.name}"
        patterns = list(super().validate(obj, list(value) if isinstance(value, tuple) else value) or ())
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TraitError(f"{setting}: {pattern!r} must be a string")
            if pattern in presets.PRESETS:
                if not self.has_presets:
                    raise TraitError(f"{setting}: {pattern!r} is a preset, which is not allowed here. List its hosts")
            else:
                try:
                    rules.parse_pattern(pattern, setting=setting, has_any_port=self.has_any_port)
                except InvalidRequest as error:
                    raise TraitError(f"{setting}: {error}") from None
        return patterns
