"""What ranks tell each other in a vote, and what follows from it.

The messages are JSON: nothing in them runs, and what they name is looked up among our own errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .. import errors
from ..capabilities import Capability, Operation, Scope, Support
from ..errors import GpuInteropError, InvalidArgumentError, PeerError
from ..handles import handle_types

_FORMAT: Final = "gpuinterop vote 1"
_OUTCOME: Final = "gpuinterop outcome 1"
_TEXT: Final = 4000
"""Characters of an error that are passed on."""

_CLASSES: Final[dict[str, type[GpuInteropError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if name in errors.__all__ and isinstance(kind, type) and issubclass(kind, GpuInteropError)
}
_ATTRIBUTES: Final[dict[str, type]] = {
    "reason": str, "fix": str, "absent": bool, "argument": str, "call": str, "code": int, "symbol": str,
}  # fmt: skip
"""Those of all our errors that are plain; a capability is rebuilt."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it travels: the class by name, the text, and the attributes."""

    kind: str
    text: str
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _CLASSES), "")
        if not kind or not isinstance(error, _CLASSES[kind]):  # somebody else's: the text says what it was
            return cls("PeerError", f"{type(error).__name__}: {_text(error)}"[:_TEXT], {})
        attributes = {name: value for name, value in vars(error).items() if type(value) is _ATTRIBUTES.get(name)}
        capability = vars(error).get("capability")
        if isinstance(capability, Capability):
            attributes["capability"] = capability.as_dict()
        return cls(kind, _text(error)[:_TEXT], attributes)

    def error(self, rank: int, step: str) -> GpuInteropError:
        """The error again, with the rank and the step before its text and as attributes."""
        return placed(self._rebuilt(f"rank {rank}, step {step!r}: {self.text}"), rank, step)

    def again(self, rank: int | None, step: str) -> GpuInteropError:
        """The error again, where the text says already which rank and step."""
        return placed(self._rebuilt(self.text), rank, step)

    def _rebuilt(self, text: str) -> GpuInteropError:
        attributes = dict(self.attributes)
        if "capability" in attributes:
            attributes["capability"] = _capability(attributes["capability"])
        return errors._rebuild(_CLASSES[self.kind], (text,), attributes)

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "attributes": dict(self.attributes)}

    @classmethod
    def parse(cls, data: Any) -> Failure:
        kind, text, attributes = data["kind"], data["text"], data["attributes"]
        if kind not in _CLASSES or not isinstance(text, str) or len(text) > 2 * _TEXT:
            raise ValueError("no error of ours")
        for name, value in attributes.items():
            if name == "capability":
                _capability(value)
            elif type(value) is not _ATTRIBUTES[name]:
                raise ValueError(f"{name} is no attribute of an error")
        return cls(kind, text, attributes)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as raised:  # of a class that is not ours
        return f"its text cannot be had ({type(raised).__name__})"


def placed(error: GpuInteropError, rank: int | None, step: str) -> GpuInteropError:
    """The error with where it came from, as ``.rank`` (None: no one rank) and ``.step``."""
    error.__dict__.update(rank=rank, step=step)
    return error


def _capability(data: Any) -> Capability:
    kind = data["handle_type"]
    return Capability(
        operation=Operation(data["operation"]),
        handle_type=None if kind is None else handle_types()[kind],
        support=Support(data["support"]),
        scope=None if data["scope"] is None else Scope(data["scope"]),
        reason=str(data["reason"] or ""),
        reference=str(data["reference"] or ""),
        workaround=str(data["workaround"] or ""),
    )


@dataclass(frozen=True, slots=True)
class Vote:
    """How a rank's part of a step went."""

    step: str
    value: Any = None
    failure: Failure | None = None
    timeout: float = 0.0
    garbled: bool = False
    """It has sent something that is no vote."""

    def as_json(self) -> dict[str, Any]:
        failure = None if self.failure is None else self.failure.as_json()
        return {
            "step": self.step,
            "value": self.value,
            "failure": failure,
            "timeout": self.timeout,
            "garbled": self.garbled,
        }

    @classmethod
    def parse(cls, data: Any) -> Vote:
        step, timeout, garbled, failure = data["step"], data["timeout"], data["garbled"], data["failure"]
        if not isinstance(step, str) or type(timeout) is not float or not isinstance(garbled, bool):
            raise TypeError("no vote")
        return cls(step, data["value"], None if failure is None else Failure.parse(failure), timeout, garbled)


GARBLED: Final = Vote("", garbled=True)
_NONSENSE: Final = (AttributeError, LookupError, TypeError, ValueError, RecursionError, GpuInteropError)
"""What comes of reading what is none of our messages."""


def pack(known: Mapping[int, Vote]) -> bytes:
    """What a rank has heard, its own vote included, as a message."""
    votes = {str(rank): vote.as_json() for rank, vote in sorted(known.items())}
    return json.dumps({"format": _FORMAT, "votes": votes}).encode()


def hear(known: dict[int, Vote], sender: int, message: bytes, size: int) -> None:
    """Add to `known` what a message says. Nobody's word counts against a rank that was heard itself."""
    try:
        data = json.loads(message)
        if data["format"] != _FORMAT:
            raise ValueError("no vote")
        votes = {int(rank): Vote.parse(vote) for rank, vote in data["votes"].items()}
        own = votes.pop(sender)
        if not votes.keys() <= set(range(size)):
            raise ValueError("no such rank")
    except _NONSENSE:
        known[sender] = GARBLED
        return
    if known.get(sender) is not GARBLED:
        known[sender] = own
    for rank, vote in votes.items():
        known.setdefault(rank, vote)


def check_values(known: dict[int, Vote], step: str, parse: Callable[[Any], object]) -> None:
    """Who says that the step is done, with a value that `parse` does not take, has sent what is no vote."""
    for rank, vote in known.items():
        if vote.step == step and vote.failure is None and not vote.garbled:
            try:
                parse(vote.value)
            except _NONSENSE:
                known[rank] = GARBLED


def decide(known: Mapping[int, Vote], size: int) -> GpuInteropError | None:
    """The outcome, by what all know; None is success."""
    step = _common(known)
    if gone := [rank for rank in range(size) if rank not in known]:
        verb = "is" if len(gone) == 1 else "are"
        timeout = max(vote.timeout for vote in known.values())
        text = f"{names(gone)} {verb} gone or did not answer within {timeout:g} s, step {step!r}."
        return placed(PeerError(text), gone[0], step)
    if garbled := [rank for rank, vote in known.items() if vote.garbled]:
        text = f"{names(garbled)} sent what is no vote, step {step!r}: is it the same gpuinterop?"
        return placed(PeerError(text), min(garbled), step)
    for rank in range(size):
        vote = known[rank]
        if vote.failure is not None:
            return vote.failure.error(rank, vote.step)
    steps = {rank: known[rank].step for rank in range(size)}
    if len(set(steps.values())) > 1:
        text = f"the ranks are out of step: {listed(steps)}. All make the same calls, in the same order."
        return placed(PeerError(text), min(rank for rank in steps if steps[rank] != step), step)
    timeouts = {rank: known[rank].timeout for rank in range(size)}
    if len(set(timeouts.values())) > 1:
        return disagreement(step, "timeout", "time-outs", timeouts)
    return None


def disagreement(step: str, argument: str, what: str, values: Mapping[int, object]) -> GpuInteropError:
    """The error of ranks that have given different values, of which none is at fault alone."""
    error = InvalidArgumentError(argument, f"the ranks have different {what}: {listed(values)}.")
    return at(error, step)


def at(error: GpuInteropError, step: str) -> GpuInteropError:
    """The error of a step, for which no one rank is to blame."""
    error.args = (f"step {step!r}: {error}",)
    return placed(error, None, step)


def pack_outcome(outcome: GpuInteropError | None) -> bytes:
    """For the last round: the error of a rank that has given the step up; None of one that goes on."""
    told = None
    if outcome is not None:
        place = {name: vars(outcome)[name] for name in ("rank", "step")}
        told = {**Failure.of(outcome).as_json(), "text": str(outcome)[: 2 * _TEXT], **place}
    return json.dumps({"format": _OUTCOME, "failure": told}).encode()


def given_up(messages: Sequence[bytes | None]) -> GpuInteropError | None:
    """The error of the lowest rank that has given the step up. What is no such message says nothing."""
    for message in messages:
        try:
            data = json.loads(message or b"")
            told = data["failure"]
            if data["format"] == _OUTCOME and told is not None:
                rank, step = told["rank"], told["step"]
                if not (rank is None or type(rank) is int) or not isinstance(step, str):
                    raise TypeError("no place")
                return Failure.parse(told).again(rank, step)
        except _NONSENSE:
            continue
    return None


def _common(known: Mapping[int, Vote]) -> str:
    """The step of most ranks; of those that as many are in, the first by name: the same on every rank."""
    steps = [vote.step for vote in known.values() if not vote.garbled]
    return min(steps, key=lambda step: (-steps.count(step), step))


def names(ranks: Sequence[int]) -> str:
    """For messages: ``rank 2``, ``ranks 0, 1 and 3``."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def listed(values: Mapping[int, object]) -> str:
    """For messages: ``4096 (ranks 0 and 1), 8192 (rank 2)``."""
    ranks: dict[object, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} ({names(those)})" for value, those in ranks.items())
