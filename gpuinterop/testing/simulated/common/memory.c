/*
 * Memory: addresses, plain and pinned allocations, external memory, virtual memory management.
 *
 * Device addresses come from a separate zone and are never reused. So a use after free is caught, and does not reach
 * memory that was mapped there later.
 */
#define _GNU_SOURCE
#include "gis.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALIGNMENT ((uintptr_t)64 << 10)
#define VMM_NAME "gpuinterop.simulated.vmm."
#define SWIFTSHADER_EXTRA 15 /* a SwiftShader memory object has this many more bytes than the allocation */

static uintptr_t zone, zone_end, zone_used;
static gis_range *ranges;

static bool make_zone(void) {
    if (zone) return true;
    /* Address space is free, but limited for some processes: by a limit, or under valgrind. */
    for (size_t size = (size_t)4 << 40; size >= (size_t)16 << 30; size >>= 2) {
        void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) continue;
        zone = (uintptr_t)found;
        zone_end = zone + size;
        zone_used = (zone + GIS_GRANULARITY - 1) & ~(GIS_GRANULARITY - 1);
        return true;
    }
    return false;
}

static uintptr_t take_addresses(size_t bytes, uintptr_t alignment) {
    if (!make_zone()) return 0;
    uintptr_t start = (zone_used + alignment - 1) & ~(alignment - 1);
    if (bytes > zone_end - start) return 0;
    zone_used = start + ((bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1)) + ALIGNMENT; /* a hole, to catch overruns */
    return start;
}

static void give_back(uintptr_t start, size_t bytes) {
    if (bytes)
        mmap((void *)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

bool gis_is_freed(uintptr_t address) {
    return address >= zone && address < zone_end && !gis_range_at(address) && !gis_reservation_at(address);
}

int gis_keep(int fd) {
    struct rlimit limit;
    int high = -1;
    if (!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur > 700) high = fcntl(fd, F_DUPFD_CLOEXEC, 600);
    if (high < 0) return fd;
    close(fd);
    return high;
}

static size_t round_to_page(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) & ~(page - 1);
}

/* -- ranges -------------------------------------------------------------------------------------------------------- */

/* Ranges overlap if one object gives all its buffers the same addresses. This finds the one that begins last, as CLR's
 * map does (rocclr/device/device.cpp, MemObjMap::FindMemObj). */
gis_range *gis_range_at(uintptr_t address) {
    gis_range *found = NULL;
    for (gis_range *range = ranges; range; range = range->next)
        if (address >= range->base && address - range->base < range->size && (!found || range->base > found->base))
            found = range;
    return found;
}

static void finish_range(gis_object *object) {
    gis_range *range = (gis_range *)object;
    give_back(range->pages, range->page_bytes); /* the reservation of a VMM mapping stays */
    if (object->kind == GIS_ALLOCATION) gis_devices[object->device].used -= range->size;
    if (range->door) gis_close_door(range->door);
    if (range->fd >= 0) close(range->fd);
    if (range->owner) gis_unref(range->owner);
}

static gis_range *new_range(gis_kind kind, gis_context *context, int device, uintptr_t base, size_t size,
                            uintptr_t pages, size_t page_bytes, gis_object *owner) {
    gis_range *range = gis_new(kind, sizeof *range, context, device, finish_range);
    range->base = base;
    range->size = size;
    range->pages = pages;
    range->page_bytes = page_bytes;
    range->access = ~0u;
    range->lands = base;
    range->settles = device;
    range->owner = owner;
    range->fd = -1;
    if (owner) gis_ref(owner);
    range->next = ranges;
    ranges = range;
    return range;
}

/* Remove it from the list at once; unmap it when the last operation has finished with it. */
static void end_range(gis_range *range) {
    for (gis_range **link = &ranges; *link; link = &(*link)->next) {
        if (*link == range) {
            *link = range->next;
            break;
        }
    }
    if (range->object.kind == GIS_MAPPING && range->owner) ((gis_external_memory *)range->owner)->mappings--;
    gis_retire(&range->object);
}

/* NULL: out of memory. With a descriptor, other processes can map the memory too. */
static gis_range *map_memory(gis_kind kind, gis_context *context, size_t size, int fd) {
    size_t bytes = round_to_page(size);
    uintptr_t start = take_addresses(bytes, ALIGNMENT);
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    if (!start) return NULL;
    void *found = mmap((void *)start, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE | MAP_FIXED, fd, 0);
    if (found == MAP_FAILED) return NULL;
    return new_range(kind, context, context->object.device, start, size, start, bytes, NULL);
}

static gis_status allocate(gis_kind kind, gis_context *context, size_t size, gis_sort sort, uintptr_t *address) {
    gis_device *device = &gis_devices[context->object.device];
    if (!size) return GIS_INVALID_VALUE;
    if (kind == GIS_ALLOCATION && (size > device->total || device->used > device->total - size))
        return GIS_OUT_OF_MEMORY;
    bool shared = kind == GIS_ALLOCATION && sort == GIS_PLAIN;
    int fd = shared ? gis_keep(memfd_create("gpuinterop.simulated.allocation", MFD_CLOEXEC)) : -1;
    gis_range *range = shared && (fd < 0 || ftruncate(fd, (off_t)size)) ? NULL : map_memory(kind, context, size, fd);
    if (!range) {
        if (fd >= 0) close(fd);
        return GIS_OUT_OF_MEMORY;
    }
    range->fd = fd;
    range->sort = sort;
    if (kind == GIS_ALLOCATION) device->used += size;
    *address = range->base;
    return GIS_OK;
}

gis_status gis_allocate(gis_context *context, size_t size, gis_sort sort, uintptr_t *address) {
    return allocate(GIS_ALLOCATION, context, size, sort, address);
}

gis_status gis_allocate_host(gis_context *context, size_t size, uintptr_t *address) {
    return allocate(GIS_HOST_ALLOCATION, context, size, GIS_PLAIN, address);
}

gis_status gis_register_host(gis_context *context, uintptr_t address, size_t size) {
    if (!address || !size) return GIS_INVALID_VALUE;
    for (gis_range *range = ranges; range; range = range->next)
        if (address < range->base + range->size && range->base < address + size) return GIS_HOST_ALREADY_REGISTERED;
    new_range(GIS_REGISTRATION, context, context->object.device, address, size, 0, 0, NULL);
    return GIS_OK;
}

/*
 * A release waits for all work of the device, and every other call of the process waits for the release, including the
 * call that would signal what the device waits for. Here that has a limit, or the mistake would look like a hang.
 */
#define SETTLE_SECONDS 10.0

void gis_settle(int device) {
    gis_settling++;
    if (!gis_device_settle(device, SETTLE_SECONDS))
        gis_violation("work was pending for %g s: the driver would block until it is done, and with it every call",
                      SETTLE_SECONDS);
    gis_settling--;
    pthread_cond_broadcast(&gis_progress);
}

gis_status gis_free(gis_kind first, gis_kind second, uintptr_t address) {
    gis_range *range = gis_range_at(address);
    if (!range || range->base != address || (range->object.kind != first && range->object.kind != second)) {
        bool freed = gis_is_freed(address);
        gis_violation("%#llx is no memory to be freed with this call%s", (unsigned long long)address,
                      freed ? ": it was freed before" : "");
        return first == GIS_REGISTRATION ? GIS_HOST_NOT_REGISTERED : GIS_INVALID_VALUE;
    }
    gis_ref(&range->object);
    if (--range->opens <= 0) {
        gis_note_if_used(&range->object, "");
        end_range(range);
    }
    gis_settle(range->settles); /* measured: cuMemHostUnregister waits too */
    gis_unref(&range->object);
    return GIS_OK;
}

gis_status gis_free_later(uintptr_t address) {
    gis_range *range = gis_range_at(address);
    if (!range || range->base != address || range->object.kind != GIS_ALLOCATION) return GIS_INVALID_VALUE;
    end_range(range);
    return GIS_OK;
}

static gis_range *opened_by(uint64_t door, const gis_context *context) {
    gis_range *range = ranges;
    while (range && (range->opened != door || range->object.context != context)) range = range->next;
    return range;
}

gis_status gis_ipc_open(gis_context *context, const void *data, uintptr_t *address) {
    uint64_t door;
    int owner, mine = context->object.device;
    gis_status status = gis_ipc_read(data, &door, &owner);
    if (status) return status;
    gis_range *range = opened_by(door, context);
    if (range) { /* measured: even if it was freed meanwhile */
        range->opens++;
        *address = range->base;
        return GIS_OK;
    }
    if (owner < gis_device_count && owner != mine && !gis_can_peer(mine, owner)) return GIS_PEER_UNSUPPORTED;
    /* Without the lock, because its exporter may be opening memory of this process. */
    gis_ref(&context->object);
    pthread_mutex_unlock(&gis_mutex);
    int fd = gis_ipc_fetch(door);
    pthread_mutex_lock(&gis_mutex);
    struct stat there;
    if (fd >= 0 && !(range = opened_by(door, context)) && !fstat(fd, &there) && context->object.live &&
        (range = map_memory(GIS_IPC_MAPPING, context, (size_t)there.st_size, fd)))
        range->opened = door;
    if (fd >= 0) close(fd);
    gis_unref(&context->object);
    if (!range) return GIS_INVALID_VALUE;
    range->opens++;
    *address = range->base;
    return GIS_OK;
}

/* -- external memory ----------------------------------------------------------------------------------------------- */

/* The memfd's name, or "". */
static void name_of(int fd, char *name, size_t size) {
    char path[64], link[256];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, link, sizeof link - 1);
    *name = 0;
    if (length <= 0) return;
    link[length] = 0;
    if (strncmp(link, "/memfd:", 7)) return;
    char *end = strstr(link, " (deleted)");
    if (end) *end = 0;
    snprintf(name, size, "%s", link + 7);
}

static bool starts_with(const char *text, const char *start) { return !strncmp(text, start, strlen(start)); }

static void finish_memory(gis_object *object) {
    gis_external_memory *memory = (gis_external_memory *)object;
    munmap((void *)memory->pages, memory->page_bytes);
    give_back(memory->whole, memory->whole_bytes);
}

static gis_external_memory *new_memory(gis_context *context, void *pages, size_t page_bytes, size_t real, size_t size) {
    gis_external_memory *memory =
        gis_new(GIS_EXTERNAL_MEMORY, sizeof *memory, context, context->object.device, finish_memory);
    memory->pages = (uintptr_t)pages;
    memory->page_bytes = page_bytes;
    memory->real = real;
    memory->size = size;
    return memory;
}

gis_status gis_import_memory(gis_context *context, int fd, size_t size, gis_external_memory **memory, bool *closed) {
    struct stat status;
    char name[200];
    *closed = false;
    if (fstat(fd, &status)) return GIS_INVALID_VALUE;
    *closed = true; /* closed even if it is not memory of this device */
    name_of(fd, name, sizeof name);
    size_t real = (size_t)status.st_size;
    bool known = true;
    if (starts_with(name, "SwiftShader.Memory."))
        real = real > SWIFTSHADER_EXTRA ? real - SWIFTSHADER_EXTRA : 0;
    else /* measured: an allocation of another GPU is accepted, unlike memory of its Vulkan driver */
        known = starts_with(name, VMM_NAME) || !strcmp(name, "gpuinterop.exporter.memory");
    if (!known || !real) {
        close(fd);
        return GIS_UNKNOWN;
    }
    size_t bytes = round_to_page((size_t)status.st_size);
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (pages == MAP_FAILED) return GIS_UNKNOWN;
    *memory = new_memory(context, pages, bytes, real, size);
    return GIS_OK;
}

gis_status gis_import_anonymous(gis_context *context, size_t size, gis_external_memory **memory) {
    size_t bytes = round_to_page(size);
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return GIS_OUT_OF_MEMORY;
    *memory = new_memory(context, pages, bytes, size, size);
    return GIS_OK;
}

/* Map a part a second time, at an address of the zone. mremap from a length of 0 copies a shared mapping. */
static gis_status map_again(gis_external_memory *memory, uint64_t offset, uint64_t size, uintptr_t *base,
                            uintptr_t *pages, size_t *page_bytes) {
    if (!size || offset > memory->real || size > memory->real - offset || offset > memory->size ||
        size > memory->size - offset)
        return GIS_INVALID_VALUE;
    uint64_t first = offset & ~((uint64_t)sysconf(_SC_PAGESIZE) - 1);
    size_t bytes = round_to_page(offset + size - first);
    uintptr_t start = take_addresses(bytes, ALIGNMENT);
    if (!start) return GIS_OUT_OF_MEMORY;
    void *found =
        mremap((void *)(memory->pages + first), 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)start);
    if (found == MAP_FAILED) return GIS_UNKNOWN;
    *base = start + (offset - first);
    *pages = start;
    *page_bytes = bytes;
    return GIS_OK;
}

gis_status gis_map_buffer(gis_external_memory *memory, uint64_t offset, uint64_t size, uintptr_t *address) {
    uintptr_t base, pages;
    size_t bytes;
    gis_status status = map_again(memory, offset, size, &base, &pages, &bytes);
    if (status) return status;
    new_range(GIS_MAPPING, memory->object.context, memory->object.device, base, size, pages, bytes, &memory->object);
    memory->mappings++;
    *address = base;
    return GIS_OK;
}

gis_status gis_map_shared(gis_external_memory *memory, uint64_t offset, uint64_t size, uintptr_t *address) {
    if (offset + size > memory->size) return GIS_INVALID_VALUE; /* also if the sum wraps */
    memory->outlived = true;
    if (!memory->whole) {
        size_t bytes = round_to_page(memory->size);
        uintptr_t start = take_addresses(bytes, ALIGNMENT);
        if (!start) return GIS_OUT_OF_MEMORY;
        size_t there = bytes < memory->page_bytes ? bytes : memory->page_bytes;
        void *found = mremap((void *)memory->pages, 0, there, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)start);
        if (found == MAP_FAILED) return GIS_UNKNOWN;
        memory->whole = start;
        memory->whole_bytes = bytes;
    }
    if (offset > memory->real || size > memory->real - offset)
        gis_violation("%llu bytes are mapped of an object that has %zu: nothing checks that, and the rest is lost",
                      (unsigned long long)(offset + size), memory->real);
    *address = memory->whole + offset;
    for (gis_range *range = ranges; range; range = range->next) {
        if (range->base != *address || range->owner != &memory->object) continue;
        gis_violation("%#llx is mapped already: its object stays mapped for ever", (unsigned long long)*address);
        gis_ref(&memory->object);
        return GIS_OK;
    }
    gis_range *range = new_range(GIS_MAPPING, memory->object.context, memory->object.device, *address, memory->size, 0,
                                 0, &memory->object);
    range->lands = memory->whole;
    range->settles = 0;
    memory->mappings++;
    return GIS_OK;
}

void gis_destroy_memory(gis_external_memory *memory) {
    if (memory->mappings && !memory->outlived)
        gis_violation("the external memory %#llx still has %d mappings", (unsigned long long)memory->object.id,
                      memory->mappings);
    gis_note_if_used(&memory->object, "");
    gis_retire(&memory->object);
}

/* -- images in external memory ------------------------------------------------------------------------------------- */

static void finish_array(gis_object *object) {
    gis_array *array = (gis_array *)object;
    give_back(array->pages, array->page_bytes);
    free(array->levels);
    gis_unref(&array->memory->object);
}

static void finish_level(gis_object *object) { gis_unref(&((gis_level *)object)->array->object); }

gis_status gis_map_array(gis_external_memory *memory, uint64_t offset, gis_image *image, gis_array **result) {
    uintptr_t base, pages;
    size_t bytes, room = memory->real < memory->size ? memory->real : memory->size;
    if (offset > room || !gis_image_fit(image, room - offset)) return GIS_INVALID_VALUE;
    gis_status status = map_again(memory, offset, gis_image_size(image), &base, &pages, &bytes);
    if (status) return status;
    gis_context *context = memory->object.context;
    int device = memory->object.device;
    gis_array *array = gis_new(GIS_MIPMAPPED_ARRAY, sizeof *array, context, device, finish_array);
    array->image = *image;
    array->memory = memory;
    gis_ref(&memory->object);
    memory->mappings++;
    array->base = base;
    array->pages = pages;
    array->page_bytes = bytes;
    array->levels = calloc(image->levels, sizeof *array->levels);
    if (!array->levels) abort();
    for (uint32_t i = 0; i < image->levels; i++) {
        gis_level *level = gis_new(GIS_ARRAY_LEVEL, sizeof *level, context, device, finish_level);
        level->array = array;
        gis_ref(&array->object);
        level->level = i;
        gis_image_plane(image, i, &level->plane);
        array->levels[i] = level;
    }
    *result = array;
    return GIS_OK;
}

void gis_destroy_array(gis_array *array) {
    for (uint32_t i = 0; i < array->image.levels; i++) {
        gis_note_if_used(&array->levels[i]->object, "");
        gis_retire(&array->levels[i]->object);
    }
    array->memory->mappings--;
    gis_ref(&array->object);
    gis_retire(&array->object);
    gis_settle(array->object.device);
    gis_unref(&array->object);
}

/* -- virtual memory management ------------------------------------------------------------------------------------- */

static void finish_handle(gis_object *object) {
    gis_vmm_handle *handle = (gis_vmm_handle *)object;
    if (handle->team)
        gis_multicast_finish(handle);
    else if (!handle->imported)
        gis_devices[object->device].used -= handle->size;
    close(handle->fd);
}

gis_vmm_handle *gis_vmm_new(gis_kind kind, int device, int fd, size_t size, bool imported) {
    gis_vmm_handle *handle = gis_new(kind, sizeof *handle, NULL, device, finish_handle);
    handle->fd = gis_keep(fd);
    handle->size = size;
    handle->holders = 1;
    handle->imported = imported;
    return handle;
}

gis_vmm_handle *gis_vmm_check(uint64_t id) {
    gis_vmm_handle *group = gis_find(GIS_MULTICAST, id);
    return group ? group : gis_check(GIS_VMM_HANDLE, id);
}

gis_status gis_vmm_create(int device, size_t size, uint32_t handle_types, gis_vmm_handle **handle) {
    if (!size || size % GIS_GRANULARITY) return GIS_INVALID_VALUE;
    if (handle_types & GIS_FABRIC && !gis_fabric_usable()) return GIS_NOT_PERMITTED;
    gis_device *it = &gis_devices[device];
    if (size > it->total || it->used > it->total - size) return GIS_OUT_OF_MEMORY;
    char name[64];
    snprintf(name, sizeof name, VMM_NAME "%d.%llu", device, (unsigned long long)gis_new_id());
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return GIS_OUT_OF_MEMORY;
    if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        close(fd);
        return GIS_OUT_OF_MEMORY;
    }
    *handle = gis_vmm_new(GIS_VMM_HANDLE, device, fd, size, false);
    (*handle)->handle_types = handle_types;
    it->used += size;
    return GIS_OK;
}

gis_status gis_vmm_import(int fd, gis_vmm_handle **handle) {
    struct stat status;
    char name[200];
    int device;
    if (fstat(fd, &status)) return GIS_INVALID_VALUE;
    name_of(fd, name, sizeof name);
    bool group = starts_with(name, GIS_MULTICAST_NAME);
    if (!group && sscanf(name, VMM_NAME "%d.", &device) != 1) return GIS_UNKNOWN;
    int mine = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (mine < 0) return GIS_UNKNOWN;
    if (group) return gis_multicast_attach(mine, handle);
    if (device >= gis_device_count) device = GIS_HIDDEN_DEVICE;
    *handle = gis_vmm_new(GIS_VMM_HANDLE, device, mine, (size_t)status.st_size, true);
    return GIS_OK; /* without handle types: an import cannot be exported again (measured) */
}

/* Note a violation if only bindings keep the memory. */
static void note_if_only_bound(const gis_vmm_handle *memory) {
    if (!memory->object.live && memory->object.refs == memory->bindings)
        gis_violation("the memory %#llx is released while it is bound to a multicast object: unbind it first",
                      (unsigned long long)memory->object.id);
}

gis_status gis_vmm_release(gis_vmm_handle *handle) {
    bool bound = handle->bindings > 0;
    if (--handle->holders == 0) gis_retire(&handle->object); /* mappings keep the memory */
    if (bound) note_if_only_bound(handle);
    return GIS_OK;
}

void gis_vmm_retain(gis_vmm_handle *handle) {
    if (!handle->object.live) gis_revive(&handle->object); /* released, but kept by mappings */
    handle->holders++;
}

typedef struct {
    uintptr_t address;
    gis_reservation *found;
} search;

static void look(gis_object *object, void *argument) {
    gis_reservation *it = (gis_reservation *)object;
    search *wanted = argument;
    if (wanted->address >= it->base && wanted->address - it->base < it->size) wanted->found = it;
}

gis_reservation *gis_reservation_at(uintptr_t address) {
    search wanted = {address, NULL};
    if (address >= zone && address < zone_end) gis_each(GIS_RESERVATION, look, &wanted);
    return wanted.found;
}

gis_status gis_vmm_reserve(size_t size, size_t alignment, uintptr_t *address) {
    if (!size || size % GIS_GRANULARITY || (alignment & (alignment - 1))) return GIS_INVALID_VALUE;
    uintptr_t start = take_addresses(size, alignment > GIS_GRANULARITY ? alignment : GIS_GRANULARITY);
    if (!start) return GIS_OUT_OF_MEMORY;
    gis_reservation *it = gis_new(GIS_RESERVATION, sizeof *it, NULL, 0, NULL);
    it->base = start;
    it->size = size;
    *address = start;
    return GIS_OK;
}

gis_status gis_vmm_free_address(uintptr_t address, size_t size) {
    gis_reservation *it = gis_reservation_at(address);
    if (!it || it->base != address || it->size != size) {
        gis_violation("%#llx (%zu bytes) was not reserved so, or was freed before", (unsigned long long)address, size);
        return GIS_INVALID_VALUE;
    }
    for (gis_range *range = ranges; range; range = range->next)
        if (range->base >= address && range->base < address + size) {
            gis_violation("the addresses at %#llx still have memory mapped", (unsigned long long)address);
            return GIS_INVALID_VALUE;
        }
    gis_retire(&it->object);
    return GIS_OK;
}

gis_status gis_vmm_map(uintptr_t address, size_t size, size_t offset, gis_vmm_handle *handle) {
    gis_status waited = handle->team ? gis_multicast_wait(handle) : GIS_OK;
    if (waited) return waited;
    gis_reservation *it = gis_reservation_at(address);
    if (!it || !size || size > it->base + it->size - address) return GIS_INVALID_VALUE;
    if (address % GIS_GRANULARITY || size % GIS_GRANULARITY || offset % GIS_GRANULARITY || offset > handle->size ||
        size > handle->size - offset)
        return GIS_INVALID_VALUE;
    for (gis_range *range = ranges; range; range = range->next)
        if (range->base < address + size && address < range->base + range->size) return GIS_INVALID_VALUE;
    /* The pages of a multicast object stay inaccessible, so that plain reads and writes fail. */
    if (!handle->team &&
        mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, (off_t)offset) == MAP_FAILED)
        return GIS_OUT_OF_MEMORY;
    gis_range *range =
        new_range(GIS_VMM_MAPPING, NULL, handle->object.device, address, size, address, size, &handle->object);
    range->offset = offset;
    range->access = 0;
    return GIS_OK;
}

static bool is_mapped_in(const gis_range *range, uintptr_t address, size_t size) {
    return range->object.kind == GIS_VMM_MAPPING && range->base >= address &&
           range->base + range->size <= address + size;
}

/* The documentation forbids gaps. NVIDIA's driver (measured) accepts them, AMD's runtime does not. */
static bool are_whole_mappings(uintptr_t address, size_t size) {
    size_t covered = 0;
    for (gis_range *range = ranges; range; range = range->next)
        if (is_mapped_in(range, address, size)) covered += range->size;
    return size && covered == size;
}

gis_status gis_vmm_unmap(uintptr_t address, size_t size) {
    gis_range *next;
    if (!are_whole_mappings(address, size)) {
        gis_violation("%#llx (%zu bytes) is not mapped so", (unsigned long long)address, size);
        return GIS_INVALID_VALUE;
    }
    for (gis_range *range = ranges; range; range = next) {
        next = range->next;
        if (!is_mapped_in(range, address, size)) continue;
        gis_note_if_used(&range->object, "");
        gis_vmm_handle *memory = (gis_vmm_handle *)range->owner;
        bool bound = memory->bindings > 0;
        end_range(range);
        if (bound) note_if_only_bound(memory);
    }
    return GIS_OK;
}

/* A multicast object is accessible to its team, and memory to its device and to devices with peer access. */
static gis_status may_access(int device, const gis_vmm_handle *handle) {
    if (handle->team) return gis_multicast_has(handle, device) ? GIS_OK : GIS_INVALID_DEVICE;
    int owner = handle->object.device;
    return device == owner || owner == GIS_HIDDEN_DEVICE || gis_can_peer(device, owner) ? GIS_OK : GIS_NOT_SUPPORTED;
}

gis_status gis_vmm_access(uintptr_t address, size_t size, int device, int protection) {
    if (device < 0 || device >= gis_device_count) return GIS_INVALID_DEVICE;
    if (!are_whole_mappings(address, size)) return GIS_INVALID_VALUE;
    for (int pass = 0; pass < 2; pass++) {
        for (gis_range *range = ranges; range; range = range->next) {
            if (!is_mapped_in(range, address, size)) continue;
            const gis_vmm_handle *handle = (gis_vmm_handle *)range->owner;
            if (!pass) {
                gis_status status = protection ? may_access(device, handle) : GIS_OK;
                if (status) return status;
                continue;
            }
            if (protection)
                range->access |= 1u << device;
            else
                range->access &= ~(1u << device);
            int flags = range->access ? PROT_READ | PROT_WRITE : PROT_NONE;
            if (handle->team) continue;
            if (mprotect((void *)range->pages, range->page_bytes, flags)) return GIS_UNKNOWN;
        }
    }
    return GIS_OK;
}
