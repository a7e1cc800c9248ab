/* Plain memory, copies, and virtual memory management. */
#define _GNU_SOURCE
#include "forwarding.h"

#include <stdlib.h>
#include <string.h>

/* -- allocations --------------------------------------------------------------------------------------------------- */

HIP_CALL(hipMalloc, (void **pointer, size_t size), (pointer, size)) {
    uint64_t made;
    NEED(pointer);
    *pointer = NULL;
    if (!size) return hipSuccess;
    ON_CURRENT;
    CUDA(cuda.cuMemAlloc(&made, size));
    *pointer = (void *)(uintptr_t)made;
    return hipSuccess;
}

/* Signal memory is 8 bytes of the host's that only hipFree takes back. */
typedef struct word {
    void *address;
    struct word *next;
} word;
static word *words;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void after_fork(void) { pthread_mutex_init(&lock, NULL); }
__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, after_fork); }

enum { DEFAULT = 0, FINE_GRAINED = 1, SIGNAL_MEMORY = 2, UNCACHED = 3 };
enum { PORTABLE = 1, MAPPED = 2 };

bool gfw_is_signal_memory(const void *pointer) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (word *it = words; it && !found; it = it->next) found = it->address == pointer;
    pthread_mutex_unlock(&lock);
    return found;
}

HIP_CALL(hipExtMallocWithFlags, (void **pointer, size_t size, uint32_t flags), (pointer, size, flags)) {
    NEED(pointer && flags <= UNCACHED);
    if (flags != SIGNAL_MEMORY) return hipMalloc_forwarded(pointer, size);
    NEED(size == 8);
    ON_CURRENT;
    word *made = malloc(sizeof *made);
    if (!made) return hipErrorOutOfMemory;
    cuda_error code = cuda.cuMemHostAlloc(&made->address, size, PORTABLE | MAPPED);
    if (code) {
        free(made);
        return gfw_code(code);
    }
    *pointer = made->address;
    pthread_mutex_lock(&lock);
    made->next = words;
    words = made;
    pthread_mutex_unlock(&lock);
    return hipSuccess;
}

static bool forget_word(const void *pointer) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (word **link = &words; *link && !found;) {
        word *it = *link;
        found = it->address == pointer;
        if (found) {
            *link = it->next;
            free(it);
        } else {
            link = &it->next;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

hip_error gfw_free_plain(void *pointer) {
    ON_CURRENT;
    if (forget_word(pointer))
        CUDA(cuda.cuMemFreeHost(pointer));
    else
        CUDA(cuda.cuMemFree((uintptr_t)pointer));
    return hipSuccess;
}

#define HOST_FLAGS 0x7u /* hipHostMallocPortable, -Mapped, -WriteCombined: as CUDA's */
/* hipHostMallocNumaUser, -Coherent, -NonCoherent: CUDA's is always coherent. */
#define HOST_COHERENCE 0xe0000000u

HIP_CALL(hipHostMalloc, (void **pointer, size_t size, uint32_t flags), (pointer, size, flags)) {
    NEED(pointer && !(flags & ~(HOST_FLAGS | HOST_COHERENCE)));
    *pointer = NULL;
    if (!size) return hipSuccess;
    ON_CURRENT;
    CUDA(cuda.cuMemHostAlloc(pointer, size, flags & HOST_FLAGS));
    return hipSuccess;
}

HIP_CALL(hipHostFree, (void *pointer), (pointer)) {
    if (!pointer) return hipSuccess;
    ON_CURRENT;
    CUDA(cuda.cuMemFreeHost(pointer));
    return hipSuccess;
}

#define REGISTER_FLAGS 0x7u  /* hipHostRegisterPortable, -Mapped, -IoMemory: as CUDA's */
#define REGISTER_COARSE 0x8u /* AMD's own; to CUDA the bit says that the memory is read-only */

HIP_CALL(hipHostRegister, (void *pointer, size_t size, uint32_t flags), (pointer, size, flags)) {
    NEED(pointer && size && !(flags & ~(REGISTER_FLAGS | REGISTER_COARSE)));
    ON_CURRENT;
    CUDA(cuda.cuMemHostRegister(pointer, size, flags & REGISTER_FLAGS));
    return hipSuccess;
}

HIP_CALL(hipHostUnregister, (void *pointer), (pointer)) {
    NEED(pointer);
    ON_CURRENT;
    CUDA(cuda.cuMemHostUnregister(pointer));
    return hipSuccess;
}

HIP_CALL(hipHostGetDevicePointer, (void **there, void *pointer, uint32_t flags), (there, pointer, flags)) {
    uint64_t found;
    NEED(there && pointer && !flags);
    ON_CURRENT;
    CUDA(cuda.cuMemHostGetDevicePointer(&found, pointer, 0));
    *there = (void *)(uintptr_t)found;
    return hipSuccess;
}

/* -- what a pointer is --------------------------------------------------------------------------------------------- */

enum { TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, ORDINAL = 9, LAST_ATTRIBUTE = 17 };

/* hipMemoryType is 1 and 2 as CUDA's, then 10 for arrays and 11 for unified memory. */
static uint32_t memory_type(uint32_t cuda_type) {
    return cuda_type == 3 ? 10 : cuda_type == 4 ? 11 : cuda_type;
}

/* The numbers are CUDA's. Of an address that nobody knows the type is 0, and the call fails all the same. */
HIP_CALL(hipPointerGetAttribute, (void *data, uint32_t number, void *pointer), (data, number, pointer)) {
    NEED(data && pointer && number >= 1 && number <= LAST_ATTRIBUTE);
    ON_CURRENT;
    cuda_error code = cuda.cuPointerGetAttribute(data, number, (uintptr_t)pointer);
    if (number == TYPE) {
        uint32_t type = 0;
        if (!code) memcpy(&type, data, sizeof type);
        type = memory_type(type);
        memcpy(data, &type, sizeof type);
    }
    return gfw_code(code);
}

/* -- copies and fills ---------------------------------------------------------------------------------------------- */

/* hipMemcpyHostToHost to -Default, and AMD's own -DeviceToDeviceNoCU: CUDA finds out by itself what the addresses are. */
static bool is_kind(uint32_t kind) { return kind <= 4 || kind == 1024; }

static hip_error copy_async(void *target, const void *source, size_t size, uint32_t kind, void *stream, bool wait) {
    if (!is_kind(kind)) return hipErrorInvalidMemcpyDirection;
    if (!size) return hipSuccess;
    NEED(target && source);
    ON_CURRENT;
    CUDA(cuda.cuMemcpyAsync((uintptr_t)target, (uintptr_t)source, size, stream));
    if (wait) CUDA(cuda.cuStreamSynchronize(stream));
    return hipSuccess;
}

HIP_CALL(hipMemcpyAsync, (void *target, const void *source, size_t size, uint32_t kind, void *stream),
         (target, source, size, kind, stream)) {
    return copy_async(target, source, size, kind, stream, false);
}

HIP_CALL(hipMemcpy, (void *target, const void *source, size_t size, uint32_t kind), (target, source, size, kind)) {
    if (!is_kind(kind)) return hipErrorInvalidMemcpyDirection;
    if (!size) return hipSuccess;
    NEED(target && source);
    ON_CURRENT;
    CUDA(cuda.cuMemcpy((uintptr_t)target, (uintptr_t)source, size));
    return hipSuccess;
}

static hip_error fill_async(void *target, uint8_t byte, size_t size, void *stream) {
    if (!size) return hipSuccess;
    NEED(target);
    ON_CURRENT;
    CUDA(cuda.cuMemsetD8Async((uintptr_t)target, byte, size, stream));
    return hipSuccess;
}

HIP_CALL(hipMemsetD8Async, (void *target, uint8_t byte, size_t size, void *stream), (target, byte, size, stream)) {
    return fill_async(target, byte, size, stream);
}

HIP_CALL(hipMemset, (void *target, int byte, size_t size), (target, byte, size)) {
    if (!size) return hipSuccess;
    NEED(target);
    ON_CURRENT;
    CUDA(cuda.cuMemsetD8((uintptr_t)target, (uint8_t)byte, size));
    return hipSuccess;
}

enum { END_HOST = 1, END_DEVICE = 2, END_ARRAY = 3, END_UNIFIED = 4 };

/* CUarray_format to bytes of a channel. */
static size_t channel_bytes(uint32_t format) {
    switch (format) {
    case 0x01:
    case 0x08:
        return 1;
    case 0x02:
    case 0x09:
    case 0x10:
        return 2;
    case 0x03:
    case 0x0a:
    case 0x20:
        return 4;
    default:
        return 0;
    }
}

static hip_error texel_bytes(void *array, size_t *bytes) {
    cuda_array_desc desc;
    CUDA(cuda.cuArray3DGetDescriptor(&desc, array));
    *bytes = channel_bytes(desc.format) * desc.channels;
    return *bytes ? hipSuccess : hipErrorInvalidValue;
}

/* Of memory the position counts bytes, of an array its texels. */
static void set_end(cuda_copy_end *end, void *array, const hip_position *at, const hip_pitched *pitched, size_t texel) {
    *end = (cuda_copy_end){.x = at->x * (array ? texel : 1), .y = at->y, .z = at->z};
    if (array) {
        end->type = END_ARRAY;
        end->array = array;
    } else {
        end->type = END_UNIFIED;
        end->device = (uintptr_t)pitched->pointer;
        end->pitch = pitched->pitch;
        end->height = pitched->height;
    }
}

/*
 * END_UNIFIED is for addresses that CUDA knows; of the others it has to be told that they are the host's.
 */
static void set_host(cuda_copy_end *end) {
    uint32_t type;
    if (end->type != END_UNIFIED || !cuda.cuPointerGetAttribute(&type, TYPE, end->device)) return;
    end->type = END_HOST;
    end->host = (const void *)(uintptr_t)end->device;
    end->device = 0;
}

HIP_CALL(hipMemcpy3DAsync, (const hip_copy_3d *job, void *stream), (job, stream)) {
    size_t texel = 1;
    NEED(job);
    if (!is_kind(job->kind)) return hipErrorInvalidMemcpyDirection;
    NEED(!job->source_array != !job->source.pointer && !job->target_array != !job->target.pointer);
    ON_CURRENT;
    /* The extent counts texels as soon as an array takes part, and both of two arrays have texels of one size. */
    void *array = job->source_array ? job->source_array : job->target_array;
    if (array) TRY(texel_bytes(array, &texel));
    cuda_copy_3d made = {
        .width = job->extent.width * texel,
        .height = job->extent.height,
        .depth = job->extent.depth,
    };
    set_end(&made.source, job->source_array, &job->source_at, &job->source, texel);
    set_end(&made.target, job->target_array, &job->target_at, &job->target, texel);
    set_host(&made.source);
    set_host(&made.target);
    CUDA(cuda.cuMemcpy3DAsync(&made, stream));
    return hipSuccess;
}

/* -- virtual memory management ------------------------------------------------------------------------------------- */

enum { PINNED = 1, ON_DEVICE = 1, POSIX_FD = 1, BY_VALUE = 70100000 };

static hip_error take_prop(const hip_allocation_prop *prop, cuda_allocation_prop *made) {
    NEED(prop && prop->type == PINNED && prop->where.type == ON_DEVICE);
    if (!gfw_is_device(prop->where.id)) return hipErrorInvalidDevice;
    *made = (cuda_allocation_prop){.type = PINNED,
                                   .handle_types = prop->handle_types,
                                   .where = {ON_DEVICE, gfw_cuda_device(prop->where.id)},
                                   .rdma = prop->rdma};
    return hipSuccess;
}

HIP_CALL(hipMemGetAllocationGranularity, (size_t *bytes, const hip_allocation_prop *prop, uint32_t option),
         (bytes, prop, option)) {
    cuda_allocation_prop made;
    NEED(bytes && option <= 1);
    ON_CURRENT;
    TRY(take_prop(prop, &made));
    CUDA(cuda.cuMemGetAllocationGranularity(bytes, &made, option));
    return hipSuccess;
}

HIP_CALL(hipMemCreate, (uint64_t *allocation, size_t size, const hip_allocation_prop *prop, uint64_t flags),
         (allocation, size, prop, flags)) {
    cuda_allocation_prop made;
    NEED(allocation && size && !flags);
    ON_CURRENT;
    TRY(take_prop(prop, &made));
    CUDA(cuda.cuMemCreate(allocation, size, &made, 0));
    return hipSuccess;
}

HIP_CALL(hipMemRelease, (uint64_t allocation), (allocation)) {
    NEED(allocation);
    ON_CURRENT;
    CUDA(cuda.cuMemRelease(allocation));
    return hipSuccess;
}

HIP_CALL(hipMemExportToShareableHandle, (void *shared, uint64_t allocation, uint32_t type, uint64_t flags),
         (shared, allocation, type, flags)) {
    NEED(shared && allocation && !flags);
    ON_CURRENT;
    CUDA(cuda.cuMemExportToShareableHandle(shared, allocation, type, 0));
    return hipSuccess;
}

/* The descriptor by value from 7.1 on, by a pointer to it before; it stays the caller's either way. */
HIP_CALL(hipMemImportFromShareableHandle, (uint64_t *allocation, void *shared, uint32_t type),
         (allocation, shared, type)) {
    NEED(allocation);
    if (type == POSIX_FD && gfw_version() < BY_VALUE) {
        NEED(shared);
        shared = (void *)(intptr_t)*(const int *)shared;
    }
    ON_CURRENT;
    CUDA(cuda.cuMemImportFromShareableHandle(allocation, shared, type));
    return hipSuccess;
}

HIP_CALL(hipMemAddressReserve, (void **pointer, size_t size, size_t alignment, void *hint, uint64_t flags),
         (pointer, size, alignment, hint, flags)) {
    uint64_t made;
    NEED(pointer && !flags);
    ON_CURRENT;
    CUDA(cuda.cuMemAddressReserve(&made, size, alignment, (uintptr_t)hint, 0));
    *pointer = (void *)(uintptr_t)made;
    return hipSuccess;
}

HIP_CALL(hipMemAddressFree, (void *pointer, size_t size), (pointer, size)) {
    NEED(pointer && size);
    ON_CURRENT;
    CUDA(cuda.cuMemAddressFree((uintptr_t)pointer, size));
    return hipSuccess;
}

/* An allocation is mapped from its start only. */
HIP_CALL(hipMemMap, (void *pointer, size_t size, size_t offset, uint64_t allocation, uint64_t flags),
         (pointer, size, offset, allocation, flags)) {
    NEED(pointer && allocation && size && !offset && !flags);
    ON_CURRENT;
    CUDA(cuda.cuMemMap((uintptr_t)pointer, size, 0, allocation, 0));
    return hipSuccess;
}

HIP_CALL(hipMemUnmap, (void *pointer, size_t size), (pointer, size)) {
    NEED(pointer);
    ON_CURRENT;
    CUDA(cuda.cuMemUnmap((uintptr_t)pointer, size));
    return hipSuccess;
}

HIP_CALL(hipMemSetAccess, (void *pointer, size_t size, const hip_access_desc *desc, size_t count),
         (pointer, size, desc, count)) {
    hip_access_desc made[GFW_MAX_DEVICES];
    NEED(pointer && size && desc && count && count <= GFW_MAX_DEVICES);
    ON_CURRENT;
    for (size_t i = 0; i < count; i++) {
        made[i] = desc[i];
        if (made[i].where.type == ON_DEVICE) {
            if (!gfw_is_device(made[i].where.id)) return hipErrorInvalidDevice;
            made[i].where.id = gfw_cuda_device(made[i].where.id);
        }
    }
    CUDA(cuda.cuMemSetAccess((uintptr_t)pointer, size, made, count));
    return hipSuccess;
}

HIP_CALL(hipMemGetAllocationPropertiesFromHandle, (hip_allocation_prop * prop, uint64_t allocation),
         (prop, allocation)) {
    cuda_allocation_prop found;
    NEED(prop && allocation);
    ON_CURRENT;
    CUDA(cuda.cuMemGetAllocationPropertiesFromHandle(&found, allocation));
    *prop = (hip_allocation_prop){
        .type = found.type, .handle_types = found.handle_types, .where = found.where, .rdma = found.rdma};
    for (int i = 0; found.where.type == ON_DEVICE && i < gfw_device_count(); i++)
        if (gfw_cuda_device(i) == found.where.id) prop->where.id = i;
    return hipSuccess;
}

