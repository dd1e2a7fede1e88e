"""Errors that a person can act on: each names the field or the tensor and the fix."""

from __future__ import annotations


class WalkgateError(Exception):
    """Base of every error that Walkgate raises on purpose."""


class RequestError(WalkgateError):
    """A request that can't be served as asked; becomes a 4xx.

    `field` is the request's field at fault (dotted for nested ones), `code` a stable word for programs.
    """

    def __init__(
        self, message: str, *, field: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code
        self.status = status


class CheckpointError(WalkgateError):
    """A model folder that can't be loaded: a missing, unused or misshapen tensor, or a config key that is absent."""


class DeclarationError(WalkgateError):
    """A walk table that contradicts itself; raised at boot, never while serving."""


class EngineDeadError(WalkgateError):
    """The engine process ended; every request that it held has failed."""
