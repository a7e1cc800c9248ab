/*
 * A libamdhip64.so that turns calls of the HIP runtime into calls of the CUDA driver. README.md says what for, and what
 * it proves.
 *
 * Both sides are declared as far as they are needed: HIP's structs in ../hip/abi.h, CUDA's here, as the driver takes
 * them. Handles pass through as they are; numbers are ordinals on both sides.
 */
#ifndef GFW_H
#define GFW_H

#include "abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GFW_EXPORT __attribute__((visibility("default")))
#define GFW_MAX_DEVICES 64

typedef int cuda_error; /* CUresult */

enum { CUDA_INVALID_VALUE = 1, CUDA_NO_DEVICE = 100 };

/* -- CUDA's, where they differ ------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t x, y, z, lod;
    uint32_t type, padding;
    const void *host;
    uint64_t device;
    void *array, *reserved;
    uint64_t pitch, height;
} cuda_copy_end;

typedef struct {
    cuda_copy_end source, target;
    uint64_t width, height, depth;
} cuda_copy_3d;
_Static_assert(sizeof(cuda_copy_3d) == 200 && offsetof(cuda_copy_3d, target) == 88, "CUDA_MEMCPY3D");

typedef struct {
    uint64_t width, height, depth;
    uint32_t format, channels, flags, padding;
} cuda_array_desc;
_Static_assert(sizeof(cuda_array_desc) == 40, "CUDA_ARRAY3D_DESCRIPTOR");

typedef struct {
    uint64_t offset;
    cuda_array_desc array;
    uint32_t levels, reserved[16], padding;
} cuda_mipmap_desc;
_Static_assert(sizeof(cuda_mipmap_desc) == 120, "CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC");

typedef struct {
    uint32_t type, handle_types;
    hip_location where;
    void *win32;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
} cuda_allocation_prop;
_Static_assert(sizeof(cuda_allocation_prop) == 32, "CUmemAllocationProp");

/* -- the CUDA driver ----------------------------------------------------------------------------------------------- */

/* Each as of CUDA 12.0, which says which version of it cuGetProcAddress gives. */
#define CUDA_FUNCTIONS(X)                                                                                       \
    X(cuInit, (uint32_t flags))                                                                                 \
    X(cuGetErrorString, (cuda_error code, const char **text))                                                   \
    X(cuDeviceGet, (int *device, int ordinal))                                                                  \
    X(cuDeviceGetCount, (int *count))                                                                           \
    X(cuDeviceGetName, (char *name, int size, int device))                                                      \
    X(cuDeviceGetPCIBusId, (char *text, int size, int device))                                                  \
    X(cuDeviceGetAttribute, (int *value, int number, int device))                                               \
    X(cuDeviceCanAccessPeer, (int *can, int device, int peer))                                                  \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                                                   \
    X(cuCtxGetCurrent, (void **context))                                                                        \
    X(cuCtxSetCurrent, (void *context))                                                                         \
    X(cuCtxPushCurrent, (void *context))                                                                        \
    X(cuCtxPopCurrent, (void **context))                                                                        \
    X(cuCtxGetDevice, (int *device))                                                                            \
    X(cuCtxSynchronize, (void))                                                                                 \
    X(cuStreamCreateWithPriority, (void **stream, uint32_t flags, int priority))                                \
    X(cuStreamDestroy, (void *stream))                                                                          \
    X(cuStreamQuery, (void *stream))                                                                            \
    X(cuStreamSynchronize, (void *stream))                                                                      \
    X(cuStreamGetCtx, (void *stream, void **context))                                                           \
    X(cuStreamGetFlags, (void *stream, unsigned *flags))                                                        \
    X(cuStreamWaitEvent, (void *stream, void *event, uint32_t flags))                                           \
    X(cuStreamIsCapturing, (void *stream, int *status))                                                         \
    X(cuStreamBeginCapture, (void *stream, uint32_t mode))                                                      \
    X(cuStreamEndCapture, (void *stream, void **graph))                                                         \
    X(cuThreadExchangeStreamCaptureMode, (uint32_t *mode))                                                      \
    X(cuGraphDestroy, (void *graph))                                                                            \
    X(cuEventCreate, (void **event, uint32_t flags))                                                            \
    X(cuEventRecord, (void *event, void *stream))                                                               \
    X(cuEventQuery, (void *event))                                                                              \
    X(cuEventDestroy, (void *event))                                                                            \
    X(cuMemAlloc, (uint64_t *address, size_t size))                                                             \
    X(cuMemFree, (uint64_t address))                                                                            \
    X(cuMemHostAlloc, (void **address, size_t size, uint32_t flags))                                            \
    X(cuMemFreeHost, (void *address))                                                                           \
    X(cuMemHostRegister, (void *address, size_t size, uint32_t flags))                                          \
    X(cuMemHostUnregister, (void *address))                                                                     \
    X(cuMemHostGetDevicePointer, (uint64_t *pointer, void *address, uint32_t flags))                            \
    X(cuPointerGetAttribute, (void *data, uint32_t attribute, uint64_t address))                                \
    X(cuMemcpy, (uint64_t target, uint64_t source, size_t size))                                                \
    X(cuMemcpyAsync, (uint64_t target, uint64_t source, size_t size, void *stream))                             \
    X(cuMemsetD8, (uint64_t target, uint8_t value, size_t count))                                               \
    X(cuMemsetD8Async, (uint64_t target, uint8_t value, size_t count, void *stream))                            \
    X(cuMemcpy3DAsync, (const cuda_copy_3d *job, void *stream))                                                 \
    X(cuArray3DGetDescriptor, (cuda_array_desc * desc, void *array))                                            \
    X(cuImportExternalMemory, (void **memory, const hip_memory_desc *desc))                                     \
    X(cuExternalMemoryGetMappedBuffer, (uint64_t *address, void *memory, const hip_buffer_desc *desc))          \
    X(cuExternalMemoryGetMappedMipmappedArray, (void **array, void *memory, const cuda_mipmap_desc *desc))      \
    X(cuDestroyExternalMemory, (void *memory))                                                                  \
    X(cuMipmappedArrayGetLevel, (void **level, void *array, uint32_t number))                                   \
    X(cuMipmappedArrayDestroy, (void *array))                                                                   \
    X(cuMemGetAllocationGranularity, (size_t *bytes, const cuda_allocation_prop *prop, uint32_t option))        \
    X(cuMemCreate, (uint64_t *allocation, size_t size, const cuda_allocation_prop *prop, uint64_t flags))       \
    X(cuMemRelease, (uint64_t allocation))                                                                      \
    X(cuMemExportToShareableHandle, (void *shared, uint64_t allocation, uint32_t type, uint64_t flags))         \
    X(cuMemImportFromShareableHandle, (uint64_t *allocation, void *shared, uint32_t type))                      \
    X(cuMemAddressReserve, (uint64_t *address, size_t size, size_t alignment, uint64_t hint, uint64_t flags))   \
    X(cuMemAddressFree, (uint64_t address, size_t size))                                                        \
    X(cuMemMap, (uint64_t address, size_t size, size_t offset, uint64_t allocation, uint64_t flags))            \
    X(cuMemUnmap, (uint64_t address, size_t size))                                                              \
    X(cuMemSetAccess, (uint64_t address, size_t size, const hip_access_desc *desc, size_t count))               \
    X(cuMemGetAllocationPropertiesFromHandle, (cuda_allocation_prop * prop, uint64_t allocation))               \
    X(cuStreamWaitValue64, (void *stream, uint64_t address, uint64_t value, uint32_t flags))                    \
    X(cuStreamWriteValue64, (void *stream, uint64_t address, uint64_t value, uint32_t flags))

#define GFW_MEMBER(NAME, ARGUMENTS) cuda_error (*NAME) ARGUMENTS;
extern struct gfw_cuda { CUDA_FUNCTIONS(GFW_MEMBER) } cuda;

/* Load the driver and initialise it, once; what came of it. */
hip_error gfw_ready(void);
int gfw_device_count(void);
int gfw_cuda_device(int ordinal);
bool gfw_is_device(int ordinal);
hip_error gfw_code(cuda_error code);
int gfw_version(void);

/* -- the calling thread -------------------------------------------------------------------------------------------- */

extern _Thread_local int gfw_device; /* HIP's current one; every thread begins with 0 */

typedef struct {
    bool pushed;
} gfw_scope;

/* Make the device's primary context current, until the scope is left. */
hip_error gfw_enter(gfw_scope *scope, int device);
void gfw_leave(gfw_scope *scope);
hip_error gfw_context(int device, void **context);

typedef struct gfw_count {
    const char *name;
    uint64_t calls;
    bool known;
    struct gfw_count *next;
} gfw_count;

void gfw_called(gfw_count *count);
hip_error gfw_note(hip_error code); /* it is this thread's last error then */

/* -- writing an entry point ---------------------------------------------------------------------------------------- */

/* The function that is exported counts the call and notes its error; what follows the macro is what it does. */
#define HIP_CALL(NAME, PARAMETERS, ARGUMENTS)                \
    static hip_error NAME##_forwarded PARAMETERS;            \
    GFW_EXPORT hip_error NAME PARAMETERS;                    \
    GFW_EXPORT hip_error NAME PARAMETERS {                   \
        static gfw_count calls_ = {.name = #NAME};           \
        gfw_called(&calls_);                                 \
        return gfw_note(NAME##_forwarded ARGUMENTS);         \
    }                                                        \
    static hip_error NAME##_forwarded PARAMETERS

#define NEED(CONDITION) \
    if (!(CONDITION)) return hipErrorInvalidValue
#define TRY(CALL)                          \
    do {                                   \
        hip_error code_ = (CALL);          \
        if (code_) return code_;           \
    } while (0)
#define CUDA(CALL)                                \
    do {                                          \
        cuda_error code_ = (CALL);                \
        if (code_) return gfw_code(code_);        \
    } while (0)
#define READY TRY(gfw_ready())
/* Calls that belong to a device, the thread's or an object's. */
#define ON(DEVICE)                                                        \
    gfw_scope scope_ __attribute__((cleanup(gfw_leave))) = {false};       \
    TRY(gfw_enter(&scope_, DEVICE))
#define ON_CURRENT ON(gfw_device)

const char *gfw_error_name(hip_error code); /* NULL for what HIP has no name for */

/* hipFree, of what is no external memory's. */
hip_error gfw_free_plain(void *pointer);
bool gfw_is_signal_memory(const void *pointer);

#endif
