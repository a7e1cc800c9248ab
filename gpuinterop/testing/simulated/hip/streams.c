/* Streams, events, capture, and words in memory that streams write and wait for. */
#include "hip.h"

#include <stdlib.h>
#include <string.h>

/* 0 and 1 are the current device's default stream, 2 is the thread's. */
gis_stream *hip_stream(const void *handle) {
    if ((uintptr_t)handle > 2) return gis_check(GIS_STREAM, (uint64_t)handle);
    gis_context *context = hip_context();
    return (uintptr_t)handle == 2 ? gis_thread_stream(context) : gis_legacy_stream(context);
}

static hip_error create(void **stream, uint32_t flags, int priority) {
    NEED(stream && flags <= 1);
    gis_stream *made;
    TRY(gis_stream_create(hip_context(), flags == 0, flags, priority, &made));
    *stream = (void *)made->object.id;
    return hipSuccess;
}

HIP(hipStreamCreateWithFlags, (void **stream, uint32_t flags), (stream, flags)) {
    ENTER(hipStreamCreateWithFlags);
    return create(stream, flags, 0);
}

HIP(hipStreamCreateWithPriority, (void **stream, uint32_t flags, int priority), (stream, flags, priority)) {
    ENTER(hipStreamCreateWithPriority);
    return create(stream, flags, priority);
}

/* It waits for the stream's work. */
HIP(hipStreamDestroy, (void *which), (which)) {
    ENTER(hipStreamDestroy);
    if ((uintptr_t)which <= 2) return hipErrorInvalidHandle;
    NEED_STREAM(which);
    if (stream->implicit) return hipErrorInvalidHandle;
    if (!stream->capture) gis_stream_synchronize(stream);
    if (stream->object.live) gis_stream_destroy(stream);
    return hipSuccess;
}

/*
 * The first query reports work that was not synchronised as not done even if it is, because only the query enqueues the
 * marker that shows it (CLR, hip_stream.cpp:522).
 */
HIP(hipStreamQuery, (void *which), (which)) {
    ENTER(hipStreamQuery);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    TRY(gis_stream_query(stream));
    if (stream->told == stream->submitted) return hipSuccess;
    stream->told = stream->submitted;
    return hipErrorNotReady;
}

/*
 * While a thread synchronises, other threads' calls wait for it (ROCm/rocm-systems #11678), including the call that
 * would end its wait.
 */
hip_error hip_alone(gis_status (*call)(void *), void *argument) {
    gis_settling++;
    gis_status status = call(argument);
    gis_settling--;
    pthread_cond_broadcast(&gis_progress);
    return gis_code(status);
}

static gis_status synchronize(void *stream) { return gis_stream_synchronize(stream); }

HIP(hipStreamSynchronize, (void *which), (which)) {
    ENTER(hipStreamSynchronize);
    NEED_STREAM(which);
    TRY(gis_not_capturing(stream));
    return hip_alone(synchronize, stream);
}

HIP(hipStreamGetDevice, (void *which, int *device), (which, device)) {
    ENTER(hipStreamGetDevice);
    NEED_STREAM(which);
    NEED(device);
    *device = stream->object.device;
    return hipSuccess;
}

HIP(hipStreamGetFlags, (void *which, uint32_t *flags), (which, flags)) {
    ENTER(hipStreamGetFlags);
    NEED_STREAM(which);
    NEED(flags);
    *flags = stream->flags;
    return hipSuccess;
}

HIP(hipStreamGetPriority, (void *which, int *priority), (which, priority)) {
    ENTER(hipStreamGetPriority);
    NEED_STREAM(which);
    NEED(priority);
    *priority = stream->priority;
    return hipSuccess;
}

HIP(hipStreamWaitEvent, (void *which, void *event, uint32_t flags), (which, event, flags)) {
    ENTER(hipStreamWaitEvent);
    NEED_STREAM(which);
    FIND(gis_event, found, GIS_EVENT, event);
    NEED(!flags);
    return gis_code(gis_event_wait(stream, found));
}

/* -- capture ------------------------------------------------------------------------------------------------------- */

HIP(hipStreamIsCapturing, (void *which, int *status), (which, status)) {
    ENTER(hipStreamIsCapturing);
    NEED_STREAM(which);
    NEED(status);
    TRY(gis_capture_implicit(stream, true));
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return hipSuccess;
}

HIP(hipStreamBeginCapture, (void *which, uint32_t mode), (which, mode)) {
    ENTER(hipStreamBeginCapture);
    NEED_STREAM(which);
    NEED(mode <= 2);
    return gis_code(gis_capture_begin(stream, (gis_capture_mode)mode));
}

HIP(hipStreamEndCapture, (void *which, void **graph), (which, graph)) {
    ENTER(hipStreamEndCapture);
    NEED_STREAM(which);
    NEED(graph);
    gis_graph *made;
    gis_status status = gis_capture_end(stream, &made);
    *graph = made ? (void *)made->object.id : NULL;
    return gis_code(status);
}

HIP(hipThreadExchangeStreamCaptureMode, (uint32_t *mode), (mode)) {
    ENTER(hipThreadExchangeStreamCaptureMode);
    NEED(mode && *mode <= 2);
    *mode = (uint32_t)gis_exchange_mode((gis_capture_mode)*mode);
    return hipSuccess;
}

HIP(hipGraphDestroy, (void *graph), (graph)) {
    ENTER(hipGraphDestroy);
    gis_graph *found = gis_check(GIS_GRAPH, (uint64_t)graph);
    NEED(found);
    gis_graph_destroy(found);
    return hipSuccess;
}

HIP(hipGraphInstantiate, (void **executable, void *graph, void **node, char *log, size_t size),
    (executable, graph, node, log, size)) {
    ENTER(hipGraphInstantiate);
    (void)node;
    if (log && size) *log = 0;
    gis_graph *found = gis_check(GIS_GRAPH, (uint64_t)graph);
    NEED(found && executable);
    gis_executable *made;
    TRY(gis_instantiate(found, &made));
    *executable = (void *)made->object.id;
    return hipSuccess;
}

HIP(hipGraphLaunch, (void *executable, void *which), (executable, which)) {
    ENTER(hipGraphLaunch);
    NEED_STREAM(which);
    gis_executable *found = gis_check(GIS_EXECUTABLE, (uint64_t)executable);
    NEED(found);
    return gis_code(gis_launch(found, stream));
}

HIP(hipGraphExecDestroy, (void *executable), (executable)) {
    ENTER(hipGraphExecDestroy);
    gis_executable *found = gis_check(GIS_EXECUTABLE, (uint64_t)executable);
    NEED(found);
    gis_retire(&found->object); /* a running launch finishes */
    return hipSuccess;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

/* CLR reads the stream that the event was recorded in, even if it is destroyed (hip_event.cpp:439, 461). */
static void note_if_orphaned(const gis_event *event) {
    if (event->mark.stream && !event->mark.stream->object.live)
        gis_violation("the event %#llx is asked for after its stream was destroyed", (unsigned long long)event->object.id);
}

HIP(hipEventCreateWithFlags, (void **event, uint32_t flags), (event, flags)) {
    ENTER(hipEventCreateWithFlags);
    NEED(event && !(flags & ~0xe0000007u));
    gis_event *made;
    TRY(gis_event_create(hip_context(), flags, &made));
    *event = (void *)made->object.id;
    return hipSuccess;
}

HIP(hipEventRecord, (void *event, void *which), (event, which)) {
    ENTER(hipEventRecord);
    NEED_STREAM(which);
    FIND(gis_event, found, GIS_EVENT, event);
    return gis_code(gis_event_record(found, stream));
}

HIP(hipEventQuery, (void *event), (event)) {
    ENTER(hipEventQuery);
    FIND(gis_event, found, GIS_EVENT, event);
    note_if_orphaned(found);
    if (!found->capture) TRY(gis_unsafe());
    return gis_code(gis_event_query(found, false));
}

static gis_status wait_for_event(void *event) { return gis_event_query(event, true); }

HIP(hipEventSynchronize, (void *event), (event)) {
    ENTER(hipEventSynchronize);
    FIND(gis_event, found, GIS_EVENT, event);
    note_if_orphaned(found);
    if (!found->capture) TRY(gis_unsafe());
    return hip_alone(wait_for_event, found);
}

HIP(hipEventDestroy, (void *event), (event)) {
    ENTER(hipEventDestroy);
    FIND(gis_event, found, GIS_EVENT, event);
    gis_event_destroy(found);
    return hipSuccess;
}

/* -- stream memory operations -------------------------------------------------------------------------------------- */

/*
 * By default a kernel with one thread polls any address that HIP knows. With GPU_STREAMOPS_CP_WAIT=1 the command
 * processor waits, only on memory of hipMallocSignalMemory (CLR: hip_stream_ops.cpp, and the flag among its settings).
 */
static bool only_signals(void) {
    const char *text = getenv("GPU_STREAMOPS_CP_WAIT");
    return text && *text && strcmp(text, "0");
}

static hip_error word(gis_op_kind kind, void *which, void *pointer, uint64_t value, uint32_t flags, uint64_t mask) {
    NEED_STREAM(which);
    uint64_t address = (uint64_t)pointer;
    int allowed = 1;
    gis_overridden(stream->object.device, 10013, &allowed);
    if (!allowed) return hipErrorNotSupported;
    gis_range *range = gis_range_at(address);
    NEED(range);
    if (kind == GIS_OP_WAIT_VALUE) { /* CLR checks no flags of a write */
        NEED(flags <= 3 && (!only_signals() || range->signal));
        if (flags == GIS_WAIT_GEQ) flags = GIS_WAIT_UNSIGNED_GEQ; /* CLR's kernel, __amd_streamOpsWait */
    }
    gis_capture *capture = stream->capture; /* no capture records a word: it is enqueued now (hip_stream_ops.cpp:26) */
    stream->capture = NULL;
    gis_status status = gis_word(stream, kind, address, value, mask, flags);
    stream->capture = capture;
    return gis_code(status);
}

HIP(hipStreamWaitValue64, (void *which, void *pointer, uint64_t value, uint32_t flags, uint64_t mask),
    (which, pointer, value, flags, mask)) {
    ENTER(hipStreamWaitValue64);
    return word(GIS_OP_WAIT_VALUE, which, pointer, value, flags, mask);
}

HIP(hipStreamWriteValue64, (void *which, void *pointer, uint64_t value, uint32_t flags),
    (which, pointer, value, flags)) {
    ENTER(hipStreamWriteValue64);
    return word(GIS_OP_WRITE_VALUE, which, pointer, value, flags, ~0ull);
}

