"""The identity and the capabilities of the current context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._context import current_context

if TYPE_CHECKING:
    from ..capabilities import Capabilities
    from ..handles import DeviceIdentity
    from ._api import Lookup


def identity(*, get_proc_address: Lookup | None = None) -> DeviceIdentity:
    """Identify the current context's device for ``gpuinterop.match_device``.

    Reads ``GL_DEVICE_UUID_EXT`` and ``GL_DRIVER_UUID_EXT``, which need ``GL_EXT_memory_object``.

    Parameters
    ----------
    get_proc_address : callable, optional
        See :func:`share_buffer`.

    Returns
    -------
    DeviceIdentity

    Raises
    ------
    InvalidArgumentError
        No context is current in the calling thread.

    Examples
    --------
    >>> device = gi.match_device(gi.opengl.identity())
    """
    return current_context(get_proc_address).identity


def capabilities(*, get_proc_address: Lookup | None = None) -> Capabilities:
    """Return the current context's capabilities, as :func:`gpuinterop.vulkan.capabilities` does a driver's.

    Usable are ``import_memory:opaque_fd``, ``map_buffer:opaque_fd`` and ``map_mipmapped_array:opaque_fd`` if the
    context imports Vulkan's memory, ``import_semaphore:timeline_fd`` if it imports Vulkan's timelines, and
    ``export_allocation:vmm_fd`` and ``export_array:vmm_fd`` if it imports a device's allocations.

    Parameters
    ----------
    get_proc_address : callable, optional
        See :func:`share_buffer`.

    Returns
    -------
    Capabilities

    Raises
    ------
    InvalidArgumentError
        See :func:`identity`.

    Examples
    --------
    >>> table = gi.opengl.capabilities()
    >>> table.supports((gi.Operation.MAP_BUFFER, gi.OpaqueFd))
    True
    """
    return current_context(get_proc_address).capabilities
