/*
 * HIP's structs and numbers that these libraries need. The structs match hip-python (chip.pxd, cyhip.pxd), and have not
 * changed since ROCm 6.0. Sizes are those of 64-bit ABIs.
 */
#ifndef GIS_HIP_ABI_H
#define GIS_HIP_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int hip_error; /* hipError_t */

enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidDevicePointer = 17,
    hipErrorInvalidMemcpyDirection = 21,
    hipErrorNoDevice = 100,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorNotReady = 600,
    hipErrorPeerAccessAlreadyEnabled = 704,
    hipErrorContextIsDestroyed = 709,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801,
    hipErrorUnknown = 999,
};

typedef struct {
    uint32_t type, padding;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
    } handle;
    uint64_t size;
    uint32_t flags, reserved[16];
} hip_memory_desc;
_Static_assert(sizeof(hip_memory_desc) == 104 && offsetof(hip_memory_desc, flags) == 32,
               "hipExternalMemoryHandleDesc");

typedef struct {
    uint64_t offset, size;
    uint32_t flags, reserved[16];
} hip_buffer_desc;
_Static_assert(sizeof(hip_buffer_desc) == 88, "hipExternalMemoryBufferDesc");

typedef struct {
    int x, y, z, w;
    uint32_t kind;
} hip_channels;

typedef struct {
    size_t width, height, depth;
} hip_extent;

typedef struct {
    uint64_t offset;
    hip_channels format;
    hip_extent extent;
    uint32_t flags, levels;
} hip_mipmap_desc;
_Static_assert(sizeof(hip_mipmap_desc) == 64 && offsetof(hip_mipmap_desc, extent) == 32,
               "hipExternalMemoryMipmappedArrayDesc");

typedef struct {
    uint32_t type, padding;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
    } handle;
    uint32_t flags, reserved[16], padding2;
} hip_semaphore_desc;
_Static_assert(sizeof(hip_semaphore_desc) == 96, "hipExternalSemaphoreHandleDesc");

/* Of a signal and of a wait: the part before the flags differs, and is not read. */
typedef struct {
    uint64_t value, rest[8];
    uint32_t flags, reserved[16], padding;
} hip_semaphore_params;
_Static_assert(sizeof(hip_semaphore_params) == 144 && offsetof(hip_semaphore_params, flags) == 72,
               "hipExternalSemaphoreSignalParams");

typedef struct {
    int type, id;
} hip_location;

typedef struct {
    uint32_t type, handle_types;
    hip_location where;
    void *win32;
    uint8_t compression, rdma;
    uint16_t usage;
} hip_allocation_prop;
_Static_assert(sizeof(hip_allocation_prop) == 32, "hipMemAllocationProp");

typedef struct {
    hip_location where;
    uint32_t flags;
} hip_access_desc;
_Static_assert(sizeof(hip_access_desc) == 12, "hipMemAccessDesc");

typedef struct {
    size_t x, y, z;
} hip_position;

typedef struct {
    void *pointer;
    size_t pitch, width, height;
} hip_pitched;

typedef struct {
    void *source_array;
    hip_position source_at;
    hip_pitched source;
    void *target_array;
    hip_position target_at;
    hip_pitched target;
    hip_extent extent;
    uint32_t kind, padding;
} hip_copy_3d;
_Static_assert(sizeof(hip_copy_3d) == 160, "hipMemcpy3DParms");

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    uint32_t flags;
} hip_pointer;
_Static_assert(sizeof(hip_pointer) == 32, "hipPointerAttribute_t");

typedef struct {
    char bytes[64];
} hip_ipc_handle;

/* The beginning of hipDeviceProp_tR0600. */
typedef struct {
    char name[256];
    uint8_t uuid[16];
    char luid[8];
    uint32_t luid_mask, padding;
    size_t total;
} hip_properties;
_Static_assert(offsetof(hip_properties, luid) == 272 && offsetof(hip_properties, total) == 288, "hipDeviceProp_t");
#define HIP_PROPERTIES_BYTES 1472

#endif
