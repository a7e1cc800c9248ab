"""Pages that a device keeps for its next semaphores: a test that counts what is left lets go of them first."""

from gpuinterop._core.device import Device
from gpuinterop._core.own_timeline import OwnTimelines, Spare


def unpin_spare_pages(device: Device) -> None:
    for kept in device._opened.values():
        spare = kept._spare if isinstance(kept, OwnTimelines) else kept
        while isinstance(spare, Spare) and spare._pages:
            spare._pages.pop().close()
