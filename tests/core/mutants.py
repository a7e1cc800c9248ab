"""Mistakes that the core could have, one at a time, and what finds each: else the search would be too thin.

A mutant is other text in a function of the core. Its code is put in place of the function's own, so whoever has the
function by name has the mutant.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import pytest

from gpuinterop._core import drain, known_stream, lifetime
from gpuinterop._core.array import ArrayLevel
from gpuinterop._core.enqueue import Enqueues
from gpuinterop._core.graph import Graph
from gpuinterop._core.known_stream import KnownStream
from gpuinterop._core.lifetime import Lifetime
from gpuinterop._core.memory import Buffer, Hold
from gpuinterop._core.resource import Resource
from gpuinterop._core.semaphore import ExternalSemaphore
from gpuinterop._core.stream import Stream

from . import pairs
from .call_table import ROWS, check
from .explored import Core
from .explorer import Failed
from .scenes import SCENES

Text = tuple[Callable[..., Any], str, str]
"""A function, what it says, and what the mutant says in its place."""


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes
    ----------
    texts : tuple of Text
    found_by : str
        Two actions of `pairs` with an ampersand between them, a scene, or a row of `call_table`.
    """

    texts: tuple[Text, ...]
    found_by: str


def _mutated(function: Callable[..., Any], texts: Iterable[Text]) -> CodeType:
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    for _, old, new in texts:
        assert source.count(old) == 1, f"{function.__qualname__} says {source.count(old)} times: {old}"
        source = source.replace(old, new)
    tree = ast.increment_lineno(ast.parse(source), first - 1)
    code = function.__code__
    whole = compile(tree, code.co_filename, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    found = [one for one in whole.co_consts if isinstance(one, CodeType) and one.co_name == code.co_name]
    return found[0].replace(co_qualname=code.co_qualname)


def put_in_place(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in dict.fromkeys(text[0] for text in mutant.texts):
        own: Any = inspect.unwrap(function)  # the monitor's decorator stays
        code = _mutated(own, [text for text in mutant.texts if text[0] is function])
        monkeypatch.setattr(own, "__code__", code)


def find(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> str:
    """How it is found, after how many schedules; empty when it is not."""
    put_in_place(mutant, monkeypatch)
    try:
        if mutant.found_by in ROWS:
            check(mutant.found_by)
            return ""
    except AssertionError as error:
        return str(error)
    core = Core(monkeypatch)
    try:
        if mutant.found_by in SCENES:
            SCENES[mutant.found_by].play(core)
        else:
            actions = {action.name: action for action in pairs.actions()}
            one, other = (actions[name] for name in mutant.found_by.split(" & "))
            assert not pairs.exclusion(one, other), "what finds it is left out"
            pairs.meet(core, one, other, budget=pairs.preemptions(one, other))
    except Failed as error:
        return f"{error.runs} schedules: {_last(error)}"
    return ""


def _last(error: Failed) -> str:
    """What the driver or the check has said."""
    found = [line for line in error.why.splitlines() if line.strip() and not line.startswith(" ")]
    return found[0][:150]


_NOTE = (
    "            known.waits.append(pending)  # as in `KnownStream.note`\n"
    "            waiting[known] = None  # before the look at the gate: see there\n"
)
_LOOK = "            if gate.shut:\n                gate.let_releases_end()\n"
_MARKS = "    calls, streams = marked.calls, known.calls\n"
_TELL = (
    "    for step, place, one in self._signals:\n"
    "        told, at = note_told([one], stream._known_as())[0]\n"
    "        told[at] = step.values[place]\n"
)
_NOTES = '        waits = "the exit" if _exiting else gate.held_by()\n'

MUTANTS: dict[str, Mutant] = {
    "a transition outside of the monitor": Mutant(
        ((Resource.close, "retire(self.lifetime)", "retire.__wrapped__(self.lifetime)"),),
        "ExternalMemory.close & Device.drain",
    ),
    "a use is forgotten": Mutant(
        ((Buffer._use_on, "self.mapping.used_on(known, first, first + size)", "pass"),),
        "work that lasts beside a close",
    ),
    "a signal's mark comes behind the look": Mutant(
        (
            (Enqueues._enqueue, "    calls += MARK\n", "    was = marked.state\n    calls += MARK\n"),
            (Enqueues._enqueue, "if (odd := known.odd) or marked.state is", "if (odd := known.odd) or was is"),
        ),
        "ExternalSemaphore.close & ExternalSemaphore.signal",
    ),
    "a question's mark comes behind the look": Mutant(
        (
            (Lifetime.ask, "    calls += MARK\n", "    state = self.state\n    calls += MARK\n"),
            (Lifetime.ask, "if self.state in", "if state in"),
        ),
        "Stream.close & Stream.capturing",
    ),
    "a release does not look for calls": Mutant(
        (
            (drain._ready, "if lifetime.calls.copy():", "if False:"),
            (drain._begin, "lifetime.standing or lifetime.calls.copy()", "lifetime.standing"),
        ),
        "ExternalSemaphore.close & ExternalSemaphore.signal",
    ),
    "a release looks for calls only when it is claimed": Mutant(
        ((drain._begin, "lifetime.standing or lifetime.calls.copy()", "lifetime.standing"),),
        "a stream and what it has used are closed",
    ),
    "a point is taken before the calls are looked for": Mutant(
        ((drain._ready, "if lifetime.calls.copy():", "if False:"),), "a signal that lasts beside a close"
    ),
    "an event is recorded on what is being released": Mutant(
        ((Lifetime.ask, "self.state in (LIVE, RETIRED)", "self.state not in GONE"),),
        "Stream.close & Buffer.copy_from_host",
    ),
    "a wait looks at the gate, then notes itself": Mutant(
        ((Enqueues._enqueue, _NOTE + _LOOK, _LOOK + _NOTE),), "a wait beside a release that blocks"
    ),
    "a batch's wait looks at the gate, then notes itself": Mutant(
        ((Enqueues._enqueue, _NOTE + _LOOK, _LOOK + _NOTE),),
        "a batch's wait beside a release that blocks",
    ),
    "a batch's wait does not look at the gate": Mutant(
        ((Enqueues._enqueue, _LOOK, ""),), "a batch's wait beside a release that blocks"
    ),
    "a wait does not look at the gate": Mutant(
        ((Enqueues._enqueue, _LOOK, ""),), "a wait beside a release that blocks"
    ),
    "a release looks at the notes, then shuts the gate": Mutant(
        (
            (drain._release_at_gate, _NOTES, ""),
            (drain._release_at_gate, "    shut = gate.shut\n", _NOTES[4:] + "    shut = gate.shut\n"),
        ),
        "a wait beside a release that blocks",
    ),
    "a release does not look at the notes": Mutant(
        ((drain._release_at_gate, "gate.held_by()", '""'),), "a wait beside two releases of one drain"
    ),
    "a parent is let go when its child's release begins": Mutant(
        ((drain._begin, "    lifetime.state = RELEASING\n", "    lifetime.state = RELEASING\n    leave(lifetime)\n"),),
        "Buffer.close & ExternalMemory.close",
    ),
    "a child that comes up under a closed parent stays": Mutant(
        ((lifetime._came_up, "            _retire(lifetime)\n", "            pass\n"),),
        "ExternalMemory.close & ExternalMemory.map_buffer",
    ),
    "a closed child is forgotten where its parent is closed": Mutant(
        ((lifetime.leave, "if parent.state is RETIRED:", "if parent.state is LIVE:"),),
        "ExternalMemory.close & ExternalMemory.map_buffer",
    ),
    "children are not closed": Mutant(
        ((lifetime._retire, "if how is Standing.CHILD:\n            _retire(one, lifetime)", "pass"),),
        "Buffer.fill, on a stream & ExternalMemory.close",
    ),
    "a wait that is inherited is not noted": Mutant(
        ((Stream._follow, "stream.inherits(other)", "[]"),),
        "a chain over two devices",
    ),
    "a note is lost beside the end of another": Mutant(
        ((known_stream.settle, "waiting[stream] = None", "pass"),), "notes of waits by opcode"
    ),
    "a wait has passed before the driver has it": Mutant(
        ((KnownStream.enqueued, " if wait.enqueued", ""),), "a wait, a question and a release that blocks"
    ),
    "who waits for a point comes behind it": Mutant(
        ((known_stream._reached, "waiting_for_a_look.update(fence.waiters)", "pass"),),
        "a stream closed under work that lasts",
    ),
    "a thread's own default stream is given work, and no event": Mutant(
        (
            (Stream._call, "stream.bare = stream.thread is not None", "stream.bare = False"),
            (Stream._call, "stream.came_along()", "None"),
        ),
        "a thread's own default stream beside a close",
    ),
    "a state is looked at twice": Mutant(
        ((Lifetime.ask, "self.state in (LIVE, RETIRED)", "self.state is LIVE or self.state is RETIRED"),),
        "a look at a closed stream beside one that wraps it again",
    ),
    "a failure is noted as told, then looked up": Mutant(
        (
            (KnownStream.tell_failure, "_tell(self)", "(setattr(self, 'told', True), self.failure)[1]"),
        ),
        "who is told of a failure beside one that wraps the stream again",
    ),
    "a blocked release is looked for, then named": Mutant(
        (
            (Lifetime.what_holds, "(waits := self.gate.blocked.get(self))", "self in self.gate.blocked"),
            (Lifetime.what_holds, "{waits}", "{self.gate.blocked[self]}"),
        ),
        "what holds a release beside that release",
    ),
    "a callback is looked for, then taken": Mutant(
        (
            (
                drain._take,
                "callbacks, lifetime.callbacks = lifetime.callbacks, []",
                "callbacks = lifetime.callbacks",
            ),
        ),
        "two threads add callbacks to what is released",
    ),
    "an array's mark comes behind the look": Mutant(
        (
            (Buffer.hold, "    token = Hold(self)", "    was = self.lifetime.state\n    token = Hold(self)"),
            (Buffer.hold, "if self.lifetime.state is not", "if was is not"),
        ),
        "an array beside a close",
    ),
    "a release does not look for arrays": Mutant(
        ((drain._ready, " or lifetime.arrays.copy()", ""),), "an array beside a close"
    ),
    "an array's end comes unseen": Mutant(
        ((Hold.__del__, "if mapping.state is not LIVE:", "if False:"),), "an array's end beside a close"
    ),
    "an array's end looks, then takes its mark": Mutant(
        (
            (Hold.__del__, "        del mapping", "        was = mapping.state\n        del mapping"),
            (Hold.__del__, "if mapping.state is", "if was is"),
        ),
        "an array beside a close",
    ),
    "a drain does not look again where an array has ended": Mutant(
        ((lifetime.retire_dropped, "if lifetime.state is RETIRED:", "if False:"),), "an array's end beside a close"
    ),
    "a batch's signal's mark comes behind the look": Mutant(
        (
            (Enqueues._enqueue, "    calls += MARK\n", "    was = marked.state\n    calls += MARK\n"),
            (Enqueues._enqueue, "if (odd := known.odd) or marked.state is", "if (odd := known.odd) or was is"),
        ),
        "SemaphoreBatch.signal",
    ),
    "a launch does not look at the gate": Mutant(
        ((Enqueues._enqueue, "if gate.shut:", "if gate.shut and numbers:"),), "Graph.launch"
    ),
    "a launch does not note its mappings": Mutant(
        ((Graph._note_use, "mapping.used_on(known, first, last)", "pass"),), "Graph.launch"
    ),
    "a launch notes what it uses, then marks and looks": Mutant(
        ((Enqueues._enqueue, _MARKS, "    self._noted.get(known) or self._note_use(stream, known)\n" + _MARKS),),
        "Graph.launch",
    ),
    "a launch notes its signals, then calls the driver": Mutant(
        (
            (Graph.launch, "    places = self._enqueue(", _TELL + "    places = self._enqueue("),
        ),
        "Graph.launch",
    ),
    "a level's copy does not note the image": Mutant(
        ((ArrayLevel._enqueue, "elif known not in array.lifetime.uses:", "elif False:"),),
        "ArrayLevel.copy_from_buffer",
    ),
    "a copy without a stream forgets its use, although it has failed": Mutant(
        (
            (Buffer._on, "        copier.enqueue(", "        try:\n            copier.enqueue("),
            (Buffer._on, "        copier.synchronize()\n        forget_use(",
             "            copier.synchronize()\n        finally:\n            forget_use("),
        ),
        "Buffer.copy_from_host",
    ),
    "an export looks at the gate": Mutant(
        ((ExternalSemaphore.export, "    handle = ", "    self.gate.let_releases_end()\n    handle = "),),
        "ExternalSemaphore.export",
    ),
    "the release of what was exported does not stand at the gate": Mutant(
        ((ExternalSemaphore.export, "self.gate if self._calls.blocks else None", "None"),),
        "ExternalSemaphore.export",
    ),
    "a use by a closed stream is forgotten": Mutant(
        ((lifetime.note_use, "if known.is_over", "if known.state is not LIVE"),),
        "a stream is closed, and another uses the same",
    ),
    "a stream that waits for a captured one does not join": Mutant(
        ((Stream._follow, "if graph is None or", "if True or"),), "a stream joins a capture"
    ),
}  # fmt: skip
"""By what is wrong."""
