"""A command that could not do its work, through no mistake in how it was called."""

from __future__ import annotations


class CommandFailed(RuntimeError):
    """Ends the command with exit code 1 and one line."""
