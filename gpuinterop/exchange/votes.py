"""The ranks' messages in an all-gather, and the outcome that follows from them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from .. import errors as ours
from ..capabilities import Capability
from ..errors import GpuInteropError, InvalidArgumentError, PeerError

_FORMAT: Final = b"gpuinterop vote 3\n"
_TEXT: Final = 4000
"""Characters of an error's text that are sent."""

Vote: TypeAlias = dict[str, Any]
"""A rank's report on its part of a step."""


def packed(step: str, timeout: float, vote: Vote, error: BaseException | None) -> bytes:
    """The message of this rank."""
    return _FORMAT + pickle.dumps((step, timeout, vote, None if error is None else _portable(error)))


def heard(step: str, messages: Sequence[bytes]) -> list[Vote]:
    """The votes of all ranks, or the error of the lowest rank that failed.

    It is also an error if the ranks have different versions, steps or time-outs.
    """
    for rank, message in enumerate(messages):
        if not message.startswith(_FORMAT):
            text = f"expected {_FORMAT!r}, got {message[:40]!r}; install the same gpuinterop on all ranks."
            raise placed(PeerError(text), step, rank)
    steps, timeouts, votes, errors = zip(*[pickle.loads(message[len(_FORMAT) :]) for message in messages], strict=True)
    for rank, error in enumerate(errors):
        if error is not None:
            raise placed(error, steps[rank], rank)
    for rank, other in enumerate(steps):
        if other != steps[0]:
            text = f"the ranks are out of step: {listed(steps)}; make the same calls in the same order on all."
            raise placed(PeerError(text), other, rank)
    same([{"timeout": timeout} for timeout in timeouts], "timeout")
    return list(votes)


def same(votes: Sequence[Vote], *arguments: str) -> None:
    """Refuse arguments that differ between ranks."""
    for argument in arguments:
        values = [vote[argument] for vote in votes]
        if any(value != values[0] for value in values):
            raise blamed(InvalidArgumentError(argument, f"expected the same on all ranks, got {listed(values)}."))


def blamed(error: GpuInteropError, rank: int | None = None) -> GpuInteropError:
    """Set ``.rank``: the rank that failed, or None if the ranks disagree and no single one failed."""
    error.__dict__["rank"] = rank
    return error


def placed(error: GpuInteropError, step: str, rank: int | None = None) -> GpuInteropError:
    """Add where the error came from, to its text and as ``.rank`` and ``.step``."""
    blame = "" if rank is None or hasattr(error, "rank") else f"rank {rank}, "
    error.args = (f"{blame}step {step!r}: {error}",)
    error.__dict__.setdefault("rank", rank)
    error.__dict__["step"] = step
    return error


def _portable(error: BaseException) -> GpuInteropError:
    """An error in the form that is sent: a gpuinterop error's class, text and plain attributes; else only the text."""
    kind = next((base for base in type(error).__mro__ if base.__module__ == ours.__name__), None)
    if kind is None:
        return PeerError(f"{type(error).__name__}: {error}"[:_TEXT])
    plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | None | Capability)}
    return ours._rebuild(kind, (str(error)[:_TEXT],), plain)


def names(ranks: Iterable[int]) -> str:
    """Ranks in a message: ``rank 2``, ``ranks 0, 1 and 3``."""
    *others, last = sorted(ranks)
    return f"ranks {', '.join(map(str, others))} and {last}" if others else f"rank {last}"


def listed(values: Sequence[object]) -> str:
    """Each rank's value in a message: ``4096 (ranks 0 and 1), 8192 (rank 2)``."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} ({names(those)})" for value, those in ranks.items())
