/*
 * Fabric handles: 64 bytes that name memory or a multicast object to another process. They hold no reference. Only a
 * process that can use the same channel (on NVIDIA: an IMEX channel's device node) can make and import them.
 */
#define _GNU_SOURCE
#include "gis.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    char magic[16];
    int32_t process, fd;
    uint64_t inode;
    char channel[32];
} fabric_handle;
_Static_assert(sizeof(fabric_handle) == GIS_FABRIC_BYTES, "CUmemFabricHandle, hipMemFabricHandle_t");

#define MAGIC "gpuinterop.sim"

static const char *channel(void) {
    const char *name = getenv("GPUINTEROP_SIM_FABRIC");
    return name && *name ? name : NULL;
}

bool gis_fabric_usable(void) { return channel() != NULL; }

/* Killed, but not reaped yet: only root can read such a process's files. */
static bool is_dead(pid_t process) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "r");
    if (!file) return true;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && (name_end[2] == 'Z' || name_end[2] == 'X');
}

gis_status gis_open_theirs(pid_t process, int fd, uint64_t inode, int *found) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)process, fd);
    *found = open(path, O_RDWR | O_CLOEXEC);
    if (*found < 0) {
        bool gone = errno == ENOENT || errno == ESRCH || (errno == EACCES && is_dead(process));
        return gone ? GIS_INVALID_VALUE : GIS_UNKNOWN;
    }
    int failed = fstat(*found, &status);
    if (!failed && status.st_ino == inode) return GIS_OK;
    close(*found); /* the number now belongs to another file, or to another process's */
    return failed ? GIS_UNKNOWN : GIS_INVALID_VALUE;
}

gis_status gis_fabric_export(const gis_vmm_handle *handle, void *data) {
    struct stat status;
    if (!(handle->handle_types & GIS_FABRIC)) return GIS_INVALID_VALUE;
    if (!channel()) return GIS_NOT_PERMITTED;
    if (fstat(handle->fd, &status)) return GIS_UNKNOWN;
    fabric_handle made = {.magic = MAGIC, .process = getpid(), .fd = handle->fd, .inode = status.st_ino};
    snprintf(made.channel, sizeof made.channel, "%s", channel());
    memcpy(data, &made, sizeof made);
    return GIS_OK;
}

gis_status gis_fabric_import(const void *data, gis_vmm_handle **handle) {
    fabric_handle it;
    memcpy(&it, data, sizeof it);
    if (memcmp(it.magic, MAGIC, sizeof MAGIC)) return GIS_INVALID_VALUE;
    if (!channel() || strncmp(it.channel, channel(), sizeof it.channel - 1)) return GIS_NOT_PERMITTED;
    int fd;
    gis_status status = gis_open_theirs(it.process, it.fd, it.inode, &fd);
    if (status) return status;
    status = gis_vmm_import(fd, handle);
    close(fd);
    return status;
}
