/* Contexts, streams (threads with a queue), events. */
#define _GNU_SOURCE
#include "gis.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* -- contexts ------------------------------------------------------------------------------------------------------ */

/* Handles, not pointers: a context can be destroyed while it is current in another thread. */
static __thread uint64_t stack[GIS_CONTEXT_STACK];
static __thread int depth;

gis_context *gis_current(void) { return depth ? gis_find(GIS_CONTEXT, stack[depth - 1]) : NULL; }

gis_status gis_context_create(int device, uint32_t flags, gis_context **result) {
    if (device < 0 || device >= gis_device_count) return GIS_INVALID_DEVICE;
    gis_context *context = gis_new(GIS_CONTEXT, sizeof *context, NULL, device, NULL);
    context->flags = flags;
    *result = context;
    return GIS_OK;
}

typedef struct {
    gis_context *context;
    gis_object *found;
} belonging;

static void find_belonging(gis_object *object, void *argument) {
    belonging *search = argument;
    if (object->context == search->context) search->found = object;
}

/* Release what was made in a context. */
static void empty(gis_context *context) {
    for (int kind = 0; kind < GIS_KINDS; kind++) {
        for (;;) {
            belonging search = {context, NULL};
            gis_each((gis_kind)kind, find_belonging, &search);
            if (!search.found) break;
            if (search.found->uses) gis_note_if_used(search.found, ", and its context is destroyed");
            if (kind == GIS_STREAM)
                gis_stream_destroy((gis_stream *)search.found);
            else if (kind == GIS_ALLOCATION)
                gis_free(GIS_ALLOCATION, GIS_ALLOCATION, ((gis_range *)search.found)->base);
            else if (kind == GIS_HOST_ALLOCATION || kind == GIS_REGISTRATION || kind == GIS_MAPPING)
                gis_free((gis_kind)kind, (gis_kind)kind, ((gis_range *)search.found)->base);
            else
                gis_retire(search.found);
        }
    }
    context->legacy = NULL;
    while (context->per_thread) {
        struct gis_thread_stream *entry = context->per_thread;
        context->per_thread = entry->next;
        free(entry);
    }
}

static void find_busy(gis_object *object, void *argument) {
    belonging *search = argument;
    gis_stream *stream = (gis_stream *)object;
    if (object->context == search->context && stream->completed < stream->submitted) search->found = object;
}

gis_status gis_context_destroy(gis_context *context) {
    belonging busy = {context, NULL};
    gis_each(GIS_STREAM, find_busy, &busy);
    if (busy.found)
        gis_violation("the context still has work pending on stream %#llx", (unsigned long long)busy.found->id);
    empty(context);
    if (depth && stack[depth - 1] == context->object.id) depth--;
    gis_retire(&context->object);
    return GIS_OK;
}

gis_status gis_primary_retain(int device, gis_context **context) {
    if (device < 0 || device >= gis_device_count) return GIS_INVALID_DEVICE;
    gis_device *it = &gis_devices[device];
    if (!it->primary) {
        gis_status status = gis_context_create(device, 0, &it->primary);
        if (status) return status;
        it->primary->primary = true;
    }
    it->primary->retained++;
    *context = it->primary;
    return GIS_OK;
}

gis_status gis_primary_release(int device) {
    if (device < 0 || device >= gis_device_count) return GIS_INVALID_DEVICE;
    gis_device *it = &gis_devices[device];
    if (!it->primary) return GIS_INVALID_CONTEXT;
    if (--it->primary->retained > 0) return GIS_OK;
    gis_context *context = it->primary;
    it->primary = NULL;
    return gis_context_destroy(context);
}

void gis_set_current(gis_context *context) {
    if (depth) depth--;
    if (context) stack[depth++] = context->object.id;
}

gis_status gis_push(gis_context *context) {
    if (depth == GIS_CONTEXT_STACK) return GIS_INVALID_VALUE;
    stack[depth++] = context->object.id;
    return GIS_OK;
}

gis_status gis_pop(gis_context **context) {
    if (!depth) return GIS_INVALID_CONTEXT;
    *context = gis_current();
    depth--;
    return GIS_OK;
}

/* -- operations ---------------------------------------------------------------------------------------------------- */

gis_op *gis_op_new(gis_op_kind kind) {
    gis_op *op = calloc(1, sizeof *op);
    if (!op) abort();
    op->kind = kind;
    return op;
}

static void *copy_of(const void *bytes, size_t size) {
    if (!size) return NULL;
    void *copy = malloc(size);
    if (!copy) abort();
    memcpy(copy, bytes, size);
    return copy;
}

/* Copy an operation for another run. Marks are not copied: they belong to their queue. */
gis_op *gis_op_clone(const gis_op *op) {
    gis_op *copy = copy_of(op, sizeof *op);
    copy->next = NULL;
    copy->after = NULL;
    copy->marks = 0;
    copy->object = copy_of(op->object, op->objects * sizeof *op->object);
    for (uint32_t i = 0; i < op->objects; i++) gis_ref(op->object[i]);
    if (op->kind == GIS_OP_SIGNAL || op->kind == GIS_OP_WAIT) {
        uint32_t count = op->semaphores.count;
        copy->semaphores.semaphores = copy_of(op->semaphores.semaphores, count * sizeof(void *));
        copy->semaphores.ids = copy_of(op->semaphores.ids, count * sizeof(uint64_t));
        copy->semaphores.values = copy_of(op->semaphores.values, count * sizeof(uint64_t));
        copy->semaphores.raw = copy_of(op->semaphores.raw, count * op->semaphores.raw_size);
    } else if (op->kind == GIS_OP_GRAPH) {
        copy->graph.operations = copy_of(op->graph.operations, op->graph.count * sizeof(void *));
        for (uint32_t i = 0; i < op->graph.count; i++)
            copy->graph.operations[i] = gis_op_clone(op->graph.operations[i]);
    } else if (op->kind == GIS_OP_EVENT_WAIT && op->mark.stream) {
        gis_ref(&op->mark.stream->object);
    }
    return copy;
}

void gis_op_free(gis_op *op) {
    for (uint32_t i = 0; i < op->objects; i++) gis_unref(op->object[i]);
    for (uint32_t i = 0; i < op->marks; i++) gis_unref(&op->after[i].stream->object);
    if (op->kind == GIS_OP_SIGNAL || op->kind == GIS_OP_WAIT) {
        free(op->semaphores.semaphores);
        free(op->semaphores.ids);
        free(op->semaphores.values);
        free(op->semaphores.raw);
    } else if (op->kind == GIS_OP_GRAPH) {
        for (uint32_t i = 0; i < op->graph.count; i++) gis_op_free(op->graph.operations[i]);
        free(op->graph.operations);
    } else if (op->kind == GIS_OP_EVENT_WAIT && op->mark.stream) {
        gis_unref(&op->mark.stream->object);
    }
    free(op->object);
    free(op->after);
    free(op);
}

void gis_op_needs(gis_op *op, gis_object *object) {
    op->object = realloc(op->object, (op->objects + 1) * sizeof *op->object);
    if (!op->object) abort();
    op->object[op->objects++] = object;
    gis_ref(object);
}

static void op_after(gis_op *op, gis_stream *stream, uint64_t position) {
    op->after = realloc(op->after, (op->marks + 1) * sizeof *op->after);
    if (!op->after) abort();
    op->after[op->marks++] = (gis_mark){stream, position};
    gis_ref(&stream->object);
}

static void count_uses(gis_op *op, int by) {
    for (uint32_t i = 0; i < op->objects; i++) op->object[i]->uses += by;
    if (op->kind == GIS_OP_GRAPH)
        for (uint32_t i = 0; i < op->graph.count; i++) count_uses(op->graph.operations[i], by);
}

/* -- the streams' threads ------------------------------------------------------------------------------------------ */

static bool word_reached(const gis_op *op) {
    uint64_t mask = op->word.mask, value = op->word.value & mask;
    uint64_t now = __atomic_load_n((uint64_t *)op->word.address, __ATOMIC_ACQUIRE) & mask;
    switch (op->word.condition) {
    case GIS_WAIT_GEQ: /* cyclic: half the circle counts as ahead */
        return (int64_t)(now - value) >= 0;
    case GIS_WAIT_UNSIGNED_GEQ:
        return now >= value;
    case GIS_WAIT_EQ:
        return now == value;
    case GIS_WAIT_AND:
        return (now & value) != 0;
    default:
        return (~(now | value) & mask) != 0;
    }
}

static void wait_for_word(const gis_op *op) {
    long pause = 20000;
    for (int i = 0; !word_reached(op); i++) {
        if (i < 30) {
            sched_yield();
            continue;
        }
        struct timespec time = {0, pause};
        nanosleep(&time, NULL);
        pause = pause < 500000 ? pause + pause / 2 : pause;
    }
}

static void fill(const gis_op *op) {
    uint8_t *target = (uint8_t *)op->fill.target;
    if (op->fill.width == 1) {
        memset(target, (int)op->fill.value, op->fill.count);
        return;
    }
    for (size_t i = 0; i < op->fill.count; i++) memcpy(target + i * op->fill.width, &op->fill.value, op->fill.width);
}

static void copy_3d(const gis_op *op) {
    for (uint64_t z = 0; z < op->copy3d.depth; z++)
        for (uint64_t y = 0; y < op->copy3d.height; y++)
            memmove((void *)(op->copy3d.target + z * op->copy3d.target_slice + y * op->copy3d.target_pitch),
                    (void *)(op->copy3d.source + z * op->copy3d.source_slice + y * op->copy3d.source_pitch),
                    op->copy3d.width);
}

/* Holds the lock throughout, so that no thread unbinds meanwhile. */
static gis_status multimem(const gis_op *op) {
    size_t count = op->multimem.count;
    uint32_t *words = calloc(count + 1, sizeof *words);
    if (!words) return GIS_OUT_OF_MEMORY;
    gis_status status;
    if (op->kind == GIS_OP_MULTIMEM_STORE) {
        for (size_t i = 0; i < count; i++) words[i] = op->multimem.value;
        status = gis_multicast_store(op->multimem.group, op->multimem.offset, words, count);
    } else {
        status = gis_multicast_sum(op->multimem.group, op->multimem.offset, words, count);
        if (!status) memcpy((void *)op->multimem.target, words, count * sizeof *words);
    }
    free(words);
    return status;
}

static bool reached(const gis_mark *mark) { return mark->stream->completed >= mark->position; }

static void wait_for_mark(const gis_mark *mark) {
    while (mark->stream && !reached(mark)) pthread_cond_wait(&gis_progress, &gis_mutex);
}

static const char *const op_names[] = {"memcpy",      "memcpy_3d",  "memset",       "signal",     "wait",
                                       "write_value", "wait_value", "event_record", "event_wait", "graph",
                                       "multimem_store", "multimem_add"};

/* The lock is held on entry and on return, but not while it works. */
static void run(gis_op *op, gis_stream *stream) {
    const char *name = op_names[op->kind];
    if (op->failure) {
        stream->error = op->failure;
        return;
    }
    switch (op->kind) {
    case GIS_OP_EVENT_RECORD:
        gis_log(name, stream, 0, 0, 0);
        return;
    case GIS_OP_EVENT_WAIT:
        wait_for_mark(&op->mark);
        gis_log(name, stream, 0, 0, 0);
        return;
    case GIS_OP_GRAPH:
        gis_log(name, stream, op->graph.count, 0, 0);
        for (uint32_t i = 0; i < op->graph.count && !stream->error; i++) run(op->graph.operations[i], stream);
        return;
    case GIS_OP_MULTIMEM_STORE:
    case GIS_OP_MULTIMEM_ADD:
        stream->error = multimem(op);
        gis_log(name, stream, op->multimem.value, op->multimem.address, op->multimem.count * sizeof(uint32_t));
        return;
    default:
        break;
    }
    pthread_mutex_unlock(&gis_mutex);
    switch (op->kind) {
    case GIS_OP_COPY:
        memmove((void *)op->copy.target, (void *)op->copy.source, op->copy.size);
        break;
    case GIS_OP_COPY_3D:
        copy_3d(op);
        break;
    case GIS_OP_FILL:
        fill(op);
        break;
    case GIS_OP_SIGNAL:
        for (uint32_t i = 0; i < op->semaphores.count; i++)
            gis_semaphore_signal(op->semaphores.semaphores[i], op->semaphores.values[i]);
        break;
    case GIS_OP_WAIT:
        for (uint32_t i = 0; i < op->semaphores.count; i++)
            gis_semaphore_wait(op->semaphores.semaphores[i], op->semaphores.values[i]);
        break;
    case GIS_OP_WRITE_VALUE:
        __atomic_store_n((uint64_t *)op->word.address, op->word.value, __ATOMIC_RELEASE);
        break;
    case GIS_OP_WAIT_VALUE:
        wait_for_word(op);
        break;
    default:
        break;
    }
    pthread_mutex_lock(&gis_mutex);
    switch (op->kind) {
    case GIS_OP_COPY:
        gis_log(name, stream, op->copy.source, op->copy.target, op->copy.size);
        break;
    case GIS_OP_COPY_3D:
        gis_log(name, stream, op->copy3d.source, op->copy3d.target,
                op->copy3d.width * op->copy3d.height * op->copy3d.depth);
        break;
    case GIS_OP_FILL:
        gis_log(name, stream, op->fill.value, op->fill.target, op->fill.count * op->fill.width);
        break;
    case GIS_OP_SIGNAL:
    case GIS_OP_WAIT:
        for (uint32_t i = 0; i < op->semaphores.count; i++)
            gis_log(name, stream, op->semaphores.values[i], op->semaphores.ids[i], 0);
        break;
    default:
        gis_log(name, stream, op->word.value, op->word.address, sizeof op->word.value);
        break;
    }
}

/* A stream that was destroyed with pending work cannot be found any more, but still works: hence this list. */
static gis_stream *working;

static void each_working(void (*call)(gis_object *, void *), void *argument) {
    for (gis_stream *stream = working; stream; stream = stream->next_working) call(&stream->object, argument);
}

static void *work(void *argument) {
    gis_stream *stream = argument;
    pthread_setname_np(pthread_self(), GIS_THREAD);
    pthread_mutex_lock(&gis_mutex);
    for (;;) {
        while (!stream->head && stream->object.live) pthread_cond_wait(&stream->wake, &gis_mutex);
        gis_op *op = stream->head;
        if (!op) break;
        stream->head = op->next;
        if (!stream->head) stream->tail = NULL;
        for (uint32_t i = 0; i < op->marks; i++) wait_for_mark(&op->after[i]);
        if (stream->fail_at && stream->completed + 1 >= stream->fail_at) {
            stream->error = stream->fail_code;
            stream->fail_at = 0;
        }
        if (!stream->error) run(op, stream); /* after a failure nothing runs */
        count_uses(op, -1);
        gis_op_free(op);
        stream->completed++;
        pthread_cond_broadcast(&gis_progress);
    }
    for (gis_stream **link = &working; *link; link = &(*link)->next_working) {
        if (*link == stream) {
            *link = stream->next_working;
            break;
        }
    }
    gis_unref(&stream->object);
    pthread_mutex_unlock(&gis_mutex);
    return NULL;
}

bool gis_start_thread(void *(*call)(void *), void *argument, pthread_t *joined) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    if (!joined) pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(joined ? joined : &thread, &attributes, call, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !code;
}

static bool start(gis_stream *stream) {
    gis_ref(&stream->object);
    if (!gis_start_thread(work, stream, NULL)) {
        gis_unref(&stream->object);
        return false;
    }
    stream->next_working = working;
    working = stream;
    return true;
}

/* -- streams ------------------------------------------------------------------------------------------------------- */

static void finish_stream(gis_object *object) {
    gis_stream *stream = (gis_stream *)object;
    pthread_cond_destroy(&stream->wake);
    free(stream->tip.node);
}

gis_status gis_stream_create(gis_context *context, bool blocking, uint32_t flags, int priority, gis_stream **result) {
    gis_stream *stream = gis_new(GIS_STREAM, sizeof *stream, context, context->object.device, finish_stream);
    pthread_cond_init(&stream->wake, &gis_monotonic);
    stream->blocking = blocking;
    stream->flags = flags;
    stream->priority = priority;
    *result = stream;
    return GIS_OK;
}

void gis_stream_destroy(gis_stream *stream) {
    gis_ref(&stream->object);
    if (stream->capture) {
        gis_violation("the stream %#llx is being captured", (unsigned long long)stream->object.id);
        gis_capture_abandon(stream);
    }
    gis_retire(&stream->object);
    pthread_cond_signal(&stream->wake); /* the thread does what is queued, and exits */
    gis_unref(&stream->object);
}

gis_stream *gis_legacy_stream(gis_context *context) {
    if (!context->legacy) {
        gis_stream_create(context, true, 0, 0, &context->legacy);
        context->legacy->implicit = true;
    }
    return context->legacy;
}

gis_stream *gis_thread_stream(gis_context *context) {
    pid_t thread = gis_thread_id();
    for (struct gis_thread_stream *entry = context->per_thread; entry; entry = entry->next)
        if (entry->thread == thread) return entry->stream;
    struct gis_thread_stream *entry = calloc(1, sizeof *entry);
    if (!entry) abort();
    gis_stream_create(context, true, 0, 0, &entry->stream);
    entry->stream->implicit = true;
    entry->thread = thread;
    entry->next = context->per_thread;
    context->per_thread = entry;
    return entry->stream;
}

typedef struct {
    gis_stream *stream;
    gis_op *op;
} gathering;

static void gather(gis_object *object, void *argument) {
    gathering *it = argument;
    gis_stream *other = (gis_stream *)object, *stream = it->stream;
    if (other == stream || !other->blocking || other->object.context != stream->object.context) return;
    if (other->completed < other->submitted) op_after(it->op, other, other->submitted);
}

/* The legacy default stream and blocking streams wait for each other's work at the time of the call. */
static void order(gis_stream *stream, gis_op *op) {
    if (!stream->blocking) return;
    gis_context *context = stream->object.context;
    gis_stream *legacy = context->legacy;
    if (stream == legacy) {
        gathering it = {stream, op};
        each_working(gather, &it);
    } else if (legacy && legacy->completed < legacy->submitted) {
        op_after(op, legacy, legacy->submitted);
    }
}

static gis_status capture(gis_stream *stream, gis_op *op) {
    gis_capture *it = stream->capture;
    if (it->invalid) {
        gis_op_free(op);
        return GIS_CAPTURE_INVALIDATED;
    }
    gis_node *node = gis_graph_add(it->graph, op, &stream->tip);
    gis_nodes_clear(&stream->tip);
    gis_nodes_add(&stream->tip, node);
    return GIS_OK;
}

static void drop_marks(gis_op *op) {
    for (uint32_t i = 0; i < op->marks; i++) gis_unref(&op->after[i].stream->object);
    free(op->after);
}

/* On an idle stream an event is done as soon as it is recorded; the thread would report that later. */
static bool done_at_once(gis_stream *stream, gis_op *op) {
    bool nothing = op->kind == GIS_OP_EVENT_RECORD || (op->kind == GIS_OP_EVENT_WAIT && reached(&op->mark));
    if (!nothing || stream->completed < stream->submitted || stream->fail_at) return false;
    order(stream, op);
    if (op->marks) {
        drop_marks(op);
        op->after = NULL;
        op->marks = 0;
        return false;
    }
    gis_log(op_names[op->kind], stream, 0, 0, 0);
    stream->completed = ++stream->submitted;
    if (op->kind == GIS_OP_EVENT_RECORD) stream->told = stream->submitted;
    gis_op_free(op);
    return true;
}

gis_status gis_submit(gis_stream *stream, gis_op *op, bool block) {
    gis_status status = stream->error ? stream->error : gis_capture_implicit(stream, false);
    if (status) {
        gis_op_free(op);
        return status;
    }
    if (stream->capture) return capture(stream, op);
    if (gis_does_nothing) {
        gis_op_free(op);
        return GIS_OK;
    }
    if (done_at_once(stream, op)) return GIS_OK;
    if (!stream->started && !(stream->started = start(stream))) {
        gis_op_free(op);
        return GIS_OUT_OF_MEMORY;
    }
    order(stream, op);
    count_uses(op, 1);
    if (stream->tail)
        stream->tail->next = op;
    else
        stream->head = op;
    stream->tail = op;
    uint64_t position = ++stream->submitted;
    if (block || op->kind == GIS_OP_EVENT_RECORD) stream->told = position;
    pthread_cond_signal(&stream->wake);
    if (!block) return GIS_OK;
    gis_ref(&stream->object);
    while (stream->completed < position) pthread_cond_wait(&gis_progress, &gis_mutex);
    status = stream->error;
    gis_unref(&stream->object);
    return status;
}

gis_status gis_stream_query(gis_stream *stream) {
    if (stream->error) return stream->error;
    if (stream->completed < stream->submitted) return GIS_NOT_READY;
    gis_op probe = {0};
    order(stream, &probe); /* a default stream is busy while the streams that it waits for are */
    uint32_t marks = probe.marks;
    for (uint32_t i = 0; i < marks; i++) gis_unref(&probe.after[i].stream->object);
    free(probe.after);
    return marks && stream == stream->object.context->legacy ? GIS_NOT_READY : GIS_OK;
}

gis_status gis_stream_synchronize(gis_stream *stream) {
    gis_op probe = {0};
    if (stream == stream->object.context->legacy) order(stream, &probe);
    uint64_t position = stream->submitted;
    gis_ref(&stream->object);
    while (stream->completed < position) pthread_cond_wait(&gis_progress, &gis_mutex);
    if (stream->told < position) stream->told = position;
    for (uint32_t i = 0; i < probe.marks; i++) wait_for_mark(&probe.after[i]);
    for (uint32_t i = 0; i < probe.marks; i++) gis_unref(&probe.after[i].stream->object);
    free(probe.after);
    gis_status status = stream->error;
    gis_unref(&stream->object);
    return status;
}

typedef struct {
    int device;
    gis_context *context;
    gis_op probe;
} census;

static void gather_busy(gis_object *object, void *argument) {
    census *it = argument;
    gis_stream *stream = (gis_stream *)object;
    if (object->device != it->device || (it->context && object->context != it->context)) return;
    if (stream->completed < stream->submitted) op_after(&it->probe, stream, stream->submitted);
}

bool gis_device_settle(int device, double seconds) {
    census it = {.device = device};
    struct timespec until;
    bool settled = true;
    gis_deadline(&until, seconds);
    each_working(gather_busy, &it);
    for (uint32_t i = 0; i < it.probe.marks && settled; i++)
        while (!reached(&it.probe.after[i]) && settled)
            settled = pthread_cond_timedwait(&gis_progress, &gis_mutex, &until) != ETIMEDOUT ||
                      reached(&it.probe.after[i]);
    drop_marks(&it.probe);
    return settled;
}

static void tell(gis_object *object, void *context) {
    gis_stream *stream = (gis_stream *)object;
    if (object->context == context) stream->told = stream->completed;
}

gis_status gis_context_synchronize(gis_context *context) {
    census it = {.device = context->object.device, .context = context};
    gis_status status = GIS_OK;
    each_working(gather_busy, &it);
    for (uint32_t i = 0; i < it.probe.marks; i++) {
        wait_for_mark(&it.probe.after[i]);
        if (!status) status = it.probe.after[i].stream->error;
    }
    drop_marks(&it.probe);
    each_working(tell, context);
    return status;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

static void forget(gis_event *event) {
    if (event->mark.stream) gis_unref(&event->mark.stream->object);
    event->mark.stream = NULL;
    if (event->capture) gis_capture_unref(event->capture);
    event->capture = NULL;
    gis_nodes_clear(&event->tip);
}

static void finish_event(gis_object *object) {
    gis_event *event = (gis_event *)object;
    forget(event);
    free(event->tip.node);
}

gis_status gis_event_create(gis_context *context, uint32_t flags, gis_event **result) {
    gis_event *event = gis_new(GIS_EVENT, sizeof *event, context, context->object.device, finish_event);
    event->flags = flags;
    *result = event;
    return GIS_OK;
}

gis_status gis_event_record(gis_event *event, gis_stream *stream) {
    if (event->object.device != stream->object.device) return GIS_INVALID_HANDLE;
    if (stream->capture) {
        if (stream->capture->invalid) return GIS_CAPTURE_INVALIDATED;
        forget(event);
        event->recorded = true;
        event->capture = stream->capture;
        stream->capture->refs++;
        gis_nodes_union(&event->tip, &stream->tip);
        return GIS_OK;
    }
    gis_op *op = gis_op_new(GIS_OP_EVENT_RECORD);
    gis_status status = gis_submit(stream, op, false);
    if (status) return status;
    forget(event);
    event->recorded = true;
    event->mark = (gis_mark){stream, stream->submitted};
    gis_ref(&stream->object);
    return GIS_OK;
}

gis_status gis_event_wait(gis_stream *stream, gis_event *event) {
    if (event->capture) { /* the stream joins the capture */
        if (event->capture->ended) return GIS_CAPTURED_EVENT;
        if (stream->capture && stream->capture != event->capture) return GIS_CAPTURE_MERGE;
        if (event->capture->invalid) return GIS_CAPTURE_INVALIDATED;
        gis_status status = stream->error ? stream->error : gis_capture_implicit(stream, false);
        if (status) return status;
        if (stream == stream->object.context->legacy) return GIS_CAPTURE_UNSUPPORTED;
        if (!stream->capture) {
            gis_nodes_clear(&stream->tip);
            stream->capture = event->capture;
            stream->capture->refs++;
        }
        gis_nodes_union(&stream->tip, &event->tip);
        return GIS_OK;
    }
    if (stream->capture) {
        if (stream->capture->invalid) return GIS_CAPTURE_INVALIDATED;
        stream->capture->invalid = true;
        return GIS_CAPTURE_ISOLATION;
    }
    if (!event->recorded) return stream->error;
    gis_op *op = gis_op_new(GIS_OP_EVENT_WAIT);
    op->mark = event->mark;
    if (op->mark.stream) gis_ref(&op->mark.stream->object);
    return gis_submit(stream, op, false);
}

gis_status gis_event_query(gis_event *event, bool block) {
    if (event->capture) {
        event->capture->invalid = true;
        return GIS_CAPTURED_EVENT;
    }
    gis_mark mark = event->mark;
    if (!mark.stream) return GIS_OK;
    gis_status status = GIS_OK;
    gis_ref(&mark.stream->object);
    if (block) wait_for_mark(&mark);
    if (!reached(&mark))
        status = mark.stream->error ? mark.stream->error : GIS_NOT_READY;
    else if (mark.stream->error)
        status = mark.stream->error;
    gis_unref(&mark.stream->object);
    return status;
}

void gis_event_destroy(gis_event *event) { gis_retire(&event->object); }
