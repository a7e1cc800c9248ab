#!/usr/bin/env bash
# Run a command in a checkout of HEAD on another Debian, in a separate root file system: as root, with debootstrap.
#
#   tools/other_debian.sh SUITE [--no-compiler] [--mesa] [--no-vulkan] [COMMAND]    default: make demo && make test
#
# SUITE is bookworm, trixie or sid. --mesa installs Debian's own drivers. With --no-vulkan, apt has no sources, so no
# driver can be fetched. The root is kept in ${OTHER_DEBIANS:-/tmp/other-debians}, so later runs start at once.
set -euo pipefail
suite=${1:?bookworm, trixie or sid}
shift
compiler=",gcc,libc6-dev" mesa='' sources=kept
while [[ ${1:-} == --* ]]; do
    case $1 in
        --no-compiler) compiler='' ;;
        --mesa) mesa=",mesa-vulkan-drivers,libvulkan1,libegl1,libgl1" ;;
        --no-vulkan) sources='' ;;
        *) echo "expected --no-compiler, --mesa or --no-vulkan, got $1" >&2 && exit 2 ;;
    esac
    shift
done
command=${*:-make demo && make test}
checkout=$(git rev-parse --show-toplevel)
root=${OTHER_DEBIANS:-/tmp/other-debians}/$suite${compiler:+-cc}${mesa:+-mesa}${sources:+-apt}
command -v debootstrap >/dev/null ||
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends debootstrap >/dev/null; }
if [[ ! -e $root/.ready ]]; then
    mirror=$(grep -hm1 -E '^URIs:|^deb ' /etc/apt/sources.list.d/*.sources /etc/apt/sources.list 2>/dev/null |
        grep -oE "https?://[^ ]+" | head -1 || true)
    mkdir -p "$root"
    debootstrap --variant=minbase --include="make,git,ca-certificates,python3,python3-venv,procps$compiler$mesa" \
        "$suite" "$root" "$mirror" >"$root.log" 2>&1 || { tail -5 "$root.log" && exit 1; }
    [[ -n $sources ]] || rm -f "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*
    touch "$root/.ready"
fi
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
    [[ ! -e $file ]] || cp "$file" "$root$file"
done
leave() { for one in dev/pts dev/shm dev proc sys; do umount "$root/$one" 2>/dev/null || true; done; }
trap leave EXIT
leave # after a run that was killed
for one in dev dev/pts dev/shm sys; do mount --bind "/$one" "$root/$one"; done
mount -t proc proc "$root/proc"
rm -rf "$root/root/checkout"
git clone -q "$checkout" "$root/root/checkout"
certificates=/etc/ssl/certs/ca-certificates.crt
env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    SSL_CERT_FILE=$certificates PIP_CERT=$certificates \
    chroot "$root" bash -c "cd /root/checkout && python3 --version && $command"
