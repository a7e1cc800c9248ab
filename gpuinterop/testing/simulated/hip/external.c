/* External memory and semaphores, in which AMD's runtime is most unlike what one would expect. */
#define _GNU_SOURCE
#include "hip.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OPAQUE_FD = 1, OPAQUE_WIN32 = 2, D3D11_RESOURCE_KMT = 7 }; /* hipExternalMemoryHandleType */
enum { D3D12_FENCE = 4 };                                         /* hipExternalSemaphoreHandleType */

/* -- memory -------------------------------------------------------------------------------------------------------- */

/*
 * CLR (hip_memory.cpp:98-132) checks type, flags and size, and reports every later failure as out of memory. On Linux
 * it uses any descriptor, 0 too, as a dma-buf, whatever the type. It never closes the descriptor, on success or on
 * failure (the kernel's import of a dma-buf does not either), and does not check its size.
 */
HIP(hipImportExternalMemory, (void **memory, const hip_memory_desc *desc), (memory, desc)) {
    ENTER(hipImportExternalMemory);
    TRY(gis_unsafe());
    NEED(memory && desc);
    const hip_memory_desc d = *desc;
    const void *name = d.type >= OPAQUE_WIN32 && d.type <= D3D11_RESOURCE_KMT ? d.handle.win32.name : NULL;
    gis_record("hipImportExternalMemory", &d, sizeof d, name, gis_name_bytes(name), 1);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    NEED(d.type >= OPAQUE_FD && d.type <= D3D11_RESOURCE_KMT); /* the enum has NvSciBuf (8), but it is refused */
    NEED(d.size && d.flags <= 1);                              /* dedicated: accepted, and then ignored */
    gis_external_memory *made;
    if (gis_windows) {
        NEED(d.type != OPAQUE_FD && (d.handle.win32.handle || name));
        if (gis_import_anonymous(hip_context(), d.size, &made)) return hipErrorOutOfMemory;
    } else {
        bool closed;
        int mine = fcntl(d.handle.fd, F_DUPFD_CLOEXEC, 3);
        gis_status status = mine < 0 ? GIS_UNKNOWN : gis_import_memory(hip_context(), mine, d.size, &made, &closed);
        if (status && mine >= 0 && !closed) close(mine);
        if (status) return hipErrorOutOfMemory;
    }
    made->outlived = true; /* mappings stay until hipFree */
    *memory = (void *)made->object.id;
    return hipSuccess;
}

/*
 * The mapped address is the object's address plus the offset, but that address is used as the object's beginning: work
 * on it changes the object's first bytes (CLR, hip_memory.cpp:155; fixed by rocm-systems #1749). The same offset gives
 * the same pointer, and keeps the object mapped for ever. A sum of offset and size that wraps is accepted
 * (hip_memory.cpp:151).
 */
HIP(hipExternalMemoryGetMappedBuffer, (void **pointer, void *memory, const hip_buffer_desc *desc),
    (pointer, memory, desc)) {
    ENTER(hipExternalMemoryGetMappedBuffer);
    NEED(pointer && desc);
    const hip_buffer_desc d = *desc;
    gis_record("hipExternalMemoryGetMappedBuffer", &d, sizeof d, &memory, sizeof memory, 1);
    gis_external_memory *found = gis_check(GIS_EXTERNAL_MEMORY, (uint64_t)memory);
    NEED(found);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    NEED(!d.flags);
    uintptr_t made;
    TRY(gis_map_shared(found, d.offset, d.size, &made));
    *pointer = (void *)made;
    return hipSuccess;
}

/* It releases the handle. hipFree unmaps; both are needed, in either order. */
HIP(hipDestroyExternalMemory, (void *memory), (memory)) {
    ENTER(hipDestroyExternalMemory);
    gis_external_memory *found = gis_check(GIS_EXTERNAL_MEMORY, (uint64_t)memory);
    NEED(found);
    gis_destroy_memory(found);
    return hipSuccess;
}

/* -- mipmapped arrays ---------------------------------------------------------------------------------------------- */

/* AMD's library for Linux does not export it (ROCm/hip #3779). */
#if GIP_MIPMAP
enum { KNOWN_ARRAY_FLAGS = 0x0f };

HIP(hipExternalMemoryGetMappedMipmappedArray, (void **array, void *memory, const hip_mipmap_desc *desc),
    (array, memory, desc)) {
    ENTER(hipExternalMemoryGetMappedMipmappedArray);
    NEED(array && desc);
    const hip_mipmap_desc d = *desc;
    gis_record("hipExternalMemoryGetMappedMipmappedArray", &d, sizeof d, &memory, sizeof memory, 1);
    gis_external_memory *found = gis_check(GIS_EXTERNAL_MEMORY, (uint64_t)memory);
    NEED(found);
    int bits = d.format.x + d.format.y + d.format.z + d.format.w;
    gis_image image = {.texel = (size_t)bits / 8,
                       .width = d.extent.width,
                       .height = d.extent.height,
                       .levels = d.levels,
                       .exact = true};
    NEED(bits > 0 && bits % 8 == 0 && !(d.flags & ~(uint32_t)KNOWN_ARRAY_FLAGS));
    NEED(gis_image_shape(&image, d.flags, d.extent.depth));
    gis_array *made;
    TRY(gis_map_array(found, d.offset, &image, &made));
    *array = (void *)made->object.id;
    return hipSuccess;
}
#endif

HIP(hipGetMipmappedArrayLevel, (void **level, void *array, uint32_t number), (level, array, number)) {
    ENTER(hipGetMipmappedArrayLevel);
    FIND(gis_array, found, GIS_MIPMAPPED_ARRAY, array);
    NEED(level && number < found->image.levels);
    *level = (void *)found->levels[number]->object.id;
    return hipSuccess;
}

HIP(hipFreeMipmappedArray, (void *array), (array)) {
    ENTER(hipFreeMipmappedArray);
    FIND(gis_array, found, GIS_MIPMAPPED_ARRAY, array);
    gis_destroy_array(found);
    return hipSuccess;
}

/* -- semaphores ---------------------------------------------------------------------------------------------------- */

/* GPUINTEROP_SIM_HIP_ABORT: abort, as builds with assertions do. */
static bool aborts;

__attribute__((constructor)) static void look(void) {
    const char *text = getenv("GPUINTEROP_SIM_HIP_ABORT");
    aborts = text && *text && strcmp(text, "0");
}

/*
 * Types above D3D12Fence are refused everywhere, although the enum has them, and so is the descriptor 0. On Linux all
 * others reach a function that does not exist: builds with assertions abort the process (ROCm/clr #72), others report
 * that it is not supported. On Windows the handle counts, and a name is not read (rocm-systems #6021, #6632).
 */
HIP(hipImportExternalSemaphore, (void **semaphore, const hip_semaphore_desc *desc), (semaphore, desc)) {
    ENTER(hipImportExternalSemaphore);
    TRY(gis_unsafe());
    NEED(semaphore && desc);
    const hip_semaphore_desc d = *desc;
    const void *name = d.type == OPAQUE_FD ? NULL : d.handle.win32.name;
    gis_record("hipImportExternalSemaphore", &d, sizeof d, name, gis_name_bytes(name), 1);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    NEED(d.type >= OPAQUE_FD && d.type <= D3D12_FENCE && !d.flags);
    if (!gis_windows) {
        NEED(d.handle.fd);
        if (aborts) abort();
        return hipErrorNotSupported;
    }
    NEED(d.type != OPAQUE_FD && d.handle.win32.handle);
    gis_semaphore *made;
    TRY(gis_make_semaphore(hip_context(), GIS_DUMMY, &made));
    *semaphore = (void *)made->object.id;
    return hipSuccess;
}

HIP(hipDestroyExternalSemaphore, (void *semaphore), (semaphore)) {
    ENTER(hipDestroyExternalSemaphore);
    NEED(semaphore);
    if (!gis_windows) { /* CLR, rocclr/device/rocm/rocdevice.hpp:264: ShouldNotReachHere */
        if (aborts) abort();
        return hipSuccess;
    }
    gis_semaphore *found = gis_check(GIS_EXTERNAL_SEMAPHORE, (uint64_t)semaphore);
    NEED(found);
    gis_note_if_used(&found->object, "");
    gis_ref(&found->object);
    gis_retire(&found->object);
    gis_settle(found->object.device);
    gis_unref(&found->object);
    return hipSuccess;
}

/*
 * It runs entry by entry: an invalid semaphore in the middle fails the call after the earlier entries. Of the
 * parameters only the fence's value and the flags are read. On Linux the function that it calls is empty: it accepts
 * every pointer but null, and does nothing (CLR, hip_memory.cpp:203-280; HIP's documentation: not supported on Linux).
 */
static hip_error batch(const char *call, gis_op_kind kind, void *const *semaphores, const hip_semaphore_params *params,
                       uint32_t count, void *which) {
    NEED(semaphores && params);
    NEED_STREAM(which);
    uint64_t *head = malloc((count + 1) * sizeof *head);
    if (!head) abort();
    head[0] = (uint64_t)which;
    memcpy(head + 1, semaphores, count * sizeof *head);
    gis_record(call, head, (count + 1) * sizeof *head, params, count * sizeof *params, count);
    free(head);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t id = (uint64_t)semaphores[i];
        NEED(id && !params[i].flags);
        if (!gis_windows) continue;
        gis_status status = GIS_INVALID_VALUE;
        gis_op *op = gis_find(GIS_EXTERNAL_SEMAPHORE, id)
                         ? gis_semaphore_op(kind, 1, &id, &params[i].value, &params[i], sizeof *params, &status)
                         : NULL;
        if (!op) return hipErrorInvalidValue;
        TRY(gis_submit(stream, op, false));
    }
    return hipSuccess;
}

HIP(hipSignalExternalSemaphoresAsync,
    (void *const *semaphores, const hip_semaphore_params *params, uint32_t count, void *which),
    (semaphores, params, count, which)) {
    ENTER(hipSignalExternalSemaphoresAsync);
    return batch("hipSignalExternalSemaphoresAsync", GIS_OP_SIGNAL, semaphores, params, count, which);
}

HIP(hipWaitExternalSemaphoresAsync,
    (void *const *semaphores, const hip_semaphore_params *params, uint32_t count, void *which),
    (semaphores, params, count, which)) {
    ENTER(hipWaitExternalSemaphoresAsync);
    return batch("hipWaitExternalSemaphoresAsync", GIS_OP_WAIT, semaphores, params, count, which);
}
