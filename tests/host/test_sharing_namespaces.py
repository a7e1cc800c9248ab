"""Exporter and readers in namespaces of their own, as containers have them; only the socket's folder is shared."""

from __future__ import annotations

import os
import subprocess
from typing import Final

import pytest

from tests.limits import LIMIT

from .shells import Raised, Shell, needs_root
from .test_sharing_frames import FRAMES, PUBLISH

UNSHARE: Final = (
    "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--net",
    "--mount",
)  # fmt: skip


@pytest.fixture(autouse=True)
def there_are_some(sockets: object) -> None:
    """GPUINTEROP_REQUIRE_NAMESPACES=1 fails the test, and does not skip it, where none can be made."""
    try:
        problem = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=LIMIT, check=False).stderr
    except OSError as error:
        problem = str(error)
    if problem:
        (pytest.fail if os.environ.get("GPUINTEROP_REQUIRE_NAMESPACES") else pytest.skip)(f"no namespaces: {problem}")


def test_containers() -> None:
    with Shell(*UNSHARE) as exporter, Shell(*UNSHARE) as one, Shell(*UNSHARE) as two:
        exporter("array = array(); share = gi.share(array); share.acquire(); array[:] = 1; share.release()")
        for kind in ("pid", "net", "ipc", "mnt", "user"):
            assert len({each(f"os.readlink('/proc/self/ns/{kind}')") for each in (exporter, one, two)}) == 3
        for reader in (one, two):
            assert reader("os.getpid()") == exporter("os.getpid()") == 1
            reader(f"attached = gi.attach({exporter.descriptor('share')}, timeout=300)")
        for number in range(2, 9):
            exporter(f"share.acquire(timeout=300); array[:] = {number}; share.release()")
            for reader in (one, two):
                assert reader("attached.acquire(timeout=300) or np.unique(attached.view).tolist()") == [number]
                reader("attached.release()")
        one("attached.acquire(timeout=300)")
        one.kill()
        exporter("share.acquire(timeout=300); share.release()")
        exporter.until("leases() == 1")
        exporter.kill()
        two.until("attached._side().failure is not None")
        with pytest.raises(Raised, match=r"PeerError: .*has ended"):
            two("attached.acquire(timeout=300)")


def test_frames_in_containers() -> None:
    with Shell(*UNSHARE) as writer, Shell(*UNSHARE) as one, Shell() as two:
        for each in (writer, one, two):
            each(FRAMES)
        writer(PUBLISH)
        for each in (one, two):
            each("camera = gi.subscribe('camera', timeout=300)")
        for value in range(1, 5):
            writer(f"write({value})")
            for each in (one, two):
                assert each(f"watch({value})[-1]") == [value, value, 0, False]
        with pytest.raises(Raised, match="ResourceBusyError: 'camera' is published already"):
            one("gi.publish('camera', 4)")
        writer.kill()
        one("""def publishes():
            global other
            with contextlib.suppress(gi.ResourceBusyError):
                other = gi.publish('camera', 1 << 16, 'int64')
                return True
        """)
        one.until("publishes()")  # the kernel has ended all of the container
        one("with other.write() as frame: np.asarray(frame)[:] = 9")
        assert two("watch(5)[-1]") == [9, 1, 0, True]
        one("other.close()")


@needs_root
def test_a_user_that_the_namespace_does_not_map() -> None:
    with Shell(*UNSHARE) as exporter, Shell() as reader:
        exporter("array = array(); share = gi.share(array, users=(1234, 65534))")
        reader(f"descriptor = {exporter.descriptor('share')}; gi.device(); server.boot_id()")
        reader("os.setgroups([]); os.setuid(1234)")
        with pytest.raises(Raised, match=r"user 65534\b.*namespaces"):
            reader("gi.attach(descriptor, timeout=300, users=(0,))")
