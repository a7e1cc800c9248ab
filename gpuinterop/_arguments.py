"""Argument checks for every layer. An error names the argument, the expected value and the given value."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, Final, NoReturn, TypeVar

from .errors import ArgumentTypeError, InvalidArgumentError

T = TypeVar("T")

MAX_32: Final = 2**32 - 1
MAX_64: Final = 2**64 - 1
MAX_SIZE: Final = 2**63 - 1  # bytes: Python's C API and some driver calls use signed sizes and offsets
_INTERNAL: Final = (
    "address", "driver", "gate", "key", "known", "lifetime", "location", "mapping", "max_value", "streams",
    "takes_value",
)  # fmt: skip
"""Attributes of public objects that only gpuinterop uses."""
LONGEST_S: Final = 2_000_000  # the longest time-out that every system call accepts: poll() has milliseconds in a C int


class NoCopy:
    """Base of owners and other objects that must not be copied: closing a copy would end what the original uses."""

    __slots__ = ()
    _instead: ClassVar[str] = "use the object itself; another process makes its own."

    def __reduce__(self) -> NoReturn:  # also asked for a copy
        kind = type(self).__name__
        raise ArgumentTypeError(
            kind, f"expected one owner of what it holds, got a request for a copy or a pickle; {self._instead}"
        )

    def __dir__(self) -> list[str]:
        """The names that users call."""
        return [name for name in super().__dir__() if name[:2] == "__" or not (name[0] == "_" or name in _INTERNAL)]


class NotAnArray:
    """Not an array. NumPy would wrap it as one Python object; the error names the call that makes an array of it."""

    _as_array: ClassVar[str] = "numpy.asarray(allocation.view(shape, dtype))"

    def _refuse_arrays(self) -> NoReturn:
        raise ArgumentTypeError("array", f"expected a view, got {type(self).__name__}; use {self._as_array}.")

    def __array__(self, *_args: object, **_kwargs: object) -> NoReturn:
        self._refuse_arrays()

    def __dlpack__(self, *_args: object, **_kwargs: object) -> NoReturn:
        self._refuse_arrays()

    __dlpack_device__ = __dlpack__


def check_type(value: object, kind: type[T], argument: str, wanted: str) -> T:
    """Return the value if it has the type."""
    if not isinstance(value, kind):
        raise ArgumentTypeError(argument, f"expected {wanted}, got {type(value).__name__}.")
    return value


def check_int(value: object, argument: str, *, minimum: int = -MAX_SIZE - 1, maximum: int = MAX_64) -> int:
    """Return an int that fits a native field; accepts NumPy's integers and other objects with ``__index__``.

    Refuses a bool, which is usually a misplaced argument.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(argument, f"expected an int, got {type(value).__name__}.") from None
    if not minimum <= number <= maximum:
        wanted = f"expected {_spelled(minimum)} to {_spelled(maximum)}"
        raise InvalidArgumentError(argument, f"{wanted}, got {_shown(number)}.")
    return number


def check_nbytes(value: object, argument: str = "size", *, minimum: int = 1) -> int:
    """Return a number of bytes."""
    if type(value) is int and minimum <= value <= MAX_SIZE:
        return value
    return check_int(value, argument, minimum=minimum, maximum=MAX_SIZE)


def check_flags(value: object, argument: str, *, empty: bool = False) -> int:
    """Return a set of ``Vk*Flags``."""
    return check_int(value, argument, minimum=0 if empty else 1, maximum=MAX_32)


def check_sequence(value: object, argument: str, wanted: str) -> None:
    """Refuse anything but a sequence. A str is refused too."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ArgumentTypeError(argument, f"expected {wanted}, got {value!r}.")


def check_timeout(timeout: Any, argument: str = "timeout") -> float | None:
    """Return any real number of seconds as a float, or None for no limit (None or infinity)."""
    if timeout is None:
        return None
    kind = type(timeout)
    if kind is bool or not (kind is float or issubclass(kind, numbers.Real)):
        raise ArgumentTypeError(argument, f"expected seconds or None, got {kind.__name__}.")
    if timeout == inf:
        return None
    if not 0 <= timeout <= LONGEST_S:  # also false for NaN
        wanted = f"expected 0 to {LONGEST_S:,} seconds, or None for no limit"
        raise InvalidArgumentError(argument, f"{wanted}, got {_shown(timeout)}.")
    return float(timeout)


def _shown(number: object) -> str:
    try:
        return str(number)
    except ValueError:  # Python prints at most 4,300 digits
        return "a number too long to print"


def _spelled(number: int) -> str:
    """Write 2**63 - 1 instead of nineteen digits."""
    bits = number.bit_length()
    return f"2**{bits} - 1" if bits > 16 and number == 2**bits - 1 else str(number)
