"""Errors that end the server with a sentence and an exit code instead of a traceback."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """The process's exit codes; scripts and supervisors depend on them."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    ENVIRONMENT = 3
    CHECKPOINT = 4
    MEMORY = 5
    RANK_DIED = 6
    SELF_CHECK = 7
    INTERRUPTED = 130


class ServerError(Exception):
    """A fault whose cause and cure fit in a sentence. `str(error)` is what the person reads."""

    exit_code = ExitCode.INTERNAL


class UsageError(ServerError):
    exit_code = ExitCode.USAGE


class EnvironmentFault(ServerError):
    """A missing library, a busy port, a device that is not there."""

    exit_code = ExitCode.ENVIRONMENT


class CheckpointError(ServerError):
    """A checkpoint that is incomplete, damaged, contradictory or of a kind that is not supported."""

    exit_code = ExitCode.CHECKPOINT


class DoesNotFit(ServerError):
    """Weights or KV cache need more memory than there is."""

    exit_code = ExitCode.MEMORY


class SelfCheckFailed(ServerError):
    exit_code = ExitCode.SELF_CHECK


class RankLost(ServerError):
    """Another rank of the group has ended, is stuck, or failed; the message names it."""

    exit_code = ExitCode.RANK_DIED

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
