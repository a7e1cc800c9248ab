/*
 * The core of the simulated drivers: devices, contexts, streams, memory, external objects, graphs, faults. It is
 * independent of the vendor: a front (cuda/, hip/) adds the vendor's structs, names of errors and entry points.
 *
 * One lock guards everything. It is not held while a stream's thread works or waits, nor while a caller blocks.
 * Code that changes something that others may wait for broadcasts gis_progress.
 */
#ifndef GIS_H
#define GIS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define GIS_EXPORT __attribute__((visibility("default")))
#define GIS_MAX_DEVICES 16
#define GIS_CONTEXT_STACK 64

/* Negative: a neutral code, which gis_code translates. Positive: the vendor's own code, from a scripted fault. */
typedef int gis_status;
enum {
    GIS_OK = 0,
    GIS_INVALID_VALUE = -1,
    GIS_INVALID_HANDLE = -2,
    GIS_INVALID_CONTEXT = -3,
    GIS_INVALID_DEVICE = -4,
    GIS_OUT_OF_MEMORY = -5,
    GIS_NOT_SUPPORTED = -6,
    GIS_UNKNOWN = -7,
    GIS_NOT_READY = -8,
    GIS_NOT_INITIALIZED = -9,
    GIS_ILLEGAL_ADDRESS = -10,
    GIS_ILLEGAL_STATE = -11,
    GIS_CAPTURE_UNSUPPORTED = -12,
    GIS_CAPTURE_INVALIDATED = -13,
    GIS_CAPTURE_MERGE = -14,
    GIS_CAPTURE_UNMATCHED = -15,
    GIS_CAPTURE_UNJOINED = -16,
    GIS_CAPTURE_ISOLATION = -17,
    GIS_CAPTURE_IMPLICIT = -18,
    GIS_CAPTURED_EVENT = -19,
    GIS_CAPTURE_WRONG_THREAD = -20,
    GIS_HOST_ALREADY_REGISTERED = -23,
    GIS_HOST_NOT_REGISTERED = -24,
    GIS_NOT_PERMITTED = -25,
    GIS_MULTICAST_FULL = -26,
    GIS_PEER_UNSUPPORTED = -27,
};

/* The vendor's number of a status. */
int gis_code(gis_status status);

typedef struct {
    int code;
    const char *name, *text;
} gis_error;

extern const gis_error gis_errors[]; /* the vendor's; the last has no name */
const gis_error *gis_error_of(int code); /* NULL: not among them */

/* -- objects ------------------------------------------------------------------------------------------------------ */

typedef enum {
    GIS_CONTEXT,
    GIS_STREAM,
    GIS_EVENT,
    GIS_ALLOCATION,      /* device memory of a plain allocation */
    GIS_HOST_ALLOCATION, /* pinned host memory */
    GIS_REGISTRATION,    /* the caller's memory, pinned */
    GIS_MAPPING,         /* a buffer in external memory */
    GIS_VMM_MAPPING,
    GIS_IPC_MAPPING, /* an opened allocation of another process */
    GIS_EXTERNAL_MEMORY,
    GIS_EXTERNAL_SEMAPHORE,
    GIS_MIPMAPPED_ARRAY,
    GIS_ARRAY_LEVEL,
    GIS_VMM_HANDLE,
    GIS_MULTICAST,         /* a gis_vmm_handle too */
    GIS_MULTICAST_BINDING, /* made by this process */
    GIS_RESERVATION,
    GIS_GRAPH,
    GIS_GRAPH_NODE,
    GIS_EXECUTABLE,
    GIS_MODULE,
    GIS_FUNCTION,
    GIS_KINDS
} gis_kind;

typedef struct gis_object gis_object;
typedef struct gis_context gis_context;
typedef struct gis_stream gis_stream;
typedef struct gis_graph gis_graph;
typedef struct gis_node gis_node;

struct gis_object {
    gis_kind kind;
    uint64_t id; /* the handle that callers see; never reused, so that an old handle is recognized */
    int refs;
    int uses; /* operations, queued or running, that need it */
    bool live;
    gis_context *context; /* may be NULL */
    int device;
    void (*finalize)(gis_object *); /* called with the last reference; frees what the struct points to */
    gis_object *next;               /* in its bucket */
};

extern pthread_mutex_t gis_mutex;
extern pthread_cond_t gis_progress;
extern pthread_condattr_t gis_monotonic;

void *gis_new(gis_kind kind, size_t size, gis_context *context, int device, void (*finalize)(gis_object *));
void *gis_find(gis_kind kind, uint64_t id);  /* NULL, without noting a violation */
void *gis_check(gis_kind kind, uint64_t id); /* NULL, and a violation noted */
void gis_ref(gis_object *object);
void gis_unref(gis_object *object);
void gis_retire(gis_object *object); /* gis_find does not return it any more */
void gis_revive(gis_object *object); /* undo that, while something refers to it */
void gis_note_if_used(gis_object *object, const char *what);
void gis_each(gis_kind kind, void (*call)(gis_object *, void *), void *argument);
const char *gis_kind_name(gis_kind kind);
uint64_t gis_new_id(void);

/* -- calls, faults, the log ---------------------------------------------------------------------------------------- */

typedef struct gis_call {
    const char *name;
    bool early; /* allowed before initialisation */
    bool known;
    int blocked; /* threads that a fault, or the driver itself, holds in it now */
    uint64_t count;
    struct gis_call *next;
} gis_call;

typedef enum { GIS_FD_AS_DRIVER = 0, GIS_FD_OPEN = 1, GIS_FD_CLOSED = 2 } gis_fd_fault;

typedef struct {
    bool locked;
    gis_fd_fault fd; /* what a scripted failure of an import does with the descriptor */
} gis_scope;

/* Count the call, run its faults (before reading any argument), check initialisation, take the lock. */
gis_status gis_enter(gis_call *call, gis_scope *scope);
void gis_leave(gis_scope *scope);

void gis_hold(int by); /* this many more threads are held in the current call */
bool gis_all_zero(const uint32_t *words, int count);
size_t gis_name_bytes(const void *name); /* of a UTF-16 name without its end; 0 except on the Windows personality */
void gis_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
void gis_record(const char *call, const void *head, size_t head_size, const void *body, size_t body_size,
                uint32_t count);
void gis_log(const char *operation, const gis_stream *stream, uint64_t value, uint64_t address, uint64_t size);

extern bool gis_windows; /* the personality */
extern bool gis_ready;   /* initialised, and not a forked child */
extern bool gis_forked;
extern bool gis_does_nothing; /* streams complete their work at once, without doing or logging it */
extern int gis_settling;        /* releases that wait for a device; every other call waits for them */

/* -- devices ------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t uuid[16], mig_uuid[16];
    uint64_t total, used;
    int overrides;
    int override_number[64], override_value[64];
    gis_context *primary;
} gis_device;

extern int gis_device_count;
extern gis_device gis_devices[GIS_MAX_DEVICES];
extern bool gis_mig;
extern uint32_t gis_no_peer[GIS_MAX_DEVICES]; /* bit n: the device cannot access memory of device n */

void gis_initialize(void);
bool gis_overridden(int device, int number, int *value);
bool gis_can_peer(int device, int peer);

/* -- contexts ------------------------------------------------------------------------------------------------------ */

struct gis_context {
    gis_object object;
    bool primary;
    int retained;
    uint32_t flags;
    uint32_t peers; /* bit n: access to memory of device n was enabled */
    gis_stream *legacy;
    struct gis_thread_stream {
        pid_t thread;
        gis_stream *stream;
        struct gis_thread_stream *next;
    } *per_thread;
};

gis_context *gis_current(void);
gis_status gis_context_create(int device, uint32_t flags, gis_context **context);
gis_status gis_context_destroy(gis_context *context);
gis_status gis_primary_retain(int device, gis_context **context);
gis_status gis_primary_release(int device);
void gis_set_current(gis_context *context);
gis_status gis_push(gis_context *context);
gis_status gis_pop(gis_context **context);
gis_status gis_context_synchronize(gis_context *context);

/* -- memory -------------------------------------------------------------------------------------------------------- */

typedef enum { GIS_PLAIN, GIS_POOL, GIS_MANAGED } gis_sort; /* of a GIS_ALLOCATION: only plain ones can be exported */
typedef struct gis_door gis_door;
typedef struct gis_range gis_range;
struct gis_range {
    gis_object object;
    uintptr_t base;
    size_t size;
    uintptr_t pages;   /* the mapped address: base rounded down */
    size_t page_bytes; /* 0: not this library's to unmap */
    size_t offset;     /* VMM: of the first byte in the mapped object */
    uint32_t access;   /* VMM: bit n: device n has access */
    bool signal;       /* HIP: memory that the command processor can wait on */
    uintptr_t lands;   /* HIP: the address that work on `base` really uses */
    int settles;       /* the device whose work a release waits for */
    gis_object *owner; /* the external memory, the VMM handle */
    gis_sort sort;
    int fd;           /* of an allocation's memory; else -1 */
    gis_door *door;   /* where other processes ask for it; NULL: it was not exported */
    uint64_t opened;  /* an IPC mapping: the door it was opened with, */
    int opens;        /* and how often */
    gis_range *next;
};

typedef struct {
    gis_object object;
    uintptr_t pages; /* the whole object, mapped */
    size_t page_bytes;
    size_t real; /* bytes of data in the object; the import may have requested more */
    size_t size; /* as imported */
    int mappings;
    uintptr_t whole; /* if buffers are at base + offset: the base, set by the first buffer */
    size_t whole_bytes;
    bool outlived; /* its mappings may outlive it */
} gis_external_memory;

typedef struct gis_team gis_team;

/* Memory, or a multicast object: the same calls export, import, map and release both. */
typedef struct {
    gis_object object; /* mappings count its uses */
    int fd;
    size_t size;
    int holders;
    bool imported;
    uint32_t handle_types;
    bool rdma;      /* was requested */
    int bindings;   /* of memory: how often it is bound */
    gis_team *team; /* of a multicast object: its state, shared by its processes; NULL: memory */
} gis_vmm_handle;

typedef struct {
    gis_object object;
    uintptr_t base;
    size_t size;
} gis_reservation;

gis_range *gis_range_at(uintptr_t address);
gis_reservation *gis_reservation_at(uintptr_t address);
bool gis_is_freed(uintptr_t address); /* an address of this library's with no mapping */
gis_status gis_allocate(gis_context *context, size_t size, gis_sort sort, uintptr_t *address);
gis_status gis_allocate_host(gis_context *context, size_t size, uintptr_t *address);
gis_status gis_register_host(gis_context *context, uintptr_t address, size_t size);
void gis_settle(int device); /* wait for the device's work, as releases do */
gis_status gis_free(gis_kind first, gis_kind second, uintptr_t address); /* of an IPC mapping: one opening of it */
gis_status gis_free_later(uintptr_t address); /* in a stream's order: earlier work keeps the memory */
int gis_keep(int fd); /* move it to a high number, to take none that the program expects */

/* Memory that other processes open through 64 bytes. */
gis_status gis_ipc_open(gis_context *context, const void *data, uintptr_t *address);
gis_status gis_ipc_export(gis_range *range, uint64_t offset, void *data);
gis_status gis_ipc_read(const void *data, uint64_t *door, int *device);
int gis_ipc_fetch(uint64_t door); /* asks the exporter; -1: exporter or memory is gone. Call without the lock */
void gis_close_door(gis_door *door);

/* Takes over `fd` on success; *closed reports whether it was closed on a failure. */
gis_status gis_import_memory(gis_context *context, int fd, size_t size, gis_external_memory **memory, bool *closed);
gis_status gis_import_anonymous(gis_context *context, size_t size, gis_external_memory **memory);
gis_status gis_map_buffer(gis_external_memory *memory, uint64_t offset, uint64_t size, uintptr_t *address);
/* AMD's way: the object has one address, and a buffer is at its offset from there. */
gis_status gis_map_shared(gis_external_memory *memory, uint64_t offset, uint64_t size, uintptr_t *address);
void gis_destroy_memory(gis_external_memory *memory);

#define GIS_GRANULARITY ((size_t)2 << 20)
#define GIS_RECOMMENDED ((size_t)4 << 20)
#define GIS_HIDDEN_DEVICE (-2) /* measured: of a GPU that is hidden from the process; its memory can still be mapped */
#define GIS_FABRIC 8u /* CU_MEM_HANDLE_TYPE_FABRIC, hipMemHandleTypeFabric */
#define GIS_FABRIC_BYTES 64
gis_status gis_vmm_create(int device, size_t size, uint32_t handle_types, gis_vmm_handle **handle);
gis_vmm_handle *gis_vmm_new(gis_kind kind, int device, int fd, size_t size, bool imported);
gis_vmm_handle *gis_vmm_check(uint64_t id); /* of either kind; NULL, and a violation noted */
gis_status gis_vmm_import(int fd, gis_vmm_handle **handle);
bool gis_fabric_usable(void); /* GPUINTEROP_SIM_FABRIC names the channel that the process can use */
gis_status gis_fabric_export(const gis_vmm_handle *handle, void *data);
gis_status gis_fabric_import(const void *data, gis_vmm_handle **handle);
/* Opens a file of another process. GIS_INVALID_VALUE: that process has closed it; GIS_UNKNOWN: unknown. */
gis_status gis_open_theirs(pid_t process, int fd, uint64_t inode, int *found);
gis_status gis_vmm_release(gis_vmm_handle *handle);
void gis_vmm_retain(gis_vmm_handle *handle);
gis_status gis_vmm_reserve(size_t size, size_t alignment, uintptr_t *address);
gis_status gis_vmm_free_address(uintptr_t address, size_t size);
gis_status gis_vmm_map(uintptr_t address, size_t size, size_t offset, gis_vmm_handle *handle);
gis_status gis_vmm_unmap(uintptr_t address, size_t size);
gis_status gis_vmm_access(uintptr_t address, size_t size, int device, int protection);

/* -- multicast ----------------------------------------------------------------------------------------------------- */

#define GIS_MULTICAST_NAME "gpuinterop.simulated.multicast."
gis_status gis_multicast_create(uint32_t devices, size_t size, uint32_t handle_types, gis_vmm_handle **group);
gis_status gis_multicast_attach(int fd, gis_vmm_handle **group); /* takes over the descriptor */
void gis_multicast_finish(gis_vmm_handle *group);
gis_status gis_multicast_add(gis_vmm_handle *group, int device);
bool gis_multicast_has(const gis_vmm_handle *group, int device);
gis_status gis_multicast_wait(gis_vmm_handle *group); /* until all devices have been added */
/* named: what the caller named the memory with, itself or a mapping; it must still exist after the wait */
gis_status gis_multicast_bind(gis_vmm_handle *group, int device, size_t offset, gis_vmm_handle *memory, size_t start,
                              size_t size, gis_object *named);
gis_status gis_multicast_unbind(gis_vmm_handle *group, int device, size_t offset, size_t size);
/* Write the words to all bound memory, or set them to the sums over it. */
gis_status gis_multicast_store(gis_vmm_handle *group, size_t offset, uint32_t *words, size_t count);
gis_status gis_multicast_sum(gis_vmm_handle *group, size_t offset, uint32_t *words, size_t count);

/* -- semaphores ---------------------------------------------------------------------------------------------------- */

typedef enum { GIS_BINARY, GIS_TIMELINE, GIS_DEAD, GIS_DUMMY, GIS_SCI_SYNC } gis_semaphore_kind;

typedef struct {
    gis_object object;
    gis_semaphore_kind kind; /* DEAD: imported as another kind than it has; DUMMY: every wait passes at once */
    uint8_t *page;
    int file;                 /* a timeline's, for the lock of its signallers; else -1 */
    bool backwards;           /* it was signalled backwards: until the next signal, */
    uint32_t at_sequence;     /* which this shows, */
    uint64_t backwards_value; /* only values up to this one are reached */
} gis_semaphore;

gis_status gis_import_semaphore(gis_context *context, int fd, bool timeline, gis_semaphore **semaphore);
gis_status gis_make_semaphore(gis_context *context, gis_semaphore_kind kind, gis_semaphore **semaphore);
void gis_semaphore_signal(gis_semaphore *semaphore, uint64_t value);
void gis_semaphore_wait(gis_semaphore *semaphore, uint64_t value);

/* -- images -------------------------------------------------------------------------------------------------------- */

typedef struct {
    size_t texel;
    uint64_t width, height, depth; /* depth 0 or 1: two-dimensional; height 0: one-dimensional */
    uint64_t layers;               /* 0: not layered */
    uint32_t levels;  /* as the caller told the driver */
    uint32_t present; /* as the memory has them */
    uint64_t stride;  /* between layers */
    bool cube;
    bool exact; /* the caller passes the image's own number of levels */
} gis_image;

typedef struct {
    uint64_t offset, pitch, slice; /* of the first texel; slice: to the next layer, or the next depth */
    uint64_t width, height, depth; /* texels; depth: layers where there are any */
} gis_plane;

void gis_image_plane(const gis_image *image, uint32_t level, gis_plane *plane);
uint64_t gis_image_size(const gis_image *image);
/* Both vendors' flags. False: no driver makes such an array. */
enum { GIS_LAYERED = 0x01, GIS_CUBEMAP = 0x04 };
bool gis_image_shape(gis_image *image, uint32_t flags, uint64_t depth);
bool gis_image_fit(gis_image *image, uint64_t room); /* sets `present` and `stride`; false: it is too large */

typedef struct gis_array gis_array;
typedef struct gis_level {
    gis_object object;
    gis_array *array;
    uint32_t level;
    gis_plane plane;
} gis_level;

struct gis_array {
    gis_object object;
    gis_image image;
    gis_external_memory *memory;
    uintptr_t base, pages;
    size_t page_bytes;
    gis_level **levels;
};

void gis_destroy_array(gis_array *array);
gis_status gis_map_array(gis_external_memory *memory, uint64_t offset, gis_image *image, gis_array **array);

/* -- streams, operations, graphs ----------------------------------------------------------------------------------- */

typedef struct {
    gis_stream *stream; /* referenced */
    uint64_t position;
} gis_mark;

typedef enum {
    GIS_OP_COPY,
    GIS_OP_COPY_3D,
    GIS_OP_FILL,
    GIS_OP_SIGNAL,
    GIS_OP_WAIT,
    GIS_OP_WRITE_VALUE,
    GIS_OP_WAIT_VALUE,
    GIS_OP_EVENT_RECORD,
    GIS_OP_EVENT_WAIT,
    GIS_OP_GRAPH,
    GIS_OP_MULTIMEM_STORE,
    GIS_OP_MULTIMEM_ADD,
} gis_op_kind;

enum { GIS_WAIT_GEQ = 0, GIS_WAIT_EQ = 1, GIS_WAIT_AND = 2, GIS_WAIT_NOR = 3, GIS_WAIT_UNSIGNED_GEQ = 4 };

typedef struct gis_op {
    struct gis_op *next;
    gis_op_kind kind;
    gis_status failure; /* found when it was enqueued, and the result of its execution */
    union {
        struct {
            uintptr_t target, source;
            size_t size;
        } copy;
        struct {
            uintptr_t target, source;
            uint64_t target_pitch, target_slice, source_pitch, source_slice;
            uint64_t width, height, depth; /* width in bytes */
        } copy3d;
        struct {
            uintptr_t target;
            size_t count;
            uint32_t value, width;
        } fill;
        struct {
            uint32_t count;
            size_t raw_size; /* of one of the vendor's structs */
            gis_semaphore **semaphores;
            uint64_t *ids, *values;
            uint8_t *raw;
        } semaphores;
        struct {
            uintptr_t address;
            uint64_t value, mask; /* mask: the bits to compare */
            uint32_t condition;
        } word;
        gis_mark mark;
        struct {
            gis_vmm_handle *group;
            uintptr_t target, address;
            size_t offset, count;
            uint32_t value;
        } multimem;
        struct {
            uint32_t count;
            struct gis_op **operations;
        } graph;
    };
    uint32_t objects, marks;
    gis_object **object; /* referenced */
    gis_mark *after;     /* work on other streams that must be done first */
} gis_op;

gis_op *gis_op_new(gis_op_kind kind);
gis_op *gis_op_clone(const gis_op *op);
void gis_op_free(gis_op *op);
void gis_op_needs(gis_op *op, gis_object *object);

typedef enum { GIS_CAPTURE_GLOBAL = 0, GIS_CAPTURE_THREAD_LOCAL = 1, GIS_CAPTURE_RELAXED = 2 } gis_capture_mode;

typedef struct gis_capture {
    uint64_t id;
    int refs;
    gis_capture_mode mode;
    pid_t thread;
    bool invalid, ended;
    gis_stream *origin;
    gis_graph *graph;
    struct gis_capture *next;
} gis_capture;

typedef struct {
    uint32_t count, room;
    gis_node **node;
} gis_nodes;

struct gis_stream {
    gis_object object;
    uint32_t flags;
    int priority;
    bool blocking, implicit, started;
    pthread_cond_t wake;
    gis_op *head, *tail;
    uint64_t submitted, completed;
    uint64_t told; /* HIP: the position of the last marker: an event, a synchronisation, a query */
    gis_status error;
    uint64_t fail_at;
    gis_status fail_code;
    gis_capture *capture;
    gis_nodes tip; /* dependencies of the next captured node */
    gis_stream *next_working;
};

typedef struct {
    gis_object object;
    uint32_t flags;
    bool recorded;
    gis_mark mark;
    gis_capture *capture; /* recorded in a capture */
    gis_nodes tip;
} gis_event;

gis_status gis_stream_create(gis_context *context, bool blocking, uint32_t flags, int priority, gis_stream **stream);
void gis_stream_destroy(gis_stream *stream);
gis_stream *gis_legacy_stream(gis_context *context);
gis_stream *gis_thread_stream(gis_context *context);
gis_status gis_submit(gis_stream *stream, gis_op *op, bool block); /* takes over the operation, also on a failure */
gis_status gis_stream_query(gis_stream *stream);
gis_status gis_stream_synchronize(gis_stream *stream);
#define GIS_THREAD "simulated drive" /* at most 15 characters; tests/leftovers.py uses this name */
bool gis_start_thread(void *(*work)(void *), void *argument, pthread_t *joined); /* NULL: it is detached */
bool gis_device_settle(int device, double seconds); /* wait for all its streams; false: timed out */
gis_status gis_event_create(gis_context *context, uint32_t flags, gis_event **event);
gis_status gis_event_record(gis_event *event, gis_stream *stream);
gis_status gis_event_wait(gis_stream *stream, gis_event *event);
gis_status gis_event_query(gis_event *event, bool block);
void gis_event_destroy(gis_event *event);

/* One end of a block's copy: a level of an array, or memory with a pitch. x is in bytes. */
typedef struct {
    gis_level *level;
    uintptr_t address;
    uint64_t pitch, height, x, y, z;
} gis_end;

typedef struct {
    uint64_t width, height, depth; /* width in bytes */
} gis_block;

gis_status gis_copy(gis_stream *stream, uintptr_t target, uintptr_t source, size_t size, bool block);
gis_status gis_copy_3d(gis_stream *stream, const gis_end *target, const gis_end *source, const gis_block *size);
gis_status gis_fill(gis_stream *stream, uintptr_t target, uint32_t value, uint32_t width, size_t count);
gis_status gis_word(gis_stream *stream, gis_op_kind kind, uintptr_t address, uint64_t value, uint64_t mask,
                    uint32_t condition);
/* `multimem.st` and `multimem.ld_reduce` on 32-bit words; only the latter has a target. */
gis_op *gis_multimem_op(gis_stream *stream, gis_op_kind kind, uintptr_t target, uintptr_t address, uint32_t value,
                        size_t count, gis_status *status);
/* NULL, and a status, if a handle is invalid. */
gis_op *gis_semaphore_op(gis_op_kind kind, uint32_t count, const uint64_t *ids, const uint64_t *values, const void *raw,
                         size_t raw_size, gis_status *status);

struct gis_node {
    gis_object object;
    gis_graph *graph;
    gis_op *op;
    gis_nodes after;
    bool reached;
};

struct gis_graph {
    gis_object object;
    gis_nodes nodes; /* in the order of their capture */
};

typedef struct {
    gis_object object;
    uint32_t count;
    uint64_t *node; /* ids */
    gis_op **operations;
} gis_executable;

/* A stream in capture cannot be queried or waited for: that ends the capture. */
gis_status gis_not_capturing(gis_stream *stream);
gis_status gis_unsafe(void); /* for calls that a capture forbids: GIS_OK, or the capture is lost */
gis_status gis_unsafe_in_any(void); /* the same in every capture, whatever its mode and thread */
gis_capture_mode gis_exchange_mode(gis_capture_mode mode);
gis_status gis_capture_begin(gis_stream *stream, gis_capture_mode mode);
gis_status gis_capture_end(gis_stream *stream, gis_graph **graph);
void gis_capture_abandon(gis_stream *stream);
/* whether a legacy stream would wait for a captured one; with `asking` captures stay valid */
gis_status gis_capture_implicit(gis_stream *stream, bool asking);
void gis_capture_unref(gis_capture *capture);
void gis_nodes_add(gis_nodes *nodes, gis_node *node);
void gis_nodes_clear(gis_nodes *nodes);
void gis_nodes_union(gis_nodes *nodes, const gis_nodes *more);
gis_graph *gis_graph_create(void);
gis_node *gis_graph_add(gis_graph *graph, gis_op *op, const gis_nodes *after);
void gis_graph_destroy(gis_graph *graph);
gis_status gis_instantiate(gis_graph *graph, gis_executable **executable);
gis_status gis_launch(gis_executable *executable, gis_stream *stream);

pid_t gis_thread_id(void);
void gis_deadline(struct timespec *until, double seconds); /* of the monotonic clock */

#endif
