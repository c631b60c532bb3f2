"""What one API key may use at the gateway. Pure."""

from __future__ import annotations

from dataclasses import dataclass

INTERACTIVE = "interactive"
BATCH = "batch"
TRAFFIC_CLASSES = (INTERACTIVE, BATCH)

MOST_CONCURRENT = 100_000
MOST_TOKENS_PER_MINUTE = 10_000_000_000


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Bounds of a key over all gateways together; `None` is no bound."""

    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and completion together."""
    traffic_class: str = INTERACTIVE
    """`batch` waits behind everybody else, and may name itself no better."""

    def problem(self) -> tuple[str, str] | None:
        """Field and what is wrong with it, or `None`."""
        if self.traffic_class not in TRAFFIC_CLASSES:
            return "traffic_class", f"choose from {', '.join(TRAFFIC_CLASSES)}"
        bounds = (
            ("max_concurrent_requests", self.max_concurrent_requests, MOST_CONCURRENT),
            ("tokens_per_minute", self.tokens_per_minute, MOST_TOKENS_PER_MINUTE),
        )
        for name, value, most in bounds:
            if value is not None and not 1 <= value <= most:
                return name, f"give a number from 1 to {most:,}, or nothing for no limit"
        return None

    def sentence(self) -> str:
        """Say the limits, for people and for the audit log."""
        parts = []
        if self.max_concurrent_requests is not None:
            parts.append(f"{self.max_concurrent_requests:,} requests at once")
        if self.tokens_per_minute is not None:
            parts.append(f"{self.tokens_per_minute:,} tokens a minute")
        return f"{', '.join(parts) or 'no limits'}; {self.traffic_class}"
