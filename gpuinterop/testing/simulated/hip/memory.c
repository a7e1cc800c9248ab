/* Allocations, registered memory, copies. */
#include "hip.h"

#include <stdlib.h>
#include <string.h>

enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2, MANAGED = 3 }; /* hipMemoryType of ROCm 6 and later */
enum { SIGNAL_MEMORY = 2 };                      /* hipMallocSignalMemory */

static hip_error allocate(void **address, size_t size, gis_sort sort, gis_context *context) {
    NEED(address);
    TRY(gis_unsafe());
    uintptr_t found = 0;
    if (size) TRY(gis_allocate(context, size, sort, &found));
    *address = (void *)found;
    return hipSuccess;
}

HIP(hipMalloc, (void **address, size_t size), (address, size)) {
    ENTER(hipMalloc);
    return allocate(address, size, GIS_PLAIN, hip_context());
}

/* Signal memory has exactly eight bytes (HIP's documentation of the flag). */
HIP(hipExtMallocWithFlags, (void **address, size_t size, uint32_t flags), (address, size, flags)) {
    ENTER(hipExtMallocWithFlags);
    NEED(flags <= 4 && (flags != SIGNAL_MEMORY || size == 8));
    hip_error code = allocate(address, size, GIS_PLAIN, hip_context());
    if (!code && flags == SIGNAL_MEMORY) gis_range_at((uintptr_t)*address)->signal = true;
    return code;
}

HIP(hipMallocManaged, (void **address, size_t size, uint32_t flags), (address, size, flags)) {
    ENTER(hipMallocManaged);
    NEED(size && (flags == 1 || flags == 2));
    return allocate(address, size, GIS_MANAGED, hip_context());
}

/* It never becomes a node of a graph here. */
HIP(hipMallocAsync, (void **address, size_t size, void *which), (address, size, which)) {
    ENTER(hipMallocAsync);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return allocate(address, size, GIS_POOL, stream->object.context);
}

HIP(hipFreeAsync, (void *address, void *which), (address, which)) {
    ENTER(hipFreeAsync);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return gis_code(gis_free_later((uintptr_t)address));
}

/*
 * It waits for the device, and every other call of the process waits for it, as with cuMemFree. For imported memory it
 * waits for device 0, whichever device imported it (CLR, hip_memory.cpp:79), and a second hipFree of such an address
 * succeeds too. For an address inside memory CLR aborts (rocclr/device/device.cpp:329), which is a violation here.
 */
HIP(hipFree, (void *address), (address)) {
    ENTER(hipFree);
    TRY(gis_unsafe());
    if (!address) return hipSuccess;
    gis_status status = gis_free(GIS_ALLOCATION, GIS_MAPPING, (uintptr_t)address);
    return gis_is_freed((uintptr_t)address) ? hipSuccess : gis_code(status);
}

HIP(hipHostMalloc, (void **address, size_t size, uint32_t flags), (address, size, flags)) {
    ENTER(hipHostMalloc);
    NEED(address);
    (void)flags;
    TRY(gis_unsafe());
    uintptr_t found;
    TRY(gis_allocate_host(hip_context(), size, &found));
    *address = (void *)found;
    return hipSuccess;
}

HIP(hipHostFree, (void *address), (address)) {
    ENTER(hipHostFree);
    TRY(gis_unsafe());
    if (!address) return hipSuccess;
    return gis_code(gis_free(GIS_HOST_ALLOCATION, GIS_HOST_ALLOCATION, (uintptr_t)address));
}

/* Registered memory can be registered again, and is unregistered once (CLR, hip_memory.cpp:1304). */
HIP(hipHostRegister, (void *address, size_t size, uint32_t flags), (address, size, flags)) {
    ENTER(hipHostRegister);
    NEED(flags <= 15);
    gis_status status = gis_register_host(hip_context(), (uintptr_t)address, size);
    return status == GIS_HOST_ALREADY_REGISTERED ? hipSuccess : gis_code(status);
}

HIP(hipHostUnregister, (void *address), (address)) {
    ENTER(hipHostUnregister);
    return gis_code(gis_free(GIS_REGISTRATION, GIS_REGISTRATION, (uintptr_t)address));
}

HIP(hipHostGetDevicePointer, (void **pointer, void *address, uint32_t flags), (pointer, address, flags)) {
    ENTER(hipHostGetDevicePointer);
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(pointer && !flags && range &&
         (range->object.kind == GIS_HOST_ALLOCATION || range->object.kind == GIS_REGISTRATION));
    *pointer = address;
    return hipSuccess;
}

static bool is_host(const gis_range *range) {
    return range->object.kind == GIS_HOST_ALLOCATION || range->object.kind == GIS_REGISTRATION;
}

static bool is_managed(const gis_range *range) {
    return range->object.kind == GIS_ALLOCATION && range->sort == GIS_MANAGED;
}

static hip_error tell(void *data, uint64_t value, size_t bytes) {
    memcpy(data, &value, bytes);
    return hipSuccess;
}

/*
 * The attributes that callers use. The numbers of hipPointer_attribute are CUDA's, but less is written: a size has 32
 * bits (CLR, hip_memory.cpp:3845-4060). CLR knows a mapping of virtual memory, and not its reservation.
 */
HIP(hipPointerGetAttribute, (void *data, uint32_t number, void *address), (data, number, address)) {
    ENTER(hipPointerGetAttribute);
    NEED(data && address);
    if (number == 1 || number == 10 || number == 14 || number == 15 || number == 17) return hipErrorNotSupported;
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(range);
    switch (number) {
    case 2: /* MEMORY_TYPE */
        return tell(data, is_host(range) || is_managed(range) ? HOST : DEVICE, 4);
    case 7: /* BUFFER_ID */
        return tell(data, range->object.id, 4);
    case 8: /* IS_MANAGED */
        return tell(data, is_managed(range), 1);
    case 9: /* DEVICE_ORDINAL */
        return tell(data, (uint64_t)range->object.device, 4);
    case 11: /* RANGE_START_ADDR */
        return tell(data, range->base, 8);
    case 12: /* RANGE_SIZE */
        return tell(data, range->size, 4);
    case 13: /* MAPPED */
        return tell(data, 1, 1);
    default:
        return hipErrorInvalidValue;
    }
}

/* It succeeds for every address, and reports unknown memory as such. */
HIP(hipPointerGetAttributes, (hip_pointer *found, void *address), (found, address)) {
    ENTER(hipPointerGetAttributes);
    NEED(found && address);
    gis_range *range = gis_range_at((uintptr_t)address);
    *found = (hip_pointer){.type = UNREGISTERED, .device = -2};
    if (!range) return hipSuccess;
    bool managed = is_managed(range), host = is_host(range) || managed;
    *found = (hip_pointer){.type = managed ? MANAGED : host ? HOST : DEVICE,
                           .device = range->object.device,
                           .device_pointer = address,
                           .host_pointer = host ? address : NULL,
                           .managed = managed};
    return hipSuccess;
}

HIP(hipMemGetAddressRange, (void **base, size_t *size, void *address), (base, size, address)) {
    ENTER(hipMemGetAddressRange);
    gis_range *range = gis_range_at((uintptr_t)address);
    if (!range) return hipErrorNotFound;
    NEED(base && size); /* CLR writes to both without a check */
    *base = (void *)range->base;
    *size = range->size;
    return hipSuccess;
}

/* -- memory of other processes ------------------------------------------------------------------------------------- */

/* HSA_ENABLE_IPC_MODE_LEGACY: with it, the call fails on current kernels (rocm-systems #2209). */
HIP(hipIpcGetMemHandle, (hip_ipc_handle *exported, void *address), (exported, address)) {
    ENTER(hipIpcGetMemHandle);
    const char *legacy = getenv("HSA_ENABLE_IPC_MODE_LEGACY");
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(exported && range && range->object.kind == GIS_ALLOCATION && range->sort == GIS_PLAIN);
    NEED(!legacy || strcmp(legacy, "1"));
    TRY(gis_ipc_export(range, (uintptr_t)address - range->base, exported));
    return hipSuccess;
}

/* The handle contains the offset of the exported address, but opening ignores it (rocclr/device/device.cpp:986). */
HIP(hipIpcOpenMemHandle, (void **address, hip_ipc_handle exported, uint32_t flags), (address, exported, flags)) {
    ENTER(hipIpcOpenMemHandle);
    NEED(address && flags == 1);
    uintptr_t found;
    gis_status status = gis_ipc_open(hip_context(), &exported, &found);
    if (status == GIS_INVALID_VALUE) return hipErrorInvalidDevicePointer; /* hip_memory.cpp:3704 */
    TRY(status);
    *address = (void *)found;
    return hipSuccess;
}

/* It waits, as hipFree does (hip_memory.cpp:3721). */
HIP(hipIpcCloseMemHandle, (void *address), (address)) {
    ENTER(hipIpcCloseMemHandle);
    return gis_code(gis_free(GIS_IPC_MAPPING, GIS_IPC_MAPPING, (uintptr_t)address));
}

/* -- copies -------------------------------------------------------------------------------------------------------- */

static hip_error copy(void *target, const void *source, size_t size, uint32_t kind, void *which, bool block) {
    NEED_STREAM(which);
    if (kind > 4) return hipErrorInvalidMemcpyDirection;
    return gis_code(gis_copy(stream, (uintptr_t)target, (uintptr_t)source, size, block));
}

HIP(hipMemcpy, (void *target, const void *source, size_t size, uint32_t kind), (target, source, size, kind)) {
    ENTER(hipMemcpy);
    TRY(gis_unsafe());
    return copy(target, source, size, kind, NULL, true);
}

HIP(hipMemcpyAsync, (void *target, const void *source, size_t size, uint32_t kind, void *which),
    (target, source, size, kind, which)) {
    ENTER(hipMemcpyAsync);
    return copy(target, source, size, kind, which, false);
}

static hip_error fill(void *target, uint32_t value, uint32_t width, size_t count, void *which, bool block) {
    NEED_STREAM(which);
    TRY(gis_fill(stream, (uintptr_t)target, value, width, count));
    gis_range *range = gis_range_at((uintptr_t)target);
    return block && range && is_host(range) ? gis_code(gis_stream_synchronize(stream)) : hipSuccess;
}

/* For device memory it does not wait for the end (HIP's documentation of hipMemset). */
HIP(hipMemset, (void *target, int value, size_t count), (target, value, count)) {
    ENTER(hipMemset);
    TRY(gis_unsafe());
    return fill(target, (uint8_t)value, 1, count, NULL, true);
}

HIP(hipMemsetD8Async, (void *target, uint8_t value, size_t count, void *which), (target, value, count, which)) {
    ENTER(hipMemsetD8Async);
    return fill(target, value, 1, count, which, false);
}

HIP(hipMemsetD32Async, (void *target, int value, size_t count, void *which), (target, value, count, which)) {
    ENTER(hipMemsetD32Async);
    return fill(target, (uint32_t)value, 4, count, which, false);
}

static hip_error end_of_copy(void *array, const hip_position *at, const hip_pitched *memory, gis_end *made) {
    memset(made, 0, sizeof *made);
    NEED(!array != !memory->pointer);
    made->x = at->x;
    made->y = at->y;
    made->z = at->z;
    if (array) {
        made->level = gis_check(GIS_ARRAY_LEVEL, (uint64_t)array);
        if (!made->level) return hipErrorInvalidHandle;
        made->x *= made->level->array->image.texel; /* an array's position is in texels */
        return hipSuccess;
    }
    made->address = (uintptr_t)memory->pointer;
    made->pitch = memory->pitch;
    made->height = memory->height;
    return hipSuccess;
}

HIP(hipMemcpy3DAsync, (const hip_copy_3d *job, void *which), (job, which)) {
    ENTER(hipMemcpy3DAsync);
    NEED(job);
    NEED_STREAM(which);
    if (job->kind > 4) return hipErrorInvalidMemcpyDirection;
    gis_end source, target;
    hip_error code = end_of_copy(job->source_array, &job->source_at, &job->source, &source);
    if (!code) code = end_of_copy(job->target_array, &job->target_at, &job->target, &target);
    if (code) return code;
    const gis_level *level = source.level ? source.level : target.level;
    uint64_t texel = level ? level->array->image.texel : 1; /* so is the extent if an array takes part */
    gis_block size = {job->extent.width * texel, job->extent.height, job->extent.depth};
    return gis_code(gis_copy_3d(stream, &target, &source, &size));
}
