"""Errors that people can do something about. Each says what to do."""

from __future__ import annotations


class OpsError(Exception):
    """Base of every error that is the caller's to mend."""


class InvalidInputError(OpsError):
    """A value that cannot be accepted; `field` names it the way the caller wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFoundError(OpsError):
    """No such object, or not visible to the caller."""


class ConflictError(OpsError):
    """The object is not in the state that the request was made for: read it again, then decide."""


class StaleError(ConflictError):
    """Somebody changed the object since the caller read it."""


class DeniedError(OpsError):
    """The caller is not who may do this."""
