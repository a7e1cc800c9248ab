/*
 * The CUDA driver's entry points. Their work is in ../common; here is what is specific to CUDA: structs, numbers, which
 * call needs a context, the meaning of errors, and what a failed import does with the descriptor.
 */
#define _GNU_SOURCE
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Tests recognize this library by it. */
GIS_EXPORT const int gpuinterop_simulated_driver = 1;

/* Simulates another version: without newer entry points. */
static int driver_number(void) {
    const char *version = getenv("GPUINTEROP_SIM_CUDA_VERSION");
    return version && *version ? atoi(version) : 13010;
}

bool cuda_is_device(int device) { return device >= 0 && device < gis_device_count; }

/* Whether stream 0 is the thread's own, as in a program compiled for that. */
static bool per_thread;

gis_stream *cuda_stream(handle stream, gis_status *status) {
    gis_stream *found;
    if (!stream && per_thread) stream = 2;
    *status = GIS_INVALID_CONTEXT;
    if (stream <= 2) {
        gis_context *context = gis_current();
        if (!context) return NULL;
        return stream == 2 ? gis_thread_stream(context) : gis_legacy_stream(context);
    }
    *status = GIS_INVALID_HANDLE;
    found = gis_check(GIS_STREAM, stream);
    return found;
}

/* -- the driver, devices ------------------------------------------------------------------------------------------- */

static result init(uint32_t flags) {
    BEGIN_CALL(cuInit, true);
    if (entered_) return gis_code(entered_);
    NEED(!flags);
    const char *code = getenv("GPUINTEROP_SIM_INIT"); /* simulates a driver that does not work */
    if (code && *code) return atoi(code);
    if (!gis_device_count) return NO_DEVICE;
    gis_initialize();
    return SUCCESS;
}

static result driver_version(int *version) {
    BEGIN_CALL(cuDriverGetVersion, true);
    if (entered_) return gis_code(entered_);
    NEED(version);
    *version = driver_number();
    return SUCCESS;
}

static result error_name(int code, const char **text) {
    BEGIN_CALL(cuGetErrorName, true);
    if (entered_ && !gis_forked) return gis_code(entered_);
    const gis_error *found = gis_error_of(code);
    *text = found ? found->name : NULL;
    return found ? SUCCESS : INVALID_VALUE;
}

static result error_string(int code, const char **text) {
    BEGIN_CALL(cuGetErrorString, true);
    if (entered_ && !gis_forked) return gis_code(entered_);
    const gis_error *found = gis_error_of(code);
    *text = found ? found->text : NULL;
    return found ? SUCCESS : INVALID_VALUE;
}

static result device_get(int *device, int ordinal) {
    ENTER(cuDeviceGet);
    if (!cuda_is_device(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

static result device_count(int *count) {
    ENTER(cuDeviceGetCount);
    *count = gis_device_count;
    return SUCCESS;
}

static result device_name(char *name, int size, int device) {
    ENTER(cuDeviceGetName);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    NEED(name && size > 0);
    snprintf(name, (size_t)size, "Simulated GPU %d", device);
    return SUCCESS;
}

static result device_uuid(uint8_t *uuid, int device) {
    ENTER(cuDeviceGetUuid);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    memcpy(uuid, gis_devices[device].uuid, 16);
    return SUCCESS;
}

static result device_uuid_2(uint8_t *uuid, int device) {
    ENTER(cuDeviceGetUuid_v2);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    memcpy(uuid, gis_mig ? gis_devices[device].mig_uuid : gis_devices[device].uuid, 16);
    return SUCCESS;
}

static result device_luid(char *luid, uint32_t *mask, int device) {
    ENTER(cuDeviceGetLuid);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    if (!gis_windows) return NOT_SUPPORTED;
    memcpy(luid, "simluid", 7);
    luid[7] = (char)('0' + device);
    *mask = 1;
    return SUCCESS;
}

static result device_bus_id(char *text, int size, int device) {
    ENTER(cuDeviceGetPCIBusId);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    NEED(text && size > 0);
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x51 + device);
    return SUCCESS;
}

#define LAST_ATTRIBUTE 147
static const int attributes[LAST_ATTRIBUTE + 1] = {
    [1] = 1024, [2] = 1024, [3] = 1024, [4] = 64, [5] = 2147483647, [6] = 65535, [7] = 65535, [8] = 49152,
    [9] = 65536, [10] = 32, [11] = 2147483647, [12] = 65536, [13] = 1980000, [14] = 512, [15] = 1, [16] = 132,
    [19] = 1, [30] = 512, [31] = 1, [32] = 1, [36] = 3201000, [37] = 6144, [38] = 62914560, [39] = 2048, [40] = 3,
    [41] = 1, [51] = 32, [75] = 9, [76] = 0, [78] = 1, [79] = 1, [80] = 1, [81] = 233472, [82] = 65536, [83] = 1,
    [87] = 2, [89] = 1, [90] = 1, [91] = 1, [95] = 1, [97] = 232448, [98] = 1, [99] = 1, [102] = 1, [103] = 1,
    [106] = 32, [107] = 1, [110] = 1, [111] = 1024, [112] = 1, [113] = 1, [114] = 1, [115] = 1, [116] = 1, [119] = 1,
    [120] = 1, [121] = 1, [122] = 1, [123] = 1, [124] = 1, [125] = 1, [126] = 4, [127] = 1, [129] = 1,
    [132] = 1,
};

static result device_attribute(int *value, int number, int device) {
    ENTER(cuDeviceGetAttribute);
    if (!cuda_is_device(device)) return INVALID_DEVICE;
    NEED(value);
    if (gis_overridden(device, number, value)) return SUCCESS;
    NEED(number >= 1 && number <= LAST_ATTRIBUTE);
    *value = number == 33 ? 0x51 + device : attributes[number]; /* 33: the PCI bus */
    if (number == 128) *value = gis_fabric_usable(); /* fabric handles */
    if (gis_windows && (number == 104 || number == 105)) *value = 1;
    if (gis_windows && (number == 103 || number == 124)) *value = 0;
    return SUCCESS;
}

static result can_access_peer(int *can, int device, int peer) {
    ENTER(cuDeviceCanAccessPeer);
    if (!cuda_is_device(device) || !cuda_is_device(peer)) return INVALID_DEVICE;
    *can = gis_can_peer(device, peer);
    return SUCCESS;
}

/* -- contexts ------------------------------------------------------------------------------------------------------ */

static result primary_retain(handle *context, int device) {
    ENTER(cuDevicePrimaryCtxRetain);
    gis_context *found;
    TRY(gis_primary_retain(device, &found));
    *context = found->object.id;
    return SUCCESS;
}

static result primary_release(int device) {
    ENTER(cuDevicePrimaryCtxRelease);
    TRY(gis_primary_release(device));
    return SUCCESS;
}

static result context_current(handle *context) {
    ENTER(cuCtxGetCurrent);
    gis_context *found = gis_current();
    *context = found ? found->object.id : 0;
    return SUCCESS;
}

static result context_set(handle context) {
    ENTER(cuCtxSetCurrent);
    gis_context *found = NULL;
    if (context && !(found = gis_check(GIS_CONTEXT, context))) return INVALID_CONTEXT;
    gis_set_current(found);
    return SUCCESS;
}

static result context_push(handle context) {
    ENTER(cuCtxPushCurrent);
    gis_context *found = gis_check(GIS_CONTEXT, context);
    if (!found) return INVALID_CONTEXT;
    TRY(gis_push(found));
    return SUCCESS;
}

static result context_pop(handle *context) {
    ENTER(cuCtxPopCurrent);
    gis_context *found;
    TRY(gis_pop(&found));
    if (context) *context = found ? found->object.id : 0;
    return SUCCESS;
}

static result context_device(int *device) {
    ENTER(cuCtxGetDevice);
    NEED_CONTEXT;
    *device = context->object.device;
    return SUCCESS;
}

static result context_device_2(int *device, handle which) {
    ENTER(cuCtxGetDevice);
    gis_context *context = which ? gis_check(GIS_CONTEXT, which) : gis_current();
    if (!context) return INVALID_CONTEXT;
    *device = context->object.device;
    return SUCCESS;
}

/* -- streams and events -------------------------------------------------------------------------------------------- */

static result create_stream(handle *stream, uint32_t flags, int priority) {
    NEED_CONTEXT;
    NEED(stream && flags <= 1);
    gis_stream *made;
    TRY(gis_stream_create(context, flags == 0, flags, priority, &made));
    *stream = made->object.id;
    return SUCCESS;
}

static result stream_create(handle *stream, uint32_t flags) {
    ENTER(cuStreamCreate);
    return create_stream(stream, flags, 0);
}

static result stream_create_priority(handle *stream, uint32_t flags, int priority) {
    ENTER(cuStreamCreateWithPriority);
    return create_stream(stream, flags, priority);
}

static result stream_destroy(handle which) {
    ENTER(cuStreamDestroy);
    if (which <= 2) return INVALID_HANDLE;
    FIND(gis_stream, stream, GIS_STREAM, which);
    if (stream->implicit) return INVALID_HANDLE;
    gis_stream_destroy(stream);
    return SUCCESS;
}

static result stream_query(handle which) {
    ENTER(cuStreamQuery);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return gis_code(gis_stream_query(stream));
}

static result stream_synchronize(handle which) {
    ENTER(cuStreamSynchronize);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return gis_code(gis_stream_synchronize(stream));
}

static result stream_context(handle which, handle *context) {
    ENTER(cuStreamGetCtx);
    NEED_STREAM(which);
    *context = stream->object.context->object.id;
    return SUCCESS;
}

static result stream_context_2(handle which, handle *context, handle *green) {
    ENTER(cuStreamGetCtx);
    NEED_STREAM(which);
    *context = stream->object.context->object.id;
    if (green) *green = 0;
    return SUCCESS;
}

static result stream_id(handle which, uint64_t *id) {
    ENTER(cuStreamGetId);
    NEED_STREAM(which);
    *id = stream->object.id;
    return SUCCESS;
}

static result stream_wait_event(handle which, handle event, uint32_t flags) {
    ENTER(cuStreamWaitEvent);
    NEED_STREAM(which);
    FIND(gis_event, found, GIS_EVENT, event);
    NEED(flags <= 1);
    return gis_code(gis_event_wait(stream, found));
}

static result stream_is_capturing(handle which, int *status) {
    ENTER(cuStreamIsCapturing);
    NEED_STREAM(which);
    TRY(gis_capture_implicit(stream, true));
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return SUCCESS;
}

static result stream_begin_capture(handle which, uint32_t mode) {
    ENTER(cuStreamBeginCapture);
    NEED_STREAM(which);
    NEED(mode <= 2);
    return gis_code(gis_capture_begin(stream, (gis_capture_mode)mode));
}

static result stream_end_capture(handle which, handle *graph) {
    ENTER(cuStreamEndCapture);
    NEED_STREAM(which);
    gis_graph *made;
    gis_status status = gis_capture_end(stream, &made);
    *graph = made ? made->object.id : 0;
    return gis_code(status);
}

static result exchange_mode(uint32_t *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    NEED(mode && *mode <= 2);
    *mode = (uint32_t)gis_exchange_mode((gis_capture_mode)*mode);
    return SUCCESS;
}

static result event_create(handle *event, uint32_t flags) {
    ENTER(cuEventCreate);
    NEED_CONTEXT;
    NEED(event && flags <= 7);
    gis_event *made;
    TRY(gis_event_create(context, flags, &made));
    *event = made->object.id;
    return SUCCESS;
}

static result event_record(handle event, handle which) {
    ENTER(cuEventRecord);
    NEED_STREAM(which);
    FIND(gis_event, found, GIS_EVENT, event);
    return gis_code(gis_event_record(found, stream));
}

static result event_state(handle event, bool block) {
    FIND(gis_event, found, GIS_EVENT, event);
    if (!found->capture) TRY(gis_unsafe());
    return gis_code(gis_event_query(found, block));
}

static result event_query(handle event) {
    ENTER(cuEventQuery);
    return event_state(event, false);
}

static result event_destroy(handle event) {
    ENTER(cuEventDestroy);
    FIND(gis_event, found, GIS_EVENT, event);
    gis_event_destroy(found);
    return SUCCESS;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static result allocate(uint64_t *address, size_t size, gis_sort sort, gis_context *context) {
    uintptr_t found;
    TRY(gis_allocate(context, size, sort, &found));
    *address = found;
    return SUCCESS;
}

static result memory_allocate(uint64_t *address, size_t size) {
    ENTER(cuMemAlloc);
    NEED_CONTEXT;
    TRY(gis_unsafe());
    return allocate(address, size, GIS_PLAIN, context);
}

static result managed_allocate(uint64_t *address, size_t size, uint32_t flags) {
    ENTER(cuMemAllocManaged);
    NEED_CONTEXT;
    TRY(gis_unsafe());
    NEED(flags == 1 || flags == 2);
    return allocate(address, size, GIS_MANAGED, context);
}

/* It never becomes a node of a graph here. */
static result pool_allocate(uint64_t *address, size_t size, handle which) {
    ENTER(cuMemAllocAsync);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return allocate(address, size, GIS_POOL, stream->object.context);
}

static result pool_free(uint64_t address, handle which) {
    ENTER(cuMemFreeAsync);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return gis_code(gis_free_later(address));
}

static result memory_free(uint64_t address) {
    ENTER(cuMemFree);
    TRY(gis_unsafe());
    if (!address) return SUCCESS;
    return gis_code(gis_free(GIS_ALLOCATION, GIS_MAPPING, address));
}

static result allocate_host(void **address, size_t size) {
    NEED_CONTEXT;
    TRY(gis_unsafe());
    uintptr_t found;
    TRY(gis_allocate_host(context, size, &found));
    *address = (void *)found;
    return SUCCESS;
}

static result host_allocate(void **address, size_t size, uint32_t flags) {
    ENTER(cuMemHostAlloc);
    NEED(flags <= 7);
    return allocate_host(address, size);
}

static result host_free(void *address) {
    ENTER(cuMemFreeHost);
    TRY(gis_unsafe());
    if (!address) return SUCCESS;
    return gis_code(gis_free(GIS_HOST_ALLOCATION, GIS_HOST_ALLOCATION, (uintptr_t)address));
}

static result host_register(void *address, size_t size, uint32_t flags) {
    ENTER(cuMemHostRegister);
    NEED_CONTEXT;
    NEED(flags <= 15);
    return gis_code(gis_register_host(context, (uintptr_t)address, size));
}

static result host_unregister(void *address) {
    ENTER(cuMemHostUnregister);
    return gis_code(gis_free(GIS_REGISTRATION, GIS_REGISTRATION, (uintptr_t)address));
}

static result host_device_pointer(uint64_t *pointer, void *address, uint32_t flags) {
    ENTER(cuMemHostGetDevicePointer);
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(!flags && range &&
         (range->object.kind == GIS_HOST_ALLOCATION || range->object.kind == GIS_REGISTRATION));
    *pointer = (uintptr_t)address;
    return SUCCESS;
}

static bool is_legacy(const gis_range *range) {
    return range->object.kind == GIS_ALLOCATION && range->sort == GIS_PLAIN;
}

static result tell(void *data, uint64_t value, size_t bytes) {
    memcpy(data, &value, bytes);
    return SUCCESS;
}

/* The attributes that callers use, as measured; all others are refused. It needs no context. */
static result tell_attribute(void *data, uint32_t number, uint64_t address) {
    gis_range *range = gis_range_at(address);
    NEED(data && range);
    const gis_object *object = &range->object;
    bool host = object->kind == GIS_HOST_ALLOCATION || object->kind == GIS_REGISTRATION;
    bool pool = object->kind == GIS_ALLOCATION && range->sort == GIS_POOL;
    const gis_vmm_handle *vmm = object->kind == GIS_VMM_MAPPING ? (gis_vmm_handle *)range->owner : NULL;
    const gis_reservation *whole = vmm ? gis_reservation_at(address) : NULL;
    switch (number) {
    case 1: /* CONTEXT */
        return tell(data, object->context && !pool ? object->context->object.id : 0, 8);
    case 2: /* MEMORY_TYPE */
        return tell(data, host ? 1 : 2, 4);
    case 7: /* BUFFER_ID */
        return tell(data, object->id, 8);
    case 8: /* IS_MANAGED */
        return tell(data, object->kind == GIS_ALLOCATION && range->sort == GIS_MANAGED, 4);
    case 9: /* DEVICE_ORDINAL */
        return tell(data, (uint64_t)object->device, 4);
    case 10: /* IS_LEGACY_CUDA_IPC_CAPABLE */
        return tell(data, is_legacy(range), 4);
    case 11: /* RANGE_START_ADDR */
        return tell(data, whole ? whole->base : range->base, 8);
    case 12: /* RANGE_SIZE */
        return tell(data, whole ? whole->size : range->size, 8);
    case 13: /* MAPPED */
        return tell(data, 1, 4);
    case 14: /* ALLOWED_HANDLE_TYPES */
        return tell(data, vmm ? vmm->handle_types : 0, 8);
    case 15: /* IS_GPU_DIRECT_RDMA_CAPABLE */
        return tell(data, vmm ? vmm->rdma : is_legacy(range), 4);
    case 17: /* MEMPOOL_HANDLE: only whether it is null matters */
        return tell(data, pool ? object->context->object.id : 0, 8);
    case 18: /* MAPPING_SIZE: small allocations share a block with others */
        return tell(data, (range->size + GIS_GRANULARITY - 1) & ~(GIS_GRANULARITY - 1), 8);
    case 19: /* MAPPING_BASE_ADDR */
        return tell(data, range->base, 8);
    case 20: /* MEMORY_BLOCK_ID */
        return tell(data, range->owner ? range->owner->id : object->id, 8);
    default:
        return INVALID_VALUE;
    }
}

static result pointer_attribute(void *data, uint32_t number, uint64_t address) {
    ENTER(cuPointerGetAttribute);
    return tell_attribute(data, number, address);
}

/* For an unknown address it returns zeros, and no error. */
static result pointer_attributes(uint32_t count, const uint32_t *numbers, void **data, uint64_t address) {
    ENTER(cuPointerGetAttributes);
    NEED(count && numbers && data);
    for (uint32_t at = 0; at < count; at++)
        if (tell_attribute(data[at], numbers[at], address)) memset(data[at], 0, 4);
    return SUCCESS;
}

/* Of virtual memory, as measured, it is only one mapping, and only with access. */
static result address_range(uint64_t *base, size_t *size, uint64_t address) {
    ENTER(cuMemGetAddressRange);
    NEED_CONTEXT;
    gis_range *range = gis_range_at(address);
    if (!range || !range->access) return NOT_FOUND;
    if (base) *base = range->base;
    if (size) *size = range->size;
    return SUCCESS;
}

/* -- memory of other processes ------------------------------------------------------------------------------------- */

typedef struct {
    char bytes[64];
} ipc_handle;

static result ipc_export(ipc_handle *exported, uint64_t address) {
    ENTER(cuIpcGetMemHandle);
    NEED_CONTEXT;
    gis_range *range = gis_range_at(address);
    NEED(exported && range && is_legacy(range));
    TRY(gis_ipc_export(range, 0, exported)); /* of the whole allocation, even if the address is inside it */
    return SUCCESS;
}

static result ipc_open(uint64_t *address, ipc_handle exported, uint32_t flags) {
    ENTER(cuIpcOpenMemHandle);
    NEED_CONTEXT;
    NEED(address && flags == 1);
    uintptr_t found;
    TRY(gis_ipc_open(context, &exported, &found));
    *address = found;
    return SUCCESS;
}

static result ipc_close(uint64_t address) {
    ENTER(cuIpcCloseMemHandle);
    NEED_CONTEXT;
    TRY(gis_unsafe());
    return gis_code(gis_free(GIS_IPC_MAPPING, GIS_IPC_MAPPING, address));
}

static result copy_later(uint64_t target, uint64_t source, size_t size, handle which) {
    NEED_STREAM(which);
    return gis_code(gis_copy(stream, target, source, size, false));
}

static result copy_async(uint64_t target, uint64_t source, size_t size, handle which) {
    ENTER(cuMemcpyAsync);
    return copy_later(target, source, size, which);
}

static result copy_out_async(void *target, uint64_t source, size_t size, handle which) {
    ENTER(cuMemcpyDtoHAsync);
    return copy_later((uint64_t)target, source, size, which);
}

static result fill8_async(uint64_t target, uint8_t value, size_t count, handle which) {
    ENTER(cuMemsetD8Async);
    NEED_STREAM(which);
    return gis_code(gis_fill(stream, target, value, 1, count));
}

static result end_of_copy(const copy_end *end, gis_end *made) {
    memset(made, 0, sizeof *made);
    made->x = end->x;
    made->y = end->y;
    made->z = end->z;
    made->pitch = end->pitch;
    made->height = end->height;
    NEED(!end->lod && !end->reserved);
    switch (end->type) {
    case 1:
        made->address = end->host;
        return SUCCESS;
    case 2:
    case 4:
        made->address = end->device;
        return SUCCESS;
    case 3:
        made->level = gis_check(GIS_ARRAY_LEVEL, end->array);
        return made->level ? SUCCESS : INVALID_HANDLE;
    default:
        return INVALID_VALUE;
    }
}

static result copy_3d_async(const memcpy3d *job, handle which) {
    ENTER(cuMemcpy3DAsync);
    NEED(job);
    NEED_STREAM(which);
    gis_end source, target;
    gis_block size = {job->width, job->height, job->depth};
    result code = end_of_copy(&job->source, &source);
    if (!code) code = end_of_copy(&job->target, &target);
    return code ? code : gis_code(gis_copy_3d(stream, &target, &source, &size));
}

/* -- external memory ----------------------------------------------------------------------------------------------- */

enum { MEMORY_FD = 1, MEMORY_D3D12_RESOURCE = 5, MEMORY_D3D11_KMT = 7, MEMORY_SCI = 8, MEMORY_DMA_BUF = 9 };
enum { SEMAPHORE_FD = 1, SEMAPHORE_SCI = 6, SEMAPHORE_TIMELINE_FD = 9, SEMAPHORE_TIMELINE_WIN32 = 10 };

static result import_fd_fault(gis_status status, gis_fd_fault what, int fd) {
    if (what == GIS_FD_CLOSED) close(fd);
    return gis_code(status);
}

static result import_memory(handle *memory, const memory_desc *desc) {
    BEGIN_CALL(cuImportExternalMemory, false);
    if (entered_) return import_fd_fault(entered_, scope_.fd, desc->handle.fd);
    NEED_CONTEXT;
    TRY(gis_unsafe());
    NEED(memory && desc);
    const memory_desc d = *desc;
    bool win32 = d.type >= 2 && d.type <= MEMORY_D3D11_KMT;
    const void *name = win32 ? d.handle.win32.name : NULL;
    gis_record("cuImportExternalMemory", &d, sizeof d, name, gis_name_bytes(name), 1);
    NEED(d.type >= MEMORY_FD && d.type <= MEMORY_DMA_BUF);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    // Measured on Linux, without the flag: invalid, before the platform is checked.
    NEED(d.flags & 1 || d.type < MEMORY_D3D12_RESOURCE || d.type > MEMORY_D3D11_KMT);
    if (d.type != MEMORY_FD && (!gis_windows || d.type == MEMORY_DMA_BUF)) return NOT_SUPPORTED;
    if (d.flags & ~1u) gis_violation("unknown flags %#x", d.flags);
    NEED(d.size && !(d.flags & ~1u));
    gis_external_memory *made;
    if (d.type == MEMORY_FD) {
        bool closed;
        TRY(gis_import_memory(context, d.handle.fd, d.size, &made, &closed));
    } else {
        NEED(d.handle.win32.handle || name);
        TRY(gis_import_anonymous(context, d.size, &made));
    }
    *memory = made->object.id;
    return SUCCESS;
}

static result map_buffer(uint64_t *address, handle memory, const buffer_desc *desc) {
    ENTER(cuExternalMemoryGetMappedBuffer);
    NEED_CONTEXT;
    NEED(address && desc);
    const buffer_desc d = *desc;
    gis_record("cuExternalMemoryGetMappedBuffer", &d, sizeof d, &memory, sizeof memory, 1);
    FIND(gis_external_memory, found, GIS_EXTERNAL_MEMORY, memory);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    if (d.flags) gis_violation("unknown flags %#x", d.flags);
    NEED(!d.flags);
    uintptr_t made;
    TRY(gis_map_buffer(found, d.offset, d.size, &made));
    *address = made;
    return SUCCESS;
}

static size_t texel_bytes(uint32_t format, uint32_t channels) {
    static const uint8_t fixed[] = {1, 2, 4, 2, 4, 8, 1, 2, 4, 2, 4, 8}; /* from UNORM_INT8X1 to SNORM_INT16X4 */
    if (format >= 0xc0 && format < 0xc0 + sizeof fixed) return fixed[format - 0xc0];
    if (format == 0x50) return 4;
    if (channels != 1 && channels != 2 && channels != 4) return 0;
    switch (format) {
    case 0x01:
    case 0x08:
        return channels;
    case 0x02:
    case 0x09:
    case 0x10:
        return 2 * (size_t)channels;
    case 0x03:
    case 0x0a:
    case 0x20:
        return 4 * (size_t)channels;
    default:
        return 0;
    }
}

enum { KNOWN_ARRAY_FLAGS = 0x1ff };

static result map_array(handle *array, handle memory, const mipmap_desc *desc) {
    ENTER(cuExternalMemoryGetMappedMipmappedArray);
    NEED_CONTEXT;
    NEED(array && desc);
    const mipmap_desc d = *desc;
    gis_record("cuExternalMemoryGetMappedMipmappedArray", &d, sizeof d, &memory, sizeof memory, 1);
    FIND(gis_external_memory, found, GIS_EXTERNAL_MEMORY, memory);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    if (d.array.flags & ~(uint32_t)KNOWN_ARRAY_FLAGS) gis_violation("unknown flags %#x", d.array.flags);
    gis_image image = {.texel = texel_bytes(d.array.format, d.array.channels),
                       .width = d.array.width,
                       .height = d.array.height,
                       .levels = d.levels};
    NEED(gis_image_shape(&image, d.array.flags, d.array.depth) && !(d.array.flags & ~(uint32_t)KNOWN_ARRAY_FLAGS));
    gis_array *made;
    TRY(gis_map_array(found, d.offset, &image, &made));
    *array = made->object.id;
    return SUCCESS;
}

static result destroy_memory(handle memory) {
    ENTER(cuDestroyExternalMemory);
    FIND(gis_external_memory, found, GIS_EXTERNAL_MEMORY, memory);
    gis_destroy_memory(found);
    return SUCCESS;
}

static result array_level(handle *level, handle array, uint32_t number) {
    ENTER(cuMipmappedArrayGetLevel);
    FIND(gis_array, found, GIS_MIPMAPPED_ARRAY, array);
    NEED(number < found->image.levels);
    *level = found->levels[number]->object.id;
    return SUCCESS;
}

static result array_destroy(handle array) {
    ENTER(cuMipmappedArrayDestroy);
    FIND(gis_array, found, GIS_MIPMAPPED_ARRAY, array);
    gis_destroy_array(found);
    return SUCCESS;
}

/* -- external semaphores ------------------------------------------------------------------------------------------- */

static result import_semaphore(handle *semaphore, const semaphore_desc *desc) {
    BEGIN_CALL(cuImportExternalSemaphore, false);
    if (entered_) return import_fd_fault(entered_, scope_.fd, desc->handle.fd);
    NEED_CONTEXT;
    TRY(gis_unsafe());
    NEED(semaphore && desc);
    const semaphore_desc d = *desc;
    bool fd = d.type == SEMAPHORE_FD || d.type == SEMAPHORE_TIMELINE_FD;
    const void *name = fd || d.type == SEMAPHORE_SCI ? NULL : d.handle.win32.name;
    gis_record("cuImportExternalSemaphore", &d, sizeof d, name, gis_name_bytes(name), 1);
    NEED(d.type >= SEMAPHORE_FD && d.type <= SEMAPHORE_TIMELINE_WIN32);
    if (!gis_all_zero(d.reserved, 16)) gis_violation("reserved words of the descriptor are not zero");
    if (!fd && !gis_windows) return NOT_SUPPORTED;
    if (d.flags) gis_violation("unknown flags %#x", d.flags);
    NEED(!d.flags);
    gis_semaphore *made;
    if (fd)
        TRY(gis_import_semaphore(context, d.handle.fd, d.type == SEMAPHORE_TIMELINE_FD, &made));
    else {
        NEED(d.handle.win32.handle || name);
        TRY(gis_make_semaphore(context, d.type == SEMAPHORE_SCI ? GIS_SCI_SYNC : GIS_DUMMY, &made));
    }
    *semaphore = made->object.id;
    return SUCCESS;
}

static result destroy_semaphore(handle semaphore) {
    ENTER(cuDestroyExternalSemaphore);
    FIND(gis_semaphore, found, GIS_EXTERNAL_SEMAPHORE, semaphore);
    gis_note_if_used(&found->object, "");
    gis_ref(&found->object);
    gis_retire(&found->object);
    gis_settle(found->object.device);
    gis_unref(&found->object);
    return SUCCESS;
}

static bool params_are_zero(const semaphore_params *params) {
    return gis_all_zero(params->reserved, 11) && gis_all_zero(params->reserved2, 16);
}

/* Make a batch's operation, checked and recorded. */
static result make_batch(const char *call, gis_op_kind kind, const uint64_t *semaphores, const semaphore_params *params,
                         uint32_t count, handle record_with, gis_op **op) {
    uint32_t known = kind == GIS_OP_SIGNAL ? 1 : 2;
    NEED(count && semaphores && params);
    uint64_t *head = malloc((count + 1) * sizeof *head), *values = malloc(count * sizeof *values);
    if (!head || !values) abort();
    head[0] = record_with;
    memcpy(head + 1, semaphores, count * sizeof *head);
    gis_record(call, head, (count + 1) * sizeof *head, params, count * sizeof *params, count);
    result code = SUCCESS;
    for (uint32_t i = 0; i < count; i++) {
        values[i] = params[i].value;
        if (!params_are_zero(&params[i])) gis_violation("reserved words of parameter %u are not zero", i);
        if (params[i].flags & ~known) {
            gis_violation("unknown flags %#x", params[i].flags);
            code = INVALID_VALUE;
        }
    }
    if (!code) {
        gis_status status;
        *op = gis_semaphore_op(kind, count, head + 1, values, params, sizeof *params, &status);
        code = gis_code(status);
    }
    free(head);
    free(values);
    return code;
}

static result batch(const char *call, gis_op_kind kind, const uint64_t *semaphores, const semaphore_params *params,
                    uint32_t count, handle which) {
    NEED_STREAM(which);
    gis_op *op;
    result code = make_batch(call, kind, semaphores, params, count, which, &op);
    if (code) return code;
    for (uint32_t i = 0; kind == GIS_OP_SIGNAL && i < count; i++)
        if (op->semaphores.semaphores[i]->kind == GIS_SCI_SYNC && params[i].sci_sync.fence)
            memset(params[i].sci_sync.fence, 0xf5, 48); /* the fence that NvSciSync would get */
    return gis_code(gis_submit(stream, op, false));
}

static result signal_semaphores(const uint64_t *semaphores, const semaphore_params *params, uint32_t count,
                                handle which) {
    ENTER(cuSignalExternalSemaphoresAsync);
    return batch("cuSignalExternalSemaphoresAsync", GIS_OP_SIGNAL, semaphores, params, count, which);
}

static result wait_semaphores(const uint64_t *semaphores, const semaphore_params *params, uint32_t count,
                              handle which) {
    ENTER(cuWaitExternalSemaphoresAsync);
    return batch("cuWaitExternalSemaphoresAsync", GIS_OP_WAIT, semaphores, params, count, which);
}

/* -- virtual memory management ------------------------------------------------------------------------------------- */

static result check_prop(const allocation_prop *prop) {
    NEED(prop && prop->type == 1 && prop->where.type == 1);
    if (!cuda_is_device(prop->where.id)) return INVALID_DEVICE;
    if (prop->handle_types & (gis_windows ? GIS_FABRIC : 6u)) return NOT_SUPPORTED;
    NEED(!(prop->handle_types & ~15u));
    return SUCCESS;
}

static result allocation_granularity(size_t *granularity, const allocation_prop *prop, uint32_t option) {
    ENTER(cuMemGetAllocationGranularity);
    result code = check_prop(prop);
    if (code) return code;
    NEED(option <= 1);
    *granularity = option ? GIS_RECOMMENDED : GIS_GRANULARITY;
    return SUCCESS;
}

static result vmm_create(handle *allocation, size_t size, const allocation_prop *prop, uint64_t flags) {
    ENTER(cuMemCreate);
    result code = check_prop(prop);
    if (code) return code;
    NEED(!flags);
    gis_vmm_handle *made;
    TRY(gis_vmm_create(prop->where.id, size, prop->handle_types, &made));
    made->rdma = prop->flags.rdma;
    *allocation = made->object.id;
    return SUCCESS;
}

static result vmm_release(handle allocation) {
    ENTER(cuMemRelease);
    gis_vmm_handle *found = gis_vmm_check(allocation);
    NEED(found);
    TRY(gis_vmm_release(found));
    return SUCCESS;
}

static result vmm_export(void *shared, handle allocation, uint32_t type, uint64_t flags) {
    ENTER(cuMemExportToShareableHandle);
    gis_vmm_handle *found = gis_vmm_check(allocation);
    NEED(found && shared && !flags);
    if (type == GIS_FABRIC) return gis_code(gis_fabric_export(found, shared));
    if (gis_windows && type == 2) {
        *(void **)shared = (void *)(uintptr_t)found->object.id;
        return SUCCESS;
    }
    if (type != 1) return NOT_SUPPORTED;
    NEED(found->handle_types & 1);
    int fd = dup(found->fd); /* inheritable, like the driver's */
    if (fd < 0) return 304;
    *(int *)shared = fd;
    return SUCCESS;
}

static result vmm_import(handle *allocation, void *shared, uint32_t type) {
    ENTER(cuMemImportFromShareableHandle);
    if (type != 1 && type != GIS_FABRIC) return NOT_SUPPORTED;
    NEED(type == 1 || shared);
    gis_vmm_handle *made;
    if (type == 1)
        TRY(gis_vmm_import((int)(intptr_t)shared, &made)); /* the descriptor stays the caller's */
    else
        TRY(gis_fabric_import(shared, &made));
    *allocation = made->object.id;
    return SUCCESS;
}

static result vmm_reserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, uint64_t flags) {
    ENTER(cuMemAddressReserve);
    (void)wanted;
    NEED(!flags);
    uintptr_t made;
    TRY(gis_vmm_reserve(size, alignment, &made));
    *address = made;
    return SUCCESS;
}

static result vmm_free(uint64_t address, size_t size) {
    ENTER(cuMemAddressFree);
    TRY(gis_vmm_free_address(address, size));
    return SUCCESS;
}

static result vmm_map(uint64_t address, size_t size, size_t offset, handle allocation, uint64_t flags) {
    ENTER(cuMemMap);
    gis_vmm_handle *found = gis_vmm_check(allocation);
    NEED(found && !flags);
    TRY(gis_vmm_map(address, size, offset, found));
    return SUCCESS;
}

static result vmm_unmap(uint64_t address, size_t size) {
    ENTER(cuMemUnmap);
    TRY(gis_vmm_unmap(address, size));
    return SUCCESS;
}

static result vmm_set_access(uint64_t address, size_t size, const access_desc *desc, size_t count) {
    ENTER(cuMemSetAccess);
    NEED(desc && count);
    for (size_t i = 0; i < count; i++) {
        NEED(desc[i].where.type == 1 && (desc[i].flags == 0 || desc[i].flags == 1 || desc[i].flags == 3));
        TRY(gis_vmm_access(address, size, desc[i].where.id, (int)desc[i].flags));
    }
    return SUCCESS;
}

static result vmm_properties(allocation_prop *prop, handle allocation) {
    ENTER(cuMemGetAllocationPropertiesFromHandle);
    gis_vmm_handle *found = gis_check(GIS_VMM_HANDLE, allocation);
    NEED(found && prop);
    memset(prop, 0, sizeof *prop);
    prop->type = 1;
    prop->handle_types = found->handle_types;
    prop->where = (location){1, found->object.device};
    return SUCCESS;
}

static result vmm_retain(handle *allocation, void *address) {
    ENTER(cuMemRetainAllocationHandle);
    gis_range *range = gis_range_at((uintptr_t)address);
    NEED(allocation && range && range->object.kind == GIS_VMM_MAPPING);
    gis_vmm_handle *found = (gis_vmm_handle *)range->owner;
    gis_vmm_retain(found);
    *allocation = found->object.id;
    return SUCCESS;
}

/* -- stream memory operations -------------------------------------------------------------------------------------- */

static result word(gis_op_kind kind, uint64_t address, uint64_t value, uint32_t flags, handle which) {
    NEED_STREAM(which);
    int allowed = 1;
    gis_overridden(stream->object.device, 122, &allowed);
    if (!allowed) return NOT_SUPPORTED;
    NEED(kind == GIS_OP_WRITE_VALUE ? flags <= 1 : !(flags & ~(3u | 1u << 30)));
    return gis_code(gis_word(stream, kind, address, value, ~0ull, flags & 3));
}

static result write64(handle which, uint64_t address, uint64_t value, uint32_t flags) {
    ENTER(cuStreamWriteValue64);
    return word(GIS_OP_WRITE_VALUE, address, value, flags, which);
}

static result wait64(handle which, uint64_t address, uint64_t value, uint32_t flags) {
    ENTER(cuStreamWaitValue64);
    return word(GIS_OP_WAIT_VALUE, address, value, flags, which);
}

/* -- graphs -------------------------------------------------------------------------------------------------------- */

static result graph_destroy(handle graph) {
    ENTER(cuGraphDestroy);
    gis_graph *found = gis_check(GIS_GRAPH, graph);
    NEED(found);
    gis_graph_destroy(found);
    return SUCCESS;
}

static result instantiate(handle *executable, handle graph, uint64_t flags) {
    gis_graph *found = gis_check(GIS_GRAPH, graph);
    NEED(found && executable && flags <= 15);
    gis_executable *made;
    TRY(gis_instantiate(found, &made));
    *executable = made->object.id;
    return SUCCESS;
}

static result graph_instantiate(handle *executable, handle graph, uint64_t flags) {
    ENTER(cuGraphInstantiate);
    return instantiate(executable, graph, flags);
}

/* Under its first name the driver still has the function of CUDA 11.0. */
static result graph_instantiate_11(handle *executable, handle graph, handle *error_node, char *log, size_t size) {
    ENTER(cuGraphInstantiate);
    NEED(size < 65536);
    if (error_node) *error_node = 0;
    if (size) *log = 0;
    return instantiate(executable, graph, 0);
}

static result graph_launch(handle executable, handle which) {
    ENTER(cuGraphLaunch);
    NEED_STREAM(which);
    gis_executable *found = gis_check(GIS_EXECUTABLE, executable);
    NEED(found);
    return gis_code(gis_launch(found, stream));
}

static result executable_destroy(handle executable) {
    ENTER(cuGraphExecDestroy);
    gis_executable *found = gis_check(GIS_EXECUTABLE, executable);
    NEED(found);
    gis_retire(&found->object); /* a running launch finishes */
    return SUCCESS;
}

static result graph_nodes(handle graph, handle *nodes, size_t *count) {
    ENTER(cuGraphGetNodes);
    gis_graph *found = gis_check(GIS_GRAPH, graph);
    NEED(found && count);
    if (!nodes) {
        *count = found->nodes.count;
        return SUCCESS;
    }
    NEED(*count);
    for (size_t i = 0; i < *count; i++) nodes[i] = i < found->nodes.count ? found->nodes.node[i]->object.id : 0;
    if (*count > found->nodes.count) *count = found->nodes.count;
    return SUCCESS;
}

static result node_type(handle node, uint32_t *type) {
    ENTER(cuGraphNodeGetType);
    gis_node *found = gis_check(GIS_GRAPH_NODE, node);
    NEED(found && type);
    static const uint32_t types[] = {[GIS_OP_COPY] = 1,        [GIS_OP_COPY_3D] = 1,     [GIS_OP_FILL] = 2,
                                     [GIS_OP_SIGNAL] = 8,      [GIS_OP_WAIT] = 9,        [GIS_OP_WRITE_VALUE] = 12,
                                     [GIS_OP_WAIT_VALUE] = 12, [GIS_OP_EVENT_RECORD] = 7, [GIS_OP_EVENT_WAIT] = 6,
                                     [GIS_OP_GRAPH] = 4,       [GIS_OP_MULTIMEM_STORE] = 0, [GIS_OP_MULTIMEM_ADD] = 0};
    *type = types[found->op->kind];
    return SUCCESS;
}

static result get_params(handle node, node_params *params, gis_op_kind kind) {
    gis_node *found = gis_check(GIS_GRAPH_NODE, node);
    NEED(found && params && found->op->kind == kind);
    params->semaphores = found->op->semaphores.ids;
    params->params = (semaphore_params *)found->op->semaphores.raw;
    params->count = found->op->semaphores.count;
    return SUCCESS;
}

static result signal_get_params(handle node, node_params *params) {
    ENTER(cuGraphExternalSemaphoresSignalNodeGetParams);
    return get_params(node, params, GIS_OP_SIGNAL);
}

static result wait_get_params(handle node, node_params *params) {
    ENTER(cuGraphExternalSemaphoresWaitNodeGetParams);
    return get_params(node, params, GIS_OP_WAIT);
}

static result set_params(const char *call, handle executable, handle node, const node_params *params,
                         gis_op_kind kind) {
    gis_executable *found = gis_check(GIS_EXECUTABLE, executable);
    NEED(found && params);
    for (uint32_t i = 0; i < found->count; i++) {
        if (found->node[i] != node) continue;
        gis_op *before = found->operations[i], *op;
        NEED(before->kind == kind && before->semaphores.count == params->count);
        result code = make_batch(call, kind, params->semaphores, params->params, params->count, node, &op);
        if (code) return code == INVALID_HANDLE ? INVALID_VALUE : code;
        found->operations[i] = op;
        gis_op_free(before);
        return SUCCESS;
    }
    return INVALID_VALUE;
}

static result signal_set_params(handle executable, handle node, const node_params *params) {
    ENTER(cuGraphExecExternalSemaphoresSignalNodeSetParams);
    return set_params("cuGraphExecExternalSemaphoresSignalNodeSetParams", executable, node, params, GIS_OP_SIGNAL);
}

static result wait_set_params(handle executable, handle node, const node_params *params) {
    ENTER(cuGraphExecExternalSemaphoresWaitNodeSetParams);
    return set_params("cuGraphExecExternalSemaphoresWaitNodeSetParams", executable, node, params, GIS_OP_WAIT);
}

/* -- the entry points by name and version -------------------------------------------------------------------------- */

GIS_EXPORT result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    BEGIN_CALL(cuGetProcAddress, true);
    if (entered_) return gis_code(entered_);
    NEED(name && function);
    if (flags & 2) per_thread = true; /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */
    *function = cuda_find(name, version);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

static result proc_address_11(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* A name can be listed several times: the newest version that is not newer than the requested one is returned. */
static const struct {
    const char *name;
    int version;
    void *function;
} entries[] = {
    {"cuInit", 2000, init},
    {"cuDriverGetVersion", 2020, driver_version},
    {"cuGetErrorName", 6000, error_name},
    {"cuGetErrorString", 6000, error_string},
    {"cuGetProcAddress", 11030, proc_address_11},
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
    {"cuDeviceGet", 2000, device_get},
    {"cuDeviceGetCount", 2000, device_count},
    {"cuDeviceGetName", 2000, device_name},
    {"cuDeviceGetUuid", 9020, device_uuid},
    {"cuDeviceGetUuid", 11040, device_uuid_2},
    {"cuDeviceGetLuid", 10000, device_luid},
    {"cuDeviceGetPCIBusId", 4010, device_bus_id},
    {"cuDeviceGetAttribute", 2000, device_attribute},
    {"cuDeviceCanAccessPeer", 4000, can_access_peer},
    {"cuDevicePrimaryCtxRetain", 7000, primary_retain},
    {"cuDevicePrimaryCtxRelease", 7000, primary_release},
    {"cuCtxGetCurrent", 4000, context_current},
    {"cuCtxSetCurrent", 4000, context_set},
    {"cuCtxPushCurrent", 4000, context_push},
    {"cuCtxPopCurrent", 4000, context_pop},
    {"cuCtxGetDevice", 2000, context_device},
    {"cuCtxGetDevice", 13000, context_device_2},
    {"cuStreamCreate", 2000, stream_create},
    {"cuStreamCreateWithPriority", 5050, stream_create_priority},
    {"cuStreamDestroy", 4000, stream_destroy},
    {"cuStreamQuery", 2000, stream_query},
    {"cuStreamSynchronize", 2000, stream_synchronize},
    {"cuStreamGetCtx", 9020, stream_context},
    {"cuStreamGetCtx", 12050, stream_context_2},
    {"cuStreamGetId", 12000, stream_id},
    {"cuStreamWaitEvent", 3020, stream_wait_event},
    {"cuStreamIsCapturing", 10000, stream_is_capturing},
    {"cuStreamBeginCapture", 10010, stream_begin_capture},
    {"cuStreamEndCapture", 10000, stream_end_capture},
    {"cuThreadExchangeStreamCaptureMode", 10010, exchange_mode},
    {"cuEventCreate", 2000, event_create},
    {"cuEventRecord", 2000, event_record},
    {"cuEventQuery", 2000, event_query},
    {"cuEventDestroy", 4000, event_destroy},
    {"cuMemAlloc", 3020, memory_allocate},
    {"cuMemFree", 3020, memory_free},
    {"cuMemAllocManaged", 6000, managed_allocate},
    {"cuMemAllocAsync", 11020, pool_allocate},
    {"cuMemFreeAsync", 11020, pool_free},
    {"cuMemHostAlloc", 2020, host_allocate},
    {"cuMemFreeHost", 2000, host_free},
    {"cuMemHostRegister", 6050, host_register},
    {"cuMemHostUnregister", 4000, host_unregister},
    {"cuMemHostGetDevicePointer", 3020, host_device_pointer},
    {"cuPointerGetAttribute", 4000, pointer_attribute},
    {"cuPointerGetAttributes", 7000, pointer_attributes},
    {"cuMemGetAddressRange", 3020, address_range},
    {"cuIpcGetMemHandle", 4010, ipc_export},
    {"cuIpcOpenMemHandle", 11000, ipc_open},
    {"cuIpcCloseMemHandle", 4010, ipc_close},
    {"cuMemcpyAsync", 4000, copy_async},
    {"cuMemcpyDtoHAsync", 3020, copy_out_async},
    {"cuMemsetD8Async", 3020, fill8_async},
    {"cuMemcpy3DAsync", 3020, copy_3d_async},
    {"cuImportExternalMemory", 10000, import_memory},
    {"cuExternalMemoryGetMappedBuffer", 10000, map_buffer},
    {"cuExternalMemoryGetMappedMipmappedArray", 10000, map_array},
    {"cuDestroyExternalMemory", 10000, destroy_memory},
    {"cuMipmappedArrayGetLevel", 5000, array_level},
    {"cuMipmappedArrayDestroy", 5000, array_destroy},
    {"cuImportExternalSemaphore", 10000, import_semaphore},
    {"cuDestroyExternalSemaphore", 10000, destroy_semaphore},
    {"cuSignalExternalSemaphoresAsync", 10000, signal_semaphores},
    {"cuWaitExternalSemaphoresAsync", 10000, wait_semaphores},
    {"cuMemGetAllocationGranularity", 10020, allocation_granularity},
    {"cuMemCreate", 10020, vmm_create},
    {"cuMemRelease", 10020, vmm_release},
    {"cuMemExportToShareableHandle", 10020, vmm_export},
    {"cuMemImportFromShareableHandle", 10020, vmm_import},
    {"cuMemAddressReserve", 10020, vmm_reserve},
    {"cuMemAddressFree", 10020, vmm_free},
    {"cuMemMap", 10020, vmm_map},
    {"cuMemUnmap", 10020, vmm_unmap},
    {"cuMemSetAccess", 10020, vmm_set_access},
    {"cuMemGetAllocationPropertiesFromHandle", 10020, vmm_properties},
    {"cuMemRetainAllocationHandle", 11000, vmm_retain},
    {"cuMulticastGetGranularity", 12010, multicast_granularity},
    {"cuMulticastCreate", 12010, multicast_create},
    {"cuMulticastAddDevice", 12010, multicast_add},
    {"cuMulticastBindMem", 12010, multicast_bind_memory},
    {"cuMulticastBindMem", 13010, multicast_bind_memory_2},
    {"cuMulticastBindAddr", 12010, multicast_bind_address},
    {"cuMulticastBindAddr", 13010, multicast_bind_address_2},
    {"cuMulticastUnbind", 12010, multicast_unbind},
    {"cuModuleLoadData", 2000, module_load},
    {"cuModuleUnload", 2000, module_unload},
    {"cuModuleGetFunction", 2000, module_function},
    {"cuLaunchKernel", 4000, launch_kernel},
    {"cuStreamWriteValue64", 11070, write64},
    {"cuStreamWaitValue64", 11070, wait64},
    {"cuGraphDestroy", 10000, graph_destroy},
    {"cuGraphInstantiateWithFlags", 11040, graph_instantiate},
    {"cuGraphInstantiate", 11000, graph_instantiate_11},
    {"cuGraphLaunch", 10000, graph_launch},
    {"cuGraphExecDestroy", 10000, executable_destroy},
    {"cuGraphGetNodes", 10000, graph_nodes},
    {"cuGraphNodeGetType", 10000, node_type},
    {"cuGraphExternalSemaphoresSignalNodeGetParams", 11020, signal_get_params},
    {"cuGraphExternalSemaphoresWaitNodeGetParams", 11020, wait_get_params},
    {"cuGraphExecExternalSemaphoresSignalNodeSetParams", 11020, signal_set_params},
    {"cuGraphExecExternalSemaphoresWaitNodeSetParams", 11020, wait_set_params},
};

void *cuda_find(const char *name, int version) {
    void *found = NULL;
    int newest = -1;
    if (version > driver_number()) version = driver_number();
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(entries[i].name, name) || entries[i].version > version || entries[i].version <= newest) continue;
        newest = entries[i].version;
        found = entries[i].function;
    }
    return found;
}
