/* Objects and their handles, devices, calls and their faults, the log, and the control functions for tests. */
#include "gis.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t gis_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t gis_progress;
pthread_condattr_t gis_monotonic;
bool gis_windows, gis_ready, gis_forked, gis_mig, gis_does_nothing;
uint32_t gis_no_peer[GIS_MAX_DEVICES];
int gis_settling;
int gis_device_count;
gis_device gis_devices[GIS_MAX_DEVICES];

static const char *const kind_names[GIS_KINDS] = {
    "context",       "stream",       "event",           "allocation",         "host_allocation", "registration",
    "mapping",       "vmm_mapping",  "ipc_mapping",     "external_memory",    "external_semaphore", "mipmapped_array",
    "array_level",   "vmm_handle",   "multicast",       "multicast_binding",  "reservation",     "graph",
    "graph_node",    "executable",   "module",          "function",
};

/* -- objects ------------------------------------------------------------------------------------------------------ */

#define BUCKETS 4096
static gis_object *buckets[BUCKETS];
static int64_t live[GIS_KINDS];
/* Above the low half of the address space, so that no handle looks like an address. */
static uint64_t next_id = 0x6a5000000000;

static gis_object **bucket(uint64_t id) { return &buckets[(id >> 4) % BUCKETS]; }

uint64_t gis_new_id(void) { return next_id += 16; }

const char *gis_kind_name(gis_kind kind) { return kind_names[kind]; }

static void enter(gis_object *object) {
    gis_object **head = bucket(object->id);
    object->next = *head;
    *head = object;
    live[object->kind]++;
}

void *gis_new(gis_kind kind, size_t size, gis_context *context, int device, void (*finalize)(gis_object *)) {
    gis_object *object = calloc(1, size);
    if (!object) abort();
    object->kind = kind;
    object->id = gis_new_id();
    object->refs = 1;
    object->live = true;
    object->context = context;
    object->device = device;
    object->finalize = finalize;
    if (context) gis_ref(&context->object);
    enter(object);
    return object;
}

void gis_revive(gis_object *object) {
    gis_ref(object);
    object->live = true;
    enter(object);
}

void *gis_find(gis_kind kind, uint64_t id) {
    for (gis_object *object = *bucket(id); object; object = object->next)
        if (object->id == id) return object->kind == kind ? object : NULL;
    return NULL;
}

void *gis_check(gis_kind kind, uint64_t id) {
    void *object = gis_find(kind, id);
    if (!object) {
        bool ours = id > 0x6a5000000000 && id <= next_id && id % 16 == 0;
        gis_violation("%#llx is no live %s%s", (unsigned long long)id, kind_names[kind],
                      ours ? ": it was destroyed, or is of another kind" : "");
    }
    return object;
}

void gis_ref(gis_object *object) { object->refs++; }

void gis_unref(gis_object *object) {
    if (--object->refs) return;
    gis_context *context = object->context;
    if (object->finalize) object->finalize(object);
    free(object);
    if (context) gis_unref(&context->object);
}

void gis_retire(gis_object *object) {
    if (!object->live) return;
    object->live = false;
    live[object->kind]--;
    for (gis_object **link = bucket(object->id); *link; link = &(*link)->next) {
        if (*link == object) {
            *link = object->next;
            break;
        }
    }
    gis_unref(object);
}

void gis_note_if_used(gis_object *object, const char *what) {
    if (object->uses)
        gis_violation("the %s %#llx is still used by %d operations that are queued or running%s",
                      kind_names[object->kind], (unsigned long long)object->id, object->uses, what);
}

void gis_each(gis_kind kind, void (*call)(gis_object *, void *), void *argument) {
    for (int i = 0; i < BUCKETS; i++) {
        gis_object *next;
        for (gis_object *object = buckets[i]; object; object = next) {
            next = object->next;
            if (object->kind == kind) call(object, argument);
        }
    }
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

static void forked(void) {
    /* The streams' threads exist only in the parent, and the lock may have been guarding unfinished changes. */
    gis_forked = true;
    gis_ready = false;
    pthread_mutex_init(&gis_mutex, NULL);
}

__attribute__((constructor)) static void prepare(void) {
    pthread_condattr_init(&gis_monotonic);
    pthread_condattr_setclock(&gis_monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&gis_progress, &gis_monotonic);
    pthread_atfork(NULL, NULL, forked);
    const char *count = getenv("GPUINTEROP_SIM_DEVICES"), *mig = getenv("GPUINTEROP_SIM_MIG");
    gis_device_count = count && *count ? atoi(count) : 1;
    if (gis_device_count < 0) gis_device_count = 0;
    if (gis_device_count > GIS_MAX_DEVICES) gis_device_count = GIS_MAX_DEVICES;
    gis_mig = mig && *mig && strcmp(mig, "0");
    const char *nothing = getenv("GPUINTEROP_SIM_DOES_NOTHING");
    gis_does_nothing = nothing && *nothing && strcmp(nothing, "0");
    for (int i = 0; i < GIS_MAX_DEVICES; i++) {
        gis_device *device = &gis_devices[i];
        memcpy(device->uuid, "SwiftShaderUUID", 15); /* device 0: its memory and semaphores are understood here */
        device->uuid[15] = (uint8_t)i;
        memcpy(device->mig_uuid, "simulated-mig-", 14);
        device->mig_uuid[15] = (uint8_t)i;
        device->total = (uint64_t)16 << 30;
    }
}

void gis_initialize(void) { gis_ready = !gis_forked; }

bool gis_can_peer(int device, int peer) { return device != peer && !(gis_no_peer[device] & 1u << peer); }

bool gis_overridden(int device, int number, int *value) {
    const gis_device *it = &gis_devices[device];
    for (int i = 0; i < it->overrides; i++) {
        if (it->override_number[i] == number) {
            *value = it->override_value[i];
            return true;
        }
    }
    return false;
}

/* -- calls and faults ---------------------------------------------------------------------------------------------- */

typedef enum { FAIL, DELAY, BLOCK } fault_kind;

typedef struct fault {
    char call[64];
    fault_kind kind;
    uint64_t nth, every; /* nth: counted down; then again after every so many calls, 0: never */
    gis_status code;
    gis_fd_fault fd;
    double seconds;
    bool released, gone, struck;
    int refs;
    struct fault *next;
} fault;

static fault *faults;
static gis_call *calls;
static __thread gis_call *current;

pid_t gis_thread_id(void) {
    static __thread pid_t id;
    static __thread bool in_child;
    if (!id || in_child != gis_forked) {
        id = (pid_t)syscall(SYS_gettid);
        in_child = gis_forked;
    }
    return id;
}

void gis_deadline(struct timespec *until, double seconds) {
    clock_gettime(CLOCK_MONOTONIC, until);
    until->tv_sec += (time_t)seconds;
    until->tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    if (until->tv_nsec >= 1000000000) {
        until->tv_nsec -= 1000000000;
        until->tv_sec++;
    }
}

static void drop_fault(fault *it) {
    if (--it->refs == 0) free(it);
}

void gis_hold(int by) {
    current->blocked += by;
    pthread_cond_broadcast(&gis_progress);
}

static void run_block(fault *it) {
    struct timespec until;
    gis_deadline(&until, it->seconds);
    gis_hold(1);
    while (!it->released && pthread_cond_timedwait(&gis_progress, &gis_mutex, &until) != ETIMEDOUT)
        ;
    gis_hold(-1);
}

#define TRACE 65536
static const char *trace[TRACE]; /* the calls in order */
static uint64_t traced;

/* The lock is held on entry and on return, but not throughout. */
static gis_status run_faults(gis_call *call, gis_scope *scope) {
    gis_status status = GIS_OK;
    fault *next;
    for (fault *it = faults; it; it = next) {
        next = it->next;
        if (it->gone || strcmp(it->call, call->name)) continue;
        if (it->nth > 1) {
            it->nth--;
            continue;
        }
        it->nth = it->every;
        it->gone = !it->every;
        it->struck = true;
        it->refs++;
        if (it->kind == FAIL) {
            status = it->code;
            scope->fd = it->fd;
        } else if (it->kind == DELAY) {
            pthread_mutex_unlock(&gis_mutex);
            usleep((useconds_t)(it->seconds * 1e6));
            pthread_mutex_lock(&gis_mutex);
        } else {
            run_block(it);
        }
        next = it->next;
        drop_fault(it);
        if (status) break;
    }
    return status;
}

gis_status gis_enter(gis_call *call, gis_scope *scope) {
    if (gis_forked) return GIS_NOT_INITIALIZED;
    pthread_mutex_lock(&gis_mutex);
    scope->locked = true;
    current = call;
    if (!call->known) {
        call->known = true;
        call->next = calls;
        calls = call;
    }
    call->count++;
    while (gis_settling) pthread_cond_wait(&gis_progress, &gis_mutex); /* a release blocks every other call */
    trace[traced++ % TRACE] = call->name;
    gis_status status = faults ? run_faults(call, scope) : GIS_OK;
    if (!status && !gis_ready && !call->early) status = GIS_NOT_INITIALIZED;
    return status;
}

void gis_leave(gis_scope *scope) {
    if (!scope->locked) return;
    current = NULL;
    pthread_mutex_unlock(&gis_mutex);
}

/* -- checks of arguments for the fronts ---------------------------------------------------------------------------- */

bool gis_all_zero(const uint32_t *words, int count) {
    for (int i = 0; i < count; i++)
        if (words[i]) return false;
    return true;
}

size_t gis_name_bytes(const void *name) {
    const uint16_t *text = name;
    size_t length = 0;
    if (!gis_windows || !text) return 0;
    while (length < 1024 && text[length]) length++;
    return 2 * length;
}

/* -- the log ------------------------------------------------------------------------------------------------------- */

#define VIOLATIONS 1024
static char *violations[VIOLATIONS];
static uint32_t violation_count;

void gis_violation(const char *format, ...) {
    char text[512];
    int used = snprintf(text, sizeof text, "%s: ", current ? current->name : "a stream, or the control");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, arguments);
    va_end(arguments);
    if (violation_count < VIOLATIONS) violations[violation_count++] = strdup(text);
}

typedef struct {
    char operation[24];
    int32_t device;
    uint32_t reserved;
    uint64_t stream, value, address, size;
} log_entry;

#define LOG 65536
static log_entry *log_ring;
static uint64_t log_count;

void gis_log(const char *operation, const gis_stream *stream, uint64_t value, uint64_t address, uint64_t size) {
    if (!log_ring && !(log_ring = calloc(LOG, sizeof *log_ring))) abort();
    log_entry *entry = &log_ring[log_count++ % LOG];
    memset(entry, 0, sizeof *entry);
    strncpy(entry->operation, operation, sizeof entry->operation - 1);
    entry->device = stream->object.device;
    entry->stream = stream->object.id;
    entry->value = value;
    entry->address = address;
    entry->size = size;
}

typedef struct {
    char call[64];
    uint32_t count;
    size_t head_size, body_size;
    uint8_t *bytes;
} record;

#define RECORDS 8192
static record *records;
static uint64_t record_count;

void gis_record(const char *call, const void *head, size_t head_size, const void *body, size_t body_size,
                uint32_t count) {
    if (gis_does_nothing) return;
    if (!records && !(records = calloc(RECORDS, sizeof *records))) abort();
    record *it = &records[record_count++ % RECORDS];
    free(it->bytes);
    memset(it, 0, sizeof *it);
    strncpy(it->call, call, sizeof it->call - 1);
    it->count = count;
    it->head_size = head_size;
    it->body_size = body_size;
    it->bytes = malloc(head_size + body_size + 1);
    if (!it->bytes) abort();
    memcpy(it->bytes, head, head_size);
    if (body_size) memcpy(it->bytes + head_size, body, body_size);
}

/* -- control ------------------------------------------------------------------------------------------------------- */

/* Count how often callers got the same handle again. */
static void count_again(gis_object *object, void *count) {
    *(int64_t *)count += ((gis_vmm_handle *)object)->holders - 1;
}

GIS_EXPORT int64_t gis_control_live(const char *name) {
    int64_t found = -1;
    pthread_mutex_lock(&gis_mutex);
    for (int kind = 0; kind < GIS_KINDS; kind++)
        if (!strcmp(kind_names[kind], name)) found = live[kind];
    if (!strcmp(name, "bytes")) {
        found = 0;
        for (int i = 0; i < GIS_MAX_DEVICES; i++) found += (int64_t)gis_devices[i].used;
    }
    if (!strcmp(name, "retained")) {
        found = 0;
        gis_each(GIS_VMM_HANDLE, count_again, &found);
    }
    pthread_mutex_unlock(&gis_mutex);
    return found;
}

/* Count streams that a context made for itself, which no caller destroys. */
static void count_implicit(gis_object *object, void *count) {
    if (((gis_stream *)object)->implicit) ++*(int64_t *)count;
}

GIS_EXPORT int64_t gis_control_implicit_streams(void) {
    int64_t count = 0;
    pthread_mutex_lock(&gis_mutex);
    gis_each(GIS_STREAM, count_implicit, &count);
    pthread_mutex_unlock(&gis_mutex);
    return count;
}

/* The names of the kinds, each ended by a newline. */
GIS_EXPORT size_t gis_control_kinds(char *text, size_t size) {
    size_t used = 0;
    for (int kind = 0; kind < GIS_KINDS; kind++)
        used += (size_t)snprintf(text + used, used < size ? size - used : 0, "%s\n", kind_names[kind]);
    return used;
}

static void add_fault(const char *call, fault_kind kind, uint64_t nth, uint64_t every, gis_status code, int fd,
                      double seconds) {
    fault *it = calloc(1, sizeof *it);
    if (!it) abort();
    strncpy(it->call, call, sizeof it->call - 1);
    it->kind = kind;
    it->nth = nth;
    it->every = every;
    it->code = code;
    it->fd = (gis_fd_fault)fd;
    it->seconds = seconds;
    it->refs = 1;
    pthread_mutex_lock(&gis_mutex);
    it->next = faults;
    faults = it;
    pthread_mutex_unlock(&gis_mutex);
}

/* Fail the nth call from now on, and then after every so many (0: only once). */
GIS_EXPORT void gis_control_fail(const char *call, uint64_t nth, uint64_t every, int code, int fd) {
    add_fault(call, FAIL, nth, every, code, fd, 0);
}

GIS_EXPORT void gis_control_delay(const char *call, double seconds) { add_fault(call, DELAY, 1, 1, 0, 0, seconds); }

GIS_EXPORT void gis_control_block(const char *call, uint64_t nth, double limit) {
    add_fault(call, BLOCK, nth, 0, 0, 0, limit);
}

/* How many threads are blocked in a call now; waits up to `seconds` for the first. */
GIS_EXPORT int gis_control_blocked(const char *call, double seconds) {
    struct timespec until;
    gis_deadline(&until, seconds);
    pthread_mutex_lock(&gis_mutex);
    int blocked;
    do {
        blocked = 0;
        for (gis_call *it = calls; it; it = it->next)
            if (!strcmp(it->name, call)) blocked += it->blocked;
    } while (!blocked && seconds > 0 && pthread_cond_timedwait(&gis_progress, &gis_mutex, &until) != ETIMEDOUT);
    pthread_mutex_unlock(&gis_mutex);
    return blocked;
}

GIS_EXPORT void gis_control_release(const char *call) {
    pthread_mutex_lock(&gis_mutex);
    for (fault *it = faults; it; it = it->next)
        if (!call || !*call || !strcmp(it->call, call)) it->released = true;
    pthread_cond_broadcast(&gis_progress);
    pthread_mutex_unlock(&gis_mutex);
}

/* Remove all faults; returns how many were not used. */
GIS_EXPORT int gis_control_clear(void) {
    int unused = 0;
    pthread_mutex_lock(&gis_mutex);
    fault *it = faults;
    faults = NULL;
    while (it) {
        fault *next = it->next;
        unused += !it->struck;
        it->released = it->gone = true;
        it->next = NULL;
        drop_fault(it);
        it = next;
    }
    pthread_cond_broadcast(&gis_progress);
    pthread_mutex_unlock(&gis_mutex);
    return unused;
}

static void forget_failure(gis_object *object, void *unused) {
    (void)unused;
    gis_stream *stream = (gis_stream *)object;
    stream->fail_at = 0;
}

GIS_EXPORT void gis_control_clear_operations(void) {
    pthread_mutex_lock(&gis_mutex);
    gis_each(GIS_STREAM, forget_failure, NULL);
    pthread_mutex_unlock(&gis_mutex);
}

/* Fail the nth operation that is enqueued on the stream from now on, when it runs. */
GIS_EXPORT int gis_control_fail_operation(uint64_t id, uint64_t nth, int code) {
    pthread_mutex_lock(&gis_mutex);
    gis_stream *stream = gis_find(GIS_STREAM, id);
    if (stream) {
        stream->fail_at = stream->submitted + nth;
        stream->fail_code = code;
    }
    pthread_mutex_unlock(&gis_mutex);
    return stream != NULL;
}

GIS_EXPORT uint64_t gis_control_calls(const char *name) {
    uint64_t count = 0;
    pthread_mutex_lock(&gis_mutex);
    for (gis_call *call = calls; call; call = call->next)
        if (!strcmp(call->name, name)) count += call->count;
    pthread_mutex_unlock(&gis_mutex);
    return count;
}

GIS_EXPORT uint64_t gis_control_trace_count(void) {
    pthread_mutex_lock(&gis_mutex);
    uint64_t count = traced;
    pthread_mutex_unlock(&gis_mutex);
    return count;
}

/* The name of call number `index`, counted from the first; NULL if it was overwritten, or is still to come. */
GIS_EXPORT const char *gis_control_trace(uint64_t index) {
    pthread_mutex_lock(&gis_mutex);
    const char *name = index < traced && index + TRACE >= traced ? trace[index % TRACE] : NULL;
    pthread_mutex_unlock(&gis_mutex);
    return name;
}

/* Set whether the device can use the peer's memory. */
GIS_EXPORT void gis_control_set_peer(int device, int peer, int can) {
    pthread_mutex_lock(&gis_mutex);
    if (can)
        gis_no_peer[device] &= ~(1u << peer);
    else
        gis_no_peer[device] |= 1u << peer;
    pthread_mutex_unlock(&gis_mutex);
}

GIS_EXPORT void gis_control_set_attribute(int device, int number, int value) {
    pthread_mutex_lock(&gis_mutex);
    gis_device *it = &gis_devices[device];
    int i = 0;
    while (i < it->overrides && it->override_number[i] != number) i++;
    if (i < 64) {
        it->override_number[i] = number;
        it->override_value[i] = value;
        if (i == it->overrides) it->overrides++;
    }
    pthread_mutex_unlock(&gis_mutex);
}

GIS_EXPORT void gis_control_reset_attributes(void) {
    pthread_mutex_lock(&gis_mutex);
    for (int i = 0; i < GIS_MAX_DEVICES; i++) gis_devices[i].overrides = 0;
    memset(gis_no_peer, 0, sizeof gis_no_peer);
    pthread_mutex_unlock(&gis_mutex);
}

GIS_EXPORT void gis_control_set_windows(int windows) {
    pthread_mutex_lock(&gis_mutex);
    gis_windows = windows != 0;
    pthread_mutex_unlock(&gis_mutex);
}

GIS_EXPORT int gis_control_settle(int device, double seconds) {
    pthread_mutex_lock(&gis_mutex);
    bool settled = gis_device_settle(device, seconds);
    pthread_mutex_unlock(&gis_mutex);
    return settled;
}

/* The violations, each ended by a newline; returns the bytes needed. `take` removes them, if the room was enough. */
GIS_EXPORT size_t gis_control_violations(char *text, size_t size, int take) {
    size_t used = 0;
    pthread_mutex_lock(&gis_mutex);
    for (uint32_t i = 0; i < violation_count; i++) {
        size_t length = strlen(violations[i]);
        if (used + length + 1 <= size) {
            memcpy(text + used, violations[i], length);
            text[used + length] = '\n';
        }
        used += length + 1;
    }
    if (take && used <= size) {
        for (uint32_t i = 0; i < violation_count; i++) free(violations[i]);
        violation_count = 0;
    }
    pthread_mutex_unlock(&gis_mutex);
    return used;
}

GIS_EXPORT uint64_t gis_control_log_count(void) {
    pthread_mutex_lock(&gis_mutex);
    uint64_t count = log_count;
    pthread_mutex_unlock(&gis_mutex);
    return count;
}

/* Entry number `index`, counted from the first; false if it was overwritten, or is still to come. */
GIS_EXPORT int gis_control_log(uint64_t index, void *entry) {
    pthread_mutex_lock(&gis_mutex);
    bool there = index < log_count && index + LOG >= log_count;
    if (there) memcpy(entry, &log_ring[index % LOG], sizeof(log_entry));
    pthread_mutex_unlock(&gis_mutex);
    return there;
}

GIS_EXPORT uint64_t gis_control_record_count(void) {
    pthread_mutex_lock(&gis_mutex);
    uint64_t count = record_count;
    pthread_mutex_unlock(&gis_mutex);
    return count;
}

/* A recorded call: its name (64 bytes), the bytes of its head and its body; returns 0 if there is none. */
GIS_EXPORT int gis_control_record(uint64_t index, char *call, uint8_t *bytes, size_t room, size_t *sizes,
                                  uint32_t *count) {
    pthread_mutex_lock(&gis_mutex);
    bool there = index < record_count && index + RECORDS >= record_count;
    if (there) {
        const record *it = &records[index % RECORDS];
        memcpy(call, it->call, sizeof it->call);
        sizes[0] = it->head_size;
        sizes[1] = it->body_size;
        *count = it->count;
        if (it->head_size + it->body_size <= room) memcpy(bytes, it->bytes, it->head_size + it->body_size);
    }
    pthread_mutex_unlock(&gis_mutex);
    return there;
}
