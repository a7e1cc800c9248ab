/*
 * Memory that other processes open through 64 bytes. These name a socket, on which the exporter sends the descriptor.
 * So every namespace that sees the socket's folder can open it, and no process needs access to another's files.
 * The folder is GPUINTEROP_SIM_IPC, or the folder of temporary files.
 */
#define _GNU_SOURCE
#include "gis.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define MAGIC "gis.ipc"
#define PATIENCE 300 /* seconds to wait for an exporter that may be stopped */

typedef struct {
    char magic[8];
    int32_t process, device;
    uint64_t door, offset;
    char unused[32];
} ipc_handle;
_Static_assert(sizeof(ipc_handle) == 64, "CUipcMemHandle, hipIpcMemHandle_t");

struct gis_door {
    uint64_t number;
    int listening, file; /* file: the memory's own */
    pthread_t thread;
    struct sockaddr_un place;
    gis_door *next;
};

static gis_door *doors; /* of exported memory that is not freed */

static bool place_of(uint64_t number, struct sockaddr_un *place) {
    const char *folder = getenv("GPUINTEROP_SIM_IPC");
    if (!folder || !*folder) folder = getenv("TMPDIR");
    if (!folder || !*folder) folder = "/tmp";
    *place = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t length = (size_t)snprintf(place->sun_path, sizeof place->sun_path, "%s/gis.ipc.%016llx", folder,
                                     (unsigned long long)number);
    return length < sizeof place->sun_path;
}

/* Send or receive one byte, with a descriptor (sent if *fd >= 0). */
static bool pass(int socket, int *fd) {
    char byte = 0, room[CMSG_SPACE(sizeof *fd)] __attribute__((aligned(8))) = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (*fd < 0) {
        ssize_t got = TEMP_FAILURE_RETRY(recvmsg(socket, &message, MSG_CMSG_CLOEXEC));
        if (got != 1 || !(head = CMSG_FIRSTHDR(&message))) return false;
        memcpy(fd, CMSG_DATA(head), sizeof *fd);
        return true;
    }
    *head = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof *fd)};
    memcpy(CMSG_DATA(head), fd, sizeof *fd);
    return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

static void *serve(void *argument) {
    gis_door *door = argument;
    int caller;
    pthread_setname_np(pthread_self(), GIS_THREAD);
    while ((caller = accept4(door->listening, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        pass(caller, &door->file);
        close(caller);
    }
    return NULL;
}

static gis_door *open_door(int file) {
    gis_door *door = calloc(1, sizeof *door);
    if (!door) abort();
    door->file = file;
    door->listening = gis_keep(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (getrandom(&door->number, sizeof door->number, 0) == sizeof door->number &&
        place_of(door->number, &door->place) &&
        !bind(door->listening, (struct sockaddr *)&door->place, sizeof door->place)) {
        if (!listen(door->listening, 64) && gis_start_thread(serve, door, &door->thread)) {
            door->next = doors;
            return doors = door;
        }
        unlink(door->place.sun_path);
    }
    close(door->listening);
    free(door);
    return NULL;
}

void gis_close_door(gis_door *door) {
    gis_door **link = &doors;
    while (*link != door) link = &(*link)->next;
    *link = door->next;
    unlink(door->place.sun_path);
    shutdown(door->listening, SHUT_RDWR);
    pthread_join(door->thread, NULL);
    close(door->listening);
    free(door);
}

__attribute__((destructor)) static void leave_none(void) {
    for (gis_door *door = gis_forked ? NULL : doors; door; door = door->next) unlink(door->place.sun_path);
}

gis_status gis_ipc_export(gis_range *range, uint64_t offset, void *data) {
    if (!range->door && !(range->door = open_door(range->fd))) return GIS_UNKNOWN;
    ipc_handle made = {MAGIC, getpid(), range->object.device, range->door->number, offset, {0}};
    memcpy(data, &made, sizeof made);
    return GIS_OK;
}

gis_status gis_ipc_read(const void *data, uint64_t *door, int *device) {
    ipc_handle it;
    memcpy(&it, data, sizeof it);
    if (memcmp(it.magic, MAGIC, sizeof MAGIC)) return GIS_INVALID_VALUE;
    if (it.process == getpid()) return GIS_INVALID_CONTEXT; /* also in another namespace: only the number counts */
    *door = it.door;
    *device = it.device;
    return GIS_OK;
}

int gis_ipc_fetch(uint64_t door) {
    struct sockaddr_un place;
    struct timeval patience = {PATIENCE, 0};
    int fd = -1, asking = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (place_of(door, &place) && !setsockopt(asking, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) &&
        !TEMP_FAILURE_RETRY(connect(asking, (struct sockaddr *)&place, sizeof place)) && !pass(asking, &fd))
        fd = -1;
    if (asking >= 0) close(asking);
    return fd;
}
