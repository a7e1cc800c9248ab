"""Messages of ranks in a vote, and what follows from them.

Messages are JSON: nothing in them runs, and an error that one names is looked up among our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from .. import errors
from ..capabilities import Capability, Cell, Operation, Scope, Support
from ..errors import GpuInteropError, InvalidArgumentError, PeerError, UnsupportedError
from ..handles import handle_types

_FORMAT: Final = "gpuinterop vote 2"
_TEXT: Final = 4000
"""Characters of an error that are passed on."""

_CLASSES: Final[dict[str, type[GpuInteropError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if name in errors.__all__ and isinstance(kind, type) and issubclass(kind, GpuInteropError)
}

_PLAIN: Final = (str, int, bool, type(None))

Vote: TypeAlias = dict[str, Any]
"""A rank's ``step``, its ``value`` for the others or its ``failure``, and its ``timeout``."""


def cast(step: str, value: Any, error: BaseException | None, timeout: float) -> Vote:
    """The vote of this rank."""
    failure = None if error is None else _failure(error)
    if failure is not None:
        failure["text"] = failure["text"][:_TEXT]
    return {"step": step, "value": value, "failure": failure, "timeout": timeout}


def _failure(error: BaseException) -> dict[str, Any]:
    """An error as it travels: the class by name, the text, and those attributes that are plain."""
    kind = next((base.__name__ for base in type(error).__mro__ if _CLASSES.get(base.__name__) is base), None)
    if kind is None:  # another library's: the text says what it was
        return {"kind": "PeerError", "text": f"{type(error).__name__}: {error}", "attributes": {}}
    attributes = {name: value for name, value in vars(error).items() if type(value) in _PLAIN}
    if isinstance(error, UnsupportedError):
        attributes["capability"] = error.capability.as_dict()
    return {"kind": kind, "text": str(error), "attributes": attributes}


def _error(failure: Mapping[str, Any], prefix: str = "") -> GpuInteropError:
    attributes = dict(failure["attributes"])
    if "capability" in attributes:
        attributes["capability"] = _capability(attributes["capability"])
    return errors._rebuild(_CLASSES[failure["kind"]], (prefix + failure["text"],), attributes)


def _capability(data: Mapping[str, Any]) -> Capability:
    """The gap of an `UnsupportedError`, from `Capability.as_dict`."""
    kind = data["handle_type"]
    cell = Cell(Operation(data["operation"]), None if kind is None else handle_types()[kind])
    gap = cell.gap(Scope(data["scope"]), data["reason"], data["reference"], data["workaround"] or "")
    return replace(gap, support=Support(data["support"]))


def placed(error: GpuInteropError, rank: int | None, step: str) -> GpuInteropError:
    """The error with where it came from, as ``.rank`` (None: no rank is at fault alone) and ``.step``."""
    error.__dict__.update(rank=rank, step=step)
    return error


def pack(known: Mapping[int, Vote]) -> bytes:
    """The message of the first two rounds: the votes that a rank has heard, its own included."""
    return json.dumps({"format": _FORMAT, "votes": known}).encode()


def hear(known: dict[int, Vote], sender: int, message: bytes, step: str) -> None:
    """Add to `known` the votes of a message. A sender of another version has failed in this step."""
    if (data := _read(message)) is None:
        problem = f"expected {_FORMAT!r}, got {message[:40]!r}; install the same gpuinterop on all ranks."
        known.setdefault(sender, cast(step, None, PeerError(problem), 0.0))
        return
    for rank, heard in data["votes"].items():
        known.setdefault(int(rank), heard)


def _read(message: bytes) -> Any:
    """The message; None where it is of another version."""
    try:
        data = json.loads(message)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("format") == _FORMAT else None


def decide(known: Mapping[int, Vote], size: int) -> GpuInteropError | None:
    """The outcome, by what all ranks know; None is success."""
    if gone := [rank for rank in range(size) if rank not in known]:
        step, verb = _common(known), "is" if len(gone) == 1 else "are"
        timeout = max(vote["timeout"] for vote in known.values())
        text = f"{names(gone)} {verb} gone or did not answer within {timeout:g} s, step {step!r}."
        return placed(PeerError(text), gone[0], step)
    for rank, vote in sorted(known.items()):
        if failure := vote["failure"]:
            step = vote["step"]
            return placed(_error(failure, f"rank {rank}, step {step!r}: "), rank, step)
    steps = {rank: vote["step"] for rank, vote in known.items()}
    if len(set(steps.values())) > 1:
        step = _common(known)
        text = f"the ranks are out of step: {listed(steps)}. All make the same calls, in the same order."
        return placed(PeerError(text), min(rank for rank in steps if steps[rank] != step), step)
    timeouts = {rank: vote["timeout"] for rank, vote in known.items()}
    if len(set(timeouts.values())) > 1:
        return disagreement(steps[0], "timeout", "time-outs", timeouts)
    return None


def disagreement(step: str, argument: str, what: str, values: Mapping[int, object]) -> GpuInteropError:
    """The error of ranks that have given different values, of which none is at fault alone."""
    return at(InvalidArgumentError(argument, f"expected the same {what} from all ranks, got {listed(values)}."), step)


def at(error: GpuInteropError, step: str) -> GpuInteropError:
    """The error of a step, for which no one rank is to blame."""
    error.args = (f"step {step!r}: {error}",)
    return placed(error, None, step)


def pack_outcome(outcome: GpuInteropError | None) -> bytes:
    """The message of the last round: the error of a rank that has given the step up; None of one that goes on."""
    return json.dumps({"format": _FORMAT, "failure": None if outcome is None else _failure(outcome)}).encode()


def given_up(messages: Sequence[bytes | None]) -> GpuInteropError | None:
    """The error of the lowest rank that has given the step up; silence says nothing."""
    for message in messages:
        if message is not None and (data := _read(message)) and data.get("failure"):
            return _error(data["failure"])
    return None


def _common(known: Mapping[int, Vote]) -> str:
    """The step of most ranks; of those that as many are in, the first by name: the same on every rank."""
    steps: list[str] = [vote["step"] for vote in known.values()]
    return min(steps, key=lambda step: (-steps.count(step), step))


def names(ranks: Iterable[int]) -> str:
    """Ranks as messages name them: ``rank 2``, ``ranks 0, 1 and 3``."""
    *others, last = sorted(ranks)
    return f"ranks {', '.join(map(str, others))} and {last}" if others else f"rank {last}"


def listed(values: Mapping[int, object]) -> str:
    """Values as messages name them: ``4096 (ranks 0 and 1), 8192 (rank 2)``."""
    ranks: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} ({names(those)})" for value, those in ranks.items())
