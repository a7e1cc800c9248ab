"""Capability table of a device: (operation, handle type) -> capability, with a reason for every gap."""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import translate
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from . import handles as _h
from .errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "DOMAIN",
    "MULTICAST",
    "Capabilities",
    "Capability",
    "Cell",
    "Operation",
    "Rules",
    "Scope",
    "Support",
    "VerifiedRun",
]

HandleType: TypeAlias = type[_h.Handle]


class Operation(Enum):
    """Operation of a device. Its value is the name in tables, in JSON and in ``GPUINTEROP_DISABLE``.

    Examples
    --------
    >>> gi.Operation("import_memory")
    <Operation.IMPORT_MEMORY: 'import_memory'>
    >>> device.capabilities.supports(gi.Operation.STREAM_MEMORY_OPS)
    True
    """

    __hash__ = object.__hash__  # faster than Enum's: each call that needs a capability looks it up

    IMPORT_MEMORY = "import_memory"
    MAP_BUFFER = "map_buffer"
    MAP_MIPMAPPED_ARRAY = "map_mipmapped_array"
    IMPORT_SEMAPHORE = "import_semaphore"
    SIGNAL_SEMAPHORE = "signal_semaphore"
    WAIT_SEMAPHORE = "wait_semaphore"
    WAIT_TIMEOUT = "wait_timeout"
    IMPORT_BY_NAME = "import_by_name"
    CREATE_SEMAPHORE = "create_semaphore"
    EXPORT_ALLOCATION = "export_allocation"
    IMPORT_ALLOCATION = "import_allocation"
    CREATE_MULTICAST = "create_multicast"
    EXPORT_MULTICAST = "export_multicast"
    IMPORT_MULTICAST = "import_multicast"
    EXPORT_ARRAY = "export_array"
    IMPORT_ARRAY = "import_array"
    STREAM_MEMORY_OPS = "stream_memory_ops"
    GRAPH_CAPTURE = "graph_capture"


MULTICAST: Final = frozenset((Operation.CREATE_MULTICAST, Operation.EXPORT_MULTICAST, Operation.IMPORT_MULTICAST))
"""Operations that also depend on the fabric between devices, so a run on one machine proves less for another.

Examples
--------
>>> gi.Operation.CREATE_MULTICAST in gi.capabilities.MULTICAST
True
"""


class Support(Enum):
    """How reliable a cell is.

    Examples
    --------
    >>> device.capabilities.of(gi.Operation.GRAPH_CAPTURE).support
    <Support.UNSUPPORTED: 'unsupported'>
    """

    SUPPORTED = "supported"
    """The backend's ``verified.toml`` records a run on a device of this name. Simulated runs never count."""
    UNVERIFIED = "unverified"
    """The vendor supports it, but no run on such a device is recorded. Usable."""
    UNSUPPORTED = "unsupported"
    """Refused before the driver is called."""
    DISABLED = "disabled"
    """Turned off with ``GPUINTEROP_DISABLE``."""


_USABLE: Final = (Support.SUPPORTED, Support.UNVERIFIED)


class Scope(Enum):
    """What a gap depends on. Another version or model of it may support the operation.

    Examples
    --------
    >>> device.capabilities.of(gi.Operation.GRAPH_CAPTURE).scope
    <Scope.RUNTIME: 'runtime'>
    """

    BINDINGS = "bindings"
    RUNTIME = "runtime"
    DRIVER = "driver"
    DEVICE = "device"
    PLATFORM = "platform"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table: an operation and, if it needs one, a handle type.

    Attributes
    ----------
    operation : Operation
    handle_type : type, optional
        None for an operation without a handle.

    Examples
    --------
    >>> cell = gi.Cell(gi.Operation.IMPORT_MEMORY, gi.OpaqueFd)
    >>> str(cell)
    'import_memory:opaque_fd'
    >>> cell == gi.Cell.parse("import_memory:opaque_fd")
    True
    >>> device.capabilities.supports(cell)
    True
    """

    operation: Operation
    handle_type: HandleType | None = None

    def __str__(self) -> str:
        name = self.operation.value
        return f"{name}:{self.handle_type.type_name}" if self.handle_type else name

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Parse the output of ``str``, for example ``import_memory:opaque_fd``.

        Raises
        ------
        InvalidArgumentError
            `text` does not name a cell of :data:`DOMAIN`.
        """
        if (cell := _BY_NAME.get(text)) is not None:
            return cell
        raise InvalidArgumentError("cell", f"expected a cell of gpuinterop.capabilities.DOMAIN, got {text!r}.")

    def unverified(self, scope: Scope, reason: str, reference: str) -> Capability:
        """Return the cell as usable but unverified. Only a recorded run makes it SUPPORTED."""
        return replace(self.gap(scope, reason, reference), support=Support.UNVERIFIED)

    def gap(self, scope: Scope, reason: str, reference: str, workaround: str = "") -> Capability:
        """Return the cell as a gap: what it depends on, why, the source, and what to do instead."""
        return Capability(
            operation=self.operation,
            handle_type=self.handle_type,
            support=Support.UNSUPPORTED,
            scope=scope,
            reason=reason,
            reference=reference,
            workaround=workaround,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a device can do in one cell of the table.

    Attributes
    ----------
    operation : Operation
        The operation of the cell.
    handle_type : type, optional
        The handle type of the cell; None for an operation without a handle.
    support : Support
        Usable if ``SUPPORTED`` or ``UNVERIFIED``.
    scope : Scope, optional
        What a gap depends on.
    reason : str
        Why; for a SUPPORTED cell, the backend's remark. Every other cell has a scope, a reason and a reference.
    reference : str
        The document or measurement for the reason; for a SUPPORTED cell, the recorded run.
    workaround : str
        What to do instead of a gap, if there is a way.

    Examples
    --------
    >>> capability = device.capabilities.of((gi.Operation.IMPORT_MEMORY, gi.DmaBufFd))
    >>> if not capability:
    ...     print(capability.workaround)
    export the memory as OpaqueFd; lavapipe and SwiftShader both do.
    """

    operation: Operation
    handle_type: HandleType | None = None
    support: Support
    scope: Scope | None = None
    reason: str = ""
    reference: str = ""
    workaround: str = ""

    def __post_init__(self) -> None:
        if self.support is not Support.SUPPORTED and not (self.scope and self.reason and self.reference):
            raise InvalidArgumentError(
                "capability",
                f"expected a scope, a reason and a reference for {self.cell}, which is {self.support.value}, got less.",
            )

    @property
    def cell(self) -> Cell:
        """The cell of the operation and the handle type."""
        return Cell(self.operation, self.handle_type)

    @property
    def usable(self) -> bool:
        """Whether you can use the operation: SUPPORTED or UNVERIFIED. The same as ``bool(capability)``."""
        return self.support in _USABLE

    def __bool__(self) -> bool:
        return self.usable

    def as_dict(self) -> dict[str, str | None]:
        """The form printed by ``gpuinterop info --json``."""
        return {
            "operation": self.operation.value,
            "handle_type": self.handle_type.type_name if self.handle_type else None,
            "support": self.support.value,
            "scope": self.scope.value if self.scope else None,
            "reason": self.reason or None,
            "reference": self.reference or None,
            "workaround": self.workaround or None,
        }


def _types(kind: HandleType) -> tuple[HandleType, ...]:
    return tuple(handle_type for handle_type in _h.handle_types().values() if issubclass(handle_type, kind))


_MEMORY, _SEMAPHORES, _ALLOCATIONS = map(_types, (_h.MemoryHandle, _h.SemaphoreHandle, _h.AllocationHandle))
_NAMED = tuple(
    kind for kind in dict.fromkeys((*_MEMORY, *_SEMAPHORES)) if issubclass(kind, _h.Win32Handle) and kind.nameable
)
_CREATED: tuple[HandleType, ...] = (_h.OpaqueFd, _h.TimelineFd)
_ARRAYS: tuple[HandleType, ...] = (_h.IpcMemHandle, _h.VmmFd, _h.OpaqueFd)

_PAIRS: Mapping[Operation, tuple[HandleType | None, ...]] = {
    Operation.IMPORT_MEMORY: _MEMORY,
    Operation.MAP_BUFFER: _MEMORY,
    Operation.MAP_MIPMAPPED_ARRAY: _MEMORY,
    Operation.IMPORT_SEMAPHORE: _SEMAPHORES,
    Operation.SIGNAL_SEMAPHORE: _SEMAPHORES,
    Operation.WAIT_SEMAPHORE: _SEMAPHORES,
    Operation.WAIT_TIMEOUT: _SEMAPHORES,
    Operation.IMPORT_BY_NAME: _NAMED,
    Operation.CREATE_SEMAPHORE: _CREATED,
    Operation.EXPORT_ALLOCATION: _ALLOCATIONS,
    Operation.IMPORT_ALLOCATION: _ALLOCATIONS,
    Operation.CREATE_MULTICAST: (None,),
    Operation.EXPORT_MULTICAST: _ALLOCATIONS,
    Operation.IMPORT_MULTICAST: _ALLOCATIONS,
    Operation.EXPORT_ARRAY: _ARRAYS,
    Operation.IMPORT_ARRAY: _ARRAYS,
    Operation.STREAM_MEMORY_OPS: (None,),
    Operation.GRAPH_CAPTURE: (None,),
}

DOMAIN: tuple[Cell, ...] = tuple(Cell(operation, kind) for operation in Operation for kind in _PAIRS[operation])
"""Every meaningful cell. A device's table has exactly these cells.

Examples
--------
>>> cells = [cell for cell in gi.capabilities.DOMAIN if cell.operation is gi.Operation.CREATE_SEMAPHORE]
>>> [str(cell) for cell in cells]
['create_semaphore:opaque_fd', 'create_semaphore:timeline_fd']
"""

_BY_NAME: Final[Mapping[str, Cell]] = {str(cell): cell for cell in DOMAIN}


def multicast_needs(kinds: Iterable[HandleType]) -> list[Cell]:
    """The cells of a multicast object whose handles have these types."""
    return [Cell(Operation.CREATE_MULTICAST), *(Cell(Operation.EXPORT_MULTICAST, kind) for kind in kinds)]


Requirement: TypeAlias = "Operation | Cell | tuple[Operation, HandleType | None]"


def _cell(requirement: Requirement) -> Cell:
    value: Any = requirement  # a caller may pass any object
    if isinstance(value, Operation):
        return Cell(value)
    if isinstance(value, Cell):
        value = value.operation, value.handle_type
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], Operation):
        raise ArgumentTypeError(
            "requirement", f"expected an Operation or a pair (Operation, handle type), got {requirement!r}."
        )
    operation, kind = value
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, _h.Handle)):
        raise ArgumentTypeError(
            "requirement", f"expected a handle type such as gpuinterop.OpaqueFd, or None, got {kind!r}."
        )
    return Cell(operation, kind)


class Capabilities(Mapping[tuple[Operation, HandleType | None], Capability]):
    """Read-only capability table of one device, with every cell of :data:`DOMAIN`.

    It maps ``(operation, handle type or None)`` to `Capability`. Its methods accept requirements: an `Operation`, a
    `Cell`, or a pair ``(operation, handle type)``.

    Examples
    --------
    >>> wanted = (gi.Operation.MAP_BUFFER, gi.OpaqueFd), (gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd)
    >>> if missing := device.capabilities.missing(*wanted):
    ...     print(missing[0].reason)  # and use another way
    >>> usable = [str(capability.cell) for capability in device.capabilities.values() if capability]
    >>> "map_buffer:opaque_fd" in usable
    True
    """

    def __init__(self, cells: Iterable[Capability], *, owner: str = "") -> None:
        self._cells: dict[Any, Capability] = {(cell.operation, cell.handle_type): cell for cell in cells}
        self._owner = owner
        if absent := [str(cell) for cell in DOMAIN if (cell.operation, cell.handle_type) not in self._cells]:
            raise InvalidArgumentError("cells", f"expected every cell of DOMAIN; missing: {', '.join(absent)}.")
        if extra := {capability.cell for capability in self._cells.values()}.difference(DOMAIN):
            raise InvalidArgumentError("cells", f"expected only cells of DOMAIN, got {', '.join(map(str, extra))}.")

    def __getitem__(self, key: tuple[Operation, HandleType | None]) -> Capability:
        if type(key) is not tuple:  # also `get(operation, handle_type)`, where the type would be the default
            raise ArgumentTypeError("key", f"expected a pair, got {key!r}; write capabilities[operation, handle_type].")
        return self._cells[key]

    def __iter__(self) -> Iterator[tuple[Operation, HandleType | None]]:
        return ((cell.operation, cell.handle_type) for cell in DOMAIN)

    def __len__(self) -> int:
        return len(DOMAIN)

    def of(self, requirement: Requirement) -> Capability:
        """Return the capability of a cell. A pair outside :data:`DOMAIN` returns a gap and raises no ``KeyError``.

        Raises
        ------
        ArgumentTypeError
            `requirement` is not an `Operation`, a `Cell` or a pair of an operation and a handle type.
        """
        try:
            capability = self._cells.get(requirement)
        except TypeError:  # an unhashable requirement, which _cell refuses
            capability = None
        if capability is None:
            cell = _cell(requirement)
            capability = self._cells.get((cell.operation, cell.handle_type))
        if capability is not None:
            return capability
        return cell.gap(Scope.BINDINGS, "the pair has no meaning: " + _meaning(cell), "gpuinterop.capabilities.DOMAIN")

    def supports(self, *requirements: Requirement) -> bool:
        """Whether all requirements are usable (SUPPORTED or UNVERIFIED)."""
        return not self.missing(*requirements)

    def missing(self, *requirements: Requirement) -> list[Capability]:
        """Return the capabilities of the requirements that are not usable, in the given order."""
        return [capability for capability in map(self.of, requirements) if not capability]

    def require(self, *requirements: Requirement) -> None:
        """Raise `UnsupportedError` for the first requirement that is not usable.

        Raises
        ------
        UnsupportedError
            A requirement is not usable; `UnsupportedError.capability` has the reason.
        """
        for requirement in requirements:
            if (capability := self.of(requirement)).support not in _USABLE:
                raise UnsupportedError(capability, context=self._owner)


def _meaning(cell: Cell) -> str:
    kinds = [kind.type_name for kind in _h.types_here(_PAIRS[cell.operation])]
    if not kinds:
        return f"{cell.operation.value} takes no handle type."
    return f"{cell.operation.value} takes one of {', '.join(kinds)}."


def disable(
    cells: Iterable[Capability], patterns: str, gaps_of: Callable[[str], Iterable[Capability]]
) -> list[Capability]:
    """Turn off cells with ``GPUINTEROP_DISABLE``: comma-separated globs over ``operation[:handle_type]``.

    ``profile:NAME`` turns off the gaps that `gaps_of` returns for the name. The first match gives the reason. A pattern
    that matches no cell raises `InvalidArgumentError`, so that a typo does not go unnoticed.
    """
    off: dict[Cell, Capability] = {}
    for pattern in filter(None, map(str.strip, patterns.split(","))):
        kind, _, profile = map(str.strip, pattern.partition(":"))
        if kind.lower() == "profile":
            why = f"turned off by GPUINTEROP_DISABLE={pattern}: "
            gaps = [replace(gap, reason=why + gap.reason) for gap in gaps_of(profile)]
        else:
            why = f"turned off by GPUINTEROP_DISABLE={patterns}."
            gaps = [
                cell.gap(Scope.PLATFORM, why, "environment", "unset GPUINTEROP_DISABLE.") for cell in _named_by(pattern)
            ]
        off = {gap.cell: replace(gap, support=Support.DISABLED) for gap in gaps} | off
    return [off.get(capability.cell, capability) if capability else capability for capability in cells]


def _named_by(pattern: str) -> frozenset[Cell]:
    """The cells that a user's glob matches; at least one."""
    try:
        return _matching(pattern)
    except ValueError:
        here = [cell for cell in DOMAIN if cell.handle_type is None or _h.is_here(cell.handle_type)]
        names = dict.fromkeys(name for cell in here for name in (cell.operation.value, str(cell)))
        near = difflib.get_close_matches(pattern.lower(), names) or [operation.value for operation in Operation]
        raise InvalidArgumentError(
            "GPUINTEROP_DISABLE", f"expected patterns of capabilities such as {', '.join(near)}; got {pattern!r}."
        ) from None


@cache
def _matching(pattern: str) -> frozenset[Cell]:
    fits = re.compile(translate(pattern)).match
    cells = frozenset(cell for name, cell in _BY_NAME.items() if fits(name) or fits(cell.operation.value))
    if not cells:
        raise ValueError(f"{pattern!r} matches no cell")
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a ``capabilities.toml``; see `Rules`."""

    cells: Sequence[str]
    but: Sequence[str] = ()
    when: Sequence[str] = ()
    gap: str = ""
    scope: str = "platform"
    reason: str
    reference: str
    workaround: str = ""

    def __post_init__(self) -> None:
        if self.gap:
            Scope(self.gap)
        Scope(self.scope)

    def holds(self, facts: Mapping[str, object]) -> bool:
        """Whether all facts of the rule hold."""
        return all(bool(facts[fact.removeprefix("not ")]) is not fact.startswith("not ") for fact in self.when)

    def capability_of(self, cell: Cell, facts: Mapping[str, object]) -> Capability:
        """Capability of a cell under this rule: a gap, or usable in the rule's scope."""
        reason, reference, workaround = (
            text.format_map(facts) for text in (self.reason, self.reference, self.workaround)
        )
        if self.gap:
            return cell.gap(Scope(self.gap), reason, reference, workaround)
        return cell.unverified(Scope(self.scope), reason, reference)


def _has_all(_symbol: str) -> bool:
    return True


class Rules:
    """A backend's ``capabilities.toml``. It lists rules; the first rule that matches a cell defines its capability.

    A rule selects cells with globs over ``operation`` or ``operation:handle_type``, as ``GPUINTEROP_DISABLE`` does;
    ``but`` excludes some of them. It matches if every fact in ``when`` holds (``not X``: X does not hold). With
    ``gap``, a `Scope`, the cell is a gap. Without it the cell is usable, and ``scope`` is its scope. The texts
    ``reason``, ``reference`` and ``workaround`` may contain ``{name}``: a text of the table ``[texts]``, or a fact.

    The table ``[symbols]`` lists the functions that a driver needs for an operation, under the same globs. The fact
    ``missing`` names the functions of a cell that the driver lacks.

    A table ``[profiles.NAME]`` lists all facts of a device; its ``missing`` lists the functions that the driver lacks.
    ``GPUINTEROP_DISABLE=profile:BACKEND-NAME`` turns off that device's gaps on any backend.

    Examples
    --------
    >>> from importlib.resources import files
    >>> rules = gi.capabilities.Rules(files("gpuinterop_host") / "capabilities.toml")
    >>> sorted(rules.facts)
    ['futex', 'swiftshader gap']
    >>> table = rules.table({"futex": False, "swiftshader gap": ""})
    """

    def __init__(self, file: Traversable) -> None:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        self.by_cell: dict[Cell, list[Rule]] = {cell: [] for cell in DOMAIN}  # in the order of the rules
        self._symbols: dict[Cell, dict[str, None]] = {cell: {} for cell in DOMAIN}
        try:
            self.rules = [Rule(**rule) for rule in content["rule"]]
            for rule in self.rules:
                for cell in set().union(*map(_matching, rule.cells)).difference(*map(_matching, rule.but)):
                    self.by_cell[cell].append(rule)
            for glob, symbols in content.get("symbols", {}).items():
                for cell in _matching(glob):
                    self._symbols[cell].update(dict.fromkeys(symbols))
        except (TypeError, ValueError) as error:  # a missing or unknown key, or a value of the wrong type
            raise InvalidArgumentError("file", f"expected rules as in `Rules`, got {file}: {error}.") from error
        self._texts: dict[str, str] = content.get("texts", {})
        self.profiles: dict[str, dict[str, Any]] = content.get("profiles", {})  # the facts of each such device
        self.facts = {fact.removeprefix("not ") for rule in self.rules for fact in rule.when} - {"missing"}
        """The names of all facts that the backend must supply.

        Examples
        --------
        >>> table = device.capabilities
        >>> table.supports((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd), (gi.Operation.MAP_BUFFER, gi.OpaqueFd))
        True
        >>> for gap in table.missing(gi.Operation.GRAPH_CAPTURE):
        ...     print(gap.reason)
        the CPU has no graphs: a stream runs its work at once and cannot record it for a replay.
        """

    def attributes(self, read: Callable[[int], int]) -> dict[str, object]:
        """The facts ``attribute N``. `read` returns an attribute's value by number."""
        names = (fact for fact in self.facts if fact.startswith("attribute "))
        return {name: read(int(name.removeprefix("attribute "))) for name in names}

    def table(self, facts: Mapping[str, object], has: Callable[[str], bool] = _has_all) -> list[Capability]:
        """Every cell that a rule matches with a device's facts. `has` checks whether its driver has a function."""
        if lacking := sorted(self.facts - facts.keys()):
            raise InvalidArgumentError(
                "facts", f"expected every fact that the rules name, got none for {', '.join(lacking)}."
            )
        return [capability for cell in DOMAIN if (capability := self.of(cell, facts, has)) is not None]

    def profile(self, name: str) -> list[Capability]:
        """The table of the device in ``[profiles.NAME]``."""
        facts = self.profiles[name]
        missing = frozenset(facts.get("missing", ()))
        if unknown := sorted(missing.difference(*self._symbols.values())):
            raise InvalidArgumentError(f"profile {name}", f"expected functions of [symbols], got {', '.join(unknown)}.")
        return self.table(facts, lambda symbol: symbol not in missing)

    def of(self, cell: Cell, facts: Mapping[str, object], has: Callable[[str], bool] = _has_all) -> Capability | None:
        """One cell; None if no rule matches it."""
        missing = ", ".join(symbol for symbol in self._symbols[cell] if not has(symbol))
        known = {**self._texts, **facts, "missing": missing}
        return next((rule.capability_of(cell, known) for rule in self.by_cell[cell] if rule.holds(known)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRun:
    """An entry of a backend's ``verified.toml``: a dated run of the conformance suite on real hardware.

    Attributes
    ----------
    date : str
        ISO 8601, for example ``2026-11-21``.
    platform : str
        ``sys.platform`` of the run. A run proves nothing for another platform.
    device : str
        Name of the device, or of the Vulkan driver. A run proves nothing for a device or driver with another name.
    versions : Mapping[str, str]
        Versions of the driver, the bindings and the exporters.
    cells : frozenset of Cell
        Cells that the run tested and that passed.
    tests : Mapping[str, int]
        Number of tests that passed, that failed, and that were skipped as declared gaps or unexpectedly.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from gpuinterop.capabilities import read_verified
    >>> runs = read_verified(files("gpuinterop_cuda") / "verified.toml")
    >>> {run.device for run in runs if gi.Cell(gi.Operation.GRAPH_CAPTURE) in run.cells}
    {'NVIDIA H...', 'NVIDIA H...'}
    """

    date: str
    platform: str
    device: str
    versions: Mapping[str, str]
    cells: frozenset[Cell]
    tests: Mapping[str, int] = field(default_factory=dict)


def read_verified(file: Traversable) -> list[VerifiedRun]:
    """Read a ``verified.toml``; none if it does not exist. Raises `InvalidArgumentError` if an entry is not a run."""
    if not file.is_file():
        return []
    try:
        return [_run(entry) for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("run", [])]
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            "file", f"expected runs as `python -m tools.record` writes them, got {file}: {error}"
        ) from error


def recorded(file: Traversable) -> list[VerifiedRun]:
    """Read a ``verified.toml``. If `read_verified` refuses it, warn and return no runs."""
    try:
        return read_verified(file)
    except InvalidArgumentError as error:
        warnings.warn(f"a broken record of runs makes no cell SUPPORTED: {error}", stacklevel=2)
        return []


def _run(entry: Mapping[str, Any]) -> VerifiedRun:
    return VerifiedRun(
        date=str(entry["date"]),
        platform=entry["platform"],
        device=entry["device"],
        versions=dict(entry.get("versions", {})),
        cells=frozenset(map(Cell.parse, entry["cells"])),
        tests=dict(entry.get("tests", {})),
    )


def _versions(run: VerifiedRun) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if name != "gpuinterop")
    return f" ({versions})" if versions else ""


def promote(cells: Iterable[Capability], runs: Iterable[VerifiedRun], *, device: str | None = None) -> list[Capability]:
    """Make an UNVERIFIED cell SUPPORTED if a run has shown it on this platform, on a device of this name.

    Backends never declare SUPPORTED, so no claim goes beyond its proof. The reason of a cell that stays UNVERIFIED
    names the runs on other devices. For a CPU `device` is None, and every run on its platform counts.
    """
    ordered = sorted(runs, key=lambda run: run.date)
    result = []
    for capability in cells:
        if capability.support is Support.UNVERIFIED:
            shown = [run for run in ordered if capability.cell in run.cells]
            proof = [run for run in shown if run.platform == sys.platform and device in (None, run.device)]
            if proof:
                run = proof[-1]
                reference = f"verified.toml: {run.date} on {run.device}{_versions(run)}"
                capability = replace(capability, support=Support.SUPPORTED, reference=reference, workaround="")
            else:
                capability = replace(capability, reason=f"{capability.reason.rstrip('.')}; {_unproven(shown)}.")
        result.append(capability)
    return result


def _unproven(shown: Sequence[VerifiedRun]) -> str:
    if not shown:
        return "no run is recorded"
    return f"recorded elsewhere: {shown[-1].date} on {shown[-1].device} ({shown[-1].platform})"
