/* The CUDA driver's structs and numbers that the simulated driver needs. Sizes are those of 64-bit ABIs. */
#ifndef GIS_CUDA_H
#define GIS_CUDA_H

#include "gis.h"

typedef int result; /* CUresult */
typedef uint64_t handle;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    MULTICAST_FULL = 47,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

void *cuda_find(const char *name, int version);
bool cuda_is_device(int device);
gis_stream *cuda_stream(handle stream, gis_status *status);

#define BEGIN_CALL(NAME, EARLY)                                             \
    static gis_call call_ = {.name = #NAME, .early = EARLY};                \
    gis_scope scope_ __attribute__((cleanup(gis_leave))) = {.locked = false}; \
    gis_status entered_ = gis_enter(&call_, &scope_)
#define ENTER(NAME)          \
    BEGIN_CALL(NAME, false); \
    if (entered_) return gis_code(entered_)
#define TRY(CALL)                                      \
    do {                                               \
        gis_status status_ = (CALL);                   \
        if (status_ != GIS_OK) return gis_code(status_); \
    } while (0)
#define NEED_CONTEXT                      \
    gis_context *context = gis_current(); \
    if (!context) return INVALID_CONTEXT
#define NEED(CONDITION) \
    if (!(CONDITION)) return INVALID_VALUE
#define FIND(TYPE, VARIABLE, KIND, HANDLE)        \
    TYPE *VARIABLE = gis_check(KIND, HANDLE);     \
    if (!VARIABLE) return INVALID_HANDLE
#define NEED_STREAM(HANDLE)                                \
    gis_status found_;                                     \
    gis_stream *stream = cuda_stream(HANDLE, &found_);     \
    if (!stream) return gis_code(found_)

/* In multicast.c. */
typedef struct multicast_prop multicast_prop;
result multicast_granularity(size_t *granularity, const multicast_prop *prop, uint32_t option);
result multicast_create(handle *group, const multicast_prop *prop);
result multicast_add(handle group, int device);
result multicast_bind_memory(handle group, size_t offset, handle memory, size_t start, size_t size, uint64_t flags);
result multicast_bind_memory_2(handle group, int device, size_t offset, handle memory, size_t start, size_t size,
                               uint64_t flags);
result multicast_bind_address(handle group, size_t offset, uint64_t address, size_t size, uint64_t flags);
result multicast_bind_address_2(handle group, int device, size_t offset, uint64_t address, size_t size, uint64_t flags);
result multicast_unbind(handle group, int device, size_t offset, size_t size);
/* In kernels.c. */
result module_load(handle *module, const void *image);
result module_unload(handle module);
result module_function(handle *function, handle module, const char *name);
result launch_kernel(handle function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                     uint32_t block_y, uint32_t block_z, uint32_t shared, handle stream, void **parameters,
                     void **extra);

typedef struct {
    uint32_t type, padding;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
        const void *object;
        uint64_t word[2];
    } handle;
    uint64_t size;
    uint32_t flags, reserved[16];
} memory_desc;
_Static_assert(sizeof(memory_desc) == 104 && offsetof(memory_desc, size) == 24, "CUDA_EXTERNAL_MEMORY_HANDLE_DESC");

typedef struct {
    uint64_t offset, size;
    uint32_t flags, reserved[16];
} buffer_desc;
_Static_assert(sizeof(buffer_desc) == 88, "CUDA_EXTERNAL_MEMORY_BUFFER_DESC");

typedef struct {
    uint64_t width, height, depth;
    uint32_t format, channels, flags, padding;
} array3d_desc;
_Static_assert(sizeof(array3d_desc) == 40, "CUDA_ARRAY3D_DESCRIPTOR");

typedef struct {
    uint64_t offset;
    array3d_desc array;
    uint32_t levels, reserved[16], padding;
} mipmap_desc;
_Static_assert(sizeof(mipmap_desc) == 120, "CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC");

typedef struct {
    uint32_t type, padding;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
        const void *object;
        uint64_t word[2];
    } handle;
    uint32_t flags, reserved[16], padding2;
} semaphore_desc;
_Static_assert(sizeof(semaphore_desc) == 96, "CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC");

/* Of a signal and of a wait: a wait has a time-out after the key. */
typedef struct {
    uint64_t value;
    union {
        void *fence;
        uint64_t word;
    } sci_sync;
    uint64_t key;
    uint32_t timeout, reserved[11];
    uint32_t flags, reserved2[16], padding;
} semaphore_params;
_Static_assert(sizeof(semaphore_params) == 144 && offsetof(semaphore_params, flags) == 72,
               "CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS");

typedef struct {
    uint64_t *semaphores;
    semaphore_params *params;
    uint32_t count, padding;
} node_params;
_Static_assert(sizeof(node_params) == 24, "CUDA_EXT_SEM_SIGNAL_NODE_PARAMS");

typedef struct {
    uint32_t type;
    int32_t id;
} location;

typedef struct {
    uint32_t type, handle_types;
    location where;
    void *win32;
    struct {
        uint8_t compression, rdma;
        uint16_t usage;
        uint8_t reserved[4];
    } flags;
} allocation_prop;
_Static_assert(sizeof(allocation_prop) == 32, "CUmemAllocationProp");

typedef struct {
    location where;
    uint32_t flags;
} access_desc;
_Static_assert(sizeof(access_desc) == 12, "CUmemAccessDesc");

struct multicast_prop {
    uint32_t devices, padding;
    uint64_t size, handle_types, flags;
};
_Static_assert(sizeof(multicast_prop) == 32, "CUmulticastObjectProp");

typedef struct {
    uint64_t x, y, z, lod;
    uint32_t type, padding;
    uint64_t host, device, array, reserved, pitch, height;
} copy_end;

typedef struct {
    copy_end source, target;
    uint64_t width, height, depth;
} memcpy3d;
_Static_assert(sizeof(memcpy3d) == 200 && offsetof(memcpy3d, target) == 88, "CUDA_MEMCPY3D");

typedef struct {
    uint64_t flags, stream, error_node;
    uint32_t result, padding;
} instantiate_params;
_Static_assert(sizeof(instantiate_params) == 32, "CUDA_GRAPH_INSTANTIATE_PARAMS");

#endif
