"""A vendor's names, numbers and the few behaviours that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..handles import ArrayUsage, Handle


@dataclass(frozen=True, kw_only=True)
class Table:
    """The calls and constants of one vendor's driver."""

    title: str  # the vendor's API in messages
    prefix: str  # of the driver's function names
    names: Mapping[str, str]  # that differ from the prefix and the name used here: {"MemFree": "hipFree"}
    memory_types: Mapping[type[Handle], int]  # the driver's number of each handle type that it can import
    semaphore_types: Mapping[type[Handle], int]
    default_stream: int  # the default stream's handle; users pass 0 or 1
    last_default_stream: int  # largest number of a default stream of the current context or device
    dlpack: int  # DLPack's device type
    array_uses: Mapping[ArrayUsage, int]  # the flag for each use of a mipmapped array
    import_takes_fd: bool  # whether a successful import of memory owns the descriptor; else the backend closes it
    types_without_flags: tuple[type[Handle], ...] = ()  # memory handles that must be imported without flags
    copy_kind: tuple[int, ...] = ()  # further arguments of MemcpyAsync, before the stream
    wait_mask: tuple[int, ...] = ()  # further arguments of StreamWaitValue64, at the end
    least_granularity: int = 0  # of allocations in bytes, if the driver reports less
    meanings: Mapping[tuple[str, int], str]  # of a status from a given call, in addition to `errors.MEANINGS`
    other_meanings: Mapping[int, str]  # of a status from any other call, in addition to `errors.OTHER_MEANINGS`
    not_out_of_memory: tuple[str, ...] = ()  # calls whose status 2 does not mean a lack of memory
