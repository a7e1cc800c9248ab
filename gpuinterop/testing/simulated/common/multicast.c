/*
 * Multicast objects: a write to one reaches the memory of every device of its team.
 *
 * Its state is in a memfd, which its handle exports: the added devices, and what each process has bound where. A
 * process writes to another one's bound memory through /proc/PID/fd. What a driver does with the share of a killed
 * process is not documented: here its devices stay added, and its memory is gone.
 */
#define _GNU_SOURCE
#include "gis.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARES 64
#define LOOK_SECONDS 0.001 /* other processes cannot wake this one */

typedef struct {
    bool taken;
    int device;
    pid_t process;
    int fd;                       /* of the memory, in that process, */
    uint64_t inode;               /* and its expected inode */
    uint64_t offset, size, start; /* where in the object, how much, where in the memory */
} share;

struct gis_team {
    pthread_mutex_t mutex; /* robust: a process can be killed while it holds it */
    uint64_t size;
    uint32_t count, handle_types;
    uint32_t added; /* bit n: device n */
    share shares[SHARES];
};

typedef struct {
    gis_object object;
    gis_vmm_handle *group, *memory; /* holds a reference to the memory; the group ends its bindings */
    int index;
} binding;

static void lock(gis_team *team) {
    if (pthread_mutex_lock(&team->mutex) == EOWNERDEAD) pthread_mutex_consistent(&team->mutex);
}

static void unlock(gis_team *team) { pthread_mutex_unlock(&team->mutex); }

/* -- objects and handles ------------------------------------------------------------------------------------------- */

static gis_status attach(int fd, bool imported, gis_vmm_handle **group) {
    gis_team *team = mmap(NULL, sizeof *team, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (team == MAP_FAILED) {
        close(fd);
        return GIS_OUT_OF_MEMORY;
    }
    *group = gis_vmm_new(GIS_MULTICAST, 0, fd, team->size, imported);
    (*group)->handle_types = imported ? 0 : team->handle_types;
    (*group)->team = team;
    return GIS_OK;
}

gis_status gis_multicast_attach(int fd, gis_vmm_handle **group) { return attach(fd, true, group); }

gis_status gis_multicast_create(uint32_t devices, size_t size, uint32_t handle_types, gis_vmm_handle **group) {
    if (!devices || devices > GIS_MAX_DEVICES || !size || size % GIS_GRANULARITY) return GIS_INVALID_VALUE;
    if (handle_types & GIS_FABRIC && !gis_fabric_usable()) return GIS_NOT_PERMITTED;
    gis_team start = {.size = size, .count = devices, .handle_types = handle_types};
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&start.mutex, &attributes);
    char name[64];
    snprintf(name, sizeof name, GIS_MULTICAST_NAME "%llu", (unsigned long long)gis_new_id());
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return GIS_OUT_OF_MEMORY;
    if (write(fd, &start, sizeof start) != sizeof start ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        close(fd);
        return GIS_OUT_OF_MEMORY;
    }
    return attach(fd, false, group);
}

/* -- the team ------------------------------------------------------------------------------------------------------ */

static uint32_t added(const gis_vmm_handle *group) { return __atomic_load_n(&group->team->added, __ATOMIC_ACQUIRE); }

bool gis_multicast_has(const gis_vmm_handle *group, int device) { return added(group) & 1u << device; }

static bool complete(const gis_vmm_handle *group) {
    return (uint32_t)__builtin_popcount(added(group)) == group->team->count;
}

gis_status gis_multicast_add(gis_vmm_handle *group, int device) {
    lock(group->team);
    bool refused = complete(group) || gis_multicast_has(group, device);
    if (!refused) __atomic_or_fetch(&group->team->added, 1u << device, __ATOMIC_RELEASE);
    unlock(group->team);
    if (refused) return GIS_INVALID_VALUE;
    pthread_cond_broadcast(&gis_progress);
    return GIS_OK;
}

/* A driver blocks for ever; here that would look like a hang. */
static double patience(void) {
    const char *seconds = getenv("GPUINTEROP_SIM_TEAM_SECONDS");
    return seconds && *seconds ? atof(seconds) : 300.0;
}

gis_status gis_multicast_wait(gis_vmm_handle *group) {
    if (complete(group)) return GIS_OK;
    struct timespec until, slice, now;
    double seconds = patience();
    gis_deadline(&until, seconds);
    gis_ref(&group->object);
    gis_hold(1);
    bool late = false;
    while (!complete(group) && !late) {
        gis_deadline(&slice, LOOK_SECONDS);
        pthread_cond_timedwait(&gis_progress, &gis_mutex, &slice);
        gis_deadline(&now, 0);
        late = now.tv_sec > until.tv_sec || (now.tv_sec == until.tv_sec && now.tv_nsec >= until.tv_nsec);
    }
    gis_hold(-1);
    if (late && !complete(group))
        gis_violation("%d of %u devices were added to the multicast object after %g s: the driver would block for ever",
                      __builtin_popcount(added(group)), group->team->count, seconds);
    gis_status status = !complete(group) ? GIS_UNKNOWN : group->object.live ? GIS_OK : GIS_INVALID_VALUE;
    gis_unref(&group->object);
    return status;
}

/* -- bindings ------------------------------------------------------------------------------------------------------ */

static gis_status open_share(const share *it, int *fd) {
    return gis_open_theirs(it->process, it->fd, it->inode, fd);
}

/* Remove the bindings of processes that have exited. */
static gis_status sweep(gis_team *team) {
    for (share *it = team->shares; it < team->shares + SHARES; it++) {
        int fd;
        if (!it->taken) continue;
        gis_status status = open_share(it, &fd);
        if (status == GIS_UNKNOWN) return status;
        if (status)
            it->taken = false;
        else
            close(fd);
    }
    return GIS_OK;
}

static gis_status take_share(gis_team *team, const share *wanted, int *index) {
    gis_status status = sweep(team);
    if (status) return status;
    *index = -1;
    for (int i = SHARES - 1; i >= 0; i--) {
        const share *it = &team->shares[i];
        if (!it->taken)
            *index = i;
        else if (it->device == wanted->device && it->offset < wanted->offset + wanted->size &&
                 wanted->offset < it->offset + it->size)
            return GIS_INVALID_VALUE;
    }
    if (*index < 0) return GIS_MULTICAST_FULL;
    team->shares[*index] = *wanted;
    return GIS_OK;
}

static void finish_binding(gis_object *object) {
    binding *it = (binding *)object;
    gis_team *team = it->group->team;
    lock(team);
    team->shares[it->index].taken = false;
    unlock(team);
    it->memory->bindings--;
    gis_unref(&it->memory->object);
}

static bool fits(size_t offset, size_t size, size_t room) {
    return size && (offset | size) % GIS_GRANULARITY == 0 && offset <= room && size <= room - offset;
}

gis_status gis_multicast_bind(gis_vmm_handle *group, int device, size_t offset, gis_vmm_handle *memory, size_t start,
                              size_t size, gis_object *named) {
    gis_ref(named); /* which keeps the memory while the lock is not held */
    gis_status status = gis_multicast_wait(group);
    int index;
    struct stat file;
    if (!status && !named->live) {
        gis_violation("the memory was released or unmapped while it was being bound");
        status = GIS_INVALID_VALUE;
    }
    if (!status && (!fits(offset, size, group->size) || !fits(start, size, memory->size))) status = GIS_INVALID_VALUE;
    if (!status && (memory->object.device != device || !gis_multicast_has(group, device))) status = GIS_INVALID_DEVICE;
    if (!status && (group->handle_types || group->imported) && !memory->handle_types) status = GIS_INVALID_VALUE;
    if (!status && fstat(memory->fd, &file)) status = GIS_UNKNOWN;
    if (!status) {
        share wanted = {true, device, getpid(), memory->fd, file.st_ino, offset, size, start};
        lock(group->team);
        status = take_share(group->team, &wanted, &index);
        unlock(group->team);
    }
    if (!status) {
        binding *made = gis_new(GIS_MULTICAST_BINDING, sizeof *made, NULL, device, finish_binding);
        made->group = group;
        made->memory = memory;
        made->index = index;
        memory->bindings++;
        gis_ref(&memory->object);
    }
    gis_unref(named);
    return status;
}

typedef struct {
    const gis_vmm_handle *group;
    int device; /* -1: any binding of the group */
    uint64_t offset, size;
    binding *found;
} search;

static void look(gis_object *object, void *argument) {
    binding *it = (binding *)object;
    search *wanted = argument;
    if (it->group != wanted->group) return;
    const share *at = &it->group->team->shares[it->index];
    bool same = at->device == wanted->device && at->offset == wanted->offset && at->size == wanted->size;
    if (wanted->device < 0 || same) wanted->found = it;
}

gis_status gis_multicast_unbind(gis_vmm_handle *group, int device, size_t offset, size_t size) {
    if (!gis_multicast_has(group, device)) return GIS_INVALID_DEVICE;
    if (!fits(offset, size, group->size)) return GIS_INVALID_VALUE;
    search wanted = {group, device, offset, size, NULL};
    gis_each(GIS_MULTICAST_BINDING, look, &wanted);
    if (!wanted.found) {
        gis_violation("nothing of device %d was bound at %#zx (%zu bytes) by this process: the driver does anything",
                      device, offset, size);
        return GIS_INVALID_VALUE;
    }
    gis_note_if_used(&group->object, "");
    gis_retire(&wanted.found->object);
    return GIS_OK;
}

void gis_multicast_finish(gis_vmm_handle *group) {
    for (;;) {
        search any = {group, -1, 0, 0, NULL};
        gis_each(GIS_MULTICAST_BINDING, look, &any);
        if (!any.found) break;
        gis_violation("the multicast object %#llx is released while memory of device %d is bound to it",
                      (unsigned long long)group->object.id, any.found->object.device);
        gis_retire(&any.found->object);
    }
    munmap(group->team, sizeof *group->team);
}

/* -- the work of multimem instructions ----------------------------------------------------------------------------- */

typedef bool visit(int fd, uint32_t *words, size_t bytes, off_t at);

static bool write_words(int fd, uint32_t *words, size_t bytes, off_t at) {
    return pwrite(fd, words, bytes, at) == (ssize_t)bytes;
}

static bool add_words(int fd, uint32_t *words, size_t bytes, off_t at) {
    uint32_t *theirs = malloc(bytes);
    bool done = theirs && pread(fd, theirs, bytes, at) == (ssize_t)bytes;
    for (size_t i = 0; done && i < bytes / sizeof *words; i++) words[i] += theirs[i];
    free(theirs);
    return done;
}

/* Visit what the device has bound there, except memory of processes that have exited. */
static gis_status visit_device(gis_team *team, int device, uint64_t offset, uint32_t *words, size_t bytes,
                               visit *call) {
    size_t covered = 0;
    for (const share *it = team->shares; it < team->shares + SHARES; it++) {
        uint64_t first = offset > it->offset ? offset : it->offset;
        uint64_t end = offset + bytes < it->offset + it->size ? offset + bytes : it->offset + it->size;
        int fd;
        if (!it->taken || it->device != device || first >= end) continue;
        gis_status status = open_share(it, &fd);
        if (!status) {
            uint32_t *part = words + (first - offset) / sizeof *words;
            if (!call(fd, part, end - first, (off_t)(it->start + first - it->offset))) status = GIS_UNKNOWN;
            close(fd);
        }
        if (status == GIS_UNKNOWN) {
            gis_violation("memory of device %d could not be reached", device);
            return status;
        }
        covered += end - first;
    }
    if (covered == bytes) return GIS_OK;
    gis_violation("device %d has no memory bound to all of the multicast object's %zu bytes from %#zx on", device,
                  bytes, offset);
    return GIS_ILLEGAL_ADDRESS;
}

static gis_status visit_all(gis_vmm_handle *group, size_t offset, uint32_t *words, size_t count, visit *call) {
    gis_status status = GIS_OK;
    lock(group->team);
    for (int device = 0; device < GIS_MAX_DEVICES; device++) {
        if (!gis_multicast_has(group, device)) continue;
        gis_status found = visit_device(group->team, device, offset, words, count * sizeof *words, call);
        if (found) status = found;
    }
    unlock(group->team);
    return status;
}

gis_status gis_multicast_store(gis_vmm_handle *group, size_t offset, uint32_t *words, size_t count) {
    return visit_all(group, offset, words, count, write_words);
}

gis_status gis_multicast_sum(gis_vmm_handle *group, size_t offset, uint32_t *words, size_t count) {
    memset(words, 0, count * sizeof *words);
    return visit_all(group, offset, words, count, add_words);
}
