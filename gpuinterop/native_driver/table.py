"""What a vendor writes of its driver: names, numbers and the few habits that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..handles import ArrayUsage, Handle


@dataclass(frozen=True, kw_only=True)
class Table:
    """The calls and constants of one vendor's driver.

    Attributes
    ----------
    title : str
        The vendor's API in messages.
    prefix : str
        What the names of the driver's functions begin with.
    names : mapping of str to str
        Functions that are not the prefix and the name used here, such as ``{"MemFree": "hipFree"}``.
    memory_types, semaphore_types : mapping of type to int
        The driver's number of each handle type that it imports.
    default_stream : int
        The handle of the default stream, which users call 0 or 1.
    last_default_stream : int
        The largest stream number that means a default stream of the current context or device.
    dlpack : int
        DLPack's device type.
    array_uses : mapping of ArrayUsage to int
        The flag of a mipmapped array for each use.
    import_takes_fd : bool
        Whether a successful import of memory owns the file descriptor. If not, the backend closes it.
    types_without_flags : tuple of type
        Memory handles for which the driver takes no flags.
    copy_kind, wait_mask : tuple of int
        Further arguments: of ``MemcpyAsync`` before the stream, of ``StreamWaitValue64`` at the end.
    least_granularity : int
        Allocations are multiples of this many bytes, even where the driver reports less.
    meanings : mapping of (str, int) to str
        The meaning of a status from a given call, beside those of `errors.MEANINGS`.
    other_meanings : mapping of int to str
        The meaning of a status from any other call, beside those of `errors.OTHER_MEANINGS`.
    not_out_of_memory : tuple of str
        Calls whose status 2 does not say that memory is lacking.
    """

    title: str
    prefix: str
    names: Mapping[str, str]
    memory_types: Mapping[type[Handle], int]
    semaphore_types: Mapping[type[Handle], int]
    default_stream: int
    last_default_stream: int
    dlpack: int
    array_uses: Mapping[ArrayUsage, int]
    import_takes_fd: bool
    types_without_flags: tuple[type[Handle], ...] = ()
    copy_kind: tuple[int, ...] = ()
    wait_mask: tuple[int, ...] = ()
    least_granularity: int = 0
    meanings: Mapping[tuple[str, int], str]
    other_meanings: Mapping[int, str]
    not_out_of_memory: tuple[str, ...] = ()
