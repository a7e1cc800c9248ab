/* Allocations, registered memory, copies. */
#include "hip.h"

#include <stdlib.h>
#include <string.h>

enum { HOST = 1, DEVICE = 2 }; /* hipMemoryType of ROCm 6 and later */
enum { SIGNAL_MEMORY = 2 };                      /* hipMallocSignalMemory */

static hip_error allocate(void **address, size_t size, bool signal) {
    NEED(address);
    TRY(gis_unsafe());
    uintptr_t found = 0;
    if (size) TRY(gis_allocate(hip_context(), size, GIS_PLAIN, &found));
    if (signal) gis_range_at(found)->signal = true;
    *address = (void *)found;
    return hipSuccess;
}

HIP(hipMalloc, (void **address, size_t size), (address, size)) {
    ENTER(hipMalloc);
    return allocate(address, size, false);
}

/* Of signal memory there are eight bytes at a time, no more and no less (HIP's documentation of the flag). */
HIP(hipExtMallocWithFlags, (void **address, size_t size, uint32_t flags), (address, size, flags)) {
    ENTER(hipExtMallocWithFlags);
    NEED(flags <= 4 && (flags != SIGNAL_MEMORY || size == 8));
    return allocate(address, size, flags == SIGNAL_MEMORY);
}

/*
 * It waits for the device, and every other call of the process waits for it: as cuMemFree does. Of imported memory it
 * waits for device 0, whichever imported it (CLR, hip_memory.cpp:79), and the second hipFree of such an address says
 * success too. Of an address within memory CLR aborts (rocclr/device/device.cpp:329), which is a violation here.
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

/* Memory that is registered is registered again, and given back once (CLR, hip_memory.cpp:1304). */
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

/* Those that anybody asks for. The numbers of hipPointer_attribute are CUDA's. */
HIP(hipPointerGetAttribute, (void *data, uint32_t number, void *address), (data, number, address)) {
    ENTER(hipPointerGetAttribute);
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(data && range);
    uint32_t type = is_host(range) ? HOST : DEVICE;
    switch (number) {
    case 2: /* MEMORY_TYPE */
        memcpy(data, &type, sizeof type);
        return hipSuccess;
    case 9: /* DEVICE_ORDINAL */
        memcpy(data, &range->object.device, sizeof(int));
        return hipSuccess;
    default:
        return hipErrorInvalidValue;
    }
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

/* Of the device's memory it does not wait for the end (HIP's documentation of hipMemset). */
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
    uint64_t texel = level ? level->array->image.texel : 1; /* so is the extent, where an array takes part */
    gis_block size = {job->extent.width * texel, job->extent.height, job->extent.depth};
    return gis_code(gis_copy_3d(stream, &target, &source, &size));
}
