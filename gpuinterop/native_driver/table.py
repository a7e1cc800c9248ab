"""A vendor's names, numbers and the few behaviours that differ."""

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
        Prefix of the driver's function names.
    names : mapping of str to str
        Functions whose names are not the prefix and the name used here, such as ``{"MemFree": "hipFree"}``.
    memory_types, semaphore_types : mapping of type to int
        The driver's number of each handle type that it can import.
    default_stream : int
        The handle of the default stream. Users pass 0 or 1 for it.
    last_default_stream : int
        The largest stream number that means a default stream of the current context or device.
    dlpack : int
        DLPack's device type.
    array_uses : mapping of ArrayUsage to int
        The flag for each use of a mipmapped array.
    import_takes_fd : bool
        Whether a successful import of memory owns the file descriptor. If not, the backend closes it.
    types_without_flags : tuple of type
        Memory handles that must be imported without flags.
    copy_kind, wait_mask : tuple of int
        Further arguments: of ``MemcpyAsync`` before the stream, of ``StreamWaitValue64`` at the end.
    least_granularity : int
        Granularity of allocations in bytes, if the driver reports a smaller one.
    meanings : mapping of (str, int) to str
        The meaning of a status from a given call, in addition to `errors.MEANINGS`.
    other_meanings : mapping of int to str
        The meaning of a status from any other call, in addition to `errors.OTHER_MEANINGS`.
    not_out_of_memory : tuple of str
        Calls whose status 2 has a meaning other than a lack of memory.
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
